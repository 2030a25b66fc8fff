"""The plugin: a weight source, model facts, a tokenizer. Imports neither torch nor gguf until a
file needs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from glowplug.core.api import (
    Component,
    FactsError,
    ModelFacts,
    Package,
    WeightOffers,
    WeightOptions,
    hookimpl,
)


class GgufOptions(WeightOptions):
    use: Literal["gguf"] = "gguf"


@hookimpl
def register_weight_sources() -> list[Component]:
    return [
        Component(
            name="gguf",
            options=GgufOptions,
            factory="glowplug_gguf.source:GgufSource",
            offers=WeightOffers(formats=frozenset({"gguf"})),
            requires=(Package("gguf", ">=0.17"),),
            contract=2,
            summary="GGUF files of Llama architecture, dequantised while loading",
        )
    ]


@hookimpl
def read_model_facts(path: Path) -> ModelFacts | None:
    file = find_gguf(path)
    if file is None:
        return None
    from glowplug_gguf.header import read_gguf
    from glowplug_gguf.llama import llama_facts

    return llama_facts(read_gguf(file))


@hookimpl
def open_tokenizer(path: Path, facts: ModelFacts) -> Any:
    if facts.format != "gguf":
        return None
    from glowplug_gguf.header import read_gguf
    from glowplug_gguf.tokenizer import tokenizer_from

    return tokenizer_from(read_gguf(Path(facts.path)))


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that ``path`` is, or the only one in the folder ``path``; None when it
    is another format.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise FactsError(
            f"{path} holds {len(files)} GGUF files: {', '.join(file.name for file in files[:5])}",
            f"name one of them: {files[0]}",
        )
    return files[0] if files else None
