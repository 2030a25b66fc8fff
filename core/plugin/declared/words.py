"""Checks of the words in offers: a word that no check of the plan knows is refused.

A misspelt word would make a component unfit for every plan, or fit for plans that it cannot serve,
and no message would say why. Plan zone: no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from glowplug.core.facts.mesh import AXES
from glowplug.core.plugin.modes import Capture, Mode
from glowplug.core.plugin.offers import DEVICES, FLOAT_DTYPES, Offers

#: field of offers -> the words that it may hold; (class, field) if only one class has these
VOCABULARY: Mapping[str | tuple[str, str], frozenset[str]] = {
    "devices": DEVICES,
    "dequantizes": DEVICES,
    "dtypes": FLOAT_DTYPES,
    "modes": frozenset(Mode),
    "captures": frozenset(Mode),
    "axes": frozenset(AXES),
    "kind": frozenset({"mla", "mha"}),
    ("AttentionOffers", "kinds"): frozenset({"mla", "mha"}),
}
#: words that are often written for another one; in fields of any words these are refused, too
MISTAKEN: Mapping[str, str] = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "gpu": "cuda",
    "nvidia": "cuda",
    "gqa": "mha",
    "mqa": "mha",
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
#: fields whose words are open, but never those of ``MISTAKEN``
OPEN = frozenset({"kv_dtypes"})
LEAST_COMPUTE, MOST_COMPUTE = 30, 200  #: bounds of compute capabilities, written as in 90 for SM90


def wrong_words(offers: Offers) -> Iterator[str]:
    """Yield the reason for every wrong word and type in ``offers``, with the likely word."""
    for found in fields(offers):
        value = getattr(offers, found.name)
        if str(found.type).startswith("frozenset"):
            if not isinstance(value, (frozenset, set)):
                yield f"{found.name} must be a frozenset, not {type(value).__name__}"
                continue
        yield from _wrong_in(type(offers).__name__, found.name, value)


def _wrong_in(kind: str, name: str, value: Any) -> Iterator[str]:
    words = VOCABULARY.get((kind, name)) or VOCABULARY.get(name)
    if name == "compute":
        yield from (_wrong_compute(one) for one in value if not _is_compute(one))
    elif name == "modes" and isinstance(value, Mapping):
        yield from (
            f"modes[{mode!s}] is {level!r}, which is not a Capture"
            for mode, level in value.items()
            if not isinstance(level, Capture)
        )
        yield from _unknown(name, value, words or frozenset())
    elif name in OPEN:
        yield from (
            f"{name} has {word!r}; did you mean {MISTAKEN[word]!r}?"
            for word in value
            if word in MISTAKEN
        )
    elif words is not None:
        yield from _unknown(name, [value] if isinstance(value, str) else value, words)


def _unknown(name: str, found: Iterable[Any], words: frozenset[str]) -> Iterator[str]:
    """Yield the reason for each of ``found`` that is not in ``words``."""
    for word in found:
        if word not in words:
            close = difflib.get_close_matches(str(word).lower(), words, 1)
            meant = MISTAKEN.get(str(word).lower(), close[0] if close else "")
            hint = f"did you mean {str(meant)!r}?" if meant in words else ""
            known = ", ".join(sorted(repr(str(one)) for one in words))
            yield f"{name} has {word!r}; {hint or f'known words: {known}'}"


def _is_compute(value: object) -> bool:
    return isinstance(value, int) and LEAST_COMPUTE <= value <= MOST_COMPUTE


def _wrong_compute(value: object) -> str:
    digits = "".join(filter(str.isdigit, str(value)))
    meant = f"did you mean {digits}?" if digits else "write 90 for SM90"
    return f"compute has {value!r}, which is not a compute capability; {meant}"
