"""The residual stream and the logits of given tokens, layer by layer, for numeric checks.

The steps use no graphs and overwrite the KV cache from its first page on, so no sequence may run
and the prefix cache must have been flushed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glowplug.core.engine.runner import Runner
from glowplug.core.errors import RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import KeepsFeatures, Scheduler
from glowplug.core.protocols.parallel_stack import ParallelStack
from glowplug.core.step.batch import Batch, shape_of

#: tokens whose logits are computed at a time: a device has little memory beside the KV cache
LOGITS_ROWS = 16
PLAIN = "plain"  #: input format of a module that reads activations in the compute dtype


class StreamProbe:
    """Handler of the control "streams".

    The first tokens of each sequence are computed as prompts, the last ones in decode steps; with
    speculation, in prefill steps of one token.

    Args:
        runner: the rank's runner.
        scheduler: the scheduler, which must be idle.
        plan: the plan with the rank's number of pages.
        rank: number of the rank; rank 0 returns the result.
        parallel: the rank's parallel strategies, which must not form groups.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        plan: EnginePlan,
        rank: int,
        parallel: ParallelStack,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._plan = plan
        self._rank = rank
        self._grouped = parallel.router() is not None

    def __call__(self, args: dict[str, Any]) -> dict[str, Any]:
        """Compute sequences of equal length.

        Args:
            args: "ids", a list of token ids for each sequence, and "decodes", the number of tokens
                at their ends that are computed in decode steps.

        Returns:
            On rank 0 "streams" and "logits", for each sequence the bytes of float32
                [tokens, 1 + layers, hidden] (the stream before the first layer, then after each)
                and [tokens, V]; and "formats", the input formats of the model's modules that round
                activations. On other ranks {}.

        Raises:
            RequestError: the model, the layout or the sequences do not permit it.
        """
        ids = np.array(args["ids"], np.int32)
        decodes = int(args["decodes"])
        self._check(ids)
        model = self._runner.model
        assert isinstance(model, KeepsFeatures)
        kept = model.feature_layers
        model.keep_features(range(self._plan.facts.model.num_layers + 1))
        try:
            found = [one for rows in self._portions(ids) for one in self._sequences(rows, decodes)]
        finally:
            model.keep_features(kept)
        if self._rank != 0:
            return {}
        return {
            "streams": [streams.tobytes() for streams, _ in found],
            "logits": [logits.tobytes() for _, logits in found],
            "formats": sorted(rounding_formats(model)),
        }

    def _check(self, ids: NDArray[np.int32]) -> None:
        """Raise RequestError if sequences ``ids`` [n, tokens] cannot be computed now."""
        sizes = self._plan.sizes
        load = self._scheduler.load()
        if load.running or load.waiting:
            raise RequestError("requests are running; streams can be computed only when idle")
        if self._grouped:
            raise RequestError("the ranks form groups, whose requests differ")
        if not isinstance(self._runner.model, KeepsFeatures):
            raise RequestError("this model family does not return the stream between its layers")
        length = ids.shape[1]
        if length > min(sizes.chunk_size, sizes.context_length):
            raise RequestError(
                f"sequences have {length} tokens; a step has at most {sizes.chunk_size}, "
                f"a sequence {sizes.context_length}"
            )

    def _portions(self, ids: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
        """Yield the sequences in portions that fit a step and the KV cache."""
        sizes = self._plan.sizes
        length = ids.shape[1]
        pages = -(-length // sizes.page_size)
        most = min(sizes.max_running, sizes.chunk_size // length, (sizes.num_pages - 1) // pages)
        if most < 1:
            raise RequestError(f"the KV cache has no room for {length} tokens")
        for begin in range(0, len(ids), most):
            yield ids[begin : begin + most]

    def _sequences(
        self, ids: NDArray[np.int32], decodes: int
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """Yield the streams and the logits of each of the sequences ``ids`` [n, tokens]."""
        length = ids.shape[1]
        prompt = length - decodes
        one = self._runner.speculative.width() == 1
        pages = first_pages(len(ids), length, self._plan.sizes.page_size)
        steps = [self._step(pages, ids[:, :prompt], prompt, decode=False)]
        for end in range(prompt + 1, length + 1):
            steps.append(self._step(pages, ids[:, end - 1 : end], end, decode=one))
        for row in range(len(ids)):
            streams, logits = (torch.cat([step[part][row] for step in steps]) for part in (0, 1))
            yield streams.numpy(), logits.numpy()

    def _step(
        self, pages: NDArray[np.int32], ids: NDArray[np.int32], end: int, decode: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute the tokens ids [n, t] that end at position ``end`` - 1.

        Returns:
            Streams [n, t, 1 + layers, hidden] and logits [n, t, V], float32 on the CPU.
        """
        batch = step_of(pages, ids, end, decode)
        batch.prompt_logprobs = np.ones(len(ids), np.bool_)  # the last layer runs for all tokens
        found = self._runner.states(batch)
        with torch.inference_mode():
            hidden = self._plan.facts.model.hidden_size
            logits = torch.cat(
                [self._runner.model.logits(rows).float().cpu() for rows in found.split(LOGITS_ROWS)]
            )
            streams = found[:, hidden:].float().cpu()
        count, tokens = ids.shape
        return streams.view(count, tokens, -1, hidden), logits.view(count, tokens, -1)


def first_pages(rows: int, length: int, page_size: int) -> NDArray[np.int32]:
    """Return page numbers for rows of ``length`` tokens, from page 1 on: int32 [rows, pages]."""
    columns = -(-length // page_size)
    return 1 + np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)


def step_of(
    pages: NDArray[np.int32], ids: NDArray[np.int32], end: int, decode: bool = False
) -> Batch:
    """Return a step of rows ids [n, t] whose last tokens are at position ``end`` - 1.

    Args:
        pages: page numbers of the rows, int32 [n, pages].
        ids: token ids.
        end: number of cached tokens of each row after the step.
        decode: True: the rows decode; False: they are chunks of prompts.
    """
    rows, count = ids.shape
    batch = Batch(
        step=0,
        mode=Mode.DECODE if decode else Mode.PREFILL,
        rows=np.arange(rows, dtype=np.int32),
        epochs=np.zeros(rows, np.int64),
        num_decodes=rows if decode else 0,
        query_lens=np.full(rows, count, np.int32),
        kv_lens=np.full(rows, end, np.int32),
        samples=np.ones(rows, np.bool_),
        prompt_ids=np.ascontiguousarray(ids).ravel(),
        pages=pages,
    )
    batch.agreed = shape_of(batch)
    return batch


def rounding_formats(module: Any) -> set[str]:
    """Return the input formats, other than plain, of a module of ``core.layers`` and its children.

    They show how GEMMs round their activations.
    """
    found = {getattr(module, "input_format", PLAIN)} - {PLAIN}
    for child in module.children() if hasattr(module, "children") else ():
        found |= rounding_formats(child)
    return found
