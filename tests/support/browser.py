"""A headless Chromium for tests of the page, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.waiting import LIMIT, until

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--lang=en",
)
#: keys by name: the fields of ``Input.dispatchKeyEvent``
KEYS: dict[str, dict[str, Any]] = {
    "Tab": {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9},
    "Enter": {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"},
    "Escape": {"key": "Escape", "code": "Escape", "windowsVirtualKeyCode": 27},
    "Space": {"key": " ", "code": "Space", "windowsVirtualKeyCode": 32, "text": " "},
}
SHIFT = 8  #: bit of a modifier in ``Input.dispatchKeyEvent``


def program() -> str:
    """Return the path of Chromium; skip the test without one."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    return found


class Browser:
    """A running Chromium.

    Args:
        profile: empty folder for its profile.
    """

    def __init__(self, profile: Path) -> None:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (to_read, to_write)]

        def connect() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        # NOTE: every descriptor of Python closes on exec, so only 3 and 4 are inherited.
        self._process = subprocess.Popen(
            [program(), *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=connect,
        )
        for fd in (to_read, to_write, *high):
            os.close(fd)
        self._id = 0
        self._replies: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with os.fdopen(self._from, "rb", buffering=0) as stream:
            rest = b""
            while data := stream.read(1 << 16):
                *messages, rest = (rest + data).split(b"\0")
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._replies.pop(message["id"]).put(message)
                    else:
                        for listener in self._listeners:
                            listener(message)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        reply: queue.Queue[dict[str, Any]] = queue.Queue()
        self._replies[self._id] = reply
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = reply.get(timeout=LIMIT)
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Pass every later event to ``listener``, in the reader's thread."""
        self._listeners.append(listener)

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(LIMIT)
        self._reader.join(LIMIT)
        os.close(self._to)


class Tab:
    """A tab with a storage of its own.

    Attributes:
        problems: errors of the console, exceptions and failed requests since the last look.
        hosts: hosts and ports of all requests.
    """

    def __init__(self, browser: Browser, **screen: Any) -> None:
        self._browser = browser
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        self._target = browser.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)[
            "sessionId"
        ]
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        browser.listen(self._event)
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        self.screen(**screen)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def _event(self, message: dict[str, Any]) -> None:
        if message.get("sessionId") != self._session:
            return
        params = message["params"]
        if message["method"] == "Network.requestWillBeSent":
            url = urlsplit(params["request"]["url"])
            if url.scheme not in ("data", "blob", "about"):
                self.hosts.add(url.netloc)
        elif message["method"] == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.problems.append(json.dumps(params["args"])[:500])

    def screen(self, width: int = 1180, height: int = 900, dark: bool = False) -> None:
        """Set the size of the view in CSS pixels and the preferred colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        until(lambda: self.run("document.readyState") == "complete", f"{url} is loaded")

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; promises are awaited."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the shown text of the first element that ``selector`` finds; "" without one."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait_text(self, selector: str, part: str) -> str:
        """Wait until an element's shown text contains ``part``, and return the text."""
        return until(
            lambda: found if part in (found := self.text(selector)) else "",
            f"{selector} shows {part!r}",
        )

    def shown(self, selector: str) -> bool:
        """Return whether an element is visible."""
        element = f"document.querySelector({json.dumps(selector)})"
        return bool(self.run(f"{element}?.checkVisibility() ?? false"))

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str, shift: bool = False) -> None:
        """Press and release a key of KEYS."""
        event = {**KEYS[key], "modifiers": SHIFT if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        released = {name: value for name, value in event.items() if name != "text"}
        self.call("Input.dispatchKeyEvent", type="keyUp", **released)

    def write(self, text: str) -> None:
        """Type text into the focused element."""
        self.call("Input.insertText", text=text)

    def focused(self) -> str:
        """Return the id of the focused element; "" without one."""
        return str(self.run("document.activeElement?.id ?? ''"))

    def tab_to(self, id: str) -> None:
        """Press Tab until the element with ``id`` is focused."""
        for _ in range(60):
            if self.focused() == id:
                return
            self.press("Tab")
        raise AssertionError(f"no way to #{id} by Tab; #{self.focused()} is focused")

    def accessible(self) -> list[tuple[str, str]]:
        """Return (role, name) of every node of the accessibility tree that is not ignored."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]

    def picture(self, path: Path) -> None:
        """Write a screenshot as PNG."""
        data = self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Run a Chromium within the context; skip the test if it is not installed."""
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
