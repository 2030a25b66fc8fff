"""Sampling and speculation: from logits to tokens, one or several a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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
    """One token for each of N logits rows: ``tokens`` int64 [N], ``bad`` bool [N], optional
    log-probabilities.
    """

    tokens: Tensor
    bad: Tensor
    logprobs: LogprobTensors | None = None


class Sampler(Protocol):
    """Turns logits into tokens by each row's own parameters, independent of what else is in the
    batch.
    """

    def reserve(self, limits: Limits) -> None: ...

    def join(
        self,
        row: int,
        params: SamplingParams,
        tokens: NDArray[np.int32],
        prompt_len: int,
        stop_ids: frozenset[int],
    ) -> None:
        """A sequence takes ``row``: tokens so far (prompt and output) seed the penalties.

        ``stop_ids`` end it, so they cannot be drawn before ``params.min_tokens`` output tokens.
        """
        ...

    def leave(self, row: int) -> None: ...

    def plan_step(self, batch: Batch) -> None:
        """Host-side preparation, behind every ``leave`` and ``join`` of the step and before its
        first ``sample``. The model's pass may be under way already."""
        ...

    def capture_key(self) -> str | None:
        """What ``sample`` and ``observe`` do in the step just planned, in a word: a step with the
        same word and shapes
        may replay its kernels. None: they depend on more than that (asked only where steps are
        replayed).
        """
        ...

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ahead: Tensor | None = None
    ) -> Sampled:
        """logits float32 [N, V] (may be overwritten), rows int64 [N], positions int64 [N] of the
        token being drawn; rows and positions may be strided, also by 0.

        The random number depends only on (seed of the row, position). ``ahead`` int64 [N, W - 1]:
        tokens that precede this one and have not been observed yet (drafts being verified), -1
        where there is none; penalties count them.
        """
        ...

    def observe(self, tokens: Tensor, counts: Tensor, rows: Tensor) -> None:
        """tokens int64 [B, W], counts int32 [B], rows int64 [B] were accepted: update penalties, on
        the device.
        """
        ...


class SpeculativeAlgorithm(Protocol):
    """Decides what decoding rows feed in and which of the results count. Width one is no
    speculation.
    """

    def width(self) -> int: ...

    def reserve(self, limits: Limits) -> None: ...

    def lengths(self, batch: Batch) -> Tensor | None:
        """int32 [D]: tokens of each decoding row whose cache entries are in place, on the device.

        None: the host's ``kv_lens`` are exact (width one). Otherwise they are upper bounds, and the
        runner places the step's tokens by these.
        """
        ...

    def draft(self, batch: Batch) -> Tensor:
        """Token ids int64 [D, W] that the decoding rows of ``batch`` compute: the last accepted
        one, then drafts.

        Called for every step, with D 0 as well, so that ranks may take part in each other's
        drafting. ``batch`` is complete but for ``input_ids``; on a device, positions and lengths
        are still the host's upper bounds. With a width above one, device work goes through
        ``batch.segments``; otherwise it is part of the target's pass.
        """
        ...

    def accept(self, logits: Tensor, hidden: Tensor, batch: Batch, sampler: Sampler) -> Accepted:
        """logits [N, V] at ``batch.logits_index``, hidden [T, hidden]. Remembers what the next
        ``draft`` needs.

        Each row that samples gains at least one token. The engine ends rows that gain none in eight
        steps in a row, with an error that names the algorithm (code "stalled").
        """
        ...

    def draft_model(
        self, context: BuildContext, family: ModelFamily, target: Model
    ) -> Model | None:
        """The draft model with empty weights, or None. Called once, before ``reserve``; the engine
        loads it.

        ``context`` is the target's, with ``first_layer`` the KV-pool number of the first layer
        behind the target's and, when the draft lies in a folder of its own, ``facts`` that
        folder's. The draft runs inside ``draft`` and ``accept``; the latter sees every step's
        hidden states, prompts' included.
        """
        ...
