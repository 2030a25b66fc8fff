"""The objects that routes share, held by ``app.state`` instead of globals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from fastapi import Request

from glowplug.core.errors import RequestError
from glowplug.core.plan.fingerprint import answers_fingerprint
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.options import LogOptions, MetricsOptions, ServerOptions
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import OutputParserFactory
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.front.client import EngineClient
from glowplug.entrypoints.server.errors import Unavailable
from glowplug.entrypoints.server.generate.grammar_gate import GrammarGate
from glowplug.entrypoints.server.generate.job import Jobs
from glowplug.entrypoints.server.generate.text_pool import TextWorkers
from glowplug.entrypoints.server.generate.token_names import TokenNames
from glowplug.entrypoints.server.metrics import Metrics
from glowplug.entrypoints.server.request_log import RequestLog
from glowplug.entrypoints.server.responses.store import ResponseStore

PROMPT_BYTES_PER_TOKEN = 16  #: default limit on prompt bytes, per token of the context


@dataclass
class Context:
    """The objects that all routes of the server share.

    Attributes:
        plan: the engine's plan.
        client: the engine's client.
        tokenizer: None if the engine runs without one.
        parsers: the plan's output parsers, in order.
        options: section ``server`` of the configuration.
        metrics: the server's metrics.
        jobs: the requests in flight.
        texts: the thread pool for tokenising and rendering.
        names: names and bytes of tokens for log-probabilities.
        eos_ids: token ids that end a sequence by default.
        fingerprint: ``system_fingerprint`` of every response.
        log: the request log.
        grammars: the checks of requests' grammars.
        stored: the responses kept for ``/v1/responses``.
        started: start of the server, seconds since the epoch.
        draining: set by the first SIGTERM; new work is then refused with 503.
    """

    plan: EnginePlan
    client: EngineClient
    tokenizer: Tokenizer | None
    parsers: Sequence[OutputParserFactory]
    options: ServerOptions
    metrics: Metrics
    jobs: Jobs
    texts: TextWorkers
    names: TokenNames
    eos_ids: frozenset[str | int | None]
    fingerprint: str
    log: RequestLog
    grammars: GrammarGate
    stored: ResponseStore
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @staticmethod
    def of(
        plan: EnginePlan,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        parsers: Sequence[OutputParserFactory],
        plugins: PluginSet | None = None,
    ) -> Context:
        """Create the context from the plan's configuration."""
        options = ServerOptions.model_validate(plan.config.get("server", {}))
        metrics_options = MetricsOptions.model_validate(plan.config.get("metrics", {}))
        cap = options.max_prompt_bytes or PROMPT_BYTES_PER_TOKEN * plan.sizes.context_length
        metrics = Metrics(
            options.served_model_name or _base_name(plan.model),
            client.stats,
            metrics_options,
            client.group_stats,
        )
        return Context(
            plan,
            client,
            tokenizer,
            parsers,
            options,
            metrics,
            Jobs(),
            TextWorkers(tokenizer, options.tokenizer_threads, cap, plan.sizes.context_length),
            TokenNames(tokenizer),
            frozenset(tokenizer.eos_ids if tokenizer is not None else ()),
            "fp_"
            + answers_fingerprint(plan, tokenizer.digest if tokenizer is not None else "")[:10],
            RequestLog(LogOptions.model_validate(plan.config.get("log", {})).requests),
            GrammarGate(plan, plugins),
            ResponseStore(options.stored_responses, options.stored_response_bytes),
        )

    @property
    def model_name(self) -> str:
        """The model's name in the API: ``server.served_model_name``, else the model's base name."""
        return self.options.served_model_name or _base_name(self.plan.model)

    def check_model(self, name: str | None) -> None:
        """Raise RequestError (404) if ``name`` is not the served model.

        None, "default", the served name and the configured path are accepted.
        """
        if name is None or name in (self.model_name, self.plan.model, "default"):
            return
        raise RequestError(
            f"the model {name[:128]!r} does not exist; this server serves {self.model_name!r}",
            code="model_not_found",
            param="model",
            status=404,
        )

    def require_ready(self) -> None:
        """Raise Unavailable (503) unless the server accepts new work."""
        if self.draining:
            raise Unavailable("the server is shutting down", "draining")
        if self.client.state == "starting":
            raise Unavailable("the model is still loading", "starting")
        if self.client.state != "ready":
            raise Unavailable("the engine is not running", "engine_" + self.client.state)


def _base_name(model: str) -> str:
    """Return the last part of a model's path; a hub id such as "org/name" is returned unchanged."""
    path = PurePath(model)
    return path.name if path.is_absolute() or model.startswith(".") else model


async def get_context(request: Request) -> Context:
    """Return the context of the app that received ``request``.

    NOTE: it is a coroutine because FastAPI runs other dependencies in a thread.
    """
    context: Context = request.app.state.context
    return context
