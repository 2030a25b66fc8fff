"""Random tiny checkpoints written by transformers, and transformers' results for them. float32,
seeded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.model_folder import read_folder
from glowplug.core.testing.harness.build import Stepper, build_context, build_model

TOLERANCE = 1e-4

COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
MLA: dict[str, Any] = dict(
    **COMMON,
    num_key_value_heads=4,
    kv_lora_rank=32,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=24,
    moe_intermediate_size=40,
    first_k_dense_replace=1,
)
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.707,
    "mscale_all_dim": 1.3,
    "beta_fast": 32,
    "beta_slow": 1,
}


@dataclass
class Reference:
    """A transformers model and the folder it was saved to."""

    model: Any
    folder: Path

    @property
    def facts(self) -> ModelFacts:
        facts = read_folder(self.folder)
        assert facts is not None
        return facts

    def tensors(self) -> dict[str, Tensor]:
        return {
            name: t
            for file in self.folder.glob("*.safetensors")
            for name, t in load_file(file).items()
        }

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """Return [T, V] of one sequence, without a cache."""
        result: Tensor = self.model(torch.tensor([ids])).logits[0]
        return result

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        out = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
        )
        return [int(token) for token in out[0, len(prompt) :]]


def write(folder: Path, architecture: str, seed: int, **config: Any) -> Reference:
    """Save a random model. Correction biases are drawn, norms and biases are moved away from their
    neutral values.
    """
    import transformers

    torch.manual_seed(seed)
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**config)).eval().float()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.2)
            elif tensor.dim() == 1 and "inv_freq" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return Reference(model, folder)


def prompts(count: int, seed: int, vocab: int = 160) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def assert_parity(reference: Reference, seed: int = 0, count: int = 12) -> None:
    """Compare the logits of a whole batch of prompts, and of prefill with decode steps, and greedy
    tokens.
    """
    facts = reference.facts
    asked = prompts(4, seed)
    model, context = build_model(facts, reference.tensors(), build_context(facts))
    together = Stepper(model, context).logits(dict(enumerate(asked)))
    wanted = [reference.logits(ids) for ids in asked]
    torch.testing.assert_close(together, torch.cat(wanted), atol=TOLERANCE, rtol=0)
    assert float(torch.cat(wanted).std()) > 0.1, "the reference's logits carry no information"

    for ids in asked[:2]:
        stepper = Stepper(model, context)
        expected = reference.greedy(ids, count)
        assert stepper.greedy(ids, count) == expected
        after = Stepper(model, context)
        after.logits({0: ids})
        decoded = [after.logits({0: [token]}, decodes=1) for token in expected[:4]]
        full = reference.logits(ids + expected[:4])[len(ids) :]
        torch.testing.assert_close(torch.cat(decoded), full, atol=TOLERANCE, rtol=0)
