"""What every route needs, in one object on ``app.state``; nothing of it is global."""

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
from glowplug.core.protocols import OutputParserFactory
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints.front.client import EngineClient
from glowplug.entrypoints.server.errors import Unavailable
from glowplug.entrypoints.server.generate.job import Jobs
from glowplug.entrypoints.server.generate.text_pool import TextWorkers
from glowplug.entrypoints.server.generate.token_names import TokenNames
from glowplug.entrypoints.server.metrics import Metrics
from glowplug.entrypoints.server.request_log import RequestLog

BYTES_A_TOKEN = 16  #: default cap on prompt bytes, a token of context


@dataclass
class Context:
    """``draining`` is set by the first SIGTERM: from then on new work is answered 503."""

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
    fingerprint: str  #: ``system_fingerprint`` of every answer
    log: RequestLog
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @staticmethod
    def of(
        plan: EnginePlan,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        parsers: Sequence[OutputParserFactory],
    ) -> Context:
        options = ServerOptions.model_validate(plan.config.get("server", {}))
        metrics_options = MetricsOptions.model_validate(plan.config.get("metrics", {}))
        cap = options.max_prompt_bytes or BYTES_A_TOKEN * plan.sizes.context_length
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
        )

    @property
    def model_name(self) -> str:
        return self.options.served_model_name or _base_name(self.plan.model)

    def check_model(self, name: str | None) -> None:
        """RequestError 404 for a model that is not served. None, "default" and the configured path
        are this one.
        """
        if name is None or name in (self.model_name, self.plan.model, "default"):
            return
        raise RequestError(
            f"the model {name[:128]!r} does not exist; this server has {self.model_name!r}",
            code="model_not_found",
            param="model",
            status=404,
        )

    def require_ready(self) -> None:
        """Unavailable (503) unless new work can be taken."""
        if self.draining:
            raise Unavailable("the server is shutting down", "draining")
        if self.client.state == "starting":
            raise Unavailable("the model is still loading", "starting")
        if self.client.state != "ready":
            raise Unavailable("the engine is not running", "engine_" + self.client.state)


def _base_name(model: str) -> str:
    """A folder's last part; a hub id such as "org/name" stays whole."""
    path = PurePath(model)
    return path.name if path.is_absolute() or model.startswith(".") else model


async def get_context(request: Request) -> Context:
    """Asynchronous, because FastAPI runs what is not in a thread of its own."""
    context: Context = request.app.state.context
    return context
