"""Runtime of the parallelism strategy "dp_attention"."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray

from glowplug.core.errors import GlowplugError
from glowplug.core.facts.mesh import axis_size, coordinates, deal
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import RequestRouter, Shard, Worker
from glowplug.core.step.batch import Batch, StepShape
from glowplug.plugins.parallel.request_router import GroupLoad, TokenRouter
from glowplug.plugins.parallel.unsplit import Unsplit

if TYPE_CHECKING:
    from torch import Tensor

    from glowplug.plugins.parallel.dp_attention import DpAttentionOptions

#: modes in ascending order of precedence: if groups differ, the step has the last of their modes
MODES = (Mode.IDLE, Mode.DECODE, Mode.VERIFY, Mode.PREFILL)


class DpAttention(Unsplit):
    """The ``ParallelStrategy`` of data-parallel attention.

    Ranks hold all attention weights that their group needs (split over the ranks of the group), and
    slices of the other weights. Before an MLP (dense or experts) the tokens of all groups are
    gathered; each group's tokens are padded with zeros to the number of tokens that the groups
    agreed on for the step, so that the exchange has the same shape on all ranks. After the MLP
    every rank keeps its group's tokens.
    """

    moves_tokens = True

    def __init__(self, options: DpAttentionOptions, plan: EnginePlan, worker: Worker) -> None:
        assert worker.collectives is not None, "groups exchange through the rank's collectives"
        self._collectives = worker.collectives
        self._groups = axis_size("dp", plan.mesh)
        own = coordinates(worker.rank, plan.mesh)
        self._shapes = plan.sizes.step_shapes
        self._group = own["dp"]
        self._within = own["attn_tp"]
        self._ranks_a_group = axis_size("attn_tp", plan.mesh)
        #: first rank of each rank's group
        self._leader_of = [
            rank - coordinates(rank, plan.mesh)["attn_tp"] for rank in range(plan.ranks)
        ]
        self._leaders = sorted(set(self._leader_of))
        self._router = TokenRouter(self._group, self._groups, self._within == 0, plan.sizes)

    def shard(self, role: str, name: str, full: int, block: int = 1) -> Shard | None:
        """Return this rank's part of an attention or vocabulary weight, split within its group.

        Return None for other weights, which the other strategies split.
        """
        projects = role == "heads_row"
        if not projects and role not in ("heads", "vocab"):
            return None
        ranks = self._ranks_a_group
        if ranks == 1:
            return Shard(0, full, full)
        start, size = deal(full, ranks, self._within, block)
        return Shard(
            start, size, full, reduce=projects, gather=role == "vocab", axis="attn_tp", parts=ranks
        )

    def agree(self, local: StepShape) -> StepShape:
        proposed = self._collectives.all_gather_numbers(self._numbers(local))
        self._check_groups(proposed)
        drafts, every = self._widen(proposed)
        groups = every[self._leaders]
        mode, rows, tokens, decodes = every[:, :4].max(axis=0).tolist()
        self._router.loads = [GroupLoad(*numbers) for numbers in groups[:, 4:8].tolist()]
        load, pending, context, free = groups[:, 4:8].sum(axis=0).tolist()
        return StepShape(
            MODES[mode],
            rows,
            tokens,
            load,
            pending,
            context,
            free,
            decodes,
            group_tokens=tuple(groups[:, 2].tolist()),
            group_decodes=tuple(groups[:, 3].tolist()),
            draft_shape=drafts,
        )

    def _check_groups(self, proposed: NDArray[np.int64]) -> None:
        """Check that the ranks of a group have made the same decisions.

        Args:
            proposed: the numbers of each rank's step, [ranks, 10].

        Raises:
            GlowplugError: they have not.
        """
        if self._ranks_a_group == 1:
            return
        differs = (proposed != proposed[self._leader_of]).any(axis=1)
        if differs.any():
            rank = int(differs.argmax())
            raise GlowplugError(
                f"rank {rank} proposes another step than rank {self._leader_of[rank]}, the first "
                "of its group: a policy, cache or scheduler decides differently on these ranks"
            )

    def _numbers(self, local: StepShape) -> NDArray[np.int64]:
        """Return the numbers of this rank's step that the ranks exchange."""
        return np.array(
            [
                MODES.index(local.mode),
                local.rows,
                local.tokens,
                local.decodes,
                local.load,
                local.pending,
                local.context,
                local.free,
                0 if local.draft_shape is None else self._shapes.index(local.draft_shape) + 1,
                local.failed,
            ],
            np.int64,
        )

    def _widen(self, every: NDArray[np.int64]) -> tuple[DraftShape | None, NDArray[np.int64]]:
        """Count the tokens of every rank as if its drafts had the largest size of any rank.

        Args:
            every: the numbers of each rank, [ranks, 10], possibly read-only; number 8 is the
                size's place among those of the plan, from 1, 0 for none.

        Returns:
            The largest size, or None if no rank has one; and the numbers with those tokens.
        """
        places = every[:, 8]
        if not places.any():
            return None, every
        widths = np.array([0, *(shape.tokens for shape in self._shapes)])
        place = int(places.max())
        wider = every.copy()
        wider[:, 2] += every[:, 3] * np.where(places > 0, widths[place] - widths[places], 0)
        return self._shapes[place - 1], wider

    def router(self) -> RequestRouter | None:
        return self._router

    def leave_attention(self, x: Tensor, batch: Batch) -> Tensor:
        """Gather the tokens x [T, hidden] of all groups to [groups * agreed tokens, hidden]."""
        assert batch.agreed is not None, "groups must agree on a step before they launch it"
        missing = batch.agreed.tokens - x.shape[0]
        return self._collectives.all_gather(F.pad(x, (0, 0, 0, missing)) if missing else x, "dp")

    def enter_attention(self, x: Tensor, batch: Batch) -> Tensor:
        """Return this group's tokens [T, hidden] of x [groups * agreed tokens, hidden]."""
        first = self._group * (x.shape[0] // self._groups)
        return x[first : first + batch.num_tokens]
