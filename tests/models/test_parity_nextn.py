"""The multi-token-prediction layer against transformers' own, and its sharing of embedding and
head.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glowplug.core.facts.model_facts import TensorFact
from glowplug.core.layers.decoder import DecoderModel
from glowplug.core.startup.load_weights import load_model
from glowplug.core.step.batch import PREVIOUS_HIDDEN
from glowplug.core.testing.harness.build import DictSource, Stepper, build_context, build_model
from glowplug.models.deepseek.nextn import DeepseekNextN
from tests.models.test_parity_deepseek import V3
from tests.support.parity import TOLERANCE, YARN, Reference, write

LAYERS = V3["num_hidden_layers"]
PREFIX = f"model.layers.{LAYERS}"


def with_mtp(folder: Path) -> tuple[Reference, Any, dict[str, Tensor]]:
    """Return a V3 reference, transformers' MTP model around it, and the tensors of both under their
    published names.
    """
    from transformers.modeling_layers import MtpModel

    config = dict(V3, rope_parameters=YARN, num_nextn_predict_layers=1)
    reference = write(folder, "DeepseekV3ForCausalLM", seed=21, **config)
    torch.manual_seed(22)
    mtp = MtpModel(reference.model, 1).eval().float()
    tensors = reference.tensors()
    with torch.no_grad():
        for name, tensor in [*mtp.layers[0].named_parameters(), *mtp.layers[0].named_buffers()]:
            scale = 0.2 if tensor.dim() > 1 else 0.1
            tensor.copy_(torch.randn_like(tensor) * scale + (1.0 if "norm" in name else 0.0))
            tensors |= published(name, tensor.detach().clone())
    return reference, mtp, tensors


def published(name: str, tensor: Tensor) -> dict[str, Tensor]:
    name = f"{PREFIX}.{name.removeprefix('mtp_block.').replace('post_norm.', 'shared_head.norm.')}"
    if name.endswith("experts.gate_up_proj"):
        stem, half = name.removesuffix("gate_up_proj"), tensor.shape[1] // 2
        return {
            f"{stem}{e}.{part}_proj.weight": tensor[e, rows]
            for e in range(tensor.shape[0])
            for part, rows in (("gate", slice(half)), ("up", slice(half, None)))
        }
    if name.endswith("experts.down_proj"):
        return {
            f"{name.removesuffix('down_proj')}{e}.down_proj.weight": matrix
            for e, matrix in enumerate(tensor)
        }
    return {name: tensor}


def load_nextn(
    reference: Reference,
    tensors: dict[str, Tensor],
) -> tuple[DecoderModel, Stepper, DeepseekNextN, Stepper]:
    facts = replace(
        reference.facts,
        tensors={
            name: TensorFact("float32", tuple(tensor.shape)) for name, tensor in tensors.items()
        },
    )
    model, context = build_model(facts, tensors, build_context(facts))
    assert isinstance(model, DecoderModel)
    draft_context = build_context(facts)
    nextn = DeepseekNextN(draft_context, model)
    load_model(nextn, DictSource(tensors), facts)
    return model, Stepper(model, context), nextn, Stepper(nextn, draft_context)


@torch.no_grad()
def expected(mtp: Any, reference: Reference, ids: list[int]) -> Tensor:
    """Return transformers' MTP logits [T - 1, V] at every position but the last."""
    from transformers.cache_utils import MtpCache

    hidden = reference.model.model(torch.tensor([ids])).last_hidden_state[:, :-1]
    shifted = torch.tensor([ids[1:]])
    cache = MtpCache(config=reference.model.config.get_mtp_config())
    out = mtp.forward_layer(0, hidden, torch.arange(len(ids) - 1)[None], cache, input_ids=shifted)
    logits: Tensor = mtp.shared_head(out)[0]
    return logits


def test_logits_equal_transformers(tmp_path: Path) -> None:
    reference, mtp, tensors = with_mtp(tmp_path)
    ids = torch.randint(0, 160, (23,), generator=torch.Generator().manual_seed(5)).tolist()
    _, main, nextn, draft = load_nextn(reference, tensors)
    hidden, _ = main.hidden({0: ids})
    wanted = expected(mtp, reference, ids)

    drafted, _ = draft.hidden({0: ids[1:]}, extra={PREVIOUS_HIDDEN: hidden[:-1]})
    torch.testing.assert_close(nextn.logits(drafted), wanted, atol=TOLERANCE, rtol=0)

    halves = [
        draft.hidden({1: ids[1:12]}, extra={PREVIOUS_HIDDEN: hidden[:11]})[0],
        draft.hidden({1: ids[12:13]}, decodes=1, extra={PREVIOUS_HIDDEN: hidden[11:12]})[0],
    ]
    torch.testing.assert_close(nextn.logits(torch.cat(halves)), wanted[:12], atol=TOLERANCE, rtol=0)

    draft.fill(2, ids[1:12], hidden[:11])
    last, _ = draft.hidden({2: ids[12:13]}, decodes=1, extra={PREVIOUS_HIDDEN: hidden[11:12]})
    torch.testing.assert_close(nextn.logits(last), wanted[11:12], atol=TOLERANCE, rtol=0)


def test_own_embedding_and_head_are_used_when_the_checkpoint_brings_them(tmp_path: Path) -> None:
    reference, _, tensors = with_mtp(tmp_path)
    generator = torch.Generator().manual_seed(8)
    ids = [5, 9, 2, 7]
    tensors[f"{PREFIX}.embed_tokens.weight"] = torch.randn(160, 64, generator=generator)
    tensors[f"{PREFIX}.shared_head.head.weight"] = torch.randn(160, 64, generator=generator)
    _, main, nextn, draft = load_nextn(reference, tensors)
    hidden, _ = main.hidden({0: ids})
    drafted, _ = draft.hidden({0: ids[1:]}, extra={PREVIOUS_HIDDEN: hidden[:-1]})
    torch.testing.assert_close(
        nextn.logits(drafted),
        drafted @ tensors[f"{PREFIX}.shared_head.head.weight"].t(),
        atol=TOLERANCE,
        rtol=0,
    )

    tensors[f"{PREFIX}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    _, main, nextn, draft = load_nextn(reference, tensors)
    hidden, _ = main.hidden({0: ids})
    other, _ = draft.hidden({0: ids[1:]}, extra={PREVIOUS_HIDDEN: hidden[:-1]})
    assert not torch.allclose(drafted, other, atol=1e-2)
