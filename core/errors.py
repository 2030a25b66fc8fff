"""Exceptions that the engine raises; all derive from :class:`GlowplugError`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class GlowplugError(Exception):
    """Base of all exceptions that the engine raises on purpose."""


@dataclass(frozen=True)
class Refusal:
    """One reason why a configuration cannot run.

    Attributes:
        by: name of the component or the planning pass that refuses it.
        field: dotted config path that the operator can change.
        reason: one sentence that states the problem, with the values.
        fix: value or action that solves the problem.
        origin: distribution of ``by``; "built in" for glowplug's own plugins.
    """

    by: str
    field: str
    reason: str
    fix: str
    origin: str = "built in"

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}\n    by {self.by} ({self.origin}) | fix: {self.fix}"


class PlanRefused(GlowplugError):
    """The configuration cannot run; nothing was loaded.

    Attributes:
        refusals: all reasons found.
        source: name of the configuration for messages, such as the name of its file.
    """

    def __init__(self, refusals: Iterable[Refusal], source: str = "the configuration") -> None:
        self.refusals = tuple(refusals)
        self.source = source
        super().__init__(str(self))

    def __str__(self) -> str:
        count = len(self.refusals)
        problems = f"{count} problem{'s' if count != 1 else ''}"
        head = f"PlanRefused: {problems} with {self.source} (nothing was loaded)"
        return "\n".join([head, *(f" {i}. {r}" for i, r in enumerate(self.refusals, 1))])


class PluginLoadError(GlowplugError):
    """A plugin could not be loaded, hung, or registered a component under a taken name.

    The message names the plugin's distribution and version.
    """


class ConfigError(PlanRefused):
    """The configuration could not be read: unknown keys, wrong types or duplicate keys.

    Attributes:
        parsed: (data, line number by dotted path) of a file whose faults still allow the rest to be
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
    """A checkpoint is truncated, or its tensors are missing, superfluous or of a wrong shape."""


class FactsError(GlowplugError):
    """A model folder or a fact sheet could not be read.

    Attributes:
        fix: action that solves the problem; "" if none is known.
    """

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


class CaptureError(GlowplugError):
    """A step could not be captured in a graph.

    The message names the mode, the number of rows, the piece and the component that failed.
    """


class RequestError(GlowplugError):
    """A request cannot be served; other requests are not affected.

    Attributes:
        code: machine-readable code, for example ``context_length_exceeded``.
        param: the request field at fault, or None.
        status: HTTP status of the answer.
        confidential: the message may quote the prompt, so only the client may see it, and logs
            show the code instead.
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
    """Return the error for a request longer than ``context`` tokens.

    NOTE: clients recognise this error by its words: litellm by the first sentence, which is
    OpenAI's; langchain by "prompt is too long", because openai's client no longer includes the code
    in an error's text.

    Args:
        context: longest sequence in tokens.
        what: second sentence, from after "However," on: the request's length and a length that
            would fit.
        param: the request field at fault.
    """
    return RequestError(
        f"This model's maximum context length is {context} tokens. However, {what}",
        code="context_length_exceeded",
        param=param,
    )


def prompt_too_long(context: int, prompt: int) -> RequestError:
    """Return the error for a prompt of ``prompt`` tokens with no room for a generated token.

    Args:
        context: longest sequence in tokens.
        prompt: number of tokens of the prompt.
    """
    return context_exceeded(
        context, f"your prompt has {prompt} tokens; with one to generate the prompt is too long"
    )


class QueueFull(RequestError):
    """The queue of waiting requests is full.

    Attributes:
        retry_after: seconds after which the client should retry.
    """

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message, code="queue_full", status=429)
        self.retry_after = retry_after


class ComponentFailed(RequestError):
    """A component failed in a call that concerns one request; only this request ends."""

    CODE = "component_failed"

    def __init__(self, message: str) -> None:
        super().__init__(message, code=self.CODE, status=500)


class CollectiveError(GlowplugError):
    """A collective did not finish: another rank has ended or did not answer in time.

    This is mostly a consequence of another rank's failure, so reports of failures look for that
    failure first.
    """


class EngineDead(GlowplugError):
    """The engine has stopped because a rank failed; the message states rank, phase and reason."""


class EngineStopped(EngineDead):
    """The engine has stopped on request."""
