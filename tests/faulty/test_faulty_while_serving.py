"""Faulty plugins that fail while requests are served: requests end by name, others are right."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug import LLM, SamplingParams
from glowplug.core.errors import EngineDead, PluginLoadError, RequestError
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.protocols import OutputRequest, Worker
from glowplug.core.startup.grammars import grammar_builder
from glowplug.core.step.structured import GrammarSpec
from glowplug.entrypoints.front.named_parsers import build_parsers
from glowplug.entrypoints.server.app import create_app
from tests.faulty.test_faulty_at_start import LEAVE_OUT, config, names_it, replace_fix, site as site
from tests.faulty.written import COMPONENT, PLUGIN, title, write

MARKED = 13  #: ``max_tokens`` of the request that a faulty component fails at
GREEDY = {"temperature": 0.0, "ignore_eos": True}
#: fault -> (slot, body of the runtime class, what the message says, method)
IN_A_STEP: dict[str, tuple[str, str, str, str]] = {
    "attention that raises in long rows": (
        "attention",
        "    def plan_step(self, batch, graph):\n"
        "        if batch.num_decodes and batch.kv_lens.max() > 20:\n"
        "            raise ValueError('too long')\n"
        "        super().plan_step(batch, graph)",
        "ValueError: too long",
        "in plan_step",
    ),
    "a cache that loses count of locks": (
        "cache",
        "    def lock(self, match, delta):\n        raise KeyError(delta)",
        "KeyError",
        "in lock",
    ),
    "a cache that raises after it took pages": (
        "cache",
        "    def insert(self, tokens, pages, salt):\n"
        "        return super().insert(tokens, pages, salt)[5000]",
        "the cache holds pages of the request",
        "in insert",
    ),
    "a cache that raises after it evicted pages": (
        "cache",
        "    def insert(self, tokens, pages, salt):\n"
        "        if self.size()[1]:\n"
        "            return self.evict(1)[5000]\n"
        "        return super().insert(tokens, pages, salt)",
        "the accounts of pages disagree",
        "in insert",
    ),
    "a sampler that cannot clear a row": (
        "sampling",
        "    def leave(self, row):\n        raise ValueError('stuck')",
        "ValueError: stuck",
        "in leave",
    ),
    "an algorithm whose drafts raise": (
        "speculative",
        "    def draft(self, batch):\n"
        f"        if any(one.params.max_tokens == {MARKED} for one in batch.joined):\n"
        "            raise ValueError('no draft')\n"
        "        return super().draft(batch)",
        "ValueError: no draft",
        "in draft",
    ),
    "a scheduler that raises": (
        "scheduler",
        "    def commit(self, batch, result):\n        raise RuntimeError('lost')",
        "RuntimeError: lost",
        "in commit",
    ),
}
#: fault -> (slot, body of the runtime class, what the message says): the marked request ends
OF_A_REQUEST: dict[str, tuple[str, str, str]] = {
    "a policy that leaves a request out": (
        "policy",
        "    def order(self, waiting, cached):\n"
        f"        return [one for one in waiting if one.params.max_tokens != {MARKED}]",
        "leaves 1 of 1 waiting requests out",
    ),
    "an algorithm that accepts nothing": (
        "speculative",
        "    def accept(self, logits, hidden, batch, sampler):\n"
        "        found = super().accept(logits, hidden, batch, sampler)\n"
        "        for one in batch.joined:\n"
        f"            if one.params.max_tokens == {MARKED}:\n"
        "                self.marked = one.row\n"
        "        found.counts = found.counts.clone()\n"
        "        found.counts[batch.row_ids == getattr(self, 'marked', -1)] = 0\n"
        "        return found",
        "accepts none",
    ),
}


def asked(*outputs: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters of requests of these numbers of output tokens."""
    prompts = [[5 + number, 9, 17, 33] for number in range(len(outputs))]
    return prompts, [SamplingParams(max_tokens=count, **GREEDY) for count in outputs]


@pytest.mark.parametrize("fault", IN_A_STEP)
def test_an_exception_in_a_step_names_component_and_method(site: Path, fault: str) -> None:
    slot, body, said, method = IN_A_STEP[fault]
    write(site, slot, body)
    llm = LLM(**config(site, slot))
    with pytest.raises(EngineDead) as caught:
        llm.generate(*asked(30, MARKED))
    names_it(str(caught.value), title(slot), said, f"phase serve, {method}: ", replace_fix(slot))
    llm.close()


@pytest.mark.parametrize("fault", OF_A_REQUEST)
def test_a_request_that_a_component_holds_ends_and_others_are_right(
    site: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glowplug.core.engine.stalls.STALL_SECONDS", 0.1)
    slot, body, said = OF_A_REQUEST[fault]
    write(site, slot, body)
    chosen = config(site, slot)
    with LLM(**chosen) as llm:
        held = llm.generate(*asked(8, MARKED, 8))
    with LLM(**{**chosen, slot: {"use": {"policy": "fcfs"}.get(slot, "none")}}) as llm:
        right = llm.generate(*asked(8, MARKED, 8))
    assert [held[i].token_ids for i in (0, 2)] == [right[i].token_ids for i in (0, 2)]
    assert held[1].finish_reason == "error" and held[1].error is not None
    names_it(held[1].error, title(slot), said, "phase serve", replace_fix(slot))


# ---- the front -----------------------------------------------------------------------------------

PARSER = """
    def start(self, *given, **named):
        if given[0].prompt_tail.endswith("raise"):
            raise ValueError("no format")
        inner = super().start(*given, **named)
        feed = inner.feed
        class Own:
            finish = inner.finish
            def feed(self, text):
                if "!" in text:
                    raise ValueError("a mark")
                return text if "?" in text else feed(text)
        return Own()
"""


@pytest.mark.parametrize(
    ("tail", "text", "said"),
    [
        ("raise", "", "ValueError: no format"),
        ("", "wait!", "ValueError: a mark"),
        ("", "well?", "not a list of Piece"),
    ],
)
def test_a_parser_that_fails_ends_its_request_alone(
    site: Path, tail: str, text: str, said: str
) -> None:
    write(site, "outputs", PARSER)
    plugins = load_plugins()
    chosen = {**config(site, "policy"), "policy": {"use": "fcfs"}, "outputs": [{"use": COMPONENT}]}
    (factory,) = build_parsers(make_plan(chosen, plugins=plugins), plugins)
    other = factory.start(OutputRequest())
    with pytest.raises(RequestError) as caught:
        factory.start(OutputRequest(tail)).feed(text)
    names_it(str(caught.value), title("outputs"), said, "phase serve", replace_fix("outputs"))
    assert (caught.value.status, caught.value.code) == (500, "component_failed")
    assert "".join(one.text for one in [*other.feed("fine"), *other.finish()]) == "fine"


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("extend_app(app, plan):\n    app.add_route_of_ours('/x')", "AttributeError"),
        (
            "extend_app(app):\n    app.add_api_route('/v1/models', lambda: 1)",
            "GET /v1/models of glowplug_faulty clashes with the route of",
        ),
        (
            "extend_app(app):\n    app.mount('/page', lambda *given: None)",
            "authentication would not cover it",
        ),
        (
            "extend_app(app, engine):\n    engine.absent('/page')",
            "AttributeError",
        ),
        ("worker_started(worker, plan):\n    plan.absent", "AttributeError"),
        ("step_observers(worker, plan):\n    return worker", "expected a list"),
    ],
)
def test_a_hook_of_the_start_that_raises_is_named(site: Path, hook: str, said: str) -> None:
    write(site, "policy", more=f"@hookimpl\ndef {hook}")
    name = hook.partition("(")[0]
    chosen = config(site, "policy")
    with pytest.raises(PluginLoadError) as caught:
        if name == "extend_app":
            plugins = load_plugins()
            client: Any = SimpleNamespace(stats=dict, group_stats=dict)
            create_app(make_plan(chosen, plugins=plugins), client, None, [], plugins)
        else:
            LLM(**chosen).close()
    names_it(str(caught.value), PLUGIN, said, f"phase: {name} | {LEAVE_OUT}")


def test_a_grammar_library_that_raises_refuses_the_request(site: Path) -> None:
    pytest.importorskip("llguidance")
    body = "    def compile(self, spec):\n        return {}[spec.kind]"
    write(site, "grammar", body)
    plugins = load_plugins()
    chosen = {**config(site, "grammar"), "model": "embedded", "skip_tokenizer": False}
    builder = grammar_builder(make_plan(chosen, plugins=plugins), plugins, Worker())
    with pytest.raises(RequestError) as caught:
        builder.build(GrammarSpec("regex", "a+"))
    names_it(
        str(caught.value),
        title("grammar"),
        "KeyError: 'regex'",
        "phase compile a request's grammar, in compile: ",
        replace_fix("grammar"),
    )
