"""bfloat16 and float16 follow the float32 model, whatever the scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glowplug.core.testing.harness.build import Stepper, build_context, build_model, plan_for
from tests.models.test_parity_deepseek import CASES
from tests.models.test_parity_llama import GQA
from tests.support.parity import prompts, write

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": CASES["v3_groups_yarn"],
    "v2_lite": CASES["v2_lite"],
    "llama": ("LlamaForCausalLM", {**GQA, "mlp_bias": True}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("quantization", ["none", "block_fp8"])
def test_logits_stay_close(name: str, dtype: str, quantization: str, tmp_path: Path) -> None:
    architecture, config = MODELS[name]
    reference = write(tmp_path, architecture, seed=4, **{**config, "initializer_range": 0.08})
    facts, tensors, ids = reference.facts, reference.tensors(), dict(enumerate(prompts(3, 4)))

    def logits(dtype: str) -> torch.Tensor:
        context = build_context(facts, plan_for(facts, dtype), quantization=quantization)
        model, context = build_model(facts, tensors, context)
        stepper = Stepper(model, context)
        prefilled = stepper.logits(ids)
        return torch.cat([prefilled, stepper.logits({row: [7] for row in ids}, decodes=len(ids))])

    wide, narrow = logits("float32"), logits(dtype)
    assert narrow.dtype == torch.float32
    error = float((narrow - wide).square().mean().sqrt() / wide.std())
    assert error < 0.15, error
