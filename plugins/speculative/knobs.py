"""The published knobs of drafts: ``steps``, ``topk`` and ``draft_tokens``. Plan zone: no torch."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field, field_validator

from glowplug.core.errors import Refusal
from glowplug.core.plugin.component import CheckContext
from glowplug.core.plugin.draft_shape import MASK_BITS, DraftShape
from glowplug.core.plugin.speculative_options import SpeculativeOptions
from glowplug.plugins.speculative.draft_vocabulary import check_vocabulary, head_rows

STEPS_MAX = 15  #: largest option ``steps``


class KnobOptions(SpeculativeOptions):
    """Options of algorithms whose draft model drafts chains and trees."""

    steps: int = Field(1, description="tokens drafted after each step; each takes one draft pass")
    topk: int = Field(
        1, description="drafts that each pass expands, and branches of each; 1: a chain"
    )
    draft_tokens: int | None = Field(
        None,
        description="tokens verified per step, the last accepted one included; None: steps + 1 for "
        "a chain, steps + topk for a tree, if a tree has as many",
    )
    draft_model: str | None = Field(None, description="folder of the draft model")
    draft_vocabulary: int | str | None = Field(
        None,
        description="tokens that drafts choose from: a number of the most frequent ones, counted "
        "while serving, or a file of ids (.json, .txt, .npy); None: all. Outputs stay the same",
    )

    @field_validator("draft_vocabulary")
    @classmethod
    def _number(cls, value: int | str | None) -> int | str | None:
        """Return a number that was given as text, as on a command line, as a number."""
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    def head_rows(self) -> int:
        return head_rows(self.draft_vocabulary)

    def refusals(self, by: str, context: CheckContext) -> Iterator[Refusal]:
        """Yield the refusals of the speculative algorithm ``by`` with these options."""
        yield from check_knobs(by, self.steps, self.topk, self.draft_tokens)
        yield from check_vocabulary(by, self.draft_vocabulary, self.topk, context)

    def width(self) -> int:
        return self.draft_shape().tokens

    def draft_shape(self) -> DraftShape:
        return shape_of_knobs(self.steps, self.topk, self.draft_tokens)

    def draft_folder(self) -> str | None:
        return self.draft_model


def shape_of_knobs(steps: int, topk: int, draft_tokens: int | None) -> DraftShape:
    """Return the size of the drafts that the knobs describe; see ``check_knobs`` for the rules."""
    steps = max(steps, 1)
    topk = max(topk, 1)
    if topk == 1:
        return DraftShape.chain(steps)
    most = min(DraftShape(steps, topk).candidates + 1, MASK_BITS)
    return DraftShape(steps, topk, draft_tokens or min(steps + topk, most))


def check_knobs(by: str, steps: int, topk: int, draft_tokens: int | None) -> Iterator[Refusal]:
    """Refuse knobs that do not fit together.

    Args:
        by: Name of the speculative algorithm.
        steps: Passes of the draft, 1 to ``STEPS_MAX``.
        topk: Drafts that each pass expands, and branches of each.
        draft_tokens: Tokens verified per step, the last accepted one included.
    """
    if not 1 <= steps <= STEPS_MAX:
        yield _refuse(
            by,
            "steps",
            f"steps is {steps}; {by} drafts 1 to {STEPS_MAX} tokens ahead",
            f"speculative.steps = {min(max(steps, 1), STEPS_MAX)}",
        )
    elif topk < 1:
        yield _refuse(by, "topk", f"topk is {topk}; 1 is a chain", "speculative.topk = 1")
    elif topk == 1:
        yield from _check_chain(by, steps, draft_tokens)
    else:
        yield from _check_tree(by, steps, topk, draft_tokens)


def _check_chain(by: str, steps: int, draft_tokens: int | None) -> Iterator[Refusal]:
    """Refuse a chain that does not verify all its drafts."""
    if draft_tokens not in (None, steps + 1):
        yield _refuse(
            by,
            "draft_tokens",
            f"draft_tokens is {draft_tokens}; a chain of {steps} steps verifies "
            f"{steps + 1}: the last accepted token and one per step",
            f"speculative.draft_tokens = {steps + 1}, or leave it out",
        )


def _check_tree(by: str, steps: int, topk: int, draft_tokens: int | None) -> Iterator[Refusal]:
    """Refuse a tree with more tokens than it has candidates, or than a mask can name."""
    shape = DraftShape(steps, topk)
    if shape.entries > MASK_BITS:
        fits = max(1, (MASK_BITS - 1) // max(steps - 1, 1))
        yield _refuse(
            by,
            "topk",
            f"{steps} steps of {topk} branches compute {shape.entries} drafts of a row; "
            f"a tree mask names {MASK_BITS}",
            f"speculative.topk = {fits}",
        )
        return
    most = min(shape.candidates + 1, MASK_BITS)
    tokens = shape_of_knobs(steps, topk, draft_tokens).tokens
    if tokens > most:
        limit = (
            f"a tree mask names {MASK_BITS}"
            if most == MASK_BITS
            else f"{steps} steps of {topk} branches make {most - 1} drafts at most"
        )
        yield _refuse(
            by,
            "draft_tokens",
            f"draft_tokens is {tokens}; {limit}",
            f"speculative.draft_tokens = {most}",
        )
    elif tokens < max(topk, 2):
        yield _refuse(
            by,
            "draft_tokens",
            f"draft_tokens is {tokens}, fewer than the {topk} drafts of a pass",
            f"speculative.draft_tokens = {min(steps + topk, most)}, or leave it out",
        )


def _refuse(by: str, field: str, reason: str, fix: str) -> Refusal:
    return Refusal(by, f"speculative.{field}", reason, fix)
