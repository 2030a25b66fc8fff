"""``glowplug chat``: a conversation in the terminal, streamed.

The engine is a running server or one in this process, described by the same options as for
``glowplug serve``. If stdin is no terminal, each of its lines is a message.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from glowplug.entrypoints.chat.screen import Screen
from glowplug.entrypoints.chat.session import ChatEngine, ChatError, ChatSession
from glowplug.entrypoints.chat.settings import ChatSettings
from glowplug.entrypoints.cli.exit_codes import FAILED
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.evaluation.options import DEFAULT_PORT, InProcess, engine_of

#: environment variables with the key of a server; the first that is set counts
KEY_VARIABLES = ("GLOWPLUG_API_KEY", "OPENAI_API_KEY")
THINKING = {"on": True, "off": False, "default": None}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options for the server, the conversation and the engine."""
    group = parser.add_argument_group("conversation")
    group.add_argument(
        "--base-url",
        "--url",
        metavar="URL",
        help="a running OpenAI server, with --model as the model's name in requests and --api-key "
        f"(else ${' or $'.join(KEY_VARIABLES)}); without any engine option it is "
        f"http://127.0.0.1:{DEFAULT_PORT}",
    )
    group.add_argument("--model-name", metavar="NAME", help="the model's name in requests")
    group.add_argument(
        "--system-prompt", default="", metavar="TEXT", help="system message of the conversation"
    )
    group.add_argument("--temperature", type=float, help="default: the server's or the engine's")
    group.add_argument("--top-p", type=float)
    group.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    group.add_argument(
        "--thinking",
        choices=sorted(THINKING),
        default="default",
        help="answer with or without reasoning, if the chat template has such a switch",
    )
    group.add_argument(
        "--reasoning",
        choices=("auto", "show", "hide"),
        default="auto",
        help="print the reasoning; auto: only on a terminal, dimmed",
    )
    group.add_argument(
        "-q", "--quick", metavar="MESSAGE", help="send one message, print the answer and exit"
    )
    group.add_argument(
        "--whole-stdin",
        action="store_true",
        help="if stdin is no terminal: all of it is one message, not one message per line",
    )
    group.add_argument("--no-color", action="store_true", help="do not dim text")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Hold the conversation; return the exit code.

    Returns:
        0; 1 if there is no server, or if a message fails and stdin is no terminal.
    """
    interactive = sys.stdin.isatty() and args.quick is None
    screen = Screen(sys.stdout, interactive, not args.no_color, args.reasoning)
    settings = ChatSettings(
        system=args.system_prompt,
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        thinking=THINKING[args.thinking],
    )
    try:
        engine = _open(args, os.environ)
    except (ChatError, ValueError) as error:
        print(f"glowplug chat: {error}", file=sys.stderr)
        return FAILED
    try:
        session = ChatSession(engine, settings, screen)
        if args.quick is not None:
            return session.run_messages([args.quick])
        if interactive:
            return session.run_terminal()
        if args.whole_stdin:
            return session.run_messages([sys.stdin.read()])
        return session.run_lines(sys.stdin)
    finally:
        engine.close()


def _open(args: argparse.Namespace, environment: Mapping[str, str]) -> ChatEngine:
    """Return the engine that the options describe.

    Raises:
        ChatError, ValueError: the server cannot be used, or an option is for another engine.
        PlanRefused: the configuration of the engine cannot run.
    """
    chosen = engine_of(args)
    if isinstance(chosen, InProcess):
        if args.model_name:
            raise ValueError("--model-name is an option for a server: give its address too")
        from glowplug.entrypoints.chat.local import LocalChat

        return LocalChat(chosen.config)
    from glowplug.entrypoints.chat.remote import RemoteChat

    keys = [chosen.api_key, *map(environment.get, KEY_VARIABLES)]
    key = next(filter(None, keys), None)
    return RemoteChat(replace(chosen, model=args.model_name or chosen.model, api_key=key))
