"""Check commit messages: a hook of pre-commit, a part of `make test`, and a command.

    python3 .ci/commit_messages.py                     the commits since BASE
    python3 .ci/commit_messages.py --commits A..B      the commits of a range
    python3 .ci/commit_messages.py .git/COMMIT_EDITMSG   one message, as git's commit-msg hook

The rules are in CONTRIBUTING.md, "Commit messages". The command prints one line for each fault and
exits with 1 if there is one. It needs git and Python's standard library only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: the newest commit that need not follow the rules; every later one has to
BASE = "3eccdb6f274a1a4f15b1098f31773b16405e3b83"
SUBJECT_COLUMNS = 72
BODY_COLUMNS = 100
#: a commit that touches more files than this outside tests/ and docs/ needs a body
FILES_WITHOUT_BODY = 30
#: subjects that begin with these words need a body: what was wrong, or why it is given up
REASON_WORDS = frozenset("disable fix ignore pin revert undo work".split())
#: subjects that begin with these words give their reason, however many files they touch
OBVIOUS_WORDS = frozenset("format move regenerate rename reword".split())
#: verbs of subjects that are nouns or adjectives at the head of a docstring: not in verbs.txt
SUBJECT_VERBS = frozenset(
    """
    answer base change clean comment cover default delay document fix form format judge lead limit
    map mention name narrow order part patch pin point profile rank reason round say shape
    size state support title trace value word work
    """.split()
)

MERGE = re.compile(r"Merge (branch|branches|commit|pull request|remote-tracking|tag)\b")
#: marks of commits that `git rebase --autosquash` folds into others
FIXUP = re.compile(r"(fixup|squash|amend)! ")
#: git's own subject of a revert, which quotes the whole subject of the other commit
QUOTED_REVERT = re.compile(r'(Revert|Reapply) ".*"$')
REVERTED = re.compile(r"This reverts commit [0-9a-f]+\b")
TRAILER = re.compile(r"[A-Z][A-Za-z]*(-[a-z]+)+: \S")
SCISSORS = re.compile(r"^# -+ >8 -+$.*", re.MULTILINE | re.DOTALL)


def verbs() -> frozenset[str]:
    """Return the verbs that a subject may begin with."""
    shared = (ROOT / "tests" / "unit" / "verbs.txt").read_text(encoding="utf-8")
    return SUBJECT_VERBS | frozenset(shared.split())


def without_comments(message: str) -> str:
    """Return the message as git stores it: without comments and without a quoted diff."""
    lines = SCISSORS.sub("", message).splitlines()
    return "\n".join(line for line in lines if not line.startswith("#")).strip()


def subject_faults(subject: str) -> Iterator[str]:
    if FIXUP.match(subject):
        yield "squash this commit into the one that it mends"
        return
    first = re.split(r"[^\w-]", subject, maxsplit=1)[0]
    if first.lower() not in verbs():
        yield (
            f"the subject begins with {first!r}, which is no verb in the imperative known here "
            "(add a missing verb to tests/unit/verbs.txt)"
        )
    elif not first[0].isupper():
        yield "the subject begins with a lower-case letter"
    if len(subject) > SUBJECT_COLUMNS and not QUOTED_REVERT.match(subject):
        yield f"the subject has {len(subject)} characters; {SUBJECT_COLUMNS} are allowed"
    if subject.endswith("."):
        yield "the subject ends with a full stop"


def body_faults(subject: str, body: list[str], files: list[str]) -> Iterator[str]:
    if body and body[0]:
        yield "the second line is not blank"
    for number, line in enumerate(body, 2):
        if len(line) > BODY_COLUMNS and " " in line.strip():  # a long address has no blank
            yield f"line {number} has {len(line)} columns; {BODY_COLUMNS} are allowed"
    prose = [line for line in body if line and not TRAILER.match(line) and not REVERTED.match(line)]
    if prose:
        return
    code = [name for name in files if not name.startswith(("tests/", "docs/"))]
    first = subject.split(maxsplit=1)[0]
    if first.lower() in REASON_WORDS:
        yield f"a subject that begins with {first!r} needs a body with the reason"
    elif len(code) > FILES_WITHOUT_BODY and first.lower() not in OBVIOUS_WORDS:
        yield (
            f"{len(code)} files outside tests/ and docs/ change: give the reason in a body "
            f"(from {FILES_WITHOUT_BODY + 1} files on)"
        )


def faults(message: str, files: list[str]) -> list[str]:
    """Return what is wrong with a commit message.

    Args:
        message: The message without git's comments.
        files: Paths that the commit changes, from the root of the repository.
    """
    if not message.strip():
        return ["the message is empty"]
    subject, *body = message.strip().splitlines()
    if MERGE.match(subject):
        return []
    found = list(subject_faults(subject))
    if not FIXUP.match(subject):
        found += body_faults(subject, body, files)
    return found


def git(root: Path, *words: str) -> str:
    """Return the output of a git command.

    Raises:
        OSError: There is no git.
        subprocess.CalledProcessError: The command failed.
    """
    command = ["git", "-C", str(root), "-c", "log.showRoot=false", "-c", "core.quotePath=false"]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    return done.stdout


def default_range(root: Path, base: str = BASE) -> str | None:
    """Return the range of commits to check, or None where the history is not this repository's.

    A shallow clone may lack the base: all of its commits are newer and are checked.
    """
    try:
        if Path(git(root, "rev-parse", "--show-toplevel").strip()).resolve() != root.resolve():
            return None
    except (OSError, subprocess.CalledProcessError):
        return None
    try:
        git(root, "merge-base", "--is-ancestor", base, "HEAD")
    except subprocess.CalledProcessError:
        shallow = git(root, "rev-parse", "--is-shallow-repository").strip()
        return "HEAD" if shallow == "true" else None
    return f"{base}..HEAD"


def commits(root: Path, commit_range: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (hash, message, changed files) of the commits of a range, merges left out.

    The oldest commit of a shallow clone has no files: its parent is not there to compare with.
    """
    layout = "--format=%x1e%h%x1f%B%x1f"
    log = git(root, "log", "--no-merges", "--name-only", "-M", layout, commit_range, "--")
    for entry in log.split("\x1e")[1:]:
        commit, message, names = entry.split("\x1f")
        yield commit, message, names.split("\n\n")[-1].splitlines()


def staged(root: Path) -> list[str]:
    return git(root, "diff", "--cached", "--name-only", "-M").splitlines()


def history_faults(root: Path, commit_range: str) -> list[str]:
    """Return one line for each fault of the commits of a range: hash, subject, fault."""
    return [
        f"{commit} {message.strip().splitlines()[0] if message.strip() else ''}: {fault}"
        for commit, message, files in commits(root, commit_range)
        for fault in faults(message, files)
    ]


def message_faults(message: str, files: list[str]) -> list[str]:
    """Return the faults of the message of a commit in the making, which may be a fixup."""
    message = without_comments(message)
    return [] if FIXUP.match(message) else faults(message, files)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Check commit messages.")
    parser.add_argument("file", type=Path, nargs="?", help="a message, as git's hook gives it")
    parser.add_argument("--commits", metavar="A..B", help="commits to check (default: since BASE)")
    args = parser.parse_args(words)
    if args.file:
        found = message_faults(args.file.read_text(encoding="utf-8"), staged(ROOT))
    else:
        commit_range = args.commits or default_range(ROOT)
        if commit_range is None:
            print(f"skipped: no git history since {BASE[:7]}")
            return 0
        found = history_faults(ROOT, commit_range)
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
