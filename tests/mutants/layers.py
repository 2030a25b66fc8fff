"""Faults planted in model families, ops and grammar libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Worker
from glowplug.core.testing.harness.build import make
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.grammar import GrammarSuite
from glowplug.core.testing.suites.models import ModelSuite
from glowplug.core.testing.suites.ops import OpsSuite
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.plugins.ops.torch_ops import TorchOpsOptions
from glowplug.plugins.ops.torch_ops_runtime import TorchOps
from tests.mutants.framework import Mutant, Planter
from tests.mutants.plain_llama import llama_facts, llama_tensors, plain_llama

# ---- model families ------------------------------------------------------------------------------


class Models(ModelSuite):
    def make(self, plan: EnginePlan, worker: Worker) -> Any:
        return make("model", "llama", plan, worker)

    def facts(self) -> ModelFacts:
        return llama_facts()

    def tensors(self) -> dict[str, Tensor]:
        return llama_tensors()

    def reference(self, tensors: Mapping[str, Tensor], ids: list[int]) -> Tensor:
        return plain_llama(tensors, ids)


families = Planter("model", Models)
PROMPT = "test_a_prompt_has_the_references_logits"
CHECKPOINT = "test_targets_are_the_checkpoints_tensors"


def family(fault: str, by: str, change: Callable[[Any], Any]) -> Mutant:
    """Return the mutant that changes every model that it builds, in place."""

    def build(correct: Any, context: Any) -> Any:
        made = correct(context)
        change(made)
        return made

    return families.swap(fault, by, "build", build)


def passes(fault: str, by: str, method: str, body: Callable[..., Any]) -> Mutant:
    """Return the mutant whose models' ``method`` is ``body``, called with the correct one."""

    def change(model: Any) -> None:
        correct = getattr(model, method)
        setattr(model, method, lambda *given: body(correct, *given))

    return family(fault, by, change)


def named(fault: str, by: str, rename: Callable[[str], str]) -> Mutant:
    """Return the mutant whose targets have other names."""

    def targets(correct: Any) -> Any:
        for target in correct():
            target.name = rename(target.name)
            yield target

    return passes(fault, by, "targets", targets)


def _exchanged(first: str, second: str) -> Callable[[str], str]:
    return lambda name: (
        name.replace(first, second) if first in name else name.replace(second, first)
    )


def config(fault: str, by: str, **changes: Any) -> Mutant:
    """Return the mutant that reads other values from config.json."""

    def build(correct: Any, context: Any) -> Any:
        facts = replace(context.facts, config={**context.facts.config, **changes})
        return correct(replace(context, facts=facts))

    return families.swap(fault, by, "build", build)


def _first_layer(correct: Any, context: Any) -> Any:
    backend = context.attention

    def mha(q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        fields = ("heads", "kv_heads", "head_dim", "scale")
        first = SimpleNamespace(index=0, **{name: getattr(layer, name) for name in fields})
        found: Tensor = backend.mha(q, k, v, first)
        return found

    methods = {name: getattr(backend, name) for name in ("kv_layout", "reserve", "plan_step")}
    attention: Any = SimpleNamespace(
        mha=mha, store_mha=backend.store_mha, mla_projected=None, **methods
    )
    made = correct(replace(context, attention=attention))
    return made


def _optional(correct: Any) -> Any:
    for target in correct():
        target.optional = True
        yield target


def _without_last(correct: Any) -> Any:
    yield from list(correct())[:-1]


def _repeated(correct: Any) -> Any:
    found = list(correct())
    yield from [*found, found[0]]


MODELS = [
    named("gate and up are exchanged", PROMPT, _exchanged("gate_proj", "up_proj")),
    named("layers are exchanged", PROMPT, _exchanged("layers.0.", "layers.1.")),
    named("keys and values are exchanged", PROMPT, _exchanged("k_proj", "v_proj")),
    named("norms are exchanged", PROMPT, _exchanged("input_layernorm", "post_attention_layernorm")),
    passes("a tensor has no target", CHECKPOINT, "targets", _without_last),
    passes("a target is named twice", CHECKPOINT, "targets", _repeated),
    passes(
        "all tensors are optional", "test_a_missing_tensor_is_refused_by_name", "targets", _optional
    ),
    config("the base of the rotation is ignored", PROMPT, rope_theta=500.0),
    config("the epsilon of norms is ignored", PROMPT, rms_norm_eps=0.1),
    passes(
        "positions are doubled",
        PROMPT,
        "forward",
        lambda f, ids, positions, batch: f(ids, positions * 2, batch),
    ),
    passes(
        "chunks begin at position 0",
        "test_chunks_have_the_references_logits",
        "forward",
        lambda f, ids, positions, batch: f(ids, positions - positions.min(), batch),
    ),
    passes(
        "tokens of a step are reversed",
        "test_rows_of_a_step_do_not_mix",
        "forward",
        lambda f, ids, positions, batch: f(ids.flip(0), positions, batch),
    ),
    passes(
        "hidden states are 0.1 % too large", PROMPT, "forward", lambda f, *given: f(*given) * 1.001
    ),
    passes("logits are half precision", PROMPT, "logits", lambda f, hidden: f(hidden).half()),
    families.swap(
        "all layers share a cache", "test_decoding_has_the_references_logits", "build", _first_layer
    ),
]

# ---- ops -----------------------------------------------------------------------------------------


class Tables(OpsSuite):
    def make(self) -> Any:
        plan: Any = SimpleNamespace()
        return TorchOps(TorchOpsOptions(), plan, Worker())


ops = Planter("ops", Tables)


def op(fault: str, name: str, body: Callable[..., Any], by: str = "") -> Mutant:
    """Return the mutant whose op ``name`` is ``body``, called with the correct one first."""
    return ops.swap(fault, by or f"test_{name}", name, body)


def _in_place(norm: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.copy_(norm(x, weight, eps))


OPS = [
    op("the epsilon is ignored", "rms_norm", lambda f, x, w, eps: f(x, w, 0.0)),
    op("the weight is ignored", "rms_norm", lambda f, x, w, eps: f(x, torch.ones_like(w), eps)),
    op("the argument is overwritten", "rms_norm", _in_place),
    op("the mean is subtracted", "rms_norm", lambda f, x, w, eps: f(x - x.mean(-1, True), w, eps)),
    op(
        "the old residual is returned",
        "add_rms_norm",
        lambda f, x, r, w, eps: (f(x, r, w, eps)[0], r),
    ),
    op(
        "the residual is not normed",
        "add_rms_norm",
        lambda f, x, r, w, eps: (f(x, r * 0, w, eps)[0], x + r),
    ),
    op("the halves are exchanged", "silu_and_mul", lambda f, x: f(x.roll(x.shape[-1] // 2, -1))),
    op(
        "it is GELU",
        "silu_and_mul",
        lambda f, x: torch.nn.functional.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    ),
    op(
        "no tokens are refused",
        "silu_and_mul",
        lambda f, x: f(x) if len(x) else x,
        "test_no_tokens",
    ),
    op(
        "pairs are always halves",
        "rope_at",
        lambda f, table, positions, interleaved: f(table, positions, False),
        "test_rope",
    ),
    op(
        "positions are one too large",
        "rope_at",
        lambda f, table, positions, i: f(table, positions + 1, i),
        "test_rope",
    ),
    op(
        "the base is ignored",
        "rope_table",
        lambda f, dim, context, theta, *rest: f(dim, context, 10_000.0, *rest),
        "test_rope",
    ),
    op("keys are not rotated", "rope", lambda f, q, k, at: (f(q, k, at)[0], k)),
    op(
        "groups are ignored",
        "topk_softmax",
        lambda f, x, k, groups, topk, *rest: f(x, k, 1, 1, *rest),
    ),
    op(
        "weights are always renormalised",
        "topk_softmax",
        lambda f, x, k, g, t, renormalize, s: f(x, k, g, t, True, s),
    ),
    op(
        "the factor is ignored",
        "topk_softmax",
        lambda f, x, k, g, t, r, scale: f(x, k, g, t, r, 1.0),
    ),
    op("the bias does not choose", "topk_sigmoid", lambda f, x, bias, *rest: f(x, bias * 0, *rest)),
    op(
        "the bias is in the weights",
        "topk_sigmoid",
        lambda f, x, bias, *rest: (f(x, bias, *rest)[0] + bias.abs().mean(), f(x, bias, *rest)[1]),
    ),
    op(
        "groups rank by their best expert",
        "topk_sigmoid",
        lambda f, x, bias, k, groups, topk, *rest: f(x, bias, k, 2 if groups > 1 else 1, 1, *rest),
    ),
    op(
        "an expert is chosen twice",
        "topk_sigmoid",
        lambda f, *given: (f(*given)[0], f(*given)[1][:, :1].expand(-1, given[2])),
    ),
]

# ---- grammars ------------------------------------------------------------------------------------

CHECKPOINT_FOLDER = Path(__file__).parents[2] / "models/embedded/checkpoint"


class Grammars(GrammarSuite):
    def make(self) -> Any:
        return make("grammar", "llguidance", bare_plan(), Worker())

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(CHECKPOINT_FOLDER)


grammars = Planter("grammar", Grammars)


def matcher(fault: str, by: str, method: str, body: Callable[..., Any]) -> Mutant:
    """Return the mutant whose matchers' ``method`` is ``body``, called with the correct one."""

    def compile(correct: Any, spec: Any) -> Any:
        compiled = correct(spec)

        def made() -> Any:
            inner = compiled.matcher()
            names = ("accept", "rollback", "fill", "complete", "error")
            members = {name: getattr(inner, name) for name in names}
            members[method] = lambda *given: body(getattr(inner, method), *given)
            return SimpleNamespace(**members)

        return SimpleNamespace(size=compiled.size, matcher=made)

    return grammars.swap(fault, by, "compile", compile)


def _adding(fill: Any, mask: Any) -> None:
    fresh = np.zeros_like(mask)
    fill(fresh)
    mask |= fresh


def _all_ones(fill: Any, mask: Any) -> None:
    fill(mask)
    mask[:] = -1


def _one_matcher(correct: Any, spec: Any) -> Any:
    compiled = correct(spec)
    kept = compiled.matcher()
    return SimpleNamespace(size=compiled.size, matcher=lambda: kept)


def _next_row(fill: Any, wanted: Any, masks: Any) -> None:
    fill([(one, row - 1) for one, row in wanted], masks)


FOLLOWED = "test_texts_of_the_grammar_are_followed_to_their_end"
GRAMMARS = [
    matcher("masks are added to what was there", "test_other_texts_are_stopped", "fill", _adding),
    matcher("all tokens are allowed", "test_other_texts_are_stopped", "fill", _all_ones),
    matcher(
        "every token is accepted",
        "test_other_texts_are_stopped",
        "accept",
        lambda f, token: f(token) or True,
    ),
    matcher(
        "one token too few is taken back",
        "test_tokens_taken_back_leave_no_trace",
        "rollback",
        lambda f, count: f(count - 1) if count > 1 else None,
    ),
    matcher(
        "a text may end anywhere", "test_an_incomplete_text_may_not_end", "complete", lambda f: True
    ),
    matcher("a text never ends", FOLLOWED, "complete", lambda f: False),
    grammars.swap(
        "a grammar has one matcher",
        "test_matchers_of_a_grammar_are_independent",
        "compile",
        _one_matcher,
    ),
    grammars.swap(
        "masks are in the row before",
        "test_rows_are_filled_as_by_their_matchers",
        "fill",
        _next_row,
    ),
    grammars.swap(
        "forbidden tokens stay",
        "test_forbidden_tokens_cannot_be_drawn",
        "forbid",
        lambda f, logits, rows, masks: None,
    ),
    grammars.swap(
        "the first rows are masked",
        "test_forbidden_tokens_cannot_be_drawn",
        "forbid",
        lambda f, logits, rows, masks: f(logits, torch.arange(len(rows)), masks),
    ),
    grammars.swap(
        "allowed tokens are forbidden",
        "test_forbidden_tokens_cannot_be_drawn",
        "forbid",
        lambda f, logits, rows, masks: f(logits, rows, ~masks),
    ),
    grammars.swap(
        "an invalid grammar is any text",
        "test_an_invalid_grammar_is_refused",
        "compile",
        lambda f, spec: SimpleNamespace(size=1),
    ),
]
MUTANTS = [*MODELS, *OPS, *GRAMMARS]
