"""Speculation as in other engines' command lines: a JSON object, and drafts by their folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from glowplug.core.config.files import Layer, set_path
from glowplug.core.errors import GlowplugError
from glowplug.core.plugin.offers import ModelOffers
from glowplug.core.plugin.registry import PluginSet
from glowplug.entrypoints.cli.flags.flag import Flag, GivenFlag

CONFIG_FLAG = "--speculative-config"  #: vLLM's flag for all settings of speculation
ALGORITHM_FLAG = "--speculative-algorithm"
#: key of vLLM's object -> the flag with the same meaning
KEYS = {
    "method": ALGORITHM_FLAG,
    "model": "--speculative-draft-model-path",
    "num_speculative_tokens": "--speculative-num-steps",
    "prompt_lookup_max": "--speculative-ngram-max-match-window-size",
    "prompt_lookup_min": "--speculative-ngram-min-match-window-size",
}
#: names that vLLM takes for the method "ngram" in the place of a draft model
NGRAM_MODELS = frozenset({"ngram", "[ngram]"})
#: vLLM's method for a draft in a folder that is none of its other kinds
BY_FOLDER = "draft_model"
#: names whose algorithm depends on the draft's folder
FOLDER_NAMES = frozenset({"EAGLE", "EAGLE3", BY_FOLDER.upper()})
ALGORITHM = "speculative.use"
FOLDER = "speculative.draft_model"


def speculative_config(text: str) -> dict[str, Any]:
    """Parse the value of ``--speculative-config``: a JSON object with vLLM's keys.

    Raises:
        argparse.ArgumentTypeError: the text is no such object.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found:
        raise argparse.ArgumentTypeError(
            f'{text!r} is no JSON object such as {{"method": "eagle3", "model": "FOLDER", '
            f'"num_speculative_tokens": 3}}'
        )
    unknown = sorted(found.keys() - KEYS.keys())
    if unknown:
        raise argparse.ArgumentTypeError(
            f"the keys {', '.join(KEYS)} are known, not {', '.join(unknown)}: leave it out; a "
            "draft is split over ranks and sized like its model"
        )
    if found.get("model") in NGRAM_MODELS:
        found["method"] = found.pop("model").strip("[]")
    if "method" not in found and "model" in found:
        found["method"] = BY_FOLDER
    return found


def with_single_flags(given: Iterable[GivenFlag], flags: Iterable[Flag]) -> Iterator[GivenFlag]:
    """Yield ``given``, with one flag for each key of a ``--speculative-config``.

    Args:
        given: flags in command-line order.
        flags: all flags.
    """
    by_name: Mapping[str, Flag] = {flag.names[0]: flag for flag in flags}
    for one in given:
        if one.flag.names[0] != CONFIG_FLAG:
            yield one
            continue
        for key, value in one.value.items():
            yield GivenFlag(by_name[KEYS[key]], f"{one.spelling} {key}", value)


def resolve_folder(layer: Layer, given: Iterable[GivenFlag], plugins: PluginSet) -> None:
    """Choose the algorithm by the draft's folder, for names that stand for several of them.

    With the folder of an EAGLE head, "EAGLE", "EAGLE3" and "draft_model" choose ``eagle``; with
    that of a next-token layer, they choose ``nextn``.
    """
    names = {
        str(one.value).upper() for one in given if one.flag.names[0] == ALGORITHM_FLAG
    } & FOLDER_NAMES
    speculative = layer.data.get("speculative")
    folder = speculative.get("draft_model") if isinstance(speculative, Mapping) else None
    if not names or not isinstance(folder, str) or ALGORITHM not in layer.origins:
        return
    try:
        architecture = plugins.read_model(folder).facts.architecture
    except GlowplugError:
        return  # the plan reports it
    for found in plugins.components("model"):
        offers = found.component.offers
        if isinstance(offers, ModelOffers) and architecture in offers.eagle_architectures:
            set_path(layer.data, ALGORITHM, "eagle")
        elif isinstance(offers, ModelOffers) and architecture in offers.draft_architectures:
            set_path(layer.data, ALGORITHM, "nextn")
