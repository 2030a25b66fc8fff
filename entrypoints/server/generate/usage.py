"""Token counts of one request in the format of OpenAI's ``usage``.

If the engine drafts, the counts include the drafts that are part of the output and those that were
rejected, under OpenAI's names for predicted tokens.
"""

from __future__ import annotations

from typing import Any

from glowplug.entrypoints.front.delta import Delta, VerifiedDrafts


class UsageCount:
    """Token counts of one request.

    Args:
        per_prompt: number of consecutive sequences that share a prompt. The prompt's tokens count
            once.
    """

    def __init__(self, per_prompt: int) -> None:
        self._per_prompt = per_prompt
        self._prompt: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._output: dict[int, int] = {}
        self._reasoning: dict[int, int] = {}
        self._drafts: dict[int, VerifiedDrafts] = {}

    def count(
        self,
        sequence: int,
        delta: Delta,
        reasoning_tokens: int = 0,
        output_tokens: int | None = None,
    ) -> None:
        """Update the counts with a sequence's latest delta.

        Args:
            sequence: index of the sequence.
            delta: its latest delta, with counts so far.
            reasoning_tokens: its reasoning tokens so far.
            output_tokens: replaces ``delta.output_tokens`` if given.
        """
        prompt = sequence // self._per_prompt
        self._prompt[prompt] = delta.prompt_tokens
        self._cached[prompt] = max(self._cached.get(prompt, 0), delta.cached_tokens)
        self._output[sequence] = delta.output_tokens if output_tokens is None else output_tokens
        self._reasoning[sequence] = reasoning_tokens
        if delta.drafts is not None:
            self._drafts[sequence] = delta.drafts

    def body(self) -> dict[str, Any]:
        """Return the ``usage`` object of the response."""
        prompt = sum(self._prompt.values())
        output = sum(self._output.values())
        details = {"reasoning_tokens": sum(self._reasoning.values())}
        if self._drafts:
            accepted = sum(drafts.accepted for drafts in self._drafts.values())
            drafted = sum(drafts.drafted for drafts in self._drafts.values())
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = drafted - accepted
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "completion_tokens_details": details,
        }
