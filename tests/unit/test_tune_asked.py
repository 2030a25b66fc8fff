"""`glowplug tune`: requested tables that do not exist, and the instructions of its list."""

from __future__ import annotations

import sys

import pytest

from glowplug.core.plugin.component import Tuner
from glowplug.entrypoints.cli.commands import tune
from glowplug.entrypoints.cli.main import main

MODEL = ("--model", "tiny-v3", "--device", "cpu", "--plugin", "tests.plugins.sleepy_tuner")


@pytest.fixture(autouse=True)
def tables(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLEEPY_TABLES", str(tmp_path))


def test_a_table_that_the_model_does_not_have_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ((), ("--list",)):
        assert main(["tune", "sleepy", *MODEL, "--tables", "N=1,K=1", *more]) == 2
        said = capsys.readouterr().err
        assert "no table 'N=1,K=1'; this model has: N=" in said


def test_a_list_gives_the_command_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "sleepy", *MODEL, "--list"]) == 0
    assert capsys.readouterr().out.endswith("not complete: run it without --list\n")


def test_a_package_that_a_tuner_imports_is_named_when_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        sys.modules, "tests.needs_absent", None
    )  # importing it fails as if it were not installed
    with pytest.raises(
        ValueError, match="odd needs tests, which is not installed: pip install tests"
    ):
        tune._factory(Tuner("odd", "tests.needs_absent:Odd"), "here")
    with pytest.raises(Exception, match="could not be imported"):
        tune._factory(Tuner("odd", "glowplug.no_such_module:Odd"), "here")
