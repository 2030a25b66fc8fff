"""Every exception the engine raises on purpose. All derive from :class:`GlowplugError`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class GlowplugError(Exception):
    """Base of every deliberate error."""


@dataclass(frozen=True)
class Refusal:
    """One reason why a combination will not run.

    Attributes:
        by: the component (or pass) that refuses.
        field: dotted config path the operator can change.
        reason: one sentence of what is wrong, with the values.
        fix: what to write instead.
        origin: distribution of ``by`` ("built in" for ours).
    """

    by: str
    field: str
    reason: str
    fix: str
    origin: str = "built in"

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}\n    by {self.by} ({self.origin}) | fix: {self.fix}"


class PlanRefused(GlowplugError):
    """The configuration cannot run. Nothing was loaded. ``refusals`` holds every reason found."""

    def __init__(self, refusals: Iterable[Refusal], source: str = "the configuration") -> None:
        self.refusals = tuple(refusals)
        self.source = source
        super().__init__(str(self))

    def __str__(self) -> str:
        count = len(self.refusals)
        head = f"PlanRefused: {count} problem{'s' if count != 1 else ''} with {self.source} (nothing was loaded)"
        return "\n".join([head, *(f" {i}. {r}" for i, r in enumerate(self.refusals, 1))])


class PluginLoadError(GlowplugError):
    """A plugin could not be loaded, hung, or claims a taken name. Names its distribution and
    version.
    """


class ConfigError(PlanRefused):
    """The configuration could not be read: unknown keys, wrong types, duplicate keys. A kind of
    refusal.

    ``parsed``: (data, line by dotted path) of a file whose faults still allow the rest to be
    checked, else None.
    """

    def __init__(
        self,
        refusals: Iterable[Refusal],
        source: str = "the configuration",
        parsed: tuple[dict[str, Any], dict[str, int]] | None = None,
    ) -> None:
        self.parsed = parsed
        super().__init__(refusals, source)


class WeightError(GlowplugError):
    """A checkpoint is incomplete, truncated, of the wrong shape, or holds a tensor too many or too
    few.
    """


class FactsError(GlowplugError):
    """A model folder or a facts sheet could not be read. ``fix`` says what to do about it."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


class CaptureError(GlowplugError):
    """A step could not be captured in a graph. Says which: mode, rows, piece, and the component
    that failed.
    """


class RequestError(GlowplugError):
    """A request cannot be served. Costs exactly that request.

    Attributes:
        code: machine-readable, for example ``context_length_exceeded``.
        param: the request field at fault, or None.
        status: HTTP status the server answers with.
        confidential: the message may quote the prompt: it is for the client alone, and logs have
            the code.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        status: int = 400,
        confidential: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status
        self.confidential = confidential


def context_exceeded(context: int, what: str, param: str = "prompt") -> RequestError:
    """Return the error for a request longer than ``context`` tokens; ``what`` says how long it is
    and what would do.

    NOTE: clients recognise this error by its words: litellm by the first sentence, which is
    OpenAI's; langchain by "prompt is too long", since openai's client no longer shows the code in
    an error's text.
    """
    return RequestError(
        f"This model's maximum context length is {context} tokens. However, {what}",
        code="context_length_exceeded",
        param=param,
    )


def prompt_too_long(context: int, prompt: int) -> RequestError:
    """Return the error for a prompt of ``prompt`` tokens that leaves no room in ``context`` tokens
    for one more.
    """
    return context_exceeded(
        context, f"your prompt has {prompt} tokens; with one to generate the prompt is too long"
    )


class QueueFull(RequestError):
    """The bounded queue is full. The client should retry after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message, code="queue_full", status=429)
        self.retry_after = retry_after


class CollectiveError(GlowplugError):
    """A collective did not finish: a peer has gone, or did not answer in time. Seldom the cause,
    mostly a consequence of another rank's end; whoever reports failures looks for that first."""


class EngineDead(GlowplugError):
    """The engine has stopped: a rank failed. Carries rank, phase and reason in its message."""


class EngineStopped(EngineDead):
    """The engine has ended because it was told to."""
