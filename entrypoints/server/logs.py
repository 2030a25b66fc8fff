"""Log set-up of the server process: one line an event, human or JSON; prompts are never logged."""
from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import orjson

from glowplug.core.messages import Stats
from glowplug.core.options import LogOptions
from glowplug.entrypoints.client import EngineClient
from glowplug.entrypoints.server.metric_names import hit_rate

logger = logging.getLogger("glowplug.server")


class OneLine(logging.Formatter):
    """``INFO 11-21 02:00:00 [name] message``. Control characters are escaped: no message can forge a second line."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
        text = record.getMessage()
        if any(ord(char) < 32 or ord(char) == 127 for char in text):
            text = text.encode("unicode_escape").decode("ascii")
        line = f"{record.levelname} {when} [{record.name}] {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, Any] = {"time": record.created, "level": record.levelname.lower(), "logger": record.name,
                                "message": record.getMessage()}
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(body).decode()


def set_up_logging(options: LogOptions) -> None:
    """Handlers of the ``glowplug`` and ``uvicorn`` loggers; nobody else's are touched."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLine() if options.format == "json" else OneLine())
    for name, level in (("glowplug", options.level.upper()), ("uvicorn", "WARNING")):
        target = logging.getLogger(name)
        target.handlers = [handler]
        target.setLevel(level)
        target.propagate = False


def _by_group(groups: list[Stats]) -> str:
    """How the running sequences lie over data-parallel groups; "" while there is one."""
    return f", by group {'+'.join(str(stats.running) for stats in groups)}" if len(groups) > 1 else ""


def stats_line(last: Stats, now: Stats, groups: list[Stats]) -> str | None:
    """The statistics line for the time between two snapshots; None without a finished step or a token in between.

    Tokens a second are those of the busy time, in which steps ran: idle time does not lower them.
    """
    output, prompt = now.output_tokens - last.output_tokens, now.prompt_tokens - last.prompt_tokens
    busy = now.busy_seconds - last.busy_seconds
    if busy <= 0 or not (output or prompt):
        return None
    used = now.pages_total - now.pages_free - now.pages_evictable
    return (f"prompt {prompt / busy:.1f} tok/s, output {output / busy:.1f} tok/s in {busy:.1f} s busy, "
            f"running {now.running}, waiting {now.waiting}, KV {100 * used / max(1, now.pages_total):.1f}%, "
            f"prefix hits {100 * hit_rate(now):.1f}%{_by_group(groups)}")


async def stats_lines(client: EngineClient, options: LogOptions) -> None:
    """A line every ``stats_interval`` seconds in which something was generated."""
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
