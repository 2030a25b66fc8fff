"""Fingerprints of a plan, and of everything that a plan's answers depend on. No torch.

Equal input gives equal digits in every process and on every machine. Neither fingerprint depends on
API keys (``schema.SECRETS``) or on the paths of the model's and the draft's folder; the content of
the folders counts instead.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import msgspec

import glowplug
from glowplug.core.config.schema import SECRETS, EngineConfig
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.plan import Choice, EnginePlan
from glowplug.core.plugin.slots import BY_NAME

DIGITS = 16  #: hexadecimal digits of a fingerprint
#: configuration fields for which the plan has a decided value
DECIDED = frozenset({"model", "dtype", "device", "seed", "context_length"})
#: slots that take no part in steps, but whose components change answers
AROUND_STEPS = frozenset({"weights", "outputs"})


def plan_fingerprint(plan: EnginePlan) -> str:
    """Return 16 hexadecimal digits for the model, the configuration and the decisions.

    They cover the content of the checkpoint and of the draft (config.json, chat template,
    ``ModelFacts.digest``), every chosen component with its version and options, sizes, mesh, and
    the sections of the configuration that belong to no slot. Defaults count as if they were
    written out. The machine, installed packages and plugins that were not chosen do not count.
    """
    return _digits(
        {
            "model": _content(plan.facts.model),
            "draft": plan.facts.draft and _content(plan.facts.draft),
            "components": [
                [*_component(choice), _options(plan, choice)] for choice in plan.every_choice
            ],
            "decided": [
                plan.dtype,
                plan.kv_dtype,
                plan.device,
                plan.seed,
                plan.overlap,
                plan.hosts,
                plan.mesh,
                plan.sampled_last_layer,
                plan.expandable_segments,
            ],
            "sizes": plan.sizes,
            "settings": _settings(plan.config),
        }
    )


def answers_fingerprint(plan: EnginePlan, text: str = "") -> str:
    """Return 16 hexadecimal digits for all that changes answers (``system_fingerprint``).

    They cover:

    - the engine's version, and the versions of the libraries that components use,
    - the content of the checkpoint and of the draft,
    - dtypes, device and cards,
    - the longest sequence, and the default seed and output length of requests,
    - the components that take part in a step, read weights or parse outputs, without their
      operational options (``Options.marked``).

    Args:
        text: digest of the tokenizer and its chat template (``Tokenizer.digest``); "" without a
            tokenizer.
    """
    settings = _settings(plan.config)
    cards = (
        sorted({card.name for card in plan.facts.hardware.devices}) if plan.device == "cuda" else []
    )
    taking = [
        choice
        for choice in plan.choices
        if BY_NAME[choice.slot].step or choice.slot in AROUND_STEPS
    ]
    return _digits(
        {
            "engine": glowplug.__version__,
            "model": _content(plan.facts.model),
            "draft": plan.facts.draft and _content(plan.facts.draft),
            "text": text,
            "computed": [
                plan.dtype,
                plan.kv_dtype,
                plan.device,
                cards,
                plan.facts.software.packages,
            ],
            "requests": [
                plan.seed,
                plan.sizes.context_length,
                settings["server"]["default_max_tokens"],
            ],
            "components": [
                [
                    *_component(choice),
                    {
                        name: value
                        for name, value in _options(plan, choice).items()
                        if name not in choice.operational
                    },
                ]
                for choice in taking
            ],
        }
    )


def _digits(content: dict[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:DIGITS]


def _content(facts: ModelFacts) -> list[Any]:
    """Return the facts of a model that a fingerprint covers.

    The path is left out. Tensors are included only if there is no digest of the weights.
    """
    return [
        facts.architecture,
        facts.format,
        facts.config,
        facts.chat_template,
        facts.digest or facts.tensors,
    ]


def _component(choice: Choice) -> list[str]:
    return [choice.slot, choice.name, choice.distribution, choice.version]


def _options(plan: EnginePlan, choice: Choice) -> dict[str, Any]:
    """Return the options of a component that a fingerprint covers.

    The path of the draft's folder is left out, because the content of the folder is covered.
    """
    folder = plan.facts.draft.path if plan.facts.draft is not None else None
    return {
        name: value
        for name, value in choice.options.items()
        if folder is None or not (isinstance(value, str) and os.path.expanduser(value) == folder)
    }


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration outside the slots' sections, without API keys and decided fields.

    Defaults are filled in.
    """
    given = {key: value for key, value in config.items() if key in EngineConfig.model_fields}
    parsed = EngineConfig.model_validate_json(msgspec.json.encode({"model": "?", **given}))
    settings = parsed.model_dump(mode="json", exclude=set(DECIDED))
    for path in SECRETS:
        section, _, key = path.partition(".")
        settings[section].pop(key, None)
    return settings
