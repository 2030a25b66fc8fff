"""Runtime of the graph runner "cuda_graph"."""

from __future__ import annotations

import gc
import logging
import traceback
from bisect import bisect_left
from collections.abc import Callable

import torch

from glowplug.core.errors import CaptureError, CollectiveError
from glowplug.core.facts.mesh import axis_size
from glowplug.core.plan.plan import EnginePlan, Sizes
from glowplug.core.plugin.draft_shape import NO_DRAFTS, DraftShape
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import Steps, Worker
from glowplug.core.step.batch import Batch, shape_of
from glowplug.core.step.request import SamplingParams
from glowplug.plugins.graphs.capture.decode_graph import DecodeGraph, GraphRecorder, GraphShape
from glowplug.plugins.graphs.capture.draft_extend_graph import Extends
from glowplug.plugins.graphs.capture.prefill_graph import Pass, Passes, Tape
from glowplug.plugins.graphs.capture.recorder import CudaRecorder
from glowplug.plugins.graphs.capture.staging import Staging
from glowplug.plugins.graphs.capture.tape import CudaTape
from glowplug.plugins.graphs.cuda_graph import CudaGraphOptions

#: example parameters of the sampling modes captured with every batch size, if the sampler has a
#: capture key for them (``Sampler.capture_key``)
COMMON_SAMPLING = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5))
#: example parameters of the sampling modes captured only for batch sizes that are powers of two,
#: because each mode takes start-up time; at other sizes sampling runs eagerly in these modes
RARE_SAMPLING = (
    SamplingParams(top_k=2),
    SamplingParams(presence_penalty=1.0),
    SamplingParams(logprobs=0),
)


class CudaGraph:
    """The ``protocols.GraphRunner`` over CUDA graphs.

    The largest batch size is captured first, so that each further graph fits into the memory of
    the one before. Then some sizes are captured again for short rows (``Sizes.short_rows``).

    Args:
        options: The runner's options.
        plan: The plan, with the shapes to capture.
        worker: The rank's device.
        recorder: Replaces the recorder of CUDA graphs for decode steps.
        tape: Replaces the recorder of CUDA graphs for prefill steps.
    """

    def __init__(
        self,
        options: CudaGraphOptions,
        plan: EnginePlan,
        worker: Worker,
        recorder: GraphRecorder | None = None,
        tape: Tape | None = None,
    ) -> None:
        self._options = options
        self._plan = plan
        self._device = torch.device(worker.device)
        self._recorder = recorder
        self._own_recorder: CudaRecorder | None = None
        self._tape = tape
        self._passes = Passes()
        self._extends = Extends()
        #: graphs by rows, for each size of the drafts
        self._decode_graphs: dict[DraftShape, dict[int, DecodeGraph]] = {}
        self._sizes: dict[DraftShape, list[int]] = {}
        self._short: dict[int, DecodeGraph] = {}

    @property
    def _marked_groups(self) -> int:
        """Number of groups of ranks whose padding is marked, so that it chooses no expert.

        It is 0 where every rank has all tokens and all experts: masking the ids would take longer.
        """
        groups = self._plan.sizes.groups
        return groups if groups > 1 or axis_size("ep", self._plan.mesh) > 1 else 0

    def shapes(self, plan: EnginePlan) -> list[tuple[Mode, int, int]]:
        return [(shape.mode, shape.rows, shape.width) for shape in self._shapes(plan.sizes)]

    def _shapes(self, sizes: Sizes) -> list[GraphShape]:
        groups = self._marked_groups
        whole = [
            GraphShape.of(rows, sizes, groups=groups, drafts=drafts)
            for drafts in sizes.step_shapes
            for rows in self._options.sizes(sizes.max_running, sizes.groups)
        ]
        return [
            *sorted(whole, key=lambda shape: shape.rows * shape.width, reverse=True),
            *(
                GraphShape.of(rows, sizes, sizes.short_keys, groups)
                for rows in reversed(sizes.short_rows)
            ),
        ]

    def capture(self, steps: Steps, report: Callable[[int, int], None]) -> None:
        sizes = self._plan.sizes
        recorder = self._recorder
        tape = self._tape
        if recorder is None:
            recorder = self._own_recorder = CudaRecorder(self._device)
            tape = CudaTape(self._own_recorder)
        made = self._shapes(sizes)
        total = len(made) + len(sizes.pass_tokens) + len(sizes.extend_tokens)
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.inference_mode():
                self._capture_decode_graphs(steps, made, recorder, lambda done: report(done, total))
                if tape is not None:
                    self._capture_passes(steps, tape, lambda done: report(len(made) + done, total))
        finally:
            if collecting:
                gc.enable()
        report(total, total)

    def _capture_passes(self, steps: Steps, tape: Tape, report: Callable[[int], None]) -> None:
        sizes = self._plan.sizes
        counts = sizes.pass_tokens
        self._passes.capture(steps, counts, tape, self._pass_failed, report, self._marked_groups)
        self._extends.capture(
            steps.draft_extend,
            sizes.extend_tokens,
            self._device,
            tape,
            self._extend_failed,
            lambda done: report(len(counts) + done),
        )

    def _capture_decode_graphs(
        self,
        steps: Steps,
        made: list[GraphShape],
        recorder: GraphRecorder,
        report: Callable[[int], None],
    ) -> None:
        room = max((shape.staged_bytes for shape in made), default=0)
        staging = Staging(room, self._device)
        for done, shape in enumerate(made):
            report(done)
            self._capture_one(steps, DecodeGraph(shape, self._device, staging, recorder))
        self._sizes = {drafts: sorted(found) for drafts, found in self._decode_graphs.items()}

    def _capture_one(self, steps: Steps, graph: DecodeGraph) -> None:
        """Capture a decode or verify step in every sampling mode; raise or log a failure.

        Pieces that the modes share are captured with the first mode.
        """
        shape = graph.shape
        sampler = steps.sampler
        nothing = _no_rows(graph.batch)
        try:
            for params in (
                COMMON_SAMPLING
                if shape.rows & (shape.rows - 1)
                else COMMON_SAMPLING + RARE_SAMPLING
            ):
                sampler.join(shape.spare, params, graph.batch.prompt_ids, 0, frozenset())
                batch = graph.fill(nothing)
                sampler.plan_step(batch)
                steps.step(batch)
        except Exception as error:
            self._failed(error, self._options.on_failure == "stop", _failure(error, shape))
            return
        finally:
            sampler.leave(shape.spare)
        graph.seal()
        whole = shape.keys == self._plan.sizes.positions
        drafts = shape.drafts or NO_DRAFTS
        (self._decode_graphs.setdefault(drafts, {}) if whole else self._short)[shape.rows] = graph

    @property
    def _stops_for_prefill(self) -> bool:
        """True: a failed capture of prefill steps stops start-up; False: such steps run eagerly.

        It does if ``graphs.prefill = true`` was set, and with several ranks: a rank without the
        graph would exchange tensors of other sizes than the ranks that pad theirs to it.
        """
        required = self._options.prefill is True or self._plan.ranks > 1
        return self._options.on_failure == "stop" and required

    def _pass_failed(self, error: Exception, made: Pass) -> None:
        """Handle ``error``, which occurred in the capture of the prefill graph ``made``.

        See ``_stops_for_prefill``.
        """
        self._failed(
            error,
            self._stops_for_prefill,
            CaptureError(
                f"the prefill graph of {made.tokens} tokens could not be captured: "
                f"{type(error).__name__} after split point {made.split_points}, by "
                f"{_component(error)}: {error}. Leave this count out (graphs.prefill_tokens, "
                "graphs.max_prefill_tokens), or set graphs.prefill = false"
            ),
        )

    def _extend_failed(self, error: Exception, tokens: int) -> None:
        """Handle ``error``, which occurred in the capture of a draft-extend graph for ``tokens``.

        See ``_stops_for_prefill``.
        """
        self._failed(
            error,
            self._stops_for_prefill,
            CaptureError(
                f"the draft-extend graph of {tokens} tokens could not be captured: "
                f"{type(error).__name__} by {_component(error)}: {error}. "
                "Leave this count out (graphs.prefill_tokens, graphs.max_prefill_tokens), or set "
                "graphs.prefill = false"
            ),
        )

    def _failed(self, error: Exception, stops: bool, failure: CaptureError) -> None:
        """Raise ``failure``, which ``error`` has caused, or log it unless it ``stops`` start-up.

        The loss of another rank is raised as it is: it is the consequence of that rank's failure.
        """
        if isinstance(error, CollectiveError):
            raise error
        if stops:
            raise failure from error
        logging.getLogger("glowplug").warning("%s; such steps run eagerly", failure)

    def graph_for(self, batch: Batch) -> DecodeGraph | None:
        shape = batch.agreed or shape_of(batch)
        if batch.num_decodes < batch.num_rows or shape.mode not in (Mode.DECODE, Mode.VERIFY):
            return None
        drafts = shape.draft_shape or self._plan.sizes.step_shapes[-1]
        sizes = self._sizes.get(drafts)
        if not sizes or shape.rows > sizes[-1]:
            return None
        rows = sizes[bisect_left(sizes, shape.rows)]
        short = self._short.get(rows)
        return (
            short
            if short and batch.kv_lens.max(initial=0) <= short.shape.keys
            else self._decode_graphs[drafts][rows]
        )

    def fill(self, graph: object, batch: Batch) -> Batch:
        assert isinstance(graph, DecodeGraph), "the graph belongs to another runner"
        return graph.fill(batch)

    def pass_for(self, batch: Batch) -> Pass | None:
        return self._passes.find(batch)

    def close(self) -> None:
        self._extends.release()
        self._decode_graphs = {}
        self._sizes = {}
        self._short = {}
        self._passes = Passes()
        self._extends = Extends()
        if self._own_recorder is not None:
            self._own_recorder.reset()
            self._own_recorder = None


def _no_rows(batch: Batch) -> Batch:
    """Return an empty batch, which leaves a graph with padding rows only."""
    return Batch(
        step=0,
        mode=batch.mode,
        rows=batch.rows[:0],
        epochs=batch.epochs[:0],
        num_decodes=0,
        query_lens=batch.query_lens[:0],
        kv_lens=batch.kv_lens[:0],
        samples=batch.samples[:0],
        prompt_ids=batch.prompt_ids,
        pages=batch.pages[:0],
    )


def _failure(error: Exception, shape: GraphShape) -> CaptureError:
    """Return the error for a decode step that could not be captured."""
    piece = next(iter(getattr(error, "__notes__", ())), "planning")
    return CaptureError(
        f"a {shape.mode} step of {shape.rows} rows could not be captured: "
        f"{type(error).__name__} in its piece {piece!r}, by {_component(error)}: {error}. "
        "Leave this size out (graphs.batch_sizes, graphs.max_batch), or set "
        'graphs.use = "eager"'
    )


def _component(error: Exception) -> str:
    """Return the name of the innermost plugin, model or kernel module in the error's traceback."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for part in ("plugins", "models", "kernels"):
            inside = frame.filename.replace("\\", "/").rpartition(f"/{part}/")[2]
            if inside != frame.filename and "plugins/graphs" not in frame.filename:
                return f"{part}/{inside} ({frame.name})"
    return "the runner"
