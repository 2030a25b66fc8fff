"""Routes for health, information, metrics and the operator's commands."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from fastapi import Depends
from starlette.responses import Response

from glowplug import __version__
from glowplug.core.errors import EngineDead, RequestError
from glowplug.core.facts.expert_load import recorded_load
from glowplug.core.plan.plan import EnginePlan, Sizes
from glowplug.core.step.request import Admission, SamplingParams
from glowplug.entrypoints.server.context import Context, get_context
from glowplug.entrypoints.server.errors import Unavailable, sanitise
from glowplug.entrypoints.server.generate.job import Job
from glowplug.entrypoints.server.protocol.native import AbortRequest, ProfileRequest
from glowplug.entrypoints.server.speculation import internal_states, speculation_info
from glowplug.entrypoints.server.transport.body import body_of
from glowplug.entrypoints.server.transport.streaming import json_response

Server = Annotated[Context, Depends(get_context)]

PROBE_SECONDS = 20.0  #: time limit of the one-token probe
#: time limit of the engine's part of ``/server_info``; the response is useful without that part
INFO_SECONDS = 5.0
CONTROL_SECONDS = 30.0  #: time limit of a command to the engine


async def health(context: Server) -> Response:
    """Report liveness.

    The status is 200 while the engine loads or sends heartbeats, 503 if it is dead or silent.
    """
    if not context.client.healthy():
        raise Unavailable("the engine has stopped or does not answer", "engine_dead")
    return json_response({"status": "draining" if context.draining else context.client.state})


async def ready(context: Server) -> Response:
    """Report readiness: 503 while the server loads, drains, or is not healthy."""
    context.require_ready()
    if not context.client.healthy():
        raise Unavailable("the engine does not answer", "engine_dead")
    return json_response({"status": "ready"})


async def health_generate(context: Server) -> Response:
    """Generate one token.

    Nothing is generated if sequences are running and the engine sends heartbeats.
    """
    context.require_ready()
    if not (context.client.healthy() and context.client.stats().running):
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await _generate_token(context)
        except TimeoutError:
            raise Unavailable(f"no token within {PROBE_SECONDS:.0f} s", "engine_silent") from None
    return json_response({"status": "ready"})


async def _generate_token(context: Context) -> None:
    """Generate one token at the highest priority, to check that the engine works."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    first = Admission(priority=-(1 << 20))
    job = Job("health", [context.client.check([0], params)], first)
    async with aclosing(job.run(context)) as source:
        async for _ in source:
            pass


async def metrics(context: Server) -> Response:
    """Return the metrics in the Prometheus text format."""
    if not context.metrics.enabled:
        raise RequestError(
            "metrics are switched off (metrics.enabled)", status=404, code="metrics_off"
        )
    return Response(context.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def version() -> Response:
    """Return the version of glowplug."""
    return json_response({"version": __version__})


async def model_info(context: Server) -> Response:
    """Return the model's properties and limits."""
    facts = context.plan.facts.model
    tokenizer = context.tokenizer
    arguments = tokenizer.template_arguments if tokenizer is not None else frozenset()
    return json_response(
        {
            "model_path": context.model_name,
            "tokenizer_path": context.model_name,
            "is_generation": True,
            "served_model_name": context.model_name,
            "architecture": facts.architecture,
            "vocab_size": facts.vocab_size,
            "context_length": context.plan.sizes.context_length,
            "dtype": context.plan.dtype,
            "quantization": facts.quant_method,
            "has_chat_template": tokenizer is not None and tokenizer.has_chat_template,
            "thinking_switch": bool(arguments & {"thinking", "enable_thinking"}),
            "status": context.client.state,
        }
    )


async def server_info(context: Server) -> Response:
    """Return the plan's decisions, the engine's latest statistics and its own report."""
    client = context.client
    engine = await _engine_info(context)  # its reply brings the statistics up to date
    groups = client.group_stats()
    found = {
        "version": __version__,
        "status": client.state,
        "model": context.model_name,
        **_plan_info(context.plan),
        "system_fingerprint": context.fingerprint,
        "stats": msgspec.structs.asdict(client.stats()),
        "speculation": speculation_info(context.plan, client.stats(), client.recent_drafts()),
        "internal_states": internal_states(client.stats()),
        "groups": [msgspec.structs.asdict(one) for one in groups] if len(groups) > 1 else [],
        "engine": engine,
    }
    return json_response(msgspec.to_builtins(found))


def _plan_info(plan: EnginePlan) -> dict[str, Any]:
    """Return the plan in the form that clients may see, without secrets and paths."""
    sizes = plan.sizes
    return {
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "device": plan.device,
        "overlap": plan.overlap,
        "sizes": whole_engine(sizes),
        "group_sizes": sizes if sizes.groups > 1 else None,
        "mesh": plan.mesh,
        "choices": {
            choice.slot: ", ".join(held.name for held in plan.choices_in(choice.slot))
            for choice in plan.choices
        },
        "decisions": [
            {
                "field": decision.field,
                "value": _without_secrets(decision.field, decision.value),
                "by": decision.by,
                "why": sanitise(decision.why),
            }
            for decision in plan.decisions
        ],
        "budget": plan.budget,
        "plugins": plan.plugins,
        "fingerprint": plan.fingerprint,
        "plugin_fingerprint": plan.plugin_fingerprint,
        "max_total_num_tokens": sizes.num_pages * sizes.page_size * plan.mesh.get("dp", 1),
    }


def whole_engine(sizes: Sizes) -> Sizes:
    """Return ``sizes`` with the limits of all dp groups together; pages stay those of one rank."""
    return replace(
        sizes,
        max_running=sizes.groups * sizes.max_running,
        max_queued=sizes.groups * sizes.max_queued,
        max_step_tokens=sizes.groups * sizes.max_step_tokens,
        chunk_size=sizes.groups * sizes.chunk_size,
    )


async def _engine_info(context: Context) -> dict[str, Any]:
    """Return the engine's reply to the control "info"; {} while ranks load or if no reply comes."""
    if context.client.state not in ("ready", "draining"):
        return {}
    try:
        async with asyncio.timeout(INFO_SECONDS):
            return await context.client.control("info")
    except (TimeoutError, EngineDead, RequestError):
        return {}


def _without_secrets(field: str, value: Any) -> Any:
    """Return a decision's value for clients, with API keys and absolute paths hidden."""
    if value is None or isinstance(value, int | float | bool):
        return value
    text = str(value)
    return "[hidden]" if "key" in field or text.startswith(("/", "~")) else text


async def expert_load(context: Server) -> Response:
    """Return the recorded load of the experts, in the form that ``placement`` reads.

    The status is 404 if the ranks do not count it.
    """
    info = await _command(context, "info")
    load = recorded_load(context.model_name, context.plan.facts.model.architecture, info)
    if load is None:
        raise RequestError(
            "the load of experts is not counted: it takes expert parallelism (--ep-size N) with "
            "count_load",
            status=404,
            code="expert_load_off",
        )
    return json_response(load.model_dump(mode="json"))


async def reset_expert_load(context: Server) -> Response:
    """Let the counts of the experts' load start anew."""
    await _command(context, "forget_load")
    return json_response({"success": True, "message": "the load of experts is counted anew"})


async def flush_cache(context: Server) -> Response:
    """Empty the prefix cache. The status is 400 while sequences run."""
    await _command(context, "flush")
    return json_response({"success": True, "message": "the prefix cache is empty"})


async def abort_request(
    body: Annotated[AbortRequest, Depends(body_of(AbortRequest))], context: Server
) -> Response:
    """Abort one request by its id, or all requests. Unknown and finished ids are ignored."""
    if body.abort_all:
        await context.client.abort_all()
    elif body.rid is not None:
        await context.client.abort(body.rid)
    else:
        raise RequestError("give rid or abort_all", param="rid")
    return json_response({"success": True, "message": "aborted"})


async def start_profile(
    body: Annotated[ProfileRequest, Depends(body_of(ProfileRequest, optional=True))],
    context: Server,
) -> Response:
    """Start recording a trace in the configured folder.

    The file's name has the label of the request, which cannot contain a path.
    """
    extra = {} if body.num_steps is None else {"num_steps": body.num_steps}
    await _command(context, "profile_start", label=body.label, **extra)
    return json_response({"success": True, "message": f"profiling, under the label {body.label!r}"})


async def stop_profile(context: Server) -> Response:
    """Stop the recording and return the name of the trace file."""
    done = await _command(context, "profile_stop")
    return json_response(
        {"success": True, "message": f"the trace is written: {done.get('file') or 'no file'}"}
    )


async def _command(context: Context, action: str, **arguments: Any) -> dict[str, Any]:
    """Send a control to the engine and return its reply.

    Raises:
        RequestError: the engine refused the control.
        Unavailable: the model is loading, or no reply came within CONTROL_SECONDS.
    """
    if context.client.state == "starting":
        raise Unavailable("the model is still loading", "starting")
    try:
        async with asyncio.timeout(CONTROL_SECONDS):
            return await context.client.control(action, **arguments)
    except TimeoutError:
        raise Unavailable(
            f"no answer from the engine within {CONTROL_SECONDS:.0f} s", "engine_silent"
        ) from None
