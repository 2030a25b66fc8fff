"""A Llama model in plain torch as the target of a head in training, of any folder or format."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.layers.module import Target
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.loading import import_factory
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.protocols import WeightSource, Worker
from glowplug.models.eagle.config import default_features
from glowplug.models.eagle.training.grouped import GroupedShape, frequencies, rotate_halves

LLAMA = "LlamaForCausalLM"


class LlamaTarget:
    """The ``HeadTarget`` of a Llama model.

    Attributes:
        feature_layers: numbers of layers after which features are read.
    """

    def __init__(self, facts: ModelFacts, read: Callable[[str], Tensor], device: str) -> None:
        """Read the weights.

        Args:
            facts: the model's facts.
            read: function from the published name of a tensor to its value.
            device: torch device of the training.

        Raises:
            ValueError: the model has another architecture, quantised weights, biases, or a scaled
                rotary embedding.
        """
        check_target(facts)
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self._shape = GroupedShape.of(facts)
        self._layers = facts.num_layers
        self._epsilon = float(facts.config.get("rms_norm_eps", 1e-6))
        self._weights = {name: read(name).to(device, dtype) for name in facts.tensors}
        self.feature_layers = default_features(facts.num_layers)
        self.frequencies = frequencies(facts).to(device)
        embedding = self._weights["model.embed_tokens.weight"]
        self.output_head = self._weights.get("lm_head.weight", embedding)

    @torch.no_grad()
    def states(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turns = torch.outer(
            torch.arange(tokens.shape[1], device=tokens.device).float(), self.frequencies
        )
        angles = turns.cos().unsqueeze(1), turns.sin().unsqueeze(1)
        embedded = F.embedding(tokens, self._weights["model.embed_tokens.weight"])
        x = embedded.float()
        after = {0: x}
        for number in range(self._layers):
            x = self._layer(x, f"model.layers.{number}", angles, mask)
            after[number + 1] = x
        features = torch.cat([after[number] for number in self.feature_layers], dim=-1)
        return embedded, features, self._norm(x, "model.norm")

    def _layer(self, x: Tensor, name: str, angles: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Return the residual stream after the layer ``name``, from that before it."""
        normed = self._norm(x, f"{name}.input_layernorm")
        x = x + self._attended(normed, f"{name}.self_attn", angles, mask)
        normed = self._norm(x, f"{name}.post_attention_layernorm")
        gate, up = (self._linear(normed, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        return x + self._linear(F.silu(gate) * up, f"{name}.mlp.down_proj")

    def _attended(
        self, x: Tensor, name: str, angles: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """Return the result of the attention ``name`` for its normed input."""
        size = self._shape.head_dim
        q, k, v = (
            self._linear(x, f"{name}.{part}_proj").unflatten(-1, (-1, size)) for part in "qkv"
        )
        q, k = (rotate_halves(part, *angles) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self._linear(out.transpose(1, 2).flatten(-2), f"{name}.o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weights[f"{name}.weight"].float()
        return F.rms_norm(x.float(), weight.shape, weight, self._epsilon)


def check_target(facts: ModelFacts) -> None:
    """Check that ``LlamaTarget`` computes a model.

    Raises:
        ValueError: the model has another architecture, quantised weights or biases.
    """
    biased = next((name for name in facts.tensors if name.endswith(".bias")), "")
    if facts.architecture != LLAMA:
        raise ValueError(f"{facts.path} is a {facts.architecture}; heads of {LLAMA} are trained")
    if facts.quant_method != "none":
        raise ValueError(f"{facts.path} has weights in {facts.quant_method}, which are not read")
    if biased:
        raise ValueError(f"{facts.path} has biases ({biased}), which are not built here")


def weight_reader(plan: EnginePlan, plugins: PluginSet) -> Callable[[str], Tensor]:
    """Return a function that reads tensors of the plan's model by their published names.

    The plan's weight source reads them, so the model may have any format that a plugin reads.
    """
    choice = plan.choice("weights")
    found = plugins.find("weights", choice.name)
    assert found is not None, "the plan was made with these plugins"
    factory: Any = import_factory(found.component, found.distribution)
    options = found.component.options.model_validate(choice.options)
    source: WeightSource = factory(options, plan, Worker(dtype=torch.float32))
    facts = plan.facts.model
    source.open(facts)

    def read(name: str) -> Tensor:
        return source.read(Target(name, facts.tensors[name].shape))

    return read
