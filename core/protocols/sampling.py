"""Protocols of sampling and speculation: from logits to one or several tokens per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from glowplug.core.protocols.models import Model, ModelFamily
from glowplug.core.protocols.worker import Limits
from glowplug.core.step.batch import Accepted, Batch, LogprobTensors
from glowplug.core.step.request import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.core.protocols.build_context import BuildContext


@dataclass(eq=False)
class Sampled:
    """One sampled token for each of N rows of logits.

    Attributes:
        tokens: int64 [N].
        bad: bool [N]; True: the row's logits have NaN or +inf, or are all -inf.
        logprobs: log-probabilities; None if no row requests them.
    """

    tokens: Tensor
    bad: Tensor
    logprobs: LogprobTensors | None = None


class Sampler(Protocol):
    """A sampler that draws tokens from logits with each row's own parameters.

    A row's token does not depend on the other rows of the batch.

    A further method is optional. ``takes_slices(slices: VocabularySlices) -> bool`` is called after
    ``plan_step`` and ``capture_key`` if ranks divide the vocabulary. True: until the next
    ``plan_step``, ``sample`` gets the logits of this rank's slice, [N, size], instead of all, and
    returns the same result on every rank. Without the method, ``sample`` always gets all logits; a
    class that overrides ``sample`` does not inherit the method.
    """

    def reserve(self, limits: Limits) -> None:
        """Allocate the state of ``limits.rows`` rows."""
        ...

    def join(
        self,
        row: int,
        params: SamplingParams,
        tokens: NDArray[np.int32],
        prompt_len: int,
        stop_ids: frozenset[int],
    ) -> None:
        """Set up ``row`` for a sequence that enters it.

        Args:
            row: row of the sequence table.
            params: the sequence's sampling parameters.
            tokens: prompt and output tokens so far, from which penalties are counted.
            prompt_len: number of prompt tokens among them.
            stop_ids: tokens that end the sequence; they cannot be drawn before the sequence has
                ``params.min_tokens`` output tokens.
        """
        ...

    def leave(self, row: int) -> None:
        """Clear the state of ``row``, whose sequence has left it."""
        ...

    def plan_step(self, batch: Batch) -> None:
        """Do the step's host work.

        The method is called after every ``leave`` and ``join`` of the step and before its first
        ``sample``. The model's pass may already be running.
        """
        ...

    def capture_key(self) -> str | None:
        """Return a key of the kernels that ``sample`` and ``observe`` run in the step just planned.

        Kernels captured in a step may be replayed in a step of the same key and shapes. It is
        called only if steps are replayed.

        Returns:
            The key; None if the kernels depend on more than the key and the shapes.
        """
        ...

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Tensor | None = None
    ) -> Sampled:
        """Draw one token for each row of logits.

        The random number depends only on the row's seed and the position.

        Args:
            logits: float32 [N, V]; may be overwritten.
            rows: rows of the sequence table, int64 [N].
            positions: position of the token to draw, int64 [N]; ``rows`` and ``positions`` may be
                strided, also with stride 0.
            ahead: int64 [N, W - 1], the tokens before this one that have not been observed yet
                (drafts being verified), -1 for none; penalties count them.
        """
        ...

    def observe(self, tokens: Tensor, counts: Tensor, rows: Tensor) -> None:
        """Count accepted tokens for the penalties of their rows, on the device.

        Args:
            tokens: int64 [B, W].
            counts: number of accepted tokens of each row, int32 [B].
            rows: rows of the sequence table, int64 [B].
        """
        ...


@runtime_checkable
class PageStates(Protocol):
    """A speculative algorithm that keeps state for each page beside the KV pool.

    A tier of the prefix cache copies the state with the page.
    """

    def page_states(self) -> Mapping[str, Tensor]:
        """Return the tensors by name, contiguous, each [num_pages * n, ...] with a whole n.

        It is called after the last ``reserve``.
        """
        ...


class SpeculativeAlgorithm(Protocol):
    """An algorithm that drafts tokens for decoding rows and decides which of them are accepted.

    Decoding without speculation is the algorithm of width one.

    An algorithm that offers ``adapts`` may have ``draft_policy(shapes, costs) -> DraftPolicy``. It
    is called once, with the sizes of drafts that a step may have (``Sizes.draft_shapes``) and
    the seconds of steps (``DraftCosts``), and returns the policy that chooses the size of each
    step. Without it, the engine's own policy chooses.

    An algorithm with the attribute ``passes_rows`` = True uses the logits only as rows that it
    passes on to the sampler. In steps whose sampler takes slices of the vocabulary, ``accept`` then
    gets the logits of this rank's slice. A class that overrides ``accept`` does not inherit it.

    All rows of a step compute as many tokens. A row may still have fewer drafts than others, or
    none, if ``draft`` sets ``batch.draft_counts``.
    """

    def width(self) -> int:
        """Return the number of tokens that a decoding row computes in a step: 1 + drafts."""
        ...

    def reserve(self, limits: Limits) -> None:
        """Allocate every persistent buffer, and bind ``limits.kv`` as the draft model's cache."""
        ...

    def lengths(self, batch: Batch) -> Tensor | None:
        """Return the number of cached tokens of each of the D decoding rows, on the device.

        Returns:
            int32 [D]; the host's ``kv_lens`` are then upper bounds, and the runner places the
            step's tokens by the returned lengths. None: ``kv_lens`` are exact (width one).
        """
        ...

    def draft(self, batch: Batch) -> Tensor:
        """Return the tokens that the decoding rows compute in this step.

        It is called in every step, also without decoding rows (D = 0), so that ranks can take part
        in each other's drafting. ``batch`` is complete but for ``input_ids``; on a device,
        positions and lengths are still the host's upper bounds. With a width above one, device work
        runs through ``batch.pieces``; otherwise it is part of the target's pass.

        An algorithm that drafts trees also sets ``batch.tree``, and one whose rows may have fewer
        drafts than others ``batch.draft_counts`` (for each row; its other tokens are valid ids,
        which ``accept`` must not accept). Their tensors are results of a piece.

        Returns:
            Token ids int64 [D, W]: the last accepted token, then drafts.
        """
        ...

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        """Decide which tokens are accepted, and keep the state that the next ``draft`` needs.

        Each row that samples gains at least one token. The engine ends rows that gain none in eight
        steps in a row, with an error that names the algorithm (code "stalled").

        Args:
            logits: float32 [N, V] at ``batch.logits_index``.
            hidden: final hidden states of all tokens, [T, hidden].
            batch: the step.
            sampler: the sampler to draw tokens with.
        """
        ...

    def draft_model(
        self, context: BuildContext, family: ModelFamily, target: Model
    ) -> Model | None:
        """Return the draft model, with weights not yet loaded, or None if there is no draft model.

        It is called once, before ``reserve``, and the engine loads the model. The draft model runs
        within ``draft`` and ``accept``; the latter receives the hidden states of every step,
        prompts included.

        Args:
            context: the target's build context with two changes. ``first_layer`` is the KV-pool
                number of the draft's first layer, which follows the target's layers. ``facts``
                are those of the draft's folder, if it has one of its own. If the plan has
                ``draft_choices``: a context with attention of the draft's own, for which
                ``reserve`` makes a KV pool with the pages of the target's; a whole model has all
                components of its own.
            family: the model family of the target; with ``draft_choices`` that of the draft.
            target: the target model.
        """
        ...
