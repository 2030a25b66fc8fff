"""Prose and questions from Python's manual and the standard library's docstrings.

The manual is Debian's `python3.11-doc`. Both are under the PSF licence.
"""

import gzip
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

SECTIONS = ("tutorial", "library", "reference", "howto", "faq", "whatsnew", "using", "extending")
BLOCKS = {"p", "pre", "li", "dt", "h1", "h2", "h3", "h4"}
SKIPPED = {"script", "style"}
UNSAFE = ("antigravity", "this", "idlelib", "turtledemo", "test", "__main__", "lib2to3")


class _Body(HTMLParser):
    """Parser that collects the text blocks of the element with role "main"."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.muted = 0
        self.blocks: list[str] = []
        self.buffer: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if self.depth or values.get("role") == "main":
            self.depth += tag == "div"
        if self.depth and tag in BLOCKS:
            self._flush()
        self.muted += tag in SKIPPED or (tag == "a" and values.get("class") == "headerlink")

    def handle_endtag(self, tag: str) -> None:
        if self.depth and tag in BLOCKS:
            self._flush(code=tag == "pre")
        self.depth -= bool(self.depth) and tag == "div"
        self.muted -= bool(self.muted) and tag in SKIPPED | {"a"}

    def handle_data(self, data: str) -> None:
        if self.depth and not self.muted:
            self.buffer.append(data)

    def _flush(self, code: bool = False) -> None:
        text = "".join(self.buffer)
        text = text.rstrip() if code else re.sub(r"\s+", " ", text).strip()
        if text.strip():
            self.blocks.append(text)
        self.buffer.clear()


def pages(folder: Path) -> Iterator[list[str]]:
    """Yield the text blocks of every page of the manual."""
    for section in SECTIONS:
        for file in sorted((folder / section).glob("*.html*")):
            raw = file.read_bytes()
            body = _Body()
            body.feed((gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8"))
            body._flush()
            yield body.blocks


def documents(folder: Path, size: int = 1200) -> Iterator[str]:
    """Yield the manual in pieces of about `size` characters, cut between blocks."""
    for blocks in pages(folder):
        piece: list[str] = []
        for block in blocks:
            piece.append(block)
            if sum(map(len, piece)) > size:
                yield "\n".join(piece)
                piece = []
        if piece:
            yield "\n".join(piece)


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield (dotted name, docstring) of public modules, classes and functions of the stdlib."""
    warnings.simplefilter("ignore")
    for name in sorted(sys.stdlib_module_names):
        if name.startswith(("_", *UNSAFE)):
            continue
        try:
            module = importlib.import_module(name)
        except Exception:  # such as a module of another platform
            continue
        yield from _module_docstrings(name, module)


def _module_docstrings(name: str, module: object) -> Iterator[tuple[str, str]]:
    if text := inspect.getdoc(module):
        yield name, text
    for attribute, value in sorted(vars(module).items()):
        if attribute.startswith("_") or not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        if getattr(value, "__module__", None) == name and (text := inspect.getdoc(value)):
            yield f"{name}.{attribute}", text


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring on one line, without a signature line."""
    paragraphs = [p for p in text.split("\n\n") if p.strip()]
    if len(paragraphs) > 1 and re.match(r"^[\w.]+\(.*\)", paragraphs[0]):
        paragraphs = paragraphs[1:]
    line = re.sub(r"\s+", " ", paragraphs[0]).strip()
    return line.split(". ")[0].rstrip(".") + "."


def questions() -> Iterator[tuple[list[str], str]]:
    """Yield (ways to ask, answer) about modules, classes and functions of the stdlib."""
    for name, text in docstrings():
        answer = first_sentence(text)
        if not 15 < len(answer) < 140:
            continue
        what = "function" if "." in name else "module"
        asks = [
            f"What does {name} do in Python?",
            f"What is {name} in Python?",
            f"Explain the Python {what} {name}.",
        ]
        yield asks, answer
