"""``glowplug chat``: a terminal, commands, Ctrl-C, pipes, keys, and an engine in this process."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glowplug.core.errors import PlanRefused
from glowplug.entrypoints import chat
from glowplug.entrypoints.chat.local import LocalChat
from glowplug.entrypoints.chat.remote import answer_parts
from glowplug.entrypoints.chat.screen import Screen, without_controls
from glowplug.entrypoints.chat.session import ChatError, ChatSession
from glowplug.entrypoints.chat.settings import SETTABLE, ChatSettings
from glowplug.entrypoints.cli.flags.parser import Parser
from glowplug.plugins.outputs.deepseek_r1 import DeepseekR1Options
from glowplug.plugins.outputs.deepseek_r1_runtime import DeepseekR1
from tests.e2e.fake_engine import FakeExecutor, make_plan
from tests.e2e.serving import Served, served
from tests.support.pseudo_terminal import CTRL_C, CTRL_D, PseudoTerminal
from tests.support.waiting import until

COMMAND = [sys.executable, "-m", "glowplug", "chat"]
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
KEY = "the-secret-key"


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """Have SIGINT interrupt, also in a test process that a shell started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    parser = DeepseekR1(DeepseekR1Options(), make_plan(), None)
    with served(FakeExecutor(step_seconds=0.001), parsers=[parser]) as one:
        yield one


def clean() -> dict[str, str]:
    """Return this process's environment without keys of servers."""
    return {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}


def piped(
    text: str, *words: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        input=text,
        env={**clean(), **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser(prog="glowplug chat")
    chat.configure(parser)
    return parser.parse_args(list(words))


# ---- a terminal ----------------------------------------------------------------------------------


def test_a_conversation_in_a_terminal(server: Served, tmp_path: Path) -> None:
    """Reasoning is dimmed, Ctrl-C stops an answer only, and the conversation goes on and is
    saved.
    """
    terminal = PseudoTerminal([*COMMAND, "--url", server.url + "/v1"], clean())
    terminal.wait_for("fake at http://")
    terminal.wait_for("> ")
    terminal.type("say:<think>because</think>therefore\n")
    terminal.wait_for("\n")
    assert terminal.wait_for("> ") == f"{DIM}because{PLAIN}\n\ntherefore{PLAIN}\n"
    terminal.type("say:" + "word " * 700 + "\n")
    terminal.wait_for("\n")
    terminal.wait_for("word word word")
    terminal.type(CTRL_C)
    terminal.wait_for(f"{DIM}[stopped]{PLAIN}")
    until(lambda: not server.context.jobs.running, "the request has ended")
    terminal.wait_for("> ")
    terminal.type("/system Be brief.\n")
    terminal.wait_for("system message: Be brief.")
    terminal.type("/set temperature 0.2\n")
    terminal.wait_for("settings: temperature 0.2")
    terminal.type("/set temperature warm\n")
    terminal.wait_for("error: temperature is a number or default")
    terminal.type("one\\\n")
    terminal.wait_for(". ")
    terminal.type("say:two\n")
    terminal.wait_for("\ntwo")
    assert server.executor.params[-1].temperature == 0.2
    saved = tmp_path / "talk.json"
    terminal.type(f"/save {saved}\n")
    terminal.wait_for("7 messages written")
    messages = json.loads(saved.read_text())["messages"]
    assert [one["role"] for one in messages] == ["system", *["user", "assistant"] * 3]
    assert messages[2] == {"role": "assistant", "reasoning": "because", "content": "therefore"}
    assert messages[4]["content"].startswith("word word word")
    assert len(messages[4]["content"]) < 5 * 700
    assert messages[5]["content"] == "one\nsay:two"
    terminal.type("/clear\n/system -\n/help\n")
    terminal.wait_for("system message: none")
    terminal.wait_for("/quit: end")
    terminal.wait_for("> ")
    terminal.type_until(CTRL_C, "/quit or Ctrl-D ends")
    terminal.wait_for("> ")
    terminal.type("fail:nan\n")
    terminal.wait_for("error: ")
    terminal.wait_for("> ")
    terminal.type(CTRL_D)
    assert terminal.end() == 0


# ---- pipes ---------------------------------------------------------------------------------------


def test_each_line_of_a_pipe_is_a_message(server: Served) -> None:
    text = "say:<think>no</think>one\n\n/set max_tokens 3\n//say:12345\n/quit\nsay:never\n"
    done = piped(text, "--base-url", server.url)
    assert (done.returncode, done.stdout) == (0, "one\n123\n")
    assert "settings: max_tokens 3" in done.stderr and "cut off" in done.stderr
    shown = piped("say:<think>no</think>one", "--url", server.url, "--reasoning", "show")
    assert shown.stdout == "no\n\none\n"


def test_a_whole_pipe_can_be_one_message(server: Served) -> None:
    done = piped("/first\nsay:a\nb\n", "--url", server.url, "--whole-stdin")
    assert (done.returncode, done.stdout) == (0, "a\nb\n\n")
    quick = piped("", "--url", server.url, "-q", "/say:quick")
    assert (quick.returncode, quick.stdout) == (0, "quick\n")


def test_failures_of_a_pipe_exit_with_1(server: Served) -> None:
    failed = piped("fail:nan\nsay:never\n", "--url", server.url)
    assert failed.returncode == 1 and "never" not in failed.stdout
    assert "error: " in failed.stderr and "Traceback" not in failed.stderr
    unknown = piped("/sett x\n", "--url", server.url)
    assert unknown.returncode == 1 and "/set, /clear" in unknown.stderr
    absent = piped("say:x\n", "--url", "http://127.0.0.1:9")
    assert absent.returncode == 1 and "no server at http://127.0.0.1:9" in absent.stderr


def test_the_key_comes_from_the_option_or_the_environment() -> None:
    with served(server={"api_key": KEY}) as one:
        url = ["--url", one.url, "-q", "say:in"]
        assert piped("", *url, "--api-key", KEY).stdout == "in\n"
        assert piped("", *url, environment={"OPENAI_API_KEY": KEY}).stdout == "in\n"
        both = {"OPENAI_API_KEY": "wrong", "GLOWPLUG_API_KEY": KEY}
        assert piped("", *url, environment=both).stdout == "in\n"
        refused = piped("", *url, "--api-key", "wrong", environment=both)
        assert refused.returncode == 1 and "refused the key (401)" in refused.stderr
        assert KEY not in refused.stderr


# ---- parts ---------------------------------------------------------------------------------------


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    text = "a\x1b]0;title\x07b\x9bc\r\ttab\n\N{FAMILY} ü"
    assert without_controls(text) == "a\\x1b]0;title\\x07b\\x9bc\\x0d\ttab\n\N{FAMILY} ü"
    out = io.StringIO()
    Screen(out, interactive=False).write("", "\x1b[2J")
    assert "\x1b" not in out.getvalue()


def test_every_setting_can_be_set_and_reset() -> None:
    settings = ChatSettings()
    for name in SETTABLE:
        settings.set(name, "off" if name == "thinking" else "1")
    assert set(settings.sampling()) == SETTABLE.keys() - {"thinking"}
    assert settings.thinking is False
    for name in SETTABLE:
        settings.set(name, "default")
    assert settings.shown() == {}
    with pytest.raises(ValueError, match="no setting 'heat'; there are temperature"):
        settings.set("heat", "1")
    with pytest.raises(ValueError, match="on or off"):
        settings.set("thinking", "1")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([b'data: {"choices": []}'], "broke off"),
        ([b"data: nonsense"], "not JSON"),
        ([b'data: {"error": {"message": "too hot"}}'], "too hot"),
    ],
)
def test_a_damaged_stream_is_an_error(lines: list[bytes], reason: str) -> None:
    with pytest.raises(ChatError, match=reason):
        list(answer_parts(lines))


def test_options_of_another_engine_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.run(parsed("--url", "http://127.0.0.1:9", "--tp", "2", "-q", "x")) == 1
    assert "--tp is an option of the engine" in capsys.readouterr().err
    assert chat.run(parsed("--model", "embedded", "--model-name", "x", "-q", "x")) == 1
    assert "--model-name is an option for a server" in capsys.readouterr().err
    with pytest.raises(PlanRefused):
        chat.run(parsed("--model", "/nowhere", "-q", "x"))


# ---- an engine in this process -------------------------------------------------------------------


def test_an_engine_in_this_process_answers_and_survives_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = LocalChat({"model": "embedded", "device": "cpu"})
    try:
        out = io.StringIO()
        screen = Screen(out, interactive=True, reasoning="show")
        settings = ChatSettings(temperature=0.0, thinking=True)
        session = ChatSession(engine, settings, screen)
        assert session.run_messages(["What is 17 + 25?"]) == 0
        reasoning, _, answer = out.getvalue().rstrip("\n").rpartition("\n\n")
        assert answer == "42" and "17 + 25" in reasoning
        assert session.messages[1]["content"] == "42"
        settings.set("temperature", "5000")
        assert session.run_messages(["x"]) == 1 and "error: " in out.getvalue()
        settings.set("temperature", "0")

        def interrupted(reasoning: str, content: str) -> None:
            signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(screen, "write", interrupted)
            assert session.run_messages(["What is 2 + 3?"]) == 0
        assert "[stopped]" in out.getvalue() and len(session.messages) in (2, 4)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        until(lambda: not engine._llm._front.streams, "the sequence has ended")
        settings.set("thinking", "off")
        assert session.run_messages(["What is 2 + 3?"]) == 0
        assert session.messages[-1]["content"] == "5"
    finally:
        engine.close()
