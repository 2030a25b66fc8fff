"""``glowplug demo``: the plan, the streamed answer, the speed."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import pytest

from glowplug.entrypoints.cli import demo
from glowplug.entrypoints.front import llm
from tests.e2e.served_folder import write_served


@pytest.mark.parametrize(
    ("details", "shown"),
    [([], "--plan full"), (["--plan", "full"], "scheduler.use"), (["--plan", "none"], "")],
)
def test_the_demo_prints_plan_answer_and_speed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    details: list[str],
    shown: str,
) -> None:
    monkeypatch.setattr(llm, "LLM", partial(llm.LLM, weights={"use": "random"}))
    parser = argparse.ArgumentParser()
    demo.configure(parser)
    words = ["Hello?", "--model", str(write_served(tmp_path)), "--max-tokens", "9", *details]
    assert demo.run(parser.parse_args(words)) == 0
    printed = capsys.readouterr().out
    assert (
        ("DeepseekV3ForCausalLM" in printed) == bool(shown)
        and shown in printed
        and "> Hello?" in printed
    )
    assert ("scheduler.use" in printed) == (shown == "scheduler.use")
    assert "9 prompt tokens, " in printed and "tokens/s" in printed


def test_the_default_questions_are_answered_right(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    demo.configure(parser)
    assert demo.run(parser.parse_args([])) == 0
    printed = capsys.readouterr().out
    assert "> What is 27 + 15?\n\n42\n" in printed
    assert "\n\nI am Glowplug" in printed
