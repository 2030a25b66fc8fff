"""The harness of ranks as threads: its collectives against numpy, its failures, and a single
rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug.core.errors import CollectiveError
from glowplug.core.facts.mesh import axis_size, coordinates, group
from glowplug.core.protocols import Worker
from glowplug.core.step.messages import Abort
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.harness.ranks import RankSet, rank_plan, run_ranks, submit
from glowplug.core.testing.harness.threads import ThreadOptions
from glowplug.core.testing.harness.threads_runtime import MEETINGS, Meeting, ThreadCollectives
from glowplug.core.testing.suites.parallel import CollectivesSuite
from tests.support.tiny import write_config

MESHES = [{"tp": 2}, {"tp": 4}, {"tp": 4, "dp": 2}, {"tp": 4, "ep": 2}, {"tp": 4, "dp": 4, "ep": 2}]


def each(
    mesh: dict[str, int], work: Callable[[ThreadCollectives], Any], timeout: float = 5.0
) -> list[Any]:
    """Run ``work`` on every rank of ``mesh`` in threads, and return results or exceptions by
    rank.
    """
    ranks, found = mesh.get("tp", 1), {}
    MEETINGS["here"] = Meeting()
    plan = replace(bare_plan(), mesh=mesh)

    def one(rank: int) -> None:
        worker = Worker(
            rank=rank, ranks=ranks, coordinates=coordinates(rank, mesh), rendezvous="here"
        )
        try:
            found[rank] = work(ThreadCollectives(ThreadOptions(timeout=timeout), plan, worker))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(ranks)]


def values(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


class TestThreadsAlone(CollectivesSuite):
    def make(self) -> ThreadCollectives:
        MEETINGS["alone"] = Meeting()
        return ThreadCollectives(ThreadOptions(), bare_plan(), Worker(rendezvous="alone"))


@pytest.mark.parametrize("axis", ["tp", "dp", "ep", "attn_tp", "moe_tp"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_tensors(mesh: dict[str, int], axis: str) -> None:
    size = axis_size(axis, mesh)

    def work(one: ThreadCollectives) -> list[torch.Tensor]:
        x = values(one.rank, size * 3, 5)
        return [
            one.all_reduce(x.clone(), axis),
            one.all_gather(x, axis),
            one.all_gather(x, axis, 1),
            one.reduce_scatter(x, axis),
            one.all_to_all(x.view(size, 3, 5), axis),
        ]

    for rank, (total, rows, columns, part, swapped) in enumerate(each(mesh, work)):
        peers = group(axis, rank, mesh)
        place, sent = peers.index(rank), [values(peer, size * 3, 5) for peer in peers]
        torch.testing.assert_close(total, torch.stack(sent).sum(0))
        assert torch.equal(rows, torch.cat(sent)) and torch.equal(columns, torch.cat(sent, 1))
        torch.testing.assert_close(part, torch.stack(sent).sum(0)[place * 3 : place * 3 + 3])
        assert torch.equal(swapped, torch.stack([x.view(size, 3, 5)[place] for x in sent]))


def test_sums_are_the_same_bits_and_copies() -> None:
    def work(one: ThreadCollectives) -> torch.Tensor:
        x = values(one.rank, 1000)
        for _ in range(50):
            total = one.all_reduce(x, "tp")
            x.fill_(float("nan"))  # the owner may change its tensor at once
            x = total / 2
        return x

    first, *others = each({"tp": 4}, work)
    assert bool(first.isfinite().all()) and all(torch.equal(first, other) for other in others)


def test_a_complete_exchange_counts_although_the_meeting_ends_at_once() -> None:
    """All ranks of the exchange return from it, also those that have not woken yet."""

    def work(one: ThreadCollectives) -> list[int]:
        gathered = one.all_gather_numbers(np.array([one.rank]))[:, 0].tolist()
        one.meeting.end()
        return gathered

    for _ in range(200):
        assert each({"tp": 4}, work) == [[0, 1, 2, 3]] * 4


def test_rows_to_each_rank_and_numbers_and_bytes() -> None:
    counts = np.array([[0, 2, 1, 3], [1, 0, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]])

    def work(one: ThreadCollectives) -> tuple[torch.Tensor, Any, bytes, list[bytes]]:
        mine, rank = counts[one.rank], one.rank
        moved = one.all_to_all_rows(
            values(rank, int(mine.sum()), 3), mine.tolist(), counts[:, rank].tolist(), "tp"
        )
        return (
            moved,
            one.all_gather_numbers(np.array([rank, 7])),
            one.broadcast_bytes(b"turn" if rank == 0 else None),
            one.all_gather_bytes(b"%d" % rank),
        )

    for rank, (moved, numbers, sent, everyones) in enumerate(each({"tp": 4}, work)):
        starts = np.concatenate([np.zeros((4, 1), int), counts.cumsum(1)], 1)
        wanted = [
            values(peer, int(counts[peer].sum()), 3)[starts[peer, rank] : starts[peer, rank + 1]]
            for peer in range(4)
        ]
        assert torch.equal(moved, torch.cat(wanted))
        assert numbers.tolist() == [[peer, 7] for peer in range(4)]
        assert sent == b"turn" and everyones == [b"0", b"1", b"2", b"3"]


def test_ranks_that_disagree_or_stay_away_are_reported() -> None:
    found = each({"tp": 2}, lambda one: one.all_reduce(torch.zeros(one.rank + 1), "tp"))
    assert all(
        isinstance(error, CollectiveError) and "different calls" in str(error) for error in found
    )
    found = each(
        {"tp": 2}, lambda one: one.rank or one.all_reduce(torch.zeros(1), "tp"), timeout=0.2
    )
    assert isinstance(found[0], CollectiveError) and "rank 0: ('all_reduce', 'tp'" in str(found[0])


# ---- whole ranks ---------------------------------------------------------------------------------


def config(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(write_config(folder, "v3")),
        "weights": {"use": "random"},
        "context_length": 96,
        "memory": {"kv_tokens": 512},
        "skip_tokenizer": True,
        "dtype": "float32",
        **more,
    }


def test_one_rank_is_driven_to_the_end(tmp_path: Path) -> None:
    collected = run_ranks(
        config(tmp_path), [submit(i, [5 + i] * (3 * i), 4 + i) for i in range(1, 6)]
    )
    assert {id: len(one.tokens) for id, one in collected.items()} == {i: 4 + i for i in range(1, 6)}
    assert all(
        one.finished and one.finished.reason == "length" and sum(one.counts) == len(one.tokens)
        for one in collected.values()
    )


def test_aborts_and_controls(tmp_path: Path) -> None:
    with RankSet(rank_plan(config(tmp_path))) as ranks:
        ranks.turn([submit(1, [5] * 20, 60), submit(2, [6] * 4, 5)])
        ranks.turn([Abort([1])])
        collected = ranks.run()
        assert (
            collected[1].finished
            and collected[1].finished.reason == "abort"
            and len(collected[2].tokens) == 5
        )
        assert ranks.control("check").ok and ranks.stats[0].aborted == 1
        ranks.check_idle()


def test_errors_of_a_rank_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: object) -> None:
        raise ZeroDivisionError("in a step")

    with RankSet(rank_plan(config(tmp_path))) as ranks:
        monkeypatch.setattr(ranks.engines[0].runner, "launch", fail)
        with pytest.raises(ZeroDivisionError, match="in a step"):
            ranks.run([submit(1, [5], 4)])
