"""The route and the command. It imports no server before the app is made."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from glowplug.core.api import GlowplugError, hookimpl
from glowplug.core.protocols import EngineHandle


@hookimpl
def extend_app(app: Any, engine: EngineHandle) -> None:
    from glowplug_messages.routes import routes

    app.include_router(routes(engine))


@hookimpl
def extend_cli(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("ask", help="print the answer of a running server as it comes")
    parser.add_argument("text")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="address of the server")
    parser.add_argument("--api-key", default="none", help="the server's key")
    parser.add_argument("--max-tokens", type=int, default=512, help="most tokens of the answer")
    parser.set_defaults(run=ask)


def ask(args: argparse.Namespace) -> int:
    """Send one message and print the text of the events; return the exit code."""
    messages = [{"role": "user", "content": args.text}]
    body = {"messages": messages, "max_tokens": args.max_tokens, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {args.api_key}"}
    request = Request(f"{args.url}/messages", json.dumps(body).encode(), headers)
    try:
        with urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if event["type"] == "error":
                        raise GlowplugError(event["error"]["message"])
                    print(event.get("delta", {}).get("text", ""), end="", flush=True)
    except HTTPError as error:
        raise GlowplugError(json.loads(error.read())["error"]["message"]) from None
    except URLError as error:
        raise GlowplugError(f"no server at {args.url}: {error.reason}") from None
    print()
    return 0
