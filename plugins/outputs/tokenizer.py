"""The tokenizer plugin for model folders with a ``tokenizer.json``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from glowplug.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from glowplug.core.facts.model_facts import ModelFacts
    from glowplug.core.text.tokenizer import Tokenizer


@hookimpl
def open_tokenizer(path: Path, facts: ModelFacts) -> Tokenizer | None:
    """Return the tokenizer of the model's folder; None if it has no ``tokenizer.json``."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "tokenizer.json").is_file() or (
        path.is_file() and path.name != "tokenizer.json"
    ):
        return None
    from glowplug.core.text.tokenizer import Tokenizer

    return Tokenizer.from_folder(folder)
