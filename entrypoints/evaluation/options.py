"""Options of ``glowplug eval`` that choose the engines and the output.

An engine is a running server (``--base-url``) or one in this process, described by the same options
as for ``glowplug serve``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glowplug.entrypoints.bench.others.engine_options import engine_config
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.evaluation.questions import positive

DEFAULT_PORT = 30000
#: fields of the configuration that describe a server to a client, by dotted path
CLIENT_FIELDS = ("model", "server.host", "server.port", "server.api_key")


@dataclass(frozen=True)
class Server:
    """A running OpenAI server.

    Attributes:
        base_url: URL without ``/v1``.
        model: the model's name in requests; None: the first of ``/v1/models``.
        api_key: sent as a bearer token; None: no key.
    """

    base_url: str
    model: str | None = None
    api_key: str | None = None


@dataclass(frozen=True)
class InProcess:
    """An engine in this process; ``config`` has the keywords of ``LLM``."""

    config: Mapping[str, Any]


Engine = Server | InProcess


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options for the run, the comparison, the result and the engine."""
    group = parser.add_argument_group("run")
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="a running OpenAI server, with --model as the model's name in requests and --api-key; "
        "--host and --port name it too, and without any engine option it is "
        f"http://127.0.0.1:{DEFAULT_PORT}",
    )
    group.add_argument(
        "--parallel",
        "--num-threads",
        type=positive,
        default=64,
        help="most questions in flight; default: 64",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="time after which a question to a server counts as unanswered",
    )
    compared = parser.add_argument_group("comparison")
    compared.add_argument(
        "--compare",
        metavar="ENGINE",
        help="put the same questions to a second engine: a server's URL, a configuration file for "
        "an engine in this process, or a result file of an earlier run",
    )
    compared.add_argument(
        "--compare-set",
        action="append",
        default=[],
        metavar="A.B=VALUE",
        help="compare with the same engine in this process with this field changed",
    )
    compared.add_argument("--compare-api-key", metavar="KEY", help="key of the second server")
    output = parser.add_argument_group("results")
    output.add_argument(
        "--output-file",
        "--result-file",
        type=Path,
        metavar="FILE",
        help="write the result with every answer as JSON, also of an interrupted run",
    )
    output.add_argument(
        "--show", type=int, default=5, metavar="N", help="wrong answers to print; default: 5"
    )
    output.add_argument(
        "--min-accuracy",
        type=float,
        metavar="SHARE",
        help="exit with 1 if the accuracy (of either engine) is below this share, 0 to 1",
    )
    output.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    add_engine_options(parser)


def engine_of(args: argparse.Namespace) -> Engine:
    """Return the engine that the options describe.

    Raises:
        ConfigError: an engine option could not be read.
        ValueError: an option is for another kind of engine.
    """
    given = {flag.flag.path: flag for flag in getattr(args, "engine_flags", None) or ()}
    others = [
        *(flag.spelling for path, flag in given.items() if path not in CLIENT_FIELDS),
        *(["--config"] if args.config else []),
        *(["--set"] if args.overrides else []),
    ]
    online = args.base_url or "server.host" in given or "server.port" in given
    if not online and (others or "model" in given):
        return InProcess(engine_config(args))
    if others:
        raise ValueError(
            f"{others[0]} is an option of the engine, and the server's engine is already running: "
            "leave it out, or leave out the server's address to start an engine in this process"
        )

    def value(path: str) -> Any:
        return given[path].value if path in given else None

    host = str(value("server.host") or "127.0.0.1")
    host = host if "://" in host else f"http://{host}"
    url = args.base_url or f"{host}:{value('server.port') or DEFAULT_PORT}"
    return Server(without_version(url), value("model"), value("server.api_key"))


def without_version(url: str) -> str:
    """Return a server's URL without a trailing ``/v1``."""
    return url.rstrip("/").removesuffix("/v1")
