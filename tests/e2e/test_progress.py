"""The progress bar of ``LLM.generate`` and ``LLM.chat``."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import tqdm

from glowplug import LLM, SamplingParams
from glowplug.core.errors import RequestError

HI = [{"role": "user", "content": "hi"}]
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("embedded", device="cpu", memory={"kv_tokens": 512}, context_length=64) as engine:
        yield engine


class Terminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self) -> bool:
        return True


class Bars:
    """Stands in for tqdm, and records what it is given.

    Attributes:
        made: (total, counted so far, closed) of each bar.
        shown: text behind each bar at its end.
    """

    def __init__(self) -> None:
        self.made: list[list[Any]] = []
        self.shown = ""

    def __call__(self, *, total: int, **settings: Any) -> Bars:
        assert {"desc", "unit"} <= settings.keys()
        self.made.append([total, 0, False])
        return self

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.shown = text

    def update(self, count: int) -> None:
        self.made[-1][1] += count

    def close(self) -> None:
        self.made[-1][2] = True


def test_a_bar_counts_every_sequence_of_generate_and_chat(llm: LLM) -> None:
    bars = Bars()
    results = llm.generate(["one", [5, 6], "three"], SHORT, use_tqdm=bars)
    assert [len(one.token_ids) for one in results] == [3, 3, 3]
    llm.chat([HI, HI], SHORT.replace(n=2), use_tqdm=bars)
    assert bars.made == [[3, 3, True], [4, 4, True]]
    assert "output" in bars.shown and bars.shown.count("tokens/s") == 2


def test_a_bar_is_shown_on_standard_error_and_only_on_a_terminal(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {}
    for use_tqdm, terminal in ((None, True), (None, False), (True, False), (False, True)):
        errors = Terminal() if terminal else io.StringIO()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", errors)
            done = llm.generate(["one", "two"], SHORT, use_tqdm=use_tqdm)
        answers[use_tqdm, terminal] = [one.text for one in done]
        shown = errors.getvalue()
        wanted = use_tqdm if use_tqdm is not None else terminal
        assert ("Generating: 100%" in shown and "2/2" in shown) == wanted == bool(shown)
    assert len(set(map(tuple, answers.values()))) == 1
    assert capsys.readouterr().out == ""


def test_a_bar_that_is_off_costs_no_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*args: object, **keywords: object) -> None:
        raise AssertionError("tqdm was called")

    monkeypatch.setattr(tqdm, "tqdm", made)
    monkeypatch.setattr("glowplug.entrypoints.front.completion.ProgressBar.count", made)
    llm.generate("one", SHORT, use_tqdm=False)
    llm.chat(HI, SHORT)  # standard error is no terminal here
    with pytest.raises(AssertionError, match="tqdm was called"):
        llm.generate("one", SHORT, use_tqdm=True)


def test_a_bar_is_closed_when_a_run_is_interrupted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = Bars()
    with pytest.raises(RequestError):
        llm.generate("one", SHORT.replace(max_tokens=4096), use_tqdm=bars)
    assert bars.made == []  # refused before it ran

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(llm, "_receive_frame", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("one", SHORT, use_tqdm=bars)
    assert bars.made == [[1, 0, True]]
    assert llm.generate("one", SHORT)[0].finish_reason == "length"
