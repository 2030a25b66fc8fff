"""Docstrings, comments, messages and documents in plain words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT, dotted, name_of, sources, tree

#: words that treat code as a person, and private words that the glossary replaces
PERSONS = re.compile(r"\b(who|whoever|whom|nobody|everybody|somebody|hears?|tells?|asks?)\b", re.I)
#: the same behind a "#"; files without it need not be tokenized, which takes most of the time
COMMENTED = re.compile(rf"#.*{PERSONS.pattern}", re.I)
#: beginnings of a clause that is used as a title
CLAUSE = re.compile(
    r"^(What|Which|Whether|As (?!a\b|an\b)|Of|For (?!each|every|the)|That|Those|Whose|The same)\b"
)
#: required share of docstrings that begin with a verb, among functions that act
VERBS_SHARE = 0.9
#: texts that are data: the embedded model is trained on them, or another program defines them
DATA = (
    "models/embedded/",
    "entrypoints/checkpoints/byte_tokenizer.py",
    "entrypoints/cli/demo.py",
    "entrypoints/bench/single_query.py",
)

#: decorators of functions that stand for a value
VALUES = {"property", "cached_property", "functools.cached_property", "overload", "pytest.fixture"}
#: endings that no imperative has; other first words are looked up in VERBS
NO_VERB = re.compile(r"(ed|ing|tion|ment|ness|ity)$")
VERBS = frozenset((ROOT / "tests" / "unit" / "verbs.txt").read_text(encoding="utf-8").split())

#: identifiers in prose are quoted
QUOTED = re.compile(r"``[^`]*``|`[^`]*`")
#: blocks of code and output in documents
FENCED = re.compile(r"^```.*?^```\n", re.MULTILINE | re.DOTALL)

#: names of models and formats, which only their families and schemes know
OTHERS = re.compile(r"kv_b_proj|deepseek|awq|compressed-tensors|noaux_tc|w8a8", re.I)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def tests() -> tuple[Path, ...]:
    """Return every Python file of the tests and of the sample package among them."""
    return tuple(sorted((ROOT / "tests").rglob("*.py")))


ZONES = pytest.mark.parametrize("paths", [sources(), tests()], ids=["sources", "tests"])


@cache
def documented(paths: tuple[Path, ...]) -> list[tuple[str, Documented, str]]:
    """Return (place, node, docstring) of every documented node."""
    found = []
    for path in paths:
        if name_of(path).startswith(DATA):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                line = getattr(node, "lineno", 1)
                found.append((f"{name_of(path)}:{line}", node, text))
    return found


def acts(node: Documented) -> bool:
    """Return whether a docstring of this node describes an action.

    It does for a function that is no property, no fixture and no test: the docstring of a test
    states a behaviour.
    """
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    marks = {dotted(m.func if isinstance(m, ast.Call) else m) for m in node.decorator_list}
    return not marks & VALUES and not node.name.startswith("test_")


def first_word(text: str) -> str:
    return re.sub(r"[^\w-].*", "", text, flags=re.DOTALL).lower()


@ZONES
def test_functions_that_act_begin_with_a_verb(paths: tuple[Path, ...]) -> None:
    texts = [(place, text) for place, node, text in documented(paths) if acts(node)]
    others = [
        f"{place}: {text.splitlines()[0]}" for place, text in texts if first_word(text) not in VERBS
    ]
    assert len(others) <= (1 - VERBS_SHARE) * len(texts), "\n".join(others)


def test_verbs_are_verbs() -> None:
    """A word of the list that ends like a noun or a participle is a mistake."""
    odd = {
        "feed",
        "speed",
        "need",
        "embed",
        "seed",
        "bring",
        "string",
        "shed",
        "proceed",
        "mention",
        "document",
        "implement",
    }
    assert [word for word in sorted(VERBS - odd) if NO_VERB.search(word)] == []


@ZONES
def test_no_clause_stands_as_a_title(paths: tuple[Path, ...]) -> None:
    found = [
        f"{place}: {text.splitlines()[0]}"
        for place, _, text in documented(paths)
        if CLAUSE.match(text)
    ]
    assert found == []


@ZONES
def test_docstrings_make_no_persons_of_code(paths: tuple[Path, ...]) -> None:
    found = [
        f"{place}: {match[0]!r} in {text.splitlines()[0]!r}"
        for place, _, text in documented(paths)
        if (match := PERSONS.search(QUOTED.sub("", text)))
    ]
    assert found == []


def comments(text: str) -> list[tuple[int, str]]:
    """Return (line, text) of every comment in the text of a file."""
    return [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]


def persons_in_comments(code: str) -> list[tuple[int, str, str]]:
    """Return (line, word, comment) of every comment that treats code as a person."""
    if not COMMENTED.search(code):
        return []
    return [
        (line, match[0], text)
        for line, text in comments(code)
        if (match := PERSONS.search(QUOTED.sub("", text)))
    ]


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every string constant that is a sentence and no docstring."""
    prose = {id(node.body[0].value) for node in ast.walk(tree(path)) if _has_docstring(node)}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            if node.value.count(" ") >= 2:
                yield node.lineno, node.value


def _has_docstring(node: ast.AST) -> bool:
    return isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None


@ZONES
def test_comments_make_no_persons_of_code(paths: tuple[Path, ...]) -> None:
    found = [
        f"{name_of(path)}:{line}: {word!r} in {text[:80]!r}"
        for path in paths
        if not name_of(path).startswith(DATA)
        for line, word, text in persons_in_comments(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_messages_make_no_persons_of_code() -> None:
    """Strings of tests are left out: prompts and quotations are among them."""
    found = [
        f"{name_of(path)}:{line}: {match[0]!r} in {text.strip()[:80]!r}"
        for path in sources()
        if not name_of(path).startswith(DATA)
        for line, text in messages(path)
        if (match := PERSONS.search(QUOTED.sub("", text)))
    ]
    assert found == []


def test_core_names_no_model_and_no_format() -> None:
    """Their tensors, defaults and formats come from offers: in code, strings and comments alike."""
    files = [path for path in (ROOT / "core").rglob("*") if path.suffix in (".py", ".json")]
    found = [
        f"{name_of(path)}:{number}: {match[0]}"
        for path in sorted(files)
        if not name_of(path).startswith("core/testing/")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := OTHERS.search(line))
    ]
    assert len(files) > 50 and found == []


def documents() -> Iterator[tuple[str, str]]:
    """Yield (place, line) of every line of the documents outside fenced blocks."""
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))):
        prose = FENCED.sub(lambda block: "\n" * block[0].count("\n"), path.read_text("utf-8"))
        for number, line in enumerate(prose.splitlines(), 1):
            yield f"{name_of(path)}:{number}", line


def test_documents_make_no_persons_of_code() -> None:
    found = [
        f"{place}: {match[0]!r} in {line!r}"
        for place, line in documents()
        if (match := PERSONS.search(QUOTED.sub("", line)))
    ]
    assert found == []


def test_no_clause_stands_as_a_heading() -> None:
    found = [
        f"{place}: {line}"
        for place, line in documents()
        if line.startswith("#") and CLAUSE.match(line.lstrip("# "))
    ]
    assert found == []


def test_rules_find_what_they_name() -> None:
    """Each rule is tried on a sentence that it refuses and on one that it allows."""
    assert PERSONS.search("nobody was measured") and not PERSONS.search("no measurement exists")
    said = "a = '# who'  # ``asks`` for\nb = 1  # Asks for\n# no `who`"
    assert [one[:2] for one in persons_in_comments(said)] == [(2, "Asks")]
    assert CLAUSE.match("What a request may ask for.") and not CLAUSE.match("Fields of a request.")
    tree = ast.parse(
        "def test_a(): ...\n@pytest.fixture(scope='module')\ndef b(): ...\ndef c(): ..."
    )
    assert [acts(node) for node in tree.body if isinstance(node, Documented)] == [
        False,
        False,
        True,
    ]
    assert FENCED.sub("", "a\n```\nwho\n```\nb\n") == "a\nb\n"
