"""Plans without a real model, for tests of code that reads only ``plan.sizes``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glowplug.core.facts.model_facts import Facts, HardwareFacts, ModelFacts, SoftwareFacts
from glowplug.core.plan.plan import EnginePlan, Sizes

VOCAB = 997  #: tokens of the fake model's vocabulary


def sizes(**changes: Any) -> Sizes:
    """Return small sizes: 64 tokens of context, 8 rows, chunks of 16 tokens, pages of 4.

    The pool has pages for all rows at full length. ``changes`` replace fields.
    """
    small = Sizes(
        context_length=64,
        max_running=8,
        max_queued=64,
        max_step_tokens=48,
        chunk_size=16,
        page_size=4,
        num_pages=8 * 16 + 1,
        kv_bytes=0,
        width=1,
    )
    return replace(small, **changes)


def bare_plan(**changes: Any) -> EnginePlan:
    """Return a plan without choices: ``sizes(**changes)`` and a model of ``VOCAB`` tokens."""
    model = ModelFacts(
        path="",
        architecture="Fake",
        format="none",
        kind="mha",
        config={},
        dtype="float32",
        vocab_size=VOCAB,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_positions=1 << 16,
    )
    return EnginePlan(
        model="fake",
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
        seed=0,
        overlap=True,
        choices=(),
        decisions=(),
        budget=(),
        sizes=sizes(**changes),
        mesh={},
        facts=Facts(model, HardwareFacts(), SoftwareFacts()),
        config={},
        plugins=(),
        plugin_fingerprint="",
    )
