"""Data never becomes code: no pickle, no ``torch.load``, no ``eval``, no remote code, no unsafe
YAML.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT, dotted, imported, name_of, sources

FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
}
FORBIDDEN_CALLS = {
    "torch.load",
    "torch.save",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "eval",
    "exec",
    "os.system",
}
FORBIDDEN_METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "recv_object_list",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
}
#: (file, call) -> why it is safe
ALLOWED: dict[tuple[str, str], str] = {}


def offences(source: ast.AST) -> list[tuple[str, int]]:
    """Yield (what, line) of every forbidden import, call and keyword below ``source``."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            found += [
                (a.name, node.lineno)
                for a in node.names
                if a.name.split(".")[0] in FORBIDDEN_MODULES
            ]
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] in FORBIDDEN_MODULES
        ):
            found.append((node.module or "", node.lineno))
        elif isinstance(node, ast.Call):
            found += _call_offences(node)
    return found


def _call_offences(node: ast.Call) -> list[tuple[str, int]]:
    name = dotted(node.func)
    found = []
    if name in FORBIDDEN_CALLS or name.split(".")[-1] in FORBIDDEN_METHODS:
        found.append((name, node.lineno))
    for keyword in node.keywords:
        value = keyword.value
        on = isinstance(value, ast.Constant) and value.value is True
        if on and keyword.arg in {"trust_remote_code", "shell", "allow_pickle"}:
            found.append((f"{keyword.arg}=True", node.lineno))
    return found


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from dill import loads",
        "import torch\ntorch.load('x')",
        "sock.recv_pyobj()",
        "eval('1')",
        "exec('1')",
        "import yaml\nyaml.load(f)",
        "f(trust_remote_code=True)",
        "subprocess.run('ls', shell=True)",
        "dist.all_gather_object(out, x)",
    ],
)
def test_the_lint_finds(bad: str) -> None:
    assert offences(ast.parse(bad))


def test_our_sources_have_none() -> None:
    found = []
    for path in sources():
        for what, line in offences(ast.parse(path.read_text(encoding="utf-8"))):
            if (name_of(path), what) not in ALLOWED:
                found.append(f"{name_of(path)}:{line}: {what}")
    assert found == []


def test_remote_code_is_named_nowhere_as_enabled() -> None:
    spelled = "trust_remote_code" + "=True"
    files: list[Path] = [*sources(), *ROOT.glob("docs/**/*.md"), *ROOT.glob("models/**/*.json")]
    assert [
        name_of(path)
        for path in files
        if spelled in path.read_text(encoding="utf-8").replace(" ", "")
    ] == []


def test_transformers_is_not_on_the_serving_path() -> None:
    """Importing it takes seconds and can run a model folder's code; only the comparison bench may
    use it.
    """
    users = {
        name_of(path)
        for path in sources()
        for module, _ in imported(path)
        if module.split(".")[0] == "transformers"
    }
    assert users <= {"entrypoints/bench/others/transformers_side.py"}
