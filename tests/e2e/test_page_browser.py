"""The page at ``/`` in headless Chromium: chat, charts, keys, keyboard, restarts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.e2e.fake_engine import FakeExecutor
from tests.e2e.serving import HTTP, Served, served
from tests.support.browser import Browser, Tab, chromium
from tests.support.prefix_proxy import prefix_proxy
from tests.support.waiting import until

KEY = "the-secret-key"
#: roles whose nodes need a name of their own
CONTROLS = {
    "button",
    "link",
    "textbox",
    "searchbox",
    "spinbutton",
    "combobox",
    "checkbox",
    "dialog",
    "image",
    "log",
    "region",
    "navigation",
    "form",
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A new tab; the test fails if the page had a problem or called another host."""
    one = Tab(browser)
    yield one
    problems, hosts = one.problems, one.hosts
    one.close()
    assert problems == []
    assert len({host.partition(":")[0] for host in hosts}) <= 1


@pytest.fixture
def server() -> Iterator[Served]:
    with served(FakeExecutor(step_seconds=0.002)) as one:
        yield one


def send(tab: Tab, text: str) -> None:
    tab.run("document.querySelector('#message').focus()")
    tab.write(text)
    tab.press("Enter")


def wait_ended(tab: Tab) -> str:
    """Wait until no answer is running, and return the text of the last message."""
    until(lambda: tab.shown("#send"), "the answer has ended")
    return last(tab)


def last(tab: Tab) -> str:
    return str(tab.run("[...document.querySelectorAll('.message')].at(-1)?.innerText ?? ''"))


def test_an_answer_streams_and_its_markup_stays_text(tab: Tab, server: Served) -> None:
    markup = "<img src=x onerror=alert(1)> **bold** `a<b` [link](http://example.org)"
    tab.open(server.url + "/#chat")
    tab.wait_text("#state", "ready")
    send(tab, f"say:{markup}")
    answer = wait_ended(tab)
    assert "<img src=x onerror=alert(1)> bold a<b [link](http://example.org)" in answer
    assert "tokens/s" in answer
    assert tab.run("[...document.querySelectorAll('#log *')].map(e => e.tagName).join()").count(
        "STRONG"
    )
    assert tab.run("document.querySelectorAll('#log img, #log a').length") == 0
    assert tab.run("document.querySelectorAll('.user strong').length") == 0
    assert tab.hosts == {urlsplit(server.url).netloc}


def test_settings_reach_the_engine(tab: Tab, server: Served) -> None:
    tab.open(server.url + "/#chat")
    tab.wait_text("#state", "ready")
    values = {"temperature": "0.25", "top-p": "0.5", "max-tokens": "5", "system": "Be brief."}
    for name, value in values.items():
        tab.run(f"document.getElementById('{name}').value = {json.dumps(value)}")
    until(lambda: not tab.run("document.getElementById('thinking-label').hidden"), "a switch")
    tab.run("document.getElementById('thinking').value = 'on'")
    send(tab, "say:0123456789")
    assert "cut off at the limit of tokens" in wait_ended(tab)
    params = server.executor.params[-1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.25, 0.5, 5)
    tab.run("document.getElementById('temperature').value = '9'")
    send(tab, "say:never sent")
    assert len(server.executor.params) == 1 and "never sent" not in tab.text("#log")


#: a script that lists a second name of the model
TWO_MODELS = """
const plain = window.fetch;
window.fetch = async (path, options) => {
  if (path !== "v1/models") return plain(path, options);
  return new Response(JSON.stringify({data: [{id: "fake"}, {id: "default"}]}));
};
"""


def test_one_of_several_models_can_be_chosen(tab: Tab, server: Served) -> None:
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=TWO_MODELS)
    tab.open(server.url + "/#chat")
    tab.wait_text("#state", "ready")
    tab.run("document.querySelector('#settings').open = true")
    assert tab.shown("#model")
    tab.run("document.querySelector('#model').value = 'default'")
    send(tab, "say:hello")
    assert wait_ended(tab).split()[:2] == ["default", "hello"]


def test_stop_aborts_the_request_and_keeps_the_text(tab: Tab, server: Served) -> None:
    tab.open(server.url + "/#chat")
    tab.wait_text("#state", "ready")
    send(tab, "say:" + "word " * 700)
    until(lambda: "word word" in last(tab), "the answer has begun")
    assert server.context.jobs.running == 1
    tab.click("#stop")
    assert "stopped" in wait_ended(tab)
    until(lambda: not server.context.jobs.running, "the request has ended")
    server.wait_idle()
    assert server.executor.stats.aborted == 1
    send(tab, "say:again")
    assert "again" in wait_ended(tab)


def test_errors_are_shown_and_can_be_tried_again(tab: Tab, server: Served) -> None:
    tab.open(server.url + "/#chat")
    tab.wait_text("#state", "ready")
    send(tab, "fail:nan")
    until(lambda: "Try again" in last(tab), "the error is shown")
    assert "engine.log" not in last(tab) and "/var" not in last(tab)
    assert tab.run("document.querySelectorAll('.message').length") == 2
    tab.click(".message footer button")
    until(lambda: len(server.executor.params) == 2, "the request was sent again")
    until(lambda: "Try again" in last(tab), "the error is shown again")
    assert tab.run("document.querySelectorAll('.message').length") == 2


def test_charts_and_figures_move_while_requests_run(tab: Tab, server: Served) -> None:
    tab.open(server.url + "/")
    tab.wait_text("#state", "ready")
    path = "document.querySelectorAll('.chart .line')[0].getAttribute('d')"
    until(lambda: tab.run(path), "a first point")
    held = tab.run(path)
    body = {"prompt": "say:x", "max_tokens": 100, "ignore_eos": True}
    assert HTTP.post(server.url + "/v1/completions", json=body).status_code == 200

    def moved() -> bool:
        value = tab.text(".chart .value").replace(",", "")
        return tab.run(path) != held and bool(re.fullmatch(r"[\d.]+", value)) and float(value) > 0

    until(moved, "the chart of output tokens shows a rate")
    assert "Output tokens per second: now" in tab.run(
        "document.querySelector('.chart svg').getAttribute('aria-label')"
    )
    assert "1" in tab.text("#tiles")


def test_the_key_is_asked_for_and_kept_in_the_tab_only(tab: Tab) -> None:
    with served(server={"api_key": KEY}) as one:
        tab.open(one.url + "/#chat")
        until(lambda: tab.shown("#key-dialog"), "the dialog for the key")
        assert tab.focused() == "key" and "locked" in tab.text("#state")
        assert tab.problems == []  # nothing was requested without the key
        tab.write("wrong")
        tab.press("Enter")
        tab.wait_text("#key-error", "API key")
        assert tab.run("sessionStorage.getItem('glowplug.key')") is None
        tab.write(KEY)
        tab.press("Enter")
        tab.wait_text("#state", "ready")
        send(tab, "say:keyed")
        assert "keyed" in wait_ended(tab)
        assert tab.run("JSON.stringify(Object.values(sessionStorage))").count(KEY) == 1
        assert tab.run("localStorage.length + document.cookie.length") == 0
        tab.open(one.url + "/#status")
        tab.wait_text("#state", "ready")
        tab.click("#key-button")
        tab.click("#key-forget")
        tab.wait_text("#state", "locked")
        assert tab.run("sessionStorage.getItem('glowplug.key')") is None
        # the browser itself reports the answers 401 to the wrong key
        assert all("401" in problem for problem in tab.problems) and tab.problems
        tab.problems.clear()


def test_the_keyboard_reaches_everything(tab: Tab, server: Served) -> None:
    tab.open(server.url + "/")
    tab.wait_text("#state", "ready")
    tab.press("Tab")
    assert tab.focused() == "skip"
    tab.tab_to("to-chat")
    tab.press("Enter")
    until(lambda: tab.shown("#message"), "the chat is shown")
    tab.tab_to("message")
    tab.write("say:" + "word " * 700)
    tab.press("Enter")
    until(lambda: "word word" in last(tab), "the answer has begun")
    tab.press("Escape")
    assert "stopped" in wait_ended(tab)
    tab.tab_to("send")
    tab.tab_to("clear")
    tab.press("Space")
    assert tab.run("document.querySelectorAll('.message').length") == 0
    assert tab.focused() == "message"
    tab.run("document.activeElement.blur(); document.getElementById('to-chat').focus()")
    tab.press("Tab", shift=True)
    assert tab.focused() == "to-status"


def test_every_control_has_a_name_for_screen_readers(tab: Tab, server: Served) -> None:
    tab.open(server.url + "/")
    tab.wait_text("#state", "ready")
    tab.wait_text("#plan-note", "fingerprint")
    seen = tab.accessible()
    tab.run("document.querySelector('#key-dialog').showModal()")
    seen += tab.accessible()
    tab.run("document.querySelector('#key-dialog').close(); location.hash = '#chat'")
    tab.run("document.querySelector('#settings').open = true")
    until(lambda: tab.shown("#message"), "the chat is shown")
    send(tab, "say:hello")
    wait_ended(tab)
    seen += tab.accessible()
    roles = {role for role, _ in seen}
    assert {"button", "textbox", "spinbutton", "combobox", "log", "dialog", "image"} <= roles
    assert [role for role, name in seen if role in CONTROLS and not name] == []
    assert ("textbox", "Message") in seen and ("button", "Send") in seen
    live = "document.getElementById('log').getAttribute('aria-live')"
    assert tab.run(live) == "polite"
    assert tab.run("document.documentElement.lang") == "en"


@pytest.mark.parametrize("width", [320, 768])
def test_narrow_screens_do_not_scroll_sideways(tab: Tab, server: Served, width: int) -> None:
    tab.screen(width=width, height=700)
    for view in ("#status", "#chat"):
        tab.open(server.url + "/" + view)
        tab.wait_text("#state", "ready")
        tab.run("document.querySelector('#settings').open = true")
        wide = "document.getElementById('main').scrollWidth"
        assert tab.run(wide) <= width and tab.run("document.body.scrollWidth") <= width


@pytest.mark.slow
def test_a_prefix_a_lost_server_and_another_one(tab: Tab) -> None:
    with served() as first, prefix_proxy("/tools/glow", first.url) as proxy:
        tab.open(proxy.url + "#chat")
        tab.wait_text("#state", "ready")
        send(tab, "say:behind a proxy")
        assert "behind a proxy" in wait_ended(tab)
        proxy.target = ""
        tab.wait_text("#banner", "does not answer")
        assert tab.run("document.getElementById('send').disabled")
        assert "behind a proxy" in tab.text("#log")
        with served(server={"served_model_name": "another"}) as second:
            proxy.target = second.url
            tab.wait_text("#model-name", "another")
            tab.wait_text("#state", "ready")
            assert tab.text("#banner") == "" and "behind a proxy" in tab.text("#log")
            send(tab, "say:once more")
            assert "once more" in wait_ended(tab)
        # the browser itself reports requests without an answer
        assert all("ERR_" in problem for problem in tab.problems)
        tab.problems.clear()


def test_a_drain_is_announced(tab: Tab, server: Served) -> None:
    tab.open(server.url + "/#chat")
    tab.wait_text("#state", "ready")
    send(tab, "hang:")
    until(lambda: server.context.jobs.running, "the request runs")
    server.stop()
    tab.wait_text("#banner", "shutting down")
    assert "draining" in tab.text("#state")
    tab.click("#stop")
    wait_ended(tab)
    assert tab.run("document.getElementById('send').disabled")
    server.join()
    tab.problems.clear()  # the server has ended


@pytest.mark.slow
def test_the_embedded_model_answers_with_folded_reasoning(tab: Tab) -> None:
    command = [sys.executable, "-m", "glowplug", "serve", "--port", "0", "--plan", "none"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            ready = next(line for line in lines if " ready: " in line)
            url = ready.split(" on ")[1].strip().removesuffix("/v1")
            tab.open(url + "/#chat")
            tab.wait_text("#state", "ready")
            until(lambda: not tab.run("document.getElementById('thinking-label').hidden"), "it")
            tab.run("document.getElementById('thinking').value = 'on'")
            tab.run("document.getElementById('temperature').value = '0'")
            send(tab, "What is 17 + 25?")
            assert "42" in wait_ended(tab)
            assert tab.run("document.querySelector('.reasoning').open") is False
            assert "17 + 25" in tab.run("document.querySelector('.thought').textContent")
            tab.click("#to-status")
            tab.wait_text("#memory", "weights")
            tab.wait_text("#phases", "self-test")
            tab.wait_text("#plan", "attention.use")
        finally:
            process.terminate()
