"""Runtime of the graph runner "cuda_graph"."""

from __future__ import annotations

import gc
import logging
import traceback
from bisect import bisect_left
from collections.abc import Callable

import torch

from glowplug.core.errors import CaptureError
from glowplug.core.plan.plan import EnginePlan, Sizes
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import Steps, Worker
from glowplug.core.step.batch import Batch, shape_of
from glowplug.core.step.request import SamplingParams
from glowplug.plugins.graphs.capture.decode_graph import Recorder, Shape, Slot
from glowplug.plugins.graphs.capture.draft_extend_graph import Extends
from glowplug.plugins.graphs.capture.prefill_graph import Pass, Passes, Tape
from glowplug.plugins.graphs.capture.recorder import CudaRecorder
from glowplug.plugins.graphs.capture.staging import Staging
from glowplug.plugins.graphs.capture.tape import CudaTape
from glowplug.plugins.graphs.cuda_graph import CudaGraphOptions

#: how rows may sample in a step whose sampling is captured with it, as far as the sampler has a
#: word for each
SAMPLED = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5))
#: the same, captured for batch sizes that are powers of two only, since each takes start-up time;
#: others sample eagerly
SELDOM = (SamplingParams(top_k=2), SamplingParams(presence_penalty=1.0), SamplingParams(logprobs=0))


class CudaGraph:
    """See ``protocols.GraphRunner``. Captures from the largest batch size to the smallest, so that
    each finds room in the memory of the one before, and then some of them again for short rows
    (``Sizes.short_rows``). ``recorder`` and ``tape`` replace CUDA's graphs."""

    def __init__(
        self,
        options: CudaGraphOptions,
        plan: EnginePlan,
        worker: Worker,
        recorder: Recorder | None = None,
        tape: Tape | None = None,
    ) -> None:
        self._options = options
        self._plan = plan
        self._device = torch.device(worker.device)
        self._recorder = recorder
        self._tape = tape
        self._passes = Passes()
        self._extends = Extends()
        self._slots: dict[Mode, dict[int, Slot]] = {}
        self._sizes: dict[Mode, list[int]] = {}
        self._short: dict[int, Slot] = {}

    def shapes(self, plan: EnginePlan) -> list[tuple[Mode, int, int]]:
        return [(shape.mode, shape.rows, shape.width) for shape in self._shapes(plan.sizes)]

    def _shapes(self, sizes: Sizes) -> list[Shape]:
        mode = Mode.DECODE if sizes.width == 1 else Mode.VERIFY
        return [
            *(
                Shape.of(mode, rows, sizes)
                for rows in reversed(self._options.sizes(sizes.max_running))
            ),
            *(Shape.of(mode, rows, sizes, sizes.short_keys) for rows in reversed(sizes.short_rows)),
        ]

    def capture(self, steps: Steps, report: Callable[[int, int], None]) -> None:
        sizes = self._plan.sizes
        recorder = self._recorder
        tape = self._tape
        if recorder is None:
            recorder = own = CudaRecorder(self._device)
            tape = CudaTape(own)
        made = self._shapes(sizes)
        behind = len(made) + len(sizes.pass_tokens)
        total = behind + len(sizes.extend_tokens)
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.inference_mode():
                self._capture_slots(steps, made, recorder, lambda done: report(done, total))
                if tape is not None:
                    self._passes.capture(
                        steps,
                        sizes.pass_tokens,
                        tape,
                        self._pass_failed,
                        lambda done: report(len(made) + done, total),
                    )
                    self._extends.capture(
                        steps.extension,
                        sizes.extend_tokens,
                        self._device,
                        tape,
                        self._extend_failed,
                        lambda done: report(behind + done, total),
                    )
        finally:
            if collecting:
                gc.enable()
        report(total, total)

    def _capture_slots(
        self, steps: Steps, made: list[Shape], recorder: Recorder, report: Callable[[int], None]
    ) -> None:
        room = max(
            (max(shape.offsets[-1], 4 * shape.rows * shape.columns) for shape in made), default=0
        )
        staging = Staging(room, self._device)
        for done, shape in enumerate(made):
            report(done)
            self._capture_one(steps, Slot(shape, self._device, staging, recorder))
        self._sizes = {mode: sorted(slots) for mode, slots in self._slots.items()}

    def _capture_one(self, steps: Steps, slot: Slot) -> None:
        """Every way of sampling in turn; what they share is captured with the first."""
        shape = slot.shape
        sampler = steps.sampler
        nothing = _no_rows(slot.batch)
        try:
            for params in SAMPLED if shape.rows & (shape.rows - 1) else SAMPLED + SELDOM:
                sampler.join(shape.spare, params, slot.batch.prompt_ids, 0, frozenset())
                batch = slot.fill(nothing)
                sampler.plan_step(batch)
                steps.step(batch)
        except Exception as error:
            self._failed(error, self._options.on_failure == "stop", _failure(error, shape))
            return
        finally:
            sampler.leave(shape.spare)
        slot.seal()
        whole = shape.keys == self._plan.sizes.positions
        (self._slots.setdefault(shape.mode, {}) if whole else self._short)[shape.rows] = slot

    def _pass_failed(self, error: Exception, made: Pass) -> None:
        """Who has not asked for passes is better served without one than not at all."""
        stops = self._options.on_failure == "stop" and self._options.prefill is True
        self._failed(
            error,
            stops,
            CaptureError(
                f"a pass of {made.tokens} tokens could not be captured: {type(error).__name__} behind its "
                f"cut {made.cuts}, by {_component(error)}: {error}. Leave this count out (graphs.prefill_tokens, "
                "graphs.max_prefill_tokens), or graphs.prefill = false"
            ),
        )

    def _extend_failed(self, error: Exception, tokens: int) -> None:
        self._failed(
            error,
            self._options.on_failure == "stop" and self._options.prefill is True,
            CaptureError(
                f"a draft's pass of {tokens} tokens could not be captured: {type(error).__name__} by "
                f"{_component(error)}: {error}. "
                "Leave this count out (graphs.prefill_tokens, graphs.max_prefill_tokens), or "
                "graphs.prefill = false"
            ),
        )

    def _failed(self, error: Exception, stops: bool, failure: CaptureError) -> None:
        if stops:
            raise failure from error
        logging.getLogger("glowplug").warning("%s; such steps run eagerly", failure)

    def slot_for(self, batch: Batch) -> Slot | None:
        shape = batch.agreed or shape_of(batch)
        sizes = self._sizes.get(shape.mode)
        if not sizes or shape.rows > sizes[-1] or batch.num_decodes < batch.num_rows:
            return None
        rows = sizes[bisect_left(sizes, shape.rows)]
        short = self._short.get(rows) if shape.mode is Mode.DECODE else None
        return (
            short
            if short and batch.kv_lens.max(initial=0) <= short.shape.keys
            else self._slots[shape.mode][rows]
        )

    def fill(self, slot: object, batch: Batch) -> Batch:
        assert isinstance(slot, Slot), "a slot of this runner's"
        return slot.fill(batch)

    def pass_for(self, batch: Batch) -> Pass | None:
        return self._passes.find(batch.num_tokens)

    def close(self) -> None:
        self._extends.release()
        self._slots = {}
        self._sizes = {}
        self._short = {}
        self._passes = Passes()
        self._extends = Extends()


def _no_rows(batch: Batch) -> Batch:
    """A batch that leaves a slot all padding."""
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


def _failure(error: Exception, shape: Shape) -> CaptureError:
    piece = next(iter(getattr(error, "__notes__", ())), "planning")
    return CaptureError(
        f"a {shape.mode} step of {shape.rows} rows could not be captured: {type(error).__name__} in its piece "
        f"{piece!r}, by {_component(error)}: {error}. Leave this size out (graphs.batch_sizes, graphs.max_batch), or "
        'graphs.use = "eager"'
    )


def _component(error: Exception) -> str:
    """The innermost plugin, model or kernel module that the error came through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for part in ("plugins", "models", "kernels"):
            inside = frame.filename.replace("\\", "/").rpartition(f"/{part}/")[2]
            if inside != frame.filename and "plugins/graphs" not in frame.filename:
                return f"{part}/{inside} ({frame.name})"
    return "the runner"
