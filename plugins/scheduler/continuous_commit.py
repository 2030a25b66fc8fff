"""Commit of a step of the continuous scheduler: append tokens, find ended rows, report.

All work is done with numpy over all rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glowplug.core.step.batch import Batch, PromptLogprobs, StepResult
from glowplug.core.step.messages import Finished, Logprobs, StepOutput
from glowplug.plugins.scheduler.continuous_rows import Ints, Rows


@dataclass(eq=False)
class Committed:
    """The outcome of a step for its n live rows: those that sampled and still own their row.

    Attributes:
        at: int64 [n], indices of the rows in the batch.
        rows: int32 [n], rows of the sequence table.
        tokens: int64 [n, W], sampled tokens; the first ``counts[i]`` of row i are kept.
        counts: int32 [n], number of kept tokens.
        given: int32 [n], number of tokens that the device accepted, including those dropped later
            because they follow a stop id or exceed a length limit.
        stop_ids: int64 [n], token that ended the row, -1 if none did.
        bad: bool [n], True if the row's logits were not finite.
        done: bool [n], True if the row has ended.
    """

    at: NDArray[np.int64]
    rows: Ints
    tokens: NDArray[np.int64]
    counts: Ints
    given: Ints
    stop_ids: NDArray[np.int64]
    bad: NDArray[np.bool_]
    done: NDArray[np.bool_]


def append(rows: Rows, batch: Batch, result: StepResult) -> Committed:
    """Append the tokens that a step sampled to their rows of the sequence table.

    The tokens of a row whose epoch has changed since the launch are stale and dropped. Tokens
    beyond a row's first stop id or its limit are dropped too. Rows are not released here.
    """
    table = rows.table
    at, members, (tokens, given, bad) = _live(rows, batch, result)
    length = table.length[members]
    limit = table.max_length[members]
    counts = np.minimum(given, limit - length)
    if bad.any():
        counts = np.where(bad, np.int32(0), counts)
    stop_ids, counts = _stops(rows, members, tokens, counts, length)
    _write(rows, members, tokens, counts, length)
    after = length + counts
    table.length[members] = after
    rows.pending[members] -= 1
    if tokens.shape[1] > 1 or not given.all():
        _reconcile(rows, batch, at, members, given)
    done = (stop_ids >= 0) | (after >= limit) | bad
    return Committed(at, members, tokens, counts, given, stop_ids, bad, done)


def _live(
    rows: Rows, batch: Batch, result: StepResult
) -> tuple[NDArray[np.int64], Ints, tuple[NDArray[np.int64], Ints, NDArray[np.bool_]]]:
    """Return the indices, rows and results of the rows that sampled and are not stale."""
    counts = result.counts.astype(np.int32, copy=False)
    live = (rows.table.epoch[batch.rows] == batch.epochs) & batch.samples
    if live.all():
        return np.arange(len(live)), batch.rows, (result.tokens, counts, result.bad)
    at = np.flatnonzero(live)
    return at, batch.rows[at], (result.tokens[at], counts[at], result.bad[at])


def _stops(
    rows: Rows, members: Ints, tokens: NDArray[np.int64], counts: Ints, length: Ints
) -> tuple[NDArray[np.int64], Ints]:
    """Return each row's first stop id, -1 if none, and the number of tokens up to and with it."""
    matches = tokens.astype(np.int32)[:, :, None] == rows.stops[members][:, None, :]
    found = np.full(len(members), -1, np.int64)
    if not rows.many_stops and not matches.any():
        return found, counts
    hits = matches.any(axis=2)
    for row, stop_ids in rows.many_stops.items():
        for i in np.flatnonzero(members == row):
            hits[i] = [token in stop_ids for token in tokens[i].tolist()]
    places = np.arange(tokens.shape[1])
    hits &= places < counts[:, None]
    hits &= length[:, None] + places + 1 >= rows.min_length[members][:, None]
    stopped = np.flatnonzero(hits.any(axis=1))
    first = hits[stopped].argmax(axis=1)
    found[stopped] = tokens[stopped, first]
    counts = counts.copy()
    counts[stopped] = first + 1
    return found, counts


def _write(
    rows: Rows, members: Ints, tokens: NDArray[np.int64], counts: Ints, length: Ints
) -> None:
    for place in range(tokens.shape[1]):
        kept = counts > place
        if kept.all():
            rows.table.tokens[members, length + place] = tokens[:, place]
        else:
            rows.table.tokens[members[kept], length[kept] + place] = tokens[kept, place]


def _reconcile(rows: Rows, batch: Batch, at: NDArray[np.int64], members: Ints, given: Ints) -> None:
    """Reduce ``launched`` of the decoding rows by the number of tokens that were not accepted.

    A decoding row launches ``width`` tokens; those that are not accepted are launched again.

    NOTE: at width one this happens only if a faulty algorithm withholds a token; without the
    subtraction positions would then run past the row's end.

    Args:
        rows: the running sequences.
        batch: the step.
        at: int64 [n], indices of the rows in the batch.
        members: int32 [n], rows of the sequence table.
        given: int32 [n], tokens that the device accepted.
    """
    decodes = int(np.searchsorted(at, batch.num_decodes))
    refused = batch.query_lens[at[:decodes]] - given[:decodes]
    if refused.any():
        rows.table.launched[members[:decodes]] -= refused


def report(rows: Rows, done: Committed, result: StepResult, output: StepOutput) -> None:
    """Add the tokens and log-probabilities of a step to the messages in ``output``.

    Call this function before rows are released.
    """
    if (done.counts == 1).all():
        output.ids = rows.ids[done.rows].tolist()
        output.tokens = done.tokens[:, 0].tolist()
    else:
        some = np.flatnonzero(done.counts > 0)
        kept = np.arange(done.tokens.shape[1]) < done.counts[:, None]
        output.ids = rows.ids[done.rows[some]].tolist()
        output.counts = done.counts[some].tolist()
        output.tokens = done.tokens[kept].tolist()
    if result.logprobs is not None:
        _report_logprobs(rows, done, result, output)


def _report_logprobs(rows: Rows, done: Committed, result: StepResult, output: StepOutput) -> None:
    assert result.logprobs is not None
    token, top_ids, top = result.logprobs
    width = done.tokens.shape[1]
    for i in np.flatnonzero((rows.logprobs[done.rows] >= 0) & (done.counts > 0)):
        row = int(done.rows[i])
        first = int(done.at[i]) * width
        k = int(rows.logprobs[row])
        span = slice(first, first + int(done.counts[i]))
        values = Logprobs(token[span].tolist(), top_ids[span, :k].tolist(), top[span, :k].tolist())
        output.logprobs.append((int(rows.ids[row]), values))


def finish_of(rows: Rows, done: Committed, i: int) -> Finished:
    """Return the Finished message of the i-th committed row, which is done."""
    id = int(rows.ids[done.rows[i]])
    if done.bad[i]:
        return Finished(
            id,
            "error",
            error="the model's output for this request is not finite",
            error_code="nan_logits",
        )
    if done.stop_ids[i] >= 0:
        return Finished(id, "stop", stop_id=int(done.stop_ids[i]))
    return Finished(id, "length")


class PromptScores:
    """Sender of prompt log-probabilities, once for each prompt.

    A preempted prompt is computed again, but its log-probabilities are not sent again.
    """

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}  # sequence id -> first position that has not been sent

    def complete(self, id: int, prompt_len: int) -> bool:
        return self._sent.get(id, 0) >= prompt_len

    def forget(self, id: int) -> None:
        self._sent.pop(id, None)

    def report(
        self, rows: Rows, batch: Batch, scored: list[PromptLogprobs], output: StepOutput
    ) -> None:
        table = rows.table
        live = dict(zip(batch.rows.tolist(), (table.epoch[batch.rows] == batch.epochs).tolist()))
        for part in scored:
            if not live.get(part.row, False):
                continue
            id = int(rows.ids[part.row])
            prompt_len = int(table.prompt_len[part.row])
            skip = max(0, self._sent.get(id, 0) - part.start)
            end = min(len(part.token), prompt_len - part.start)
            self._sent[id] = max(self._sent.get(id, 0), part.start + end)
            if skip < end:
                k = rows.running[part.row].params.prompt_logprobs or 0
                new = slice(skip, end)
                values = Logprobs(
                    part.token[new].tolist(),
                    part.top_ids[new, :k].tolist(),
                    part.top[new, :k].tolist(),
                )
                output.prompt_logprobs.append((id, values))
