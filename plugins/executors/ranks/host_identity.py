"""Comparison of the hosts' versions, plugins and plans, before anything is loaded.

Hosts that differ are refused.
"""

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

#: compared fact -> (field in the refusal, fix)
FIXES: dict[str, tuple[str, str]] = {
    "glowplug": ("version", "install the same glowplug on every host"),
    "python": ("version", "use the same minor version of Python on every host"),
    "torch": ("version", "install the same torch on every host"),
    "plugins": (
        "plugins",
        "install the same plugins in the same versions, and give the same --plugin flags",
    ),
    "checkpoint": ("model", "use the same files on every host"),
    "layout": ("parallel", "start every host with the same command except for --node-rank"),
    "components": ("plan", "start every host with the same command except for --node-rank"),
    "numbers": ("plan", "start every host with the same command except for --node-rank"),
    "sizes": (
        "memory.kv_tokens",
        "use equal hosts, or set memory.kv_tokens (--max-total-tokens) of the smaller one on both",
    ),
}
#: options of the executor in which hosts may differ
HOST_OPTIONS = frozenset({"host_rank", "address", "threads"})
#: longest value of an option, as JSON, that is compared as it is; of longer ones the digest is
VALUE_CHARS_MAX = 200


def identity(plan: EnginePlan) -> bytes:
    """Return the facts that must be equal on every host, as JSON with the keys of ``FIXES``."""
    components = {
        f"{choice.slot} {choice.name}": {
            key: _shortened(value)
            for key, value in choice.options.items()
            if choice.slot != "executor" or key not in HOST_OPTIONS
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
        "layout": _to_json(layout),
        "components": _to_json(components),
        "numbers": _to_json(numbers),
        "sizes": _to_json(msgspec.to_builtins(plan.sizes)),
    }
    return msgspec.json.encode(found)


def _shortened(value: object) -> object:
    """Return the value of an option, or the digest of one that is too long for a message."""
    text = _to_json(value)
    if len(text) <= VALUE_CHARS_MAX:
        return value
    return f"{len(text)} characters, {_digest(text.encode())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _checkpoint(facts: ModelFacts) -> str:
    """Return a digest of a checkpoint: config.json, and shapes, dtypes and samples of the weights.

    The path of the model folder may differ between hosts and is not part of it.
    """
    content = msgspec.json.encode([facts.config, facts.tensors, facts.digest], order="sorted")
    return f"{facts.architecture}, {len(facts.tensors)} tensors, {_digest(content)}"


def _to_json(values: object) -> str:
    return msgspec.json.encode(values, order="sorted").decode()


def differences(identities: Sequence[bytes], names: Sequence[str]) -> list[Refusal]:
    """Return one refusal for each fact in which a host differs from host 0.

    Args:
        identities: the result of ``identity`` of each host.
        names: the name of each host in messages.
    """
    decoded = [msgspec.json.decode(one, type=dict[str, str]) for one in identities]
    refusals = []
    for fact, (field, fix) in FIXES.items():
        for name, found in zip(names[1:], decoded[1:], strict=True):
            ours, theirs = _differing(decoded[0].get(fact, "nothing"), found.get(fact, "nothing"))
            if ours != theirs:
                refusals.append(
                    Refusal(
                        "executor",
                        field,
                        f"different {fact}: {names[0]} has {ours}, {name} has {theirs}",
                        fix,
                    )
                )
                break
    return refusals


def _differing(ours: str, theirs: str) -> tuple[str, str]:
    """Return ``ours`` and ``theirs``; if both are JSON objects, only the entries that differ."""
    if not (ours.startswith("{") and theirs.startswith("{")):
        return ours, theirs
    first = msgspec.json.decode(ours)
    second = msgspec.json.decode(theirs)
    keys = [key for key in sorted({*first, *second}) if first.get(key) != second.get(key)]
    return (
        _to_json({key: first.get(key) for key in keys}),
        _to_json({key: second.get(key) for key in keys}),
    )
