"""Checks of an EAGLE head's folder against its target. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.facts.safetensors_header import read_places
from glowplug.core.plugin.component import CheckContext
from glowplug.core.plugin.offers import SpeculativeOffers
from glowplug.models.eagle.config import EAGLE3, FEATURE_KEY, LLAMA_EAGLE, OFFSETS, EagleConfig

FOLDER = "speculative.draft_model"
ANOTHER = "a head trained for this model"
COMPLETE = "the head's folder as it was published"


def check_head(context: CheckContext) -> Iterator[Refusal]:
    """Refuse a head of an unsupported form, or one that does not fit the target's layers."""
    head = context.facts.draft
    if head is None:
        return
    chosen = [one for one in context.of(SpeculativeOffers) if one.offers.eagle_head]
    if not chosen:
        return
    if head.architecture not in LLAMA_EAGLE | EAGLE3:
        return  # a head of another form, or refused by a check of the speculative algorithm
    reasons = [*_form(head), *_features(head, context.facts.model), *_vocabulary(head)]
    for reason, fix in reasons:
        yield Refusal("models", FOLDER, reason, fix)
    if not reasons:
        yield from _options(head, chosen[0].options)


def _options(head: ModelFacts, options: Any) -> Iterator[Refusal]:
    """Refuse options of the speculative algorithm that the head's draft vocabulary excludes."""
    size = EagleConfig.read(head).draft_vocab
    if size < head.vocab_size and options.head_rows():
        yield Refusal(
            "models",
            "speculative.draft_vocabulary",
            f"the head has a draft vocabulary of its own, {size} of {head.vocab_size} tokens",
            "leave it out",
        )
    branches = getattr(options, "topk", 1)
    if branches > size:
        yield Refusal(
            "models",
            "speculative.topk",
            f"topk is {branches}; the head drafts {size} different tokens",
            f"speculative.topk = {size}",
        )


def _form(head: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield reasons and fixes for forms of a head that are not built."""
    if head.num_layers != 1:
        yield f"the head {head.path} has {head.num_layers} layers; heads of one layer run", ANOTHER
    if not head.config.get("intermediate_size"):
        yield f"{head.path}/config.json has no intermediate_size", COMPLETE
    if head.quant_method != "none":
        yield (
            f"the head's weights are quantised ({head.quant_method}); heads are loaded unquantised",
            "the head in bfloat16",
        )


def _features(head: ModelFacts, target: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield reasons and fixes for features that the target does not have.

    Columns of ``fc`` that do not fit the features are those of a head for another model.
    """
    config = EagleConfig.read(head)
    hidden = head.hidden_size
    inputs = 2 * hidden
    if config.version == 3:
        layers = config.features_of(target.num_layers)
        wrong = [layer for layer in layers if not 0 <= layer <= target.num_layers]
        if wrong:
            yield (
                f"the head reads features after layers {', '.join(map(str, layers))}; the model "
                f"has {target.num_layers} layers",
                f"{ANOTHER}, or {FEATURE_KEY} in its config.json with numbers up to "
                f"{target.num_layers}",
            )
        inputs = len(layers) * hidden
    fc = head.tensors.get(f"{config.root}fc.weight")
    if fc is None and head.tensors and inputs:
        yield f"{head.path} holds no fc.weight, the projection of an EAGLE head", COMPLETE
    elif fc is not None and fc.shape != (hidden, inputs):
        yield (
            f"the head's fc.weight is {'x'.join(map(str, fc.shape))}, it reads {inputs} numbers of "
            f"this model and makes {hidden}",
            ANOTHER,
        )


def _vocabulary(head: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield reasons and fixes for a draft vocabulary that is no part of the target's."""
    size = EagleConfig.read(head).draft_vocab
    offsets = head.tensors.get(OFFSETS)
    lacking = [name for name in (OFFSETS, "lm_head.weight") if name not in head.tensors]
    if not 0 < size <= head.vocab_size:
        yield (
            f"the head's draft vocabulary has {size} tokens (draft_vocab_size), the model's "
            f"vocabulary {head.vocab_size}",
            COMPLETE,
        )
    elif size < head.vocab_size and head.tensors and lacking:
        reason = f"the head drafts {size} of {head.vocab_size} tokens and holds no {lacking[0]}"
        yield reason, COMPLETE
    elif offsets is not None and offsets.shape != (size,):
        shown = "x".join(map(str, offsets.shape))
        yield f"{OFFSETS} has {shown} ids, draft_vocab_size is {size}", COMPLETE
    elif offsets is not None:
        yield from _ids(head, np.arange(size) + _integers(head, OFFSETS))


def _ids(head: ModelFacts, ids: NDArray[np.int64]) -> Iterator[tuple[str, str]]:
    """Yield reasons and fixes for draft ids whose ids in the target are ``ids``."""
    outside = ids[(ids < 0) | (ids >= head.vocab_size)]
    if len(outside):
        yield (
            f"{OFFSETS} maps {len(outside)} draft ids out of the model's vocabulary of "
            f"{head.vocab_size} tokens, the first to {outside[0]}",
            COMPLETE,
        )
    elif len(np.unique(ids)) < len(ids):
        yield f"{OFFSETS} maps several draft ids to one token", COMPLETE


def _integers(head: ModelFacts, name: str) -> NDArray[np.int64]:
    """Return the values of a tensor of integers in the head's folder."""
    path = Path(head.path) / head.tensors[name].file
    fact, start, end = read_places(path)[name]
    with open(path, "rb", buffering=0) as stream:
        stream.seek(start)
        raw = stream.read(end - start)
    return np.frombuffer(raw, np.dtype(fact.dtype)).astype(np.int64)
