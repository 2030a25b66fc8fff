"""The model runner: converts a scheduled batch to tensors, runs the model and returns the result.

``launch`` only enqueues device work and returns an ``InFlight``; the host waits in
``InFlight.wait``, one step later when steps overlap. This module is independent of the model, the
attention backend and the speculative algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from glowplug.core.engine.device_fields import flatten, host_arrays, logits_index, set_device_fields
from glowplug.core.engine.faults.sampler_rows import SamplerRows
from glowplug.core.engine.grammars import RankGrammars
from glowplug.core.engine.in_flight import InFlight, pack, tensors_of
from glowplug.core.engine.tiers.rank_tier import RankTier
from glowplug.core.layers.step_logits import StepLogits
from glowplug.core.plan.budget.step import SCORED
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import (
    AttentionBackend,
    GraphRunner,
    Model,
    SampledLastLayer,
    Sampler,
    SpeculativeAlgorithm,
)
from glowplug.core.speculation.places import place_tokens
from glowplug.core.speculation.simulated import SimulatedAcceptance
from glowplug.core.step.batch import Accepted, Batch, PromptLogprobs
from glowplug.core.step.graph_pieces import DIRECT, DraftExtend, SplitPoints
from glowplug.core.step.sampled_last_layer import HostEnds
from glowplug.core.step.sequence_table import SequenceTable
from glowplug.core.step.to_device import send
from glowplug.core.step.to_host import HostCopier

Forward = Callable[[torch.Tensor, torch.Tensor, Batch], torch.Tensor]


def _sampled_last_layer(model: Model, wanted: bool) -> SampledLastLayer | None:
    """Return ``model`` if its last layer runs for the sampled tokens only, else None."""
    if not wanted:
        return None
    assert isinstance(model, SampledLastLayer), "the plan has checked the model's offers"
    return model


class Runner:
    """The object that runs batches on one rank. It only reads the sequence table.

    ``layers``: number of the target's layers in the KV pool; drafts' layers follow them.
    ``grammars``: the grammars of the rank's sequences; None: no sequence has one.
    ``plan``: names the sampler in the errors of sequences; None: its exceptions are not caught.
    ``copier``: copies the results to the host; None: the device is the host.
    ``tier``: the tier of the prefix cache, whose copies precede each step; None: it has none.
    """

    tier: RankTier | None = None

    def __init__(
        self,
        *,
        model: Model,
        attention: AttentionBackend,
        speculative: SpeculativeAlgorithm,
        sampler: Sampler,
        graphs: GraphRunner,
        table: SequenceTable,
        device: str,
        split_points: SplitPoints | None = None,
        draft_extend: DraftExtend | None = None,
        sampled_last_layer: bool = False,
        layers: int = 0,
        simulated: SimulatedAcceptance | None = None,
        grammars: RankGrammars | None = None,
        plan: EnginePlan | None = None,
        copier: HostCopier | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.speculative = speculative
        self.sampler = sampler
        self.graphs = graphs
        self.table = table
        self.split_points = split_points or SplitPoints()
        self.draft_extend = draft_extend or DraftExtend()
        self.device = torch.device(device)
        self._on_host = self.device.type == "cpu"
        self._copier = copier
        self._ends_model = _sampled_last_layer(model, sampled_last_layer)
        self.step_logits = StepLogits(model, speculative, sampler)
        self._layers = layers
        self.sampler_rows = SamplerRows(sampler, simulated, plan)
        self.grammars = grammars or RankGrammars()
        self._speculates = speculative.width() > 1

    def launch(self, batch: Batch) -> InFlight:
        """Enqueue a step and return it with its results on the way to the host.

        An eager step sets the device fields of ``batch``; a replayed step copies ``batch`` into the
        memory of its graph. Afterwards ``batch`` is read-only.
        """
        with torch.inference_mode():
            if self._copier is not None:
                self._copier.mark()
            if self.tier is not None:
                self.tier.move()
            masks = self.grammars.masks
            if masks is not None:
                masks.begin(batch)
            graph = self.graphs.graph_for(batch)
            scored: list[PromptLogprobs] = []
            if graph is not None:
                self.sampler_rows.plan_step(batch)
                filled = self.graphs.fill(graph, batch)
                filled.joined = batch.joined
                filled.left = batch.left
                accepted = self.step(filled)[0]
            else:
                self._complete(batch)
                accepted, hidden = self.step(batch, partial(self.sampler_rows.plan_step, batch))
                if batch.prompt_logprobs is not None:
                    scored = self._prompt_logprobs(batch, hidden)
            inflight = self._to_host(batch, accepted, scored)
            if masks is not None:
                masks.launched(inflight)
            return inflight

    def step(
        self, batch: Batch, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Accepted, torch.Tensor]:
        """Run a batch whose device fields are set; see ``protocols.Steps``.

        ``meanwhile`` is host work that is done before sampling, while the device computes. So are
        masks, which are applied to the logits between the pieces "forward" and "accept".
        """
        run = batch.pieces.run
        masks = self.grammars.active_masks
        # NOTE: drafts plan attention for themselves and give the positions of the step's tokens.
        if self._speculates:
            self._feed(batch)
            if masks is not None:
                masks.copy_drafts(batch)
            self._place_drafts(batch)
        self.attention.plan_step(batch, batch.pieces.key("forward"))
        hidden, logits = run("forward", partial(self._forward, batch))
        if meanwhile is not None:
            meanwhile()
        if masks is not None:
            self.step_logits.edit(logits, masks.apply)
        key = None if batch.pieces is DIRECT else self.sampler.capture_key()
        self.step_logits.plan_step()
        accept = partial(self._accept, batch, logits, hidden)
        accepted = accept() if key is None else run(f"accept {key}", accept)
        return self.draft_extend.run_after(batch, accepted, hidden)

    def _place_drafts(self, batch: Batch) -> None:
        """Set the places of the decoding rows' tokens, and the mask of their trees.

        The host has only upper bounds of the places; on a CPU those of chains are exact.
        """
        tree = batch.tree
        exact = batch.placed or (tree is None and self._on_host)
        if batch.num_decodes and not exact:
            batch.pieces.run("places", partial(self._place, batch))
        batch.tree_mask = None if tree is None else tree.mask

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return the logits of a step that samples nothing, float32 [rows, V].

        This serves to measure accuracy; with speculation it is for prompts only. If a decode step
        has ``prompt_ids``, the model runs on these instead of the tokens sampled before.
        """
        with torch.inference_mode():
            self._complete(batch)
            if self._speculates:
                self._feed(batch)
            self.attention.plan_step(batch, None)
            feeds = not (batch.num_decodes and batch.prompt_ids.size)
            return self.step_logits.gather(self._forward(batch, feeds)[1]).float()

    def states(self, batch: Batch) -> torch.Tensor:
        """Return the result of the model's ``forward`` for all tokens of a step, without graphs.

        All tokens of the step are in ``prompt_ids``, also those of decoding rows.
        """
        with torch.inference_mode():
            self._complete(batch)
            self.attention.plan_step(batch, None)
            return self.model.forward(batch.input_ids, batch.positions, batch)

    def _feed(self, batch: Batch) -> None:
        drafted = self.speculative.draft(batch).flatten()
        prompts = batch.num_decodes < batch.num_rows
        batch.input_ids = torch.cat([drafted, batch.input_ids]) if prompts else drafted

    def _forward(self, batch: Batch, feeds: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        if feeds and not self._speculates:
            self._feed(batch)
        replayed = self.graphs.pass_for(batch) if batch.pieces is DIRECT else None
        if self._ends_model is not None and (replayed is not None or batch.ends is not None):
            hidden = self._forward_ends(self._ends_model, replayed or self.forward, batch)
        else:
            hidden = (replayed or self.model.forward)(batch.input_ids, batch.positions, batch)
        everything = batch.logits_index is None or batch.ends is not None
        return hidden, self.step_logits.of(hidden if everything else hidden[batch.logits_index])

    def _forward_ends(self, model: SampledLastLayer, trunk: Forward, batch: Batch) -> torch.Tensor:
        """Run ``trunk``, then the last layer for the tokens of ``batch.ends``, or for all if None.

        Returns:
            Hidden states [T, hidden], or [N, hidden] of ``batch.ends``.
        """
        stream = trunk(batch.input_ids, batch.positions, batch)
        if batch.ends is not None and batch.ends.count:
            self.attention.plan_step(batch.ends.batch, None)
        return model.tail(stream, batch.positions, batch)

    @property
    def forward(self) -> Forward:
        """The target's pass over a step with prompts; see ``protocols.Steps``."""
        return self.model.forward if self._ends_model is None else self._ends_model.trunk

    def _accept(self, batch: Batch, logits: torch.Tensor, hidden: torch.Tensor) -> Accepted:
        logits = self.step_logits.to_accept(logits)
        batch.simulated = self.sampler_rows.simulated
        accepted = self.speculative.accept(logits, hidden, batch, self.sampler)
        accepted.drafts = batch.draft_counts
        if accepted.path is not None:
            self._keep_path(batch, accepted.path)
        if self._copier is not None:
            accepted.packed = pack(accepted)
        return accepted

    def _keep_path(self, batch: Batch, path: torch.Tensor) -> None:
        """Move the KV entries of accepted tokens to the places of their positions.

        A row's tokens are stored one behind the other, those of its path may be apart.

        Args:
            batch: a step whose drafts form trees.
            path: ``Accepted.path``.
        """
        places = batch.kv_slots[: path.numel()].view(path.shape)
        self.attention.move_entries(places.gather(1, path), places, range(self._layers))

    def _complete(self, batch: Batch) -> None:
        """Set the device fields of ``batch`` from one packed host buffer.

        ``input_ids`` has the prompts' tokens only; ``_feed`` puts the decoding rows' tokens in
        front.
        """
        bounds = batch.kv_lens
        kv_lens = self._exact_lengths(batch) if self._on_host and batch.num_decodes else bounds
        flat = flatten(batch, kv_lens, self.table.page_size)
        wanted = logits_index(batch, flat.starts)
        ends = None
        if wanted is not None and self._ends_model is not None and batch.prompt_logprobs is None:
            ends = HostEnds.of(wanted, flat.rows, flat.positions, flat.kv_slots, batch.pages)
        views = send(host_arrays(batch, kv_lens, flat, wanted, ends), self.device)
        set_device_fields(batch, views, wanted is not None, ends)

    def _exact_lengths(self, batch: Batch) -> NDArray[np.int32]:
        """Return the exact ``kv_lens``; only on a CPU can the host read them without waiting."""
        decodes = batch.num_decodes
        batch.row_ids = torch.from_numpy(batch.rows).long()
        lengths = self.speculative.lengths(batch)
        if lengths is None:
            return batch.kv_lens
        exact = lengths.numpy() + batch.query_lens[:decodes]
        return (
            exact if decodes == batch.num_rows else np.concatenate([exact, batch.kv_lens[decodes:]])
        )

    def _place(self, batch: Batch) -> None:
        lengths = self.speculative.lengths(batch)
        assert lengths is not None, "only a step of width one has no lengths of its own"
        place_tokens(batch, lengths, self.table.page_size)

    def _prompt_logprobs(self, batch: Batch, hidden: torch.Tensor) -> list[PromptLogprobs]:
        """Return log-probabilities of the step's prompt tokens, for the rows that request them."""
        assert batch.prompt_logprobs is not None
        found = []
        starts = np.concatenate([[0], np.cumsum(batch.query_lens)])
        for i in np.nonzero(batch.prompt_logprobs)[0]:
            row = int(batch.rows[i])
            sequence = self.table.sequences[row]
            if sequence is None:
                continue
            first = int(batch.kv_lens[i] - batch.query_lens[i])
            last = min(int(batch.kv_lens[i]), len(sequence.prompt) - 1)
            if last > first:
                chunk = hidden[int(starts[i]) : int(starts[i]) + last - first]
                found.append(
                    self._score(
                        chunk,
                        sequence.prompt[first + 1 : last + 1],
                        row,
                        first + 1,
                        sequence.params.prompt_logprobs or 0,
                    )
                )
        return found

    def _score(
        self, hidden: torch.Tensor, targets: NDArray[np.int32], row: int, start: int, k: int
    ) -> PromptLogprobs:
        """Return log-probabilities of the prompt tokens ``targets``.

        ``SCORED`` positions are computed at a time, not a [prompt, vocabulary] tensor.

        Args:
            hidden: hidden states before each of the n targets, [n, hidden].
            targets: token ids, int32 [n].
            row: row of the sequence table.
            start: position of the first target.
            k: number of most likely tokens to return beside each target.
        """
        ids = torch.from_numpy(targets.astype(np.int64)).to(self.device)
        pieces = []
        for at in range(0, len(ids), SCORED):
            scores = torch.log_softmax(self.model.logits(hidden[at : at + SCORED]), dim=-1)
            top = scores.topk(min(k, scores.shape[-1]), dim=-1)
            pieces.append(
                (scores.gather(1, ids[at : at + SCORED, None])[:, 0], top.indices, top.values)
            )
        token, top_ids, values = (
            torch.cat(column).cpu().numpy() for column in zip(*pieces, strict=True)
        )
        return PromptLogprobs(row, start, token, top_ids, values)

    def _to_host(self, batch: Batch, accepted: Accepted, scored: list[PromptLogprobs]) -> InFlight:
        copy = None if self._copier is None else self._copier.begin(tensors_of(accepted))
        return InFlight(batch, accepted, scored, copy)
