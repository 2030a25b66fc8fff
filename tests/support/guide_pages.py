"""The guide pages of the slots: their examples, and the mistakes whose messages they show.

``python -m tests.support.guide_pages [SLOT ...]`` writes the messages anew.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import GlowplugError, RequestError
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.plugin.slots import BY_NAME
from tests.support.source_tree import ROOT
from tests.support.tiny import write_config

FOLDER = ROOT / "docs" / "guide"
COLUMNS = 110  #: longest line of a message on a page
FILE = re.compile(
    r"^`glowplug-[\w-]+/((?:src|tests)/[\w/]+\.py)`:\n\n```python\n(.*?)^```$", re.M | re.S
)
MISTAKE = re.compile(
    r"^\*\*(Load|Plan|Start|Request|Suite): (?P<title>[^\n]+?)\*\*(?:(?!^\*\*|^```)[^\n]*\n)*"
    r"```(?P<kind>diff|toml)\n(?P<change>.*?)^```\n\n```text\n(?P<message>.*?)^```$",
    re.M | re.S,
)
#: options of a nested run of pytest: it leaves the outer run's signals, output and files alone
APART = [
    word
    for name in ("timeout", "xdist", "cacheprovider", "faulthandler", "capture")
    for word in ("-p", f"no:{name}")
]
CONFIG: dict[str, Any] = {
    "weights": {"use": "random"},
    "skip_tokenizer": True,
    "dtype": "float32",
    "device": "cpu",
    "context_length": 128,
    "memory": {"kv_tokens": 512},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@dataclass(frozen=True)
class Mistake:
    """A change of an example, and the message that it leads to.

    Attributes:
        phase: "Load", "Plan", "Start", "Request" or "Suite".
        title: its title on the page.
        kind: "diff" for a change of the files, "toml" for a configuration.
        change: the change.
        message: the message as the page shows it.
    """

    phase: str
    title: str
    kind: str
    change: str
    message: str


@dataclass(frozen=True)
class Guide:
    """A guide page.

    Attributes:
        slot: the slot.
        name: name of the example's component.
        files: files of the example: path -> text.
        mistakes: the common errors of the page.
    """

    slot: str
    name: str
    files: dict[str, str]
    mistakes: tuple[Mistake, ...]

    @property
    def module(self) -> str:
        """The module of the example's declaration."""
        return f"glowplug_{self.name}.plugin"


def read(slot: str) -> Guide:
    """Return the guide of a slot, read from its page."""
    text = (FOLDER / f"{slot}.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"^<!-- example (\w+) -->$", text, re.MULTILINE)
    mistakes = tuple(
        Mistake(one.group(1), *(one.group(key) for key in ("title", "kind", "change", "message")))
        for one in MISTAKE.finditer(text)
    )
    return Guide(slot, name, dict(FILE.findall(text)), mistakes)


def edited(files: dict[str, str], change: str) -> dict[str, str]:
    """Return files after a change in the form of a diff without line numbers.

    Lines without a sign in front, and those to be removed, are found together in one file.
    """
    lines = change.splitlines()
    old = "\n".join(line[1:] for line in lines if line[:1] != "+")
    new = "\n".join(line[1:] for line in lines if line[:1] != "-")
    (path,) = [path for path, text in files.items() if f"\n{old}\n" in text]
    assert files[path].count(f"\n{old}\n") == 1, f"{path} has these lines twice:\n{old}"
    return {**files, path: files[path].replace(f"\n{old}\n", f"\n{new}\n" if new else "\n")}


def config_of(guide: Guide, folder: Path) -> dict[str, Any]:
    """Return a configuration with a small model, written to ``folder``, and the component."""
    slot = BY_NAME[guide.slot]
    changes: dict[str, Any] = {}
    if guide.slot == "model":
        found = re.search(r'architectures=frozenset\({"(\w+)"}\)', "".join(guide.files.values()))
        changes = {"architectures": [found.group(1) if found else ""]}
    config = {**CONFIG, "model": str(write_config(folder / "model", "llama", **changes))}
    if guide.slot == "weights":
        config["model"] = "embedded"
    own: dict[str, Any] = {"use": guide.name}
    if slot.section:
        config[slot.section] = [own] if slot.many else own
    return config


def _forget(name: str) -> None:
    """Remove the modules of an example, its tests included, from the imported ones."""
    own = (f"glowplug_{name}", f"test_{name}")
    for module in list(sys.modules):
        if set(module.split(".")) & set(own):
            del sys.modules[module]


@contextmanager
def importable(folder: Path, name: str) -> Iterator[None]:
    """Have the package of an example imported from ``folder``, and forget it at the end."""
    sys.path.insert(0, str(folder / "src"))
    try:
        _forget(name)
        yield
    finally:
        sys.path.remove(str(folder / "src"))
        _forget(name)


class Outcomes:
    """A pytest plugin that collects the outcomes of tests."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []
        self.messages: dict[str, str] = {}

    def pytest_configure(self) -> None:
        """Have the suites rewritten by this run, too, so that messages show values."""
        pytest.register_assert_rewrite("glowplug.core.testing")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid}\n{report.longreprtext}")
            crash = getattr(report.longrepr, "reprcrash", None)
            test = report.nodeid.rpartition("::")[2]
            self.messages[test] = crash.message if crash else report.longreprtext
        elif report.passed and report.when == "call":
            self.passed.append(report.nodeid)


def run_tests(root: Path, *words: str) -> tuple[int, Outcomes]:
    """Run pytest on a distribution, and return its exit status and the outcomes."""
    outcomes = Outcomes()
    options = ["-q", "--import-mode=importlib", "-c", str(root / "pyproject.toml"), str(root)]
    return int(pytest.main([*APART, *options, *words], plugins=[outcomes])), outcomes


def message_of(guide: Guide, mistake: Mistake, folder: Path) -> str:
    """Return the message that a mistake leads to, "" if it leads to none.

    Args:
        guide: the page.
        mistake: one of its mistakes.
        folder: an empty folder.
    """
    change = mistake.change.rstrip("\n")
    files = edited(guide.files, change) if mistake.kind == "diff" else guide.files
    files = {"pyproject.toml": "[tool.pytest.ini_options]\n", **files}
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    (folder / "src" / f"glowplug_{guide.name}" / "__init__.py").touch()
    with importable(folder, guide.name):
        if mistake.phase == "Suite":
            test = re.split(r"\W", mistake.message.strip())[0]
            _, outcomes = run_tests(folder, "-x", *(["-k", test] if test else []))
            found = list(outcomes.messages.items())
            return "".join(f"{one}: {said.splitlines()[0]}" for one, said in found)
        try:
            _act(guide, mistake, folder)
        except RequestError as error:
            return str(error)
        except GlowplugError as error:
            named = str(error).startswith(type(error).__name__)
            return str(error) if named else f"{type(error).__name__}: {error}"
    return ""


def _act(guide: Guide, mistake: Mistake, folder: Path) -> None:
    """Load, plan, start or serve with the example, as far as a mistake needs it.

    Raises:
        GlowplugError: the mistake has led to an error.
    """
    plugins = load_plugins([guide.module], entry_points=False)
    if mistake.phase == "Load":
        return
    config = config_of(guide, folder)
    if mistake.kind == "toml":
        config |= tomllib.loads(mistake.change)
    if mistake.phase == "Plan":
        make_plan(config, plugins=plugins, hardware=read_sheet("cpu"))
        return
    with LLM(plugins=[guide.module], **config) as llm:
        if mistake.phase == "Request":
            for one in llm.generate([[2, 3, 4, 5, 6], [7, 8]], GREEDY):
                if one.error:
                    raise RequestError(one.error)


def shown(message: str, folder: Path) -> str:
    """Return a message as a page shows it: without paths of this machine, in short lines."""
    text = re.sub(r" \(/\S+/site-packages/\S+\.py:\d+\)", "", message)
    text = text.replace(str(folder), "FOLDER").replace(str(ROOT), "GLOWPLUG")
    text = re.sub(r" \(/\S+\.py:\d+\)", "", text)  # a place in another package
    text = re.sub(r"(\(GLOWPLUG/\S+\.py):\d+\)", r"\1)", text)
    lines = []
    for line in text.splitlines()[:6]:
        indent = re.match(r" *", line)
        lines += textwrap.wrap(
            line,
            COLUMNS,
            subsequent_indent=(indent.group() if indent else "") + "    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines) + "\n"


def rewrite(slot: str) -> bool:
    """Write the messages of a page anew; return whether they have changed."""
    guide = read(slot)
    page = FOLDER / f"{slot}.md"
    text = old = page.read_text(encoding="utf-8")
    for mistake in guide.mistakes:
        folder = Path(tempfile.mkdtemp())
        made = shown(message_of(guide, mistake, folder), folder)
        shutil.rmtree(folder)
        before = f"{mistake.change}```\n\n```text\n{mistake.message}```"
        assert text.count(before) == 1, mistake.title
        text = text.replace(before, f"{mistake.change}```\n\n```text\n{made}```")
    page.write_text(text, encoding="utf-8")
    return text != old


if __name__ == "__main__":
    for name in sys.argv[1:] or BY_NAME:
        print(name, "written" if rewrite(name) else "unchanged")
