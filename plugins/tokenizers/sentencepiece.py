"""The tokenizer plugin for model folders with a SentencePiece ``tokenizer.model``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from glowplug.core.errors import FactsError
from glowplug.core.facts.machine import installed
from glowplug.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from glowplug.core.facts.model_facts import ModelFacts
    from glowplug.core.text.tokenizer import Tokenizer

FILE = "tokenizer.model"
PACKAGES = ("sentencepiece", "protobuf")


@hookimpl(trylast=True)
def open_tokenizer(path: Path, facts: ModelFacts) -> Tokenizer | None:
    """Return the tokenizer of the model's folder; None if it has no ``tokenizer.model``.

    A folder with a ``tokenizer.json`` is left to that file's plugin.

    Raises:
        FactsError: a package that reads the file is missing.
    """
    folder = path if path.is_dir() else path.parent
    if not (folder / FILE).is_file() or (folder / "tokenizer.json").is_file():
        return None
    missing = [name for name in PACKAGES if not installed(name)]
    if missing:
        raise FactsError(
            f"{FILE} needs {' and '.join(missing)} (not installed)",
            'pip install "glowplug[sentencepiece]", or set tokenizer = a folder with a '
            "tokenizer.json",
        )
    from glowplug.plugins.tokenizers.sentencepiece_runtime import read_tokenizer

    return read_tokenizer(folder, FILE)
