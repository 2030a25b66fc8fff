"""EAGLE heads against the same heads in plain torch, and the features of their targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.model_folder import read_folder
from glowplug.core.layers.decoder import DecoderModel
from glowplug.core.startup.load_weights import load_model
from glowplug.core.step.batch import PREVIOUS_HIDDEN
from glowplug.core.testing.harness.build import (
    DictSource,
    Stepper,
    build_context,
    build_model,
    make,
    plan_for,
)
from glowplug.models.eagle.config import EagleConfig
from glowplug.models.eagle.head import EagleHead
from tests.models.test_parity_deepseek import V3
from tests.support.eagle import (
    DEEPSEEK_3,
    LLAMA_1,
    LLAMA_3,
    PlainHead,
    Tensors,
    head_config,
    head_tensors,
    write_head,
)
from tests.support.parity import COMMON, TOLERANCE, Reference, write

LLAMA: dict[str, Any] = dict(COMMON, num_key_value_heads=2, head_dim=16)
IDS = torch.randint(0, 160, (23,), generator=torch.Generator().manual_seed(5)).tolist()
ROPE = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6}
CASES = {
    "llama-1": ("LlamaForCausalLM", LLAMA_1, {}),
    "llama-3": ("LlamaForCausalLM", LLAMA_3, {}),
    "llama-3-reduced": ("LlamaForCausalLM", LLAMA_3, {"draft_vocab_size": 37}),
    "deepseek-3": ("DeepseekV3ForCausalLM", DEEPSEEK_3, {}),
    "deepseek-3-reduced": ("DeepseekV3ForCausalLM", DEEPSEEK_3, {"draft_vocab_size": 37}),
}


@dataclass
class Case:
    """A target with its head, and the head in plain torch."""

    reference: Reference
    main: Stepper
    head: EagleHead
    draft: Stepper
    plain: PlainHead


def build(folder: Path, name: str, seed: int = 31, **more: Any) -> Case:
    architecture, form, changes = CASES[name]
    shape = dict(V3 if form == DEEPSEEK_3 else LLAMA, num_hidden_layers=5)
    reference = write(folder / "target", architecture, seed=seed, **shape)
    config = head_config(shape, form, **{**ROPE, "head_dim": 16, **changes, **more})
    tensors = head_tensors(config)
    write_head(folder / "head", config, tensors)
    return attach(reference, config, tensors, folder / "head")


def attach(reference: Reference, config: Mapping[str, Any], tensors: Tensors, folder: Path) -> Case:
    model, context = build_model(
        reference.facts, reference.tensors(), build_context(reference.facts)
    )
    assert isinstance(model, DecoderModel)
    facts = read_folder(folder)
    assert facts is not None
    draft_context = replace(build_context(facts), facts=facts)
    head = built(facts, draft_context, model)
    load_model(head, DictSource(tensors), facts)
    weights = reference.tensors()
    embedding = weights["model.embed_tokens.weight"]
    plain = PlainHead(config, tensors, embedding, weights.get("lm_head.weight", embedding))
    return Case(reference, Stepper(model, context), head, Stepper(head, draft_context), plain)


def built(facts: ModelFacts, context: Any, target: DecoderModel) -> EagleHead:
    name = "deepseek_v3" if facts.kind == "mla" else "llama"
    family = make("model", name, plan_for(facts), context.worker)
    head = family.build_eagle(context, target)
    assert isinstance(head, EagleHead)
    return head


@torch.no_grad()
def streams(reference: Reference, ids: list[int]) -> tuple[Tensor, ...]:
    """Return transformers' hidden states: the residual stream before each layer, then the final."""
    found = reference.model.model(torch.tensor([ids]), output_hidden_states=True)
    return tuple(part[0] for part in found.hidden_states)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_drafts_equal_the_head_in_plain_torch(tmp_path: Path, name: str) -> None:
    """The head's outputs are those of the plain head: in one pass, in pieces, and after a fill."""
    case = build(tmp_path, name)
    found, _ = case.main.hidden({0: IDS})
    hidden = streams(case.reference, IDS)
    features = torch.cat([hidden[2], hidden[2], hidden[2]], -1)  # five layers: 2, 5 // 2, 5 - 3
    states = case.plain.states(hidden[-1], features)
    torch.testing.assert_close(case.head.states(found), states, atol=TOLERANCE, rtol=0)
    wanted = case.plain.run(states[:-1], IDS[1:])
    before = {PREVIOUS_HIDDEN: states[:-1]}
    case.draft.lengths = [1] * len(case.draft.lengths)  # position 0 has no entry
    drafted, _ = first_key(case.draft, {0: IDS[1:]}, 0, before)
    torch.testing.assert_close(drafted, wanted, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(
        case.head.logits(drafted), case.plain.logits(wanted), atol=TOLERANCE, rtol=0
    )
    case.draft.fill(2, IDS[1:12], states[:11])
    last, _ = first_key(case.draft, {2: IDS[12:13]}, 1, {PREVIOUS_HIDDEN: states[11:12]})
    torch.testing.assert_close(last, wanted[11:12], atol=TOLERANCE, rtol=0)


def first_key(
    stepper: Stepper, chunks: Mapping[int, list[int]], decodes: int, extra: dict[str, Any]
) -> tuple[Tensor, Any]:
    """Run a step over a cache whose first position is empty."""
    plan_step = stepper.attention.plan_step

    def plan(batch: Any, graph: object | None) -> None:
        batch.first_key = 1
        plan_step(batch, graph)

    stepper.attention.plan_step = plan  # type: ignore[method-assign]
    try:
        return stepper.hidden(chunks, decodes, extra)
    finally:
        stepper.attention.plan_step = plan_step  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["llama-3", "deepseek-3"])
def test_features_are_the_stream_after_the_stated_layers(tmp_path: Path, name: str) -> None:
    """Any layer from the embedding to the last may be read, and hidden states and logits stay."""
    case = build(tmp_path, name, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 4]})
    model = case.main.model
    assert isinstance(model, DecoderModel)
    found, _ = case.main.hidden({0: IDS})
    hidden = streams(case.reference, IDS)
    wanted = torch.cat([hidden[-1], hidden[0], hidden[1], hidden[4]], -1)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(
        model.logits(found), case.reference.logits(IDS), atol=TOLERANCE, rtol=0
    )
    model.keep_features([5])
    last, _ = case.main.hidden({1: IDS})
    normed = model.norm.forward(last[:, 64:])
    torch.testing.assert_close(normed, hidden[-1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("stated", "layers"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 7, 30]}}, (3, 7, 30)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ()),
    ],
)
def test_feature_layers_of_published_configs(
    tmp_path: Path, stated: dict[str, Any], layers: tuple[int, ...]
) -> None:
    config = head_config(LLAMA, LLAMA_3, **ROPE, head_dim=16, **stated)
    facts = read_folder(write_head(tmp_path, config, head_tensors(config)))
    assert facts is not None
    assert EagleConfig.read(facts).features_of(32) == layers


@pytest.mark.parametrize(
    ("key", "tensor"), [("norm_before_residual", "hidden_norm"), ("norm_output", "norm")]
)
def test_published_variants_change_the_output(tmp_path: Path, key: str, tensor: str) -> None:
    """The residual stream begins with the normed state, or the output is normed."""
    usual = build(tmp_path / "usual", "llama-3")
    other = build(tmp_path / "other", "llama-3", **{key: True})
    states = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    extra = {PREVIOUS_HIDDEN: states}
    first, _ = usual.draft.hidden({0: IDS[:4]}, extra=extra)
    second, _ = other.draft.hidden({0: IDS[:4]}, extra=extra)
    assert not torch.allclose(first, second, atol=1e-2)
    if key == "norm_output":
        torch.testing.assert_close(other.head.logits(second), usual.head.logits(first))


def test_embedding_and_names_of_the_folder_are_used(tmp_path: Path) -> None:
    """A head may have an embedding of its own, and its layer other published names."""
    case = build(tmp_path, "llama-3")
    config = dict(case.plain.config)
    tensors = {
        f"model.{name.replace('midlayer.', 'layers.0.')}" if name != "d2t" else name: tensor
        for name, tensor in case.plain.tensors.items()
    }
    generator = torch.Generator().manual_seed(8)
    own = torch.randn(160, 64, generator=generator)
    tensors["model.embed_tokens.weight"] = own
    write_head(tmp_path / "named", config, tensors)
    named = attach(case.reference, config, tensors, tmp_path / "named")
    plain = PlainHead(
        config, {**case.plain.tensors, "embed_tokens.weight": own}, own, case.plain.head
    )
    states = torch.randn(6, 64, generator=generator)
    named.draft.lengths = [1] * len(named.draft.lengths)
    drafted, _ = first_key(named.draft, {0: IDS[:6]}, 0, {PREVIOUS_HIDDEN: states})
    torch.testing.assert_close(drafted, plain.run(states, IDS[:6]), atol=TOLERANCE, rtol=0)
