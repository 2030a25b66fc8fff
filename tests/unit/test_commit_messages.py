"""Commit messages follow CONTRIBUTING.md; ``.ci/commit_messages.py`` checks them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.support.source_tree import ROOT

SCRIPT = Path(".ci") / "commit_messages.py"
VERBS = Path("tests") / "unit" / "verbs.txt"
MANY_FILES = [f"source/module_{number}.py" for number in range(31)]

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("ci_commit_messages", ROOT / SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _own_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """git with an author and without the repository and settings of the surrounding run."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "A Contributor")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "contributor@example.com")


def git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(root: Path, message: str, *names: str) -> str:
    """Commit new content of the named files, and return the commit's hash."""
    for name in names or ("source/module.py",):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(message + name)
    git(root, "add", "-A")
    git(root, "commit", "--no-verify", "-m", message)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit, the script and its list of verbs."""
    root = tmp_path / "repository"
    for name in (SCRIPT, VERBS):
        (root / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, root / name)
    git(tmp_path, "init", "-q", str(root))
    commit(root, "old history")
    return root


@pytest.mark.parametrize(
    "message",
    [
        "Add a commit-message check",
        "Add " + "x" * 68,
        "Split the keys of long rows\n\nSigned-off-by: A <a@example.com>",
        "Fix a race at shutdown\n\nThe watcher read a closed pipe.",
        'Revert "Add a cache"\n\nThis reverts commit 0123abc.\n\nThe cache held stale rows.',
        'Revert "' + "Add " + "x" * 68 + '"\n\nIt was slower.',
        "Add a page\n\nhttps://example.com/" + "x" * 120,
        "Merge branch 'main' into feature",
        "Merge pull request #12 from somebody/feature",
    ],
)
def test_good_messages_pass(check: ModuleType, message: str) -> None:
    assert check.faults(message, ["core/plan/plan.py"]) == []


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("", "the message is empty"),
        ("Added a check", "'Added', which is no verb in the imperative"),
        ("A check of commit messages", "'A', which is no verb in the imperative"),
        ("Merging the caches", "'Merging', which is no verb in the imperative"),
        ("core: add a check", "'core', which is no verb in the imperative"),
        ("add a check", "lower-case letter"),
        ("Add " + "x" * 69, "has 73 characters; 72 are allowed"),
        ("Add a check.", "full stop"),
        ("Add a check\nof messages", "second line is not blank"),
        ("Add a check\n\nx" + " x" * 60, "line 3 has 121 columns; 100 are allowed"),
        ("Fix a race", "'Fix' needs a body"),
        ("Work around a driver fault", "'Work' needs a body"),
        ("Revert the cache\n\nSigned-off-by: A <a@example.com>", "'Revert' needs a body"),
        ('Revert "Add a cache"\n\nThis reverts commit 0123abc.', "'Revert' needs a body"),
        ("fixup! Add a check", "squash this commit"),
        ("squash! Add a check", "squash this commit"),
    ],
)
def test_each_fault_is_named_alone(check: ModuleType, message: str, fault: str) -> None:
    found = check.faults(message, ["core/plan/plan.py"])
    assert len(found) == 1 and fault in found[0]


def test_words_that_need_a_reason_are_verbs(check: ModuleType) -> None:
    assert check.verbs() >= check.REASON_WORDS


def test_a_commit_of_many_files_needs_a_body(check: ModuleType) -> None:
    subject = "Split slots"
    assert "31 files outside tests/ and docs/" in check.faults(subject, MANY_FILES)[0]
    assert check.faults(f"{subject}\n\nOne word for one concept.", MANY_FILES) == []
    assert check.faults(subject, MANY_FILES[1:]) == []
    assert check.faults(subject, [name.replace("source", "tests") for name in MANY_FILES]) == []
    assert check.faults("Rename slots", MANY_FILES) == [], "the subject says all"


def test_comments_and_quoted_diff_of_the_editor_do_not_count(check: ModuleType) -> None:
    mark = "# ------------------------ >8 ------------------------"
    message = f"Add a check\n# {'x ' * 60}\n{mark}\ndiff --git\n+ {'x ' * 60}\n"
    assert check.message_faults(message, []) == []


def test_a_fixup_may_be_committed_but_not_kept(check: ModuleType) -> None:
    assert check.message_faults("fixup! Add a check", []) == []
    assert check.faults("fixup! Add a check", []) != []


def test_history_is_checked_since_the_base(check: ModuleType, repository: Path) -> None:
    base = git(repository, "rev-parse", "HEAD")
    commit(repository, "Add a module")
    wrong = commit(repository, "Added another")
    commit(repository, "Split slots", *MANY_FILES)
    commit_range = check.default_range(repository, base)
    found = check.history_faults(repository, commit_range)
    assert commit_range == f"{base}..HEAD"
    assert [line.split(": ")[0].split(" ", 1)[1] for line in found] == [
        "Split slots",
        "Added another",
    ]
    assert wrong.startswith(found[1].split()[0])


def test_merges_are_left_out(check: ModuleType, repository: Path) -> None:
    base = git(repository, "rev-parse", "HEAD")
    git(repository, "checkout", "-q", "-b", "feature")
    commit(repository, "Add a module", "source/feature.py")
    git(repository, "checkout", "-q", "-")
    commit(repository, "Add another", "source/other.py")
    git(repository, "merge", "-q", "--no-ff", "-m", "feature and main", "feature")
    assert len(git(repository, "log", "--format=%h", f"{base}..").splitlines()) == 3
    assert check.history_faults(repository, f"{base}..HEAD") == []


def test_a_shallow_clone_is_checked_as_far_as_it_goes(
    check: ModuleType, repository: Path, tmp_path: Path
) -> None:
    base = git(repository, "rev-parse", "HEAD")
    commit(repository, "Rename slots\n\nOne word for one concept.", *MANY_FILES)
    commit(repository, "Add a module")  # the oldest of the clone, in which every file looks new
    commit(repository, "Added another")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth", "2", repository.as_uri(), str(clone))
    assert check.default_range(clone, base) == "HEAD"
    (fault,) = check.history_faults(clone, "HEAD")
    assert "Added another" in fault


@pytest.mark.parametrize("history", ["none", "surrounding", "foreign"])
def test_a_tree_without_our_history_is_skipped(
    check: ModuleType, repository: Path, tmp_path: Path, history: str
) -> None:
    """An unpacked sdist has no repository or is inside another; an imported tree has other
    commits.
    """
    if history == "none":
        (tmp_path / "tree").mkdir()
        assert check.default_range(tmp_path / "tree") is None
    elif history == "surrounding":
        assert (
            check.default_range(repository / "source", git(repository, "rev-parse", "HEAD")) is None
        )
    else:
        assert check.default_range(repository) is None
        done = subprocess.run(
            [sys.executable, str(repository / SCRIPT)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (
            0,
            f"skipped: no git history since {check.BASE[:7]}\n",
        )


def test_the_hook_stops_a_commit_with_a_bad_message(repository: Path) -> None:
    """The entry of .pre-commit-config.yaml runs as git's commit-msg hook."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert hooks["commit-message"]["stages"] == ["commit-msg"]
    assert "commit-msg" in config["default_install_hook_types"]
    assert config["default_stages"] == ["pre-commit"]  # else the other hooks run on the message too
    program, script = hooks["commit-message"]["entry"].split()
    assert program == "python"

    hook = repository / ".git" / "hooks" / "commit-msg"
    hook.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$1"\n')
    hook.chmod(0o755)
    (repository / "new.py").write_text("")
    git(repository, "add", "-A")
    with pytest.raises(subprocess.CalledProcessError) as stopped:
        git(repository, "commit", "-m", "Fix a race")
    assert "'Fix' needs a body" in stopped.value.stderr + stopped.value.stdout
    git(repository, "commit", "-m", "Fix a race", "-m", "The watcher read a closed pipe.")
    assert git(repository, "log", "-1", "--format=%s") == "Fix a race"


def test_this_repository_follows_the_rules(check: ModuleType) -> None:
    commit_range = check.default_range(ROOT)
    if commit_range is None:
        pytest.skip(f"no git history since {check.BASE[:7]}")
    assert check.history_faults(ROOT, commit_range) == []
