"""Generic checks of draft models against their target. Plan zone: no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from glowplug.core.errors import Refusal
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.checks.rules import instead, listed, reads, refuse
from glowplug.core.plan.kv_entries import own_cache_family
from glowplug.core.plan.proposal import Proposal
from glowplug.core.plugin.component import Chosen, ChosenOf
from glowplug.core.plugin.loading import Registration
from glowplug.core.plugin.offers import ModelOffers, SpeculativeOffers, WeightOffers
from glowplug.core.plugin.requirements import missing_packages
from glowplug.core.plugin.speculative_options import SpeculativeOptions

FOLDER = "speculative.draft_model"  #: option with the draft model's folder
EXPORT = "glowplug export-nextn writes one from the model's own checkpoint"
HEADS = "an EAGLE head trained for this model"
#: properties that a draft shares with its target: attribute of ``ModelFacts`` -> name
SHARED_STATES = {"hidden_size": "hidden size", "vocab_size": "vocabulary size"}
#: those of drafts in the target's KV pool
SHARED = {
    **SHARED_STATES,
    "kind": "kind of attention",
    "kv_lora_rank": "latent size (kv_lora_rank)",
    "qk_rope_head_dim": "rotary size (qk_rope_head_dim)",
    "num_heads": "number of attention heads",
}
#: further ones of drafts whose cache has an entry per head
SHARED_HEADS = {
    "num_kv_heads": "number of key heads (num_key_value_heads)",
    "head_dim": "size of a head",
}

_Drafter = ChosenOf[SpeculativeOffers, SpeculativeOptions]


def _drafter(proposal: Proposal) -> _Drafter | None:
    """Return the speculative algorithm if its draft continues hidden states, else None."""
    chosen = proposal.speculative
    return chosen if chosen is not None and proposal.values.draft_extends else None


def _layer_user(proposal: Proposal) -> _Drafter | None:
    """Return the speculative algorithm if it needs a next-token layer, else None."""
    chosen = _drafter(proposal)
    return chosen if chosen is not None and chosen.offers.nextn_layer else None


@reads("speculative", "model")
def check_nextn(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse speculation that needs a next-token layer if there is none to run.

    The checkpoint may not have the layer, or the model family may not be able to build it.
    """
    chosen = _layer_user(proposal)
    model = proposal.model
    if chosen is None or model is None:
        return
    target = proposal.facts.model
    folder = proposal.facts.draft
    if not model.offers.nextn:
        yield refuse(
            proposal,
            "speculative",
            chosen,
            f"{chosen.name} needs a next-token layer, which {model.name} does not build",
            _no_drafts(proposal),
        )
    elif folder is None and not target.nextn_layers and not proposal.values.draft_folder:
        why = f" ({'; '.join(target.notes)})" if target.notes else ""
        yield refuse(
            proposal,
            "speculative",
            chosen,
            f"{chosen.name} drafts with the checkpoint's own next-token layer; "
            f"{target.path} has none{why}",
            f"{_no_drafts(proposal)}, or {FOLDER} = a folder with one",
        )
    elif folder is not None:
        yield from _architecture(proposal, chosen, model.offers, folder)


def _no_drafts(proposal: Proposal) -> str:
    """Return the fix that names algorithms that draft nothing."""
    return instead(proposal, "speculative", lambda o: not o.drafts, 'speculative.use = "none"')


def _architecture(
    proposal: Proposal, chosen: Chosen, family: ModelOffers, folder: ModelFacts
) -> Iterator[Refusal]:
    """Refuse a draft folder of another architecture, or without a next-token layer."""
    known = family.draft_architectures | family.architectures
    if folder.architecture in family.eagle_architectures:
        yield refuse(
            proposal,
            "speculative",
            chosen,
            f"{folder.path} is a {folder.architecture}: an EAGLE head, not a next-token layer",
            _users_of_heads(proposal, f"a folder with a next-token layer: {EXPORT}"),
        )
    elif folder.architecture not in known:
        yield refuse(
            proposal,
            "speculative",
            chosen,
            f"{folder.path} is a {folder.architecture}, not a next-token "
            f"layer for {proposal.facts.model.architecture}",
            "a folder of "
            f"{listed(family.draft_architectures) or 'the same architecture'}: {EXPORT}",
            field=FOLDER,
        )
    elif not folder.nextn_layers:
        yield refuse(
            proposal,
            "speculative",
            chosen,
            f"{folder.path} holds no next-token layer",
            f"a folder with one: {EXPORT}",
            field=FOLDER,
        )


def _users_of_heads(proposal: Proposal, otherwise: str) -> str:
    """Return the fix that names algorithms that draft with EAGLE heads, if any."""
    return instead(proposal, "speculative", lambda o: o.eagle_head, otherwise)


@reads("speculative", "model")
def check_features(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a draft that reads hidden states of layers which the model does not return."""
    chosen = proposal.speculative
    model = proposal.model
    if chosen is None or model is None or chosen.offers.eagle_head or model.offers.features:
        return  # a family that builds EAGLE heads decides on them itself
    count = chosen.options.features(proposal.facts.draft or proposal.facts.model)
    if count:
        yield refuse(
            proposal,
            "speculative",
            chosen,
            f"{chosen.name} reads the hidden states of {count} layers, which models of "
            f"{model.name} do not return",
            instead(proposal, "speculative", lambda o: not o.drafts, 'speculative.use = "none"'),
        )


@reads("speculative", "model")
def check_draft_folder(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a draft folder whose sizes, quantisation or tokenizer differ from the target's."""
    chosen = _drafter(proposal)
    target = proposal.facts.model
    folder = proposal.facts.draft
    if chosen is None or folder is None:
        return
    head = chosen.offers.eagle_head
    shared = SHARED if target.kind == "mla" else SHARED | SHARED_HEADS
    if own_cache_family(proposal):
        shared = SHARED_STATES
    elif head and folder.kind != target.kind:
        return  # another check refuses it
    for key, what in shared.items():
        own = getattr(folder, key)
        other = getattr(target, key)
        if own != other:
            yield refuse(
                proposal,
                "speculative",
                chosen,
                f"the draft's {what} is {own}, the model's is {other}",
                HEADS if head else f"a draft made for this model: {EXPORT}",
                field=FOLDER,
            )
    quantised = (folder.quant_method, folder.quant_block)
    if not head and quantised != (target.quant_method, target.quant_block):
        yield _other_scheme(proposal, chosen, folder, target)
    yield from other_tokenizer(proposal, chosen, folder, target)


def other_tokenizer(
    proposal: Proposal, chosen: Chosen, folder: ModelFacts, target: ModelFacts
) -> Iterator[Refusal]:
    """Refuse a draft whose token ids have other text than its target's."""
    difference = tokenizer_difference(folder.path, target.path)
    if difference:
        yield refuse(
            proposal,
            "speculative",
            chosen,
            f"the draft has another tokenizer: {difference}",
            "a draft made with this model's tokenizer",
            field=FOLDER,
        )


def _other_scheme(
    proposal: Proposal, chosen: Chosen, folder: ModelFacts, target: ModelFacts
) -> Refusal:
    """Return the refusal of a draft that is quantised otherwise than its target."""
    return refuse(
        proposal,
        "speculative",
        chosen,
        f"the draft's weights are {_quantised(folder)}, the model's are "
        f"{_quantised(target)}, and one scheme loads both",
        f"a draft quantised like the model: {EXPORT}",
        field=FOLDER,
    )


def _quantised(model: ModelFacts) -> str:
    """Return a model's quantisation as text."""
    if model.quant_method == "none":
        return "not quantised"
    return model.quant_method + (
        " in {}x{} blocks".format(*model.quant_block) if model.quant_block else ""
    )


def other_source(proposal: Proposal) -> Registration | None:
    """Return the weight source of the draft's folder if the model's does not read its format.

    The result is None if the model's source reads it, or if no registered source does.
    """
    source = proposal.weights
    folder = proposal.facts.draft
    if source is None or folder is None or source.offers.formats & {folder.format, "synthetic"}:
        return None
    packages = proposal.facts.software.packages
    for found in proposal.plugins.components("weights"):
        offers = found.component.offers
        if isinstance(offers, WeightOffers) and folder.format in offers.formats:
            if not missing_packages(found.component, packages):
                return found
    return None


@reads("weights", "speculative")
def check_draft_weights(proposal: Proposal) -> Iterator[Refusal]:
    """Refuse a weight source that cannot read the draft folder's format."""
    source = proposal.weights
    folder = proposal.facts.draft
    chosen = proposal.speculative
    if source is None or folder is None or chosen is None:
        return
    if not source.offers.formats & {folder.format, "synthetic"} and not other_source(proposal):
        held = "no weights" if folder.format == "none" else f"{folder.format} weights"
        yield refuse(
            proposal,
            "weights",
            source,
            f"{source.name} reads {listed(source.offers.formats)}; the draft "
            f"{folder.path} holds {held}",
            "a draft folder with weights",
            field=FOLDER,
        )


# ---- tokenizers ----------------------------------------------------------------------------------


def tokenizer_difference(draft: str, target: str) -> str:
    """Return in which token ids, and how, the tokenizer.json of two folders differ, as text.

    The result is "" if there is no difference, or a folder has no tokenizer.json.
    """
    paths = [Path(folder) / "tokenizer.json" for folder in (draft, target)]
    if not all(path.is_file() for path in paths):
        return ""
    stamps = [path.stat() for path in paths]
    return _difference(str(paths[0]), str(paths[1]), *(stamp.st_mtime_ns for stamp in stamps))


@lru_cache(maxsize=64)
def _difference(draft: str, target: str, draft_time: int, target_time: int) -> str:
    """Return in which token ids, and how, two tokenizer.json files differ, as text.

    The result is "" without a difference. It is cached until the modification time of a file (in
    ns) changes, because checks run once per candidate.
    """
    del draft_time, target_time
    if _digest(draft) == _digest(target):
        return ""
    try:
        own = vocabulary(draft)
        other = vocabulary(target)
    except (ValueError, TypeError, AttributeError, KeyError):
        return "its tokenizer.json is another file and could not be read as a vocabulary"
    different = sorted(id for id in own.keys() | other.keys() if own.get(id) != other.get(id))
    if not different:
        return ""
    first = different[0]
    return (
        f"{len(different)} token ids have other text, the first is {first}: "
        f"{own.get(first)!r} instead of {other.get(first)!r}"
    )


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def vocabulary(path: str) -> dict[int, str]:
    """Return the text of each token id in a tokenizer.json.

    Raises:
        ValueError, TypeError, AttributeError, KeyError: the file is not a tokenizer.json.
    """
    data: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    listing: Any = data["model"]["vocab"]
    if isinstance(listing, dict):
        found = {int(id): str(text) for text, id in listing.items()}
    else:  # a unigram model: a list of [text, score] in order of ids
        found = {id: str(entry[0]) for id, entry in enumerate(listing)}
    found |= {int(token["id"]): str(token["content"]) for token in data.get("added_tokens") or ()}
    return found
