"""Limits of a folder's modules, of small helper modules, and of class names in several modules."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict

from tests.support.source_tree import ROOT, name_of, sources, tree
from tests.unit.test_floors import edges, modules

FOLDER_MODULES = 16
HELPER_LINES = 40
#: small helpers with one importer that stay modules of their own -> reason
ALONE = {
    "plugins/ops/triton_int8.py": "the operations of one format, which a test covers by itself",
    "plugins/quantization/block_fp8/dense_cuda.py": "imports triton, which its importer must not",
}
#: class names in several modules -> why they may be the same
SAME_NAME: dict[str, str] = {
    "Completion": "the answer in Python and the object of OpenAI's API",
    "Turn": "a turn of the ranks, as a message, and one of a conversation",
    "CompletionLogprobs": "what is collected and the object of OpenAI's API",
}


def test_a_folder_has_few_modules() -> None:
    counts = Counter(path.parent for path in sources() if path.name != "__init__.py")
    full = {name_of(folder): count for folder, count in counts.items() if count > FOLDER_MODULES}
    assert full == {}


def is_declaration(module: str) -> bool:
    """Return whether the module registers components or tuners, or declares a protocol or
    routes.
    """
    names = {
        node.name for node in tree(modules()[module]).body if isinstance(node, ast.FunctionDef)
    }
    return any(name.startswith("register_") or name in ("configure", "tuners") for name in names)


def test_a_small_helper_has_several_importers() -> None:
    importers = defaultdict(set)
    for module, targets in edges().items():
        for target in targets:
            importers[target].add(module)
    alone = []
    for module, path in modules().items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if path.name == "__init__.py" or lines >= HELPER_LINES or len(importers[module]) != 1:
            continue
        if not is_declaration(module) and name_of(path) not in ALONE:
            alone.append(f"{name_of(path)} ({lines} lines) <- {importers[module].pop()}")
    assert alone == []


def test_a_public_class_name_stands_for_one_class() -> None:
    places = defaultdict(list)
    for path in sources():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    several = {name: where for name, where in places.items() if len(where) > 1}
    assert {name: where for name, where in several.items() if name not in SAME_NAME} == {}
    assert set(SAME_NAME) <= set(several), "a name that is unique need not be listed"
