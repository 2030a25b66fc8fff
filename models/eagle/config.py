"""The published forms of EAGLE heads, read from config.json and tensor names. No torch.

EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858) have one form and differ in drafting only.
An EAGLE-3 head (arXiv 2503.01840) reads features of several layers of its target.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from glowplug.core.facts.model_facts import ModelFacts, stated

LLAMA_EAGLE = frozenset({"LlamaForCausalLMEagle", "EagleLlamaForCausalLM"})
LLAMA_EAGLE3 = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
DEEPSEEK_EAGLE3 = frozenset({"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"})
EAGLE3 = LLAMA_EAGLE3 | DEEPSEEK_EAGLE3
FEATURE_KEY = "eagle_aux_hidden_state_layer_ids"
OFFSETS = "d2t"  #: tensor of the draft vocabulary: target id minus draft id, for each draft id
TARGET_MASK = "t2d"  #: tensor that marks the draft vocabulary in the target's; not read
LAYERS = ("midlayer", "layers.0", "midlayers.0")  #: published names of a head's layer


@dataclass(frozen=True)
class EagleConfig:
    """Form and sizes of one head.

    Attributes:
        version: 3 for EAGLE-3 heads, 1 for those before.
        root: beginning of all names but those of the head and the draft vocabulary.
        layer: name of the layer.
        feature_layers: numbers of target layers after which features are read; () if the head
            reads the final hidden state instead; None if config.json leaves them to the target.
        draft_vocab: size of the draft vocabulary.
        own_embedding: the folder has an embedding; otherwise the target's is used.
        own_head: the folder has an output head that is used; otherwise the target's is.
        fc_bias: the projection ``fc`` has a bias.
        norms_features: each feature is normed before ``fc``.
        normed_residual: the residual stream begins with the normed hidden state.
        normed_output: the next pass reads the normed output.
    """

    version: int
    root: str
    layer: str
    feature_layers: tuple[int, ...] | None
    draft_vocab: int
    own_embedding: bool
    own_head: bool
    fc_bias: bool
    norms_features: bool
    normed_residual: bool
    normed_output: bool

    @classmethod
    def read(cls, facts: ModelFacts) -> EagleConfig:
        """Return the form of the head in a draft folder."""
        names = facts.tensors
        version = 3 if facts.architecture in EAGLE3 else 1
        root = "model." if "model.fc.weight" in names else ""
        draft_vocab = stated(facts, "draft_vocab_size", facts.vocab_size)
        reduced = draft_vocab != facts.vocab_size
        return cls(
            version=version,
            root=root,
            layer=_layer_name(names, root, LAYERS[0] if version == 3 else LAYERS[1]),
            feature_layers=_feature_layers(facts.config) if version == 3 else (),
            draft_vocab=draft_vocab if version == 3 else facts.vocab_size,
            own_embedding=f"{root}embed_tokens.weight" in names,
            own_head=version == 3 and ("lm_head.weight" in names or reduced and not names),
            fc_bias=f"{root}fc.bias" in names,
            norms_features=bool(facts.config.get("fc_norm")),
            normed_residual=bool(facts.config.get("norm_before_residual")),
            normed_output=bool(facts.config.get("norm_output")),
        )

    @property
    def feature_count(self) -> int:
        """Number of features of a token that the head reads."""
        return 3 if self.feature_layers is None else len(self.feature_layers)

    def features_of(self, layers: int) -> tuple[int, ...]:
        """Return the feature layers of a target with ``layers`` layers.

        By default they are those of the published training: 2, the middle, and 3 before the end.
        Some trainers count the layer whose output is read from 0, others the layers before; their
        defaults differ by one and mean the same.
        """
        default = default_features(layers)
        if self.feature_layers is None or self.feature_layers == tuple(n - 1 for n in default):
            return default
        return self.feature_layers


def default_features(layers: int) -> tuple[int, ...]:
    """Return the feature layers of the published training for a target with ``layers`` layers."""
    return 2, layers // 2, layers - 3


def _layer_name(names: Iterable[str], root: str, usual: str) -> str:
    """Return the name of the layer among the names of tensors, or the usual one."""
    found = (one for one in LAYERS if any(name.startswith(f"{root}{one}.") for name in names))
    return root + next(found, usual)


def _feature_layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the feature layers that config.json states; None if it states none."""
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, Mapping) else {}
    if nested.get("use_aux_hidden_state") is False:
        return ()
    found = config.get(FEATURE_KEY) or nested.get(FEATURE_KEY)
    if not isinstance(found, list | tuple) or not found:
        return None
    return tuple(number if isinstance(number, int) else -1 for number in found)
