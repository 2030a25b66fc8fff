"""Chat templates: the functions they may use, and that a hostile template fails only its own
request.
"""

from __future__ import annotations

import json
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from glowplug.core.errors import RequestError
from glowplug.core.text import chat_template
from glowplug.core.text.chat_template import ChatTemplate
from glowplug.core.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import ASSISTANT, BOS, CHAT, EOS, byte_level

USER = [{"role": "user", "content": "hi"}]


def make(template: str | dict[str, str] | None = CHAT) -> Tokenizer:
    return Tokenizer(
        tokenizers.Tokenizer.from_str(byte_level()),
        chat_template=template,
        special_tokens={"bos_token": BOS, "eos_token": EOS},
    )


class Looks:
    """A stand-in for the module ``time``: each reading moves the reading thread's clock on by
    ``each`` seconds.
    """

    def __init__(self) -> None:
        self.each = 0.0
        self.taken = 0
        self._own = threading.local()

    def monotonic(self) -> float:
        self.taken += 1
        self._own.now = getattr(self._own, "now", 0.0) + self.each
        return float(self._own.now)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    one = Looks()
    monkeypatch.setattr(chat_template, "time", one)
    return one


def refusal(template: str, messages: Any = None, **arguments: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(template).apply_chat_template(USER if messages is None else messages, **arguments)
    assert caught.value.status == 400
    return caught.value


# ---- functions of templates ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "read"),
    [
        ("{{ messages }}{{ thinking }}{{ other }}", {"thinking"}),
        ("{{ messages }}{% if not thinking %}{% set thinking = 1 %}{% endif %}", {"thinking"}),
        ("{{ messages }}{% if enable_thinking is defined %}x{% endif %}", {"enable_thinking"}),
        ("{{ messages }}{# thinking #}", set()),
        ("{{ messages", set()),
        (None, set()),
    ],
)
def test_the_arguments_that_a_template_reads(template: str | None, read: set[str]) -> None:
    assert make(template).template_arguments == read


def test_conversation() -> None:
    messages = [
        *USER,
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "日本 <b>&"},
    ]
    wanted = f"{BOS}<｜User｜>hi{ASSISTANT}hello{EOS}<｜User｜>日本 <b>&"
    assert make().apply_chat_template(messages) == wanted + ASSISTANT
    assert make().apply_chat_template(messages, add_generation_prompt=False) == wanted
    assert make().apply_chat_template(messages, thinking=True) == wanted + f"{ASSISTANT}<think>\n"


def test_conveniences_of_transformers() -> None:
    render = ChatTemplate(
        "{% for x in items %}{% if x == 2 %}{% continue %}{% endif %}"
        "{% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}|"
        "{{ {'b': 'é<', 'a': 1} | tojson }}|{{ [1] | tojson(indent=1) }}|{{ strftime_now('%Y') }}|"
        "{% generation %}made{% endgeneration %}|"
        "{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    ).render
    shown = render({"items": [1, 2, 3, 4, 5]}).split("|")
    assert shown[0] == "13"
    assert shown[1:] == ['{"b": "é<", "a": 1}', "[\n 1\n]", str(datetime.now().year), "made", "2"]


def test_filtered_loops_and_concatenation_keep_their_meaning() -> None:
    render = ChatTemplate(
        "{% for m in items if m > 1 %}{{ loop.index ~ ':' ~ m }}{{ ',' if not loop.last }}"
        "{% else %}none{% endfor %}"
    ).render
    assert render({"items": [1, 2, 3]}) == "1:2,2:3"
    assert render({"items": []}) == "none" and render({"items": [0]}) == "none"
    recursive = "{% for x in tree recursive %}({{ x[0] }}{{ loop(x[1]) }}){% endfor %}"
    assert ChatTemplate(recursive).render({"tree": [("a", [("b", [])]), ("c", [])]}) == "(a(b))(c)"
    macro = "{% macro m(x, y='!') %}{{ x + y }}{% endmacro %}{{ m('a') }}{{ m('b', y='?') }}"
    assert ChatTemplate(macro).render({}) == "a!b?"


def test_tools_choose_the_tool_template() -> None:
    tokenizer = make({"default": "plain", "tool_use": "{{ tools | tojson }}"})
    assert tokenizer.apply_chat_template(USER) == "plain"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert json.loads(tokenizer.apply_chat_template(USER, tools=tools)) == tools
    assert make("{{ tools is none }}").apply_chat_template(USER) == "True"


def test_continue_final_message() -> None:
    messages = [*USER, {"role": "assistant", "content": "The capital is "}]
    text = make().apply_chat_template(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text == f"{BOS}<｜User｜>hi{ASSISTANT}The capital is "
    stripping = make("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    assert (
        stripping.apply_chat_template(
            messages, add_generation_prompt=False, continue_final_message=True
        )
        == "[hi][The capital is"
    )
    for template, last in (
        ("nothing", messages[-1]),
        (CHAT, {"role": "assistant", "content": " "}),
    ):
        refusal(template, [*USER, last], add_generation_prompt=False, continue_final_message=True)
    assert refusal(CHAT, messages, continue_final_message=True).param == "continue_final_message"


def test_only_known_arguments() -> None:
    for name in ("tokenize", "chat_template", "messages_", "bos_token"):
        assert refusal(CHAT, **{name: True}).param == "chat_template_kwargs"
    shown = make("{{ thinking }} {{ enable_thinking }} {{ reasoning_effort }}").apply_chat_template(
        USER, thinking=True, enable_thinking=False, reasoning_effort="low"
    )
    assert shown == "True False low"


def test_no_template() -> None:
    with pytest.raises(RequestError) as caught:
        make(None).apply_chat_template(USER)
    assert caught.value.code == "no_chat_template"


# ---- errors --------------------------------------------------------------------------------------


def test_template_refuses_the_messages() -> None:
    error = refusal("{{ raise_exception('roles must alternate') }}")
    assert (
        "roles must alternate" in str(error)
        and error.code == "template_error"
        and error.param == "messages"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ missing.field }}",
        "{{ messages[5]['content'] }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ nothing() }}",
        "{{ messages | nofilter }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{% bogus %}",
        "{{ messages | tojson(sort_keys=x.y) }}",
    ],
)
def test_failing_templates_are_request_errors(template: str) -> None:
    assert refusal(template).code == "template_error"


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__class__.__base__.__subclasses__()[0]",
        "cycler.__init__.__globals__.os.popen('touch CANARY').read()",
        "self.__init__.__globals__",
        "joiner.__init__.__globals__",
        "namespace.__init__.__globals__['__builtins__']['open']('CANARY', 'w')",
        "raise_exception.__globals__['json']",
        "strftime_now.__globals__.__builtins__.__import__('os').system('touch CANARY')",
        "(messages | attr('__class__')).__mro__",
        "''['__class__']",
        "'{0.__class__.__mro__}'.format('')",
        "'{x.__class__}'.format_map({'x': ''})",
        "messages | map(attribute='__class__') | list | first | attr('__base__')",
        "environment.loader",
        "(self._TemplateReference__context).environment",
        "tick.__self__",
        "request.application",
    ],
)
def test_injection_executes_nothing(
    expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Template injection (CVE-2026-5760, CVE-2024-34359) gives an error or text that exposes no
    object, and never writes a file.
    """
    monkeypatch.chdir(tmp_path)
    try:
        shown = make("{{ " + expression + " }}").apply_chat_template(USER)
    except RequestError as error:
        assert error.code == "template_error"
    else:
        assert "class" not in shown and "<" not in shown and "module" not in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "template",
    [
        "{% set _ = messages.append({'role': 'user'}) %}",
        "{% set _ = messages.clear() %}",
        "{% set _ = messages[0].update(a=1) %}",
        "{% set _ = messages[0].pop('role') %}",
    ],
)
def test_templates_cannot_change_the_messages(template: str) -> None:
    messages = [dict(USER[0])]
    refusal(template, messages)
    assert messages == USER


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ [0] * 10**8 }}",
        "{{ (10**8) * 'ab' }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ (5).to_bytes(10**9) }}",
        "{% set ns = namespace(s='0123456789') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='0123456789') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% for i in range(100000) %}{{ 'aaaaaaaaaa' * 1000 }}{% endfor %}",
        "{{ lipsum(n=100000) }}",
    ],
)
def test_bombs_are_cut_short(template: str, looks: Looks) -> None:
    """Bombs are stopped by their size or their number of iterations, before they take much memory
    and long before the deadline.
    """
    looks.each = chat_template.RENDER_SECONDS / 200_000
    tracemalloc.start()
    try:
        error = refusal(template)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error.code == "template_error" and "rendering took" not in str(error)
    assert peak < 8 * chat_template.RENDER_CHARACTERS


@pytest.mark.parametrize(
    "template",
    [
        "{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% set r = range(100000) %}{% for i in r %}"
        "{% for j in r if false %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
        "{% endmacro %}{{ m(60) }}",
    ],
)
def test_endless_templates_meet_the_deadline(template: str, looks: Looks) -> None:
    looks.each = chat_template.RENDER_SECONDS / 200
    assert "rendering took longer than" in str(refusal(template))
    assert looks.taken <= 203, "the first look after the deadline is the last one"


def test_threads_have_their_own_deadlines(looks: Looks) -> None:
    endless = "{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}"
    tokenizer = make(
        "{% if messages[0].content == 'bad' %}" + endless + "{% endif %}{{ messages[0].content }}"
    )
    looks.each = chat_template.RENDER_SECONDS / 200

    def render(text: str) -> str:
        try:
            return tokenizer.apply_chat_template([{"role": "user", "content": text}])
        except RequestError as error:
            return str(error.code)

    texts = [f"good {i}" for i in range(20)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(render, ["bad", *texts])) == ["template_error", *texts]
