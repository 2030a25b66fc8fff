"""Logging of the server process: one line per event, in human or JSON format.

Prompts are never logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import orjson

from glowplug.core.config.operation_options import LogOptions
from glowplug.core.step.draft_counts import Acceptance, since
from glowplug.core.step.messages import Stats
from glowplug.entrypoints.front.client import EngineClient
from glowplug.entrypoints.server.metric_names import hit_rate

logger = logging.getLogger("glowplug.server")


def printable(text: str) -> str:
    """Escape control and format characters, line separators and lone surrogates in ``text``.

    The result cannot forge a line of a log or control the terminal that shows it.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


class OneLine(logging.Formatter):
    """Log formatter for people: ``INFO 11-21 02:00:00 [name] message``.

    Unprintable text is escaped. A line about a request ends with its id (``id=...``), which its
    caller passes as ``extra={"id": ...}``.
    """

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{record.levelname} {when} [{record.name}] {printable(record.getMessage())}"
        if hasattr(record, "id"):
            line += f" id={printable(str(record.id))}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLine(logging.Formatter):
    """Log formatter for programs: one JSON object per record, on one line.

    If the logged object has a method ``fields``, its result replaces the field "message". A line
    about a request has its id.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record.msg, "fields", None)
        message = {"message": printable(record.getMessage())} if fields is None else fields()
        body: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            **message,
        }
        if hasattr(record, "id"):
            body["id"] = str(record.id)
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(body).decode()


def set_up_logging(options: LogOptions) -> None:
    """Set the handlers of the loggers ``glowplug`` and ``uvicorn``, and of no others."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLine() if options.format == "json" else OneLine())
    for name, level in (("glowplug", options.level.upper()), ("uvicorn", "WARNING")):
        target = logging.getLogger(name)
        target.handlers = [handler]
        target.setLevel(level)
        target.propagate = False
    logging.getLogger("uvicorn.error").addFilter(_is_not_invalid_http)


def _is_not_invalid_http(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's record of an invalid HTTP request, True for other records.

    As a log filter this drops the record: the request log has a line for the same request.
    """
    return record.getMessage() != "Invalid HTTP request received."


def _running_by_group(groups: list[Stats]) -> str:
    """Return the number of running sequences of each data-parallel group, as text.

    The text is "" with a single group.
    """
    return (
        f", by group {'+'.join(str(stats.running) for stats in groups)}" if len(groups) > 1 else ""
    )


def _accept_length(last: Stats, now: Stats) -> str:
    """Return the accept length between two snapshots, as text; "" without a verify step."""
    length = Acceptance(since(now.drafts, last.drafts)).length
    return "" if length is None else f", accept length {length:.2f}"


def stats_line(last: Stats, now: Stats, groups: list[Stats]) -> str | None:
    """Return the log line with the engine's speed and load between two snapshots.

    Tokens per second count only the time in which steps ran, so idle time does not lower them.

    Args:
        last, now: statistics at the first snapshot and at the second.
        groups: latest statistics of each data-parallel group.

    Returns:
        The line; None if no step finished or no token was processed.
    """
    output = now.output_tokens - last.output_tokens
    prompt = now.prompt_tokens - last.prompt_tokens
    busy = now.busy_seconds - last.busy_seconds
    if busy <= 0 or not (output or prompt):
        return None
    used = now.pages_total - now.pages_free - now.pages_evictable
    return (
        f"prompt {prompt / busy:.1f} tok/s, output {output / busy:.1f} tok/s in {busy:.1f} s busy, "
        f"running {now.running}, waiting {now.waiting}, "
        f"KV {100 * used / max(1, now.pages_total):.1f}%, "
        f"prefix hits {100 * hit_rate(now):.1f}%"
        f"{_accept_length(last, now)}{_running_by_group(groups)}"
    )


async def stats_lines(client: EngineClient, options: LogOptions) -> None:
    """Log the statistics every ``log.stats_interval`` seconds, if there are new tokens."""
    if not options.stats_interval:
        return
    last = client.stats()
    while True:
        await asyncio.sleep(options.stats_interval)
        now = client.stats()
        line = stats_line(last, now, client.group_stats())
        if line is not None:
            logger.info("%s", line)
            last = now
