"""``glowplug new-plugin``: the distribution of every slot passes its own tests and serves.

Each has the modules that the slot's guide page shows.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glowplug import LLM
from glowplug.core.plugin.slots import SLOTS, Slot
from glowplug.entrypoints.cli.main import main
from glowplug.entrypoints.cli.plugin_template import TEMPLATES
from tests.support.guide_pages import FOLDER, GREEDY, config_of, read, run_tests
from tests.support.tiny import write_config
from tests.thirdparty.packages import private_modules

LEAST_PASSED = 3  #: tests of the shortest suite and of the declaration
#: slots whose component extends the built-in one
EXTENDED = {"scheduler", "sampling", "graphs", "executor", "ops"}
ROUNDED = {"quantization"}  #: slots whose component changes the weights
slots = pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with the distribution of every slot, importable from their src folders.

    The modules and tests are those of the slot's guide page, the other files as written.
    """
    folder = tmp_path_factory.mktemp("kit")
    with pytest.MonkeyPatch.context() as patch:
        for slot in SLOTS:
            guide = read(slot.name)
            output = folder / slot.name
            assert main(["new-plugin", slot.name, guide.name, "--output", str(output)]) == 0
            for path, text in guide.files.items():
                (output / path).write_text(text)
            patch.syspath_prepend(str(output / "src"))
        yield folder


@slots
def test_the_tests_of_a_new_distribution_pass(slot: Slot, folder: Path) -> None:
    code, outcomes = run_tests(folder / slot.name)
    assert (code, outcomes.failed) == (0, [])
    assert len(outcomes.passed) >= LEAST_PASSED


def tokens_of(llm: LLM) -> list[list[int]]:
    """Return the tokens of two requests."""
    with llm:
        prompts = [[2, 3, 4, 5, 6] * 5, [7, 8]]
        return [list(one.token_ids) for one in llm.generate(prompts, GREEDY)]


@slots
def test_an_engine_serves_with_a_new_component(slot: Slot, folder: Path, tmp_path: Path) -> None:
    """Its tokens are those of the built-in component."""
    guide = read(slot.name)
    config = config_of(guide, tmp_path)
    usual = {name: value for name, value in config.items() if name != slot.section}
    if slot.name == "weights":
        usual["weights"] = {"use": "safetensors"}
    if slot.name == "model":
        usual["model"] = str(write_config(tmp_path / "usual", "llama"))
    llm = LLM(plugins=[guide.module], **config)
    assert guide.name in [one.name for one in llm.plan.choices_in(slot.name)]
    tokens = tokens_of(llm)
    assert [len(one) for one in tokens] == [8, 8]
    assert slot.name in ROUNDED or tokens == tokens_of(LLM(**usual))


@pytest.mark.parametrize("slot", [slot for slot in SLOTS if slot.many], ids=lambda slot: slot.name)
def test_the_readmes_command_names_an_entry_of_a_list(
    slot: Slot, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = read(slot.name)
    readme = (folder / slot.name / "README.md").read_text()
    (words,) = re.findall(r"^glowplug check (--set .+)$", readme, re.MULTILINE)
    common = ["--model", "embedded", "--facts", "cpu", "--plugin", guide.module]
    assert main(["check", *shlex.split(words), *common]) == 0
    assert f"{slot.section}.0.use" in capsys.readouterr().out
    assert words.removeprefix("--set ") in (FOLDER / f"{slot.name}.md").read_text()


@slots
def test_a_new_component_imports_the_public_interface_only(slot: Slot, folder: Path) -> None:
    """A component that extends the built-in one imports it, too."""
    others = private_modules(folder / slot.name / "src")
    assert bool(others) == (slot.name in EXTENDED)
    assert all(module.startswith("glowplug.plugins.") for module in others)


def test_every_slot_has_a_template() -> None:
    found = {path.stem for path in TEMPLATES.glob("*.txt")}
    assert found == {slot.name for slot in SLOTS} | {"common"}


def test_new_files_are_formatted_and_free_of_lint(folder: Path) -> None:
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--select", "E,F,I,UP,B", "--ignore", "B905"], ["format", "--check"]):
        for slot in SLOTS:
            done = subprocess.run(
                [*ruff, *command, "--isolated", "--line-length", "100", "--no-cache", "."],
                cwd=folder / slot.name,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["polcy", "mine"], "unknown slot 'polcy', did you mean 'policy'?"),
        (["policy", "Shortest-First"], "for example 'shortest_first'"),
        (["policy", "1st"], "bad name '1st'"),
        (["policy", "a" * 33], "longer than 32"),
        (["policy", "auto"], "is reserved"),
        (["policy", "class"], "is reserved"),
        (["policy", "fcfs"], "has a built-in component called 'fcfs'"),
        (["policy", "scheduling"], "a class SchedulingPolicy, which it has already"),
        (["outputs", "output"], "a class OutputOptions, which it has already"),
    ],
)
def test_a_wrong_slot_or_name_is_refused(
    words: list[str],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", *words]) == 2
    assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    assert main(["new-plugin", "policy", "mine", "--output", str(tmp_path / "mine")]) == 2
    assert "exists; name another folder with --output" in capsys.readouterr().err
    assert list((tmp_path / "mine").iterdir()) == []
