"""Links and anchors of Markdown pages, as git hosts read them. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n]*\n.*?(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.M | re.S)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\1(?!`)", re.DOTALL)
HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$", re.MULTILINE)
UNDERLINED = re.compile(r"^ {0,3}(\S[^\n|]*)\n {0,3}(?:=+|-+)[ \t]*$", re.MULTILINE)
ANCHOR = re.compile(r"<[^>]+?\b(?:id|name)=[\"']([^\"']+)[\"']")
TARGETS = (
    re.compile(r"\]\(\s*<([^>\n]*)>(?:\s+[\"'][^)]*[\"'])?\s*\)"),
    re.compile(r"\]\(\s*([^\s()<>]*(?:\([^\s()]*\)[^\s()]*)*)(?:\s+[\"'][^)]*[\"'])?\s*\)"),
    re.compile(r"^ {0,3}\[[^\]\n]+\]:[ \t]+<?([^\s>]+)", re.MULTILINE),
    re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src)=[\"']([^\"']*)[\"']"),
)
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass(frozen=True)
class Link:
    """A link or an image of a page: its target, and where the target begins in the text."""

    target: str
    start: int

    @property
    def external(self) -> bool:
        """True for an address with a scheme (https, mailto)."""
        return SCHEME.match(self.target) is not None

    @property
    def path(self) -> str:
        """The target without its anchor, decoded; "" for a link within its page."""
        return unquote(self.target.partition("#")[0])

    @property
    def anchor(self) -> str:
        """The part of the target behind "#", decoded."""
        return unquote(self.target.partition("#")[2])


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def without_code(text: str) -> str:
    """Return ``text`` with blanks in place of fenced blocks, code spans and comments.

    All positions stay as they are.
    """
    for pattern in (FENCE, COMMENT, CODE):
        text = pattern.sub(_blank, text)
    return text


def links(text: str) -> list[Link]:
    """Return the links and images of a page outside code, in their order."""
    plain = without_code(text)
    found = {
        Link(match[1], match.start(1))
        for pattern in TARGETS
        for match in pattern.finditer(plain)
        if match[1]
    }
    return sorted(found, key=lambda link: link.start)


def slug(heading: str) -> str:
    """Return the anchor of a heading's plain text by the rule of git hosts.

    The rule: lower case, only letters, digits, "_", "-" and spaces, with "-" for each space.
    """
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def plain_text(heading: str) -> str:
    """Return a heading without the marks of links, images, code, emphasis and HTML."""
    codes = re.split(r"`+([^`]+)`+", heading)
    for at in range(0, len(codes), 2):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", codes[at])
        words = re.sub(r"<[^>]+>", "", words)
        codes[at] = re.sub(r"(?<!\w)(\*{1,3}|_{1,3})(\S.*?)\1(?!\w)", r"\2", words)
    return "".join(codes)


def headings(text: str) -> list[tuple[int, str]]:
    """Return (end of the heading's text, anchor) of each heading, in order.

    An anchor that an earlier heading has gets "-1", "-2" and so on.
    """
    plain = FENCE.sub(_blank, text)
    plain = COMMENT.sub(_blank, plain)
    matches = [*HEADING.finditer(plain), *UNDERLINED.finditer(plain)]
    found: list[tuple[int, str]] = []
    taken: set[str] = set()
    for match in sorted(matches, key=lambda one: one.start()):
        name = base = slug(plain_text(match[1]))
        number = 0
        while name in taken:
            number += 1
            name = f"{base}-{number}"
        taken.add(name)
        found.append((match.end(1), name))
    return found


@cache
def anchors(text: str) -> frozenset[str]:
    """Return all anchors of a page: those of its headings, and ``id`` and ``name`` of its HTML."""
    found = {name for _, name in headings(text)}
    return frozenset(found.union(ANCHOR.findall(without_code(text))))


def dead_links(root: Path, pages: Iterable[Path]) -> Iterator[str]:
    """Yield "page:line: target: reason" for each link within ``root`` that leads nowhere.

    Files, folders, images and anchors are checked; addresses of other hosts are not opened.

    Args:
        root: folder of the repository. Links that leave it are dead.
        pages: the Markdown files whose links are checked.
    """
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for link in links(text):
            if link.external:
                continue
            reason = _fault(root, page, link)
            if reason:
                line = text.count("\n", 0, link.start) + 1
                yield f"{page.relative_to(root).as_posix()}:{line}: {link.target}: {reason}"


def _fault(root: Path, page: Path, link: Link) -> str:
    """Return why a link within the repository leads nowhere, or "" if it leads somewhere."""
    if link.path.startswith("/"):
        return "an absolute path"
    target = (page.parent / link.path).resolve() if link.path else page
    if not target.is_relative_to(root.resolve()):
        return "outside the repository"
    if not target.exists():
        return "no such file"
    if not link.anchor:
        return ""
    if target.is_dir():
        return "an anchor of a folder"
    text = target.read_text(encoding="utf-8")
    if target.suffix != ".md":
        lines = re.fullmatch(r"L(\d+)(?:-L(\d+))?", link.anchor)
        last = int(lines[2] or lines[1]) if lines else 0
        return "" if lines and last <= text.count("\n") + 1 else "no such line"
    return "" if link.anchor in anchors(text) else "no such anchor"
