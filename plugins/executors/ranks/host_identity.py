"""Do all hosts mean the same engine? Compared before anything is loaded: versions, plugins, plan."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence

import msgspec

import glowplug
from glowplug.core.errors import Refusal
from glowplug.core.facts.machine import installed
from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.plan import EnginePlan

#: what hosts compare -> (the field a refusal names, its fix)
FIXES: dict[str, tuple[str, str]] = {
    "glowplug": ("version", "install the same glowplug on every host"),
    "python": ("version", "the same minor version of Python on every host"),
    "torch": ("version", "install the same torch on every host"),
    "plugins": (
        "plugins",
        "install the same plugins in the same versions, and give the same --plugin flags",
    ),
    "checkpoint": ("model", "the same files on every host"),
    "layout": ("parallel", "start every host with the same command, --node-rank apart"),
    "components": ("plan", "start every host with the same command, --node-rank apart"),
    "numbers": ("plan", "start every host with the same command, --node-rank apart"),
    "sizes": (
        "memory.kv_tokens",
        "hosts alike, or memory.kv_tokens (--max-total-tokens) of the smaller one on both",
    ),
}
OWN = frozenset(
    {"host_rank", "address", "threads"}
)  #: options of an executor in which hosts may differ


def identity(plan: EnginePlan) -> bytes:
    """What must be the same on every host, by the names of ``FIXES``, as JSON."""
    components = {
        f"{choice.slot} {choice.name}": {
            key: value
            for key, value in choice.options.items()
            if choice.slot != "executor" or key not in OWN
        }
        for choice in plan.choices
    }
    layout = {"ranks": plan.ranks, "hosts": plan.hosts, **plan.mesh}
    numbers = {
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "device": plan.device,
        "seed": plan.seed,
        "overlap": plan.overlap,
    }
    others = [name for name in plan.plugins if not name.startswith("glowplug.")]
    found = {
        "glowplug": glowplug.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": installed("torch"),
        "plugins": f"{plan.plugin_fingerprint} ({', '.join(others) or 'built-in ones only'})",
        "checkpoint": _checkpoint(plan.facts.model),
        "layout": _shown(layout),
        "components": _shown(components),
        "numbers": _shown(numbers),
        "sizes": _shown(msgspec.to_builtins(plan.sizes)),
    }
    return msgspec.json.encode(found)


def _checkpoint(facts: ModelFacts) -> str:
    """Configuration, shapes, dtypes and samples of the weights; where the folder lies may differ."""
    content = msgspec.json.encode([facts.config, facts.tensors, facts.digest], order="sorted")
    digest = hashlib.sha256(content).hexdigest()[:16]
    return f"{facts.architecture}, {len(facts.tensors)} tensors, {digest}"


def _shown(values: object) -> str:
    return msgspec.json.encode(values, order="sorted").decode()


def differences(identities: Sequence[bytes], names: Sequence[str]) -> list[Refusal]:
    """One refusal for each thing in which a host differs from host 0."""
    decoded = [msgspec.json.decode(one, type=dict[str, str]) for one in identities]
    refusals = []
    for what, (field, fix) in FIXES.items():
        for name, found in zip(names[1:], decoded[1:], strict=True):
            ours, theirs = _apart(decoded[0].get(what, "nothing"), found.get(what, "nothing"))
            if ours != theirs:
                refusals.append(
                    Refusal(
                        "executor",
                        field,
                        f"{what} differ: {names[0]} has {ours}, {name} has {theirs}",
                        fix,
                    )
                )
                break
    return refusals


def _apart(ours: str, theirs: str) -> tuple[str, str]:
    """Two values; of two JSON objects only the entries that differ."""
    if not (ours.startswith("{") and theirs.startswith("{")):
        return ours, theirs
    first = msgspec.json.decode(ours)
    second = msgspec.json.decode(theirs)
    keys = [key for key in sorted({*first, *second}) if first.get(key) != second.get(key)]
    return (
        _shown({key: first.get(key) for key in keys}),
        _shown({key: second.get(key) for key in keys}),
    )
