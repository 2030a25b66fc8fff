"""The tokenizer plugin for model folders with a ``tiktoken.model``, such as Kimi's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from glowplug.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from glowplug.core.facts.model_facts import ModelFacts
    from glowplug.core.text.tokenizer import Tokenizer

FILE = "tiktoken.model"


@hookimpl(trylast=True)
def open_tokenizer(path: Path, facts: ModelFacts) -> Tokenizer | None:
    """Return the tokenizer of the model's folder; None if it has no ``tiktoken.model``.

    A folder with a ``tokenizer.json`` is left to that file's plugin.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / FILE).is_file() or (folder / "tokenizer.json").is_file():
        return None
    from glowplug.plugins.tokenizers.tiktoken_runtime import read_tokenizer

    return read_tokenizer(folder, FILE, facts.vocab_size)
