"""Prompts from text that is on every machine: this project's documentation, Python's docstrings."""

import random
import re
from collections.abc import Iterator
from pathlib import Path

from glowplug.models.embedded.training.pydocs import questions

DOCS = Path(__file__).resolve().parents[3] / "docs"  #: documentation of this project, in a clone
PARAGRAPH = (80, 800)  #: fewest and most characters of a paragraph that is asked about
PARAGRAPH_ASKS = (
    "Explain this in simple words:\n\n{text}",
    "Summarise this text:\n\n{text}",
    "Continue this text:\n\n{text}",
    "Write three questions about this text:\n\n{text}",
)


def paragraphs(folder: Path) -> Iterator[str]:
    """Yield the paragraphs of prose of all Markdown files below ``folder``."""
    for file in sorted(folder.rglob("*.md")):
        for part in re.split(r"\n\s*\n", file.read_text(encoding="utf-8")):
            text = re.sub(r"\s+", " ", part).strip()
            prose = not text.startswith(("#", "|", "```", "<", "![", "- ["))
            if prose and PARAGRAPH[0] <= len(text) <= PARAGRAPH[1]:
                yield text


def prompts(folders: list[Path], seed: int) -> list[str]:
    """Return prompts in random order: about paragraphs in ``folders``, and about Python's library.

    Args:
        folders: folders with Markdown files.
        seed: seed of the order and of the wording.
    """
    rng = random.Random(seed)
    found = [rng.choice(asks) for asks, _ in questions()]
    for folder in folders:
        found += [rng.choice(PARAGRAPH_ASKS).format(text=text) for text in paragraphs(folder)]
    found = list(dict.fromkeys(found))
    rng.shuffle(found)
    return found
