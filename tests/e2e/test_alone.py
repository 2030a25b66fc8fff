"""`bench one-batch --alone`: one rank of a layout by itself works as a rank among others does."""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from glowplug.core.errors import EngineDead, GlowplugError
from glowplug.core.step.request import SamplingParams
from glowplug.core.testing.harness.ranks import RankSet, rank_plan, submit
from glowplug.core.testing.harness.threads_runtime import ThreadCollectives
from glowplug.entrypoints import bench
from glowplug.entrypoints.bench.alone.copies import HOST, LoneRankCopies
from glowplug.entrypoints.bench.alone.llm import LoneRankLLM, exchange_seconds
from glowplug.entrypoints.bench.alone.strategies import MIRRORED, OWN, SPREAD, SpreadChoices
from glowplug.entrypoints.bench.others.in_process import run_static_batch
from glowplug.entrypoints.bench.ranks.exchange_times import EXCHANGE, ExchangeTimes
from glowplug.entrypoints.cli.main import main
from tests.plugins.replaying_runtime import NEWEST
from tests.support.layouts import layout
from tests.support.tiny import VOCAB, write_config

LAYOUTS = {
    "tp 2": layout(2),
    "tp 8": layout(8),
    "tp 2, ep 2": layout(2, 2),
    "tp 8, ep 8": layout(8, 8),
    "dp 2, ep 2": layout(2, 2, 2),
    "dp 8, ep 8": layout(8, 8, 8),
    "tp 8, ep 4, dp 2": layout(8, 4, 2),
    "dp 2, static": layout(2, 2, 2, exchange="all_to_all_static"),
    "dp 2": layout(2, dp=2),
}
#: layouts in which the exchanged rows or the copies of experts depend on the routing
UNEVEN = {
    "dp 2, by counts": layout(2, 2, 2, exchange="all_to_all"),
    "dp 2, copies of experts": layout(2, 2, 2, redundant_experts=4),
}
#: a model that eight ranks can divide, with a next-token layer
CHANGES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 128,
    "n_routed_experts": 16,
    "num_nextn_predict_layers": 1,
}
LENGTH = 6  #: tokens of a prompt
pytestmark = pytest.mark.usefixtures("quick_switches")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("v3"), "v3", **CHANGES)


def config_of(folder: Path, parallel: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        "skip_tokenizer": True,
        "dtype": "float32",
        "device": "cpu",
        "context_length": 64,
        "memory": {"kv_tokens": 1024},
        "weights": {"use": "random"},
        "scheduler": {"max_running_requests": 16, "chunk_size": 512, "mixed": False},
        "cache": {"use": "none"},
        "parallel": parallel,
        **more,
    }


def groups_of(parallel: list[dict[str, Any]]) -> int:
    return next((one["size"] for one in parallel if one["use"] == "dp_attention"), 1)


@contextmanager
def rank_alone(rank: int, config: dict[str, Any], **more: Any) -> Iterator[LoneRankLLM]:
    with LoneRankLLM(rank, **config, **more) as llm:
        yield llm


Kinds = Counter[tuple[Any, ...]]


class Recorded:
    """The calls that each real rank makes, by turn of its loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        self.turns: list[list[Kinds]] = [[] for _ in range(ranks)]
        self._now: list[Kinds] = [Counter() for _ in range(ranks)]
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            monkeypatch.setattr(ThreadCollectives, name, self._counting(name))
        for name in ("broadcast_bytes", "all_gather_numbers", "all_gather_bytes"):
            monkeypatch.setattr(ThreadCollectives, name, self._counting_host(name))

    def _counting(self, name: str) -> Any:
        call = getattr(ThreadCollectives, name)

        def counted(held: Any, x: torch.Tensor, axis: str, *more: Any) -> torch.Tensor:
            _, size = held._place(axis)
            if size > 1:
                whole = x.nbytes * (size if name == "all_gather" else 1)
                self._now[held.rank][name, axis, size, whole] += 1
            found: torch.Tensor = call(held, x, axis, *more)
            return found

        return counted

    def _counting_host(self, name: str) -> Any:
        call = getattr(ThreadCollectives, name)
        shown = {"broadcast_bytes": "broadcast"}.get(name, "gather")

        def counted(held: Any, data: Any) -> Any:
            if name == "broadcast_bytes":
                self.turns[held.rank].append(self._now[held.rank])
                self._now[held.rank] = Counter()
            self._now[held.rank][shown, HOST] += 1
            return call(held, data)

        return counted

    def step(self, rank: int) -> Kinds:
        """Return the most frequent turn of a rank with exchanges of tensors."""
        turns = [turn for turn in self.turns[rank] if any(kind[1] != HOST for kind in turn)]
        keys = Counter(frozenset(turn.items()) for turn in turns)
        return Counter(dict(keys.most_common(1)[0][0]))


def kinds_of(step: list[dict[str, Any]]) -> Kinds:
    """Return a rank's replaced exchanges in the form of ``Recorded``."""
    found: Kinds = Counter()
    for one in step:
        if one["axis"] == HOST:
            found[one["operation"], HOST] += one["count"]
        elif one["operation"] != EXCHANGE:
            found[one["operation"], one["axis"], one["ranks"], one["bytes"]] += one["count"]
    return found


@pytest.mark.parametrize(
    ("name", "drafts"),
    [*((name, False) for name in LAYOUTS), ("tp 2", True), ("dp 2, ep 2", True)],
)
def test_a_rank_alone_makes_the_exchanges_of_a_rank_among_others(
    name: str, drafts: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number, axes and bytes of the exchanges are equal, and so are the host's."""
    parallel = LAYOUTS[name]
    ranks, groups = parallel[0]["size"], groups_of(parallel)
    more: dict[str, Any] = {}
    if drafts:
        more["speculative"] = {"use": "nextn", "steps": 1, "adaptive": False}
    config = config_of(folder, parallel, **more)
    rank = ranks - 1
    recorded = Recorded(monkeypatch, ranks)
    with RankSet(rank_plan(config)) as every:
        every.run([submit(id, [id + 1] * LENGTH, 8) for id in range(2 * groups)])
    with rank_alone(rank, config) as llm:
        times = llm.run_batch(random.Random(1), 2 * groups, LENGTH, 8)
        step = llm.step_exchanges(random.Random(1), times)
    assert kinds_of(step) == recorded.step(rank)
    tokens = [one["tokens"] for one in step if one["operation"] == EXCHANGE]
    rows = 2 * (2 if drafts else 1) * groups // ranks  # tokens that a rank of a group sends
    moves = groups > 1 and len(parallel) == 3
    assert max(tokens, default=0) == (max(1, rows) if moves else 0)


@pytest.mark.parametrize("name", ["tp 2", "tp 8, ep 8", "dp 8, ep 8", "tp 8, ep 4, dp 2"])
def test_a_rank_alone_holds_the_slices_of_the_plan(name: str, folder: Path) -> None:
    """Its tensors are cut as on the same rank among others, and have the plan's bytes."""
    config = config_of(folder, LAYOUTS[name])
    rank = LAYOUTS[name][0]["size"] - 1

    def slices(engine: Any) -> dict[str, Any]:
        """Return the whole shape and this rank's part of each tensor, all in float32."""
        return {one.name: (one.shape, one.index) for one in engine.runner.model.targets()}

    with RankSet(rank_plan(config)) as every:
        wanted = slices(every.engines[rank])
        planned = next(line for line in every.plan.budget if line.name == "weights")
    with rank_alone(rank, config) as llm:
        executor: Any = llm._executor
        found = slices(executor._engine)
        assert next(line for line in llm.plan.budget if line.name == "weights") == planned
    assert found == wanted
    held = sum(
        torch.empty(shape, device="meta")[index].nbytes * (2 if "kv_b_proj" in name else 1)
        for name, (shape, index) in found.items()
    )  # attention keeps kv_b_proj in a second form
    assert held == planned.on(rank)


def tokens_of(llm: LoneRankLLM, rows: int) -> list[list[int]]:
    prompts = [[3 * row + at for at in range(LENGTH)] for row in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return [one.choices[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("name", ["tp 8", "tp 8, ep 8", "dp 8, ep 8", "tp 8, ep 4, dp 2"])
def test_captured_steps_of_a_rank_alone_are_its_eager_ones(name: str, folder: Path) -> None:
    """Graphs are functions here; counting turns them off only for its own steps.

    No step is padded: the answers of a rank alone may depend on padding, since ranks of a group
    seem to have its slice of the group's tokens.
    """
    parallel = LAYOUTS[name]
    config = config_of(folder, parallel)
    with rank_alone(0, config) as llm:
        wanted = tokens_of(llm, 2)
        eager = llm.step_exchanges(random.Random(1), static(llm, parallel))
    graphs = {"use": "replaying", "batch_sizes": [2 * groups_of(parallel)]}
    graphs |= {"prefill": True, "prefill_tokens": [2 * LENGTH]}
    with rank_alone(0, config, graphs=graphs, plugins=["tests.plugins.replaying"]) as llm:
        runner = NEWEST[-1]
        before = len(runner.filled)
        runner.passed.clear()
        assert tokens_of(llm, 2) == wanted
        assert len(runner.filled) - before >= 6 and runner.passed
        times = static(llm, parallel)
        replayed = len(runner.filled)
        assert kinds_of(llm.step_exchanges(random.Random(1), times)) == kinds_of(eager)
        assert len(runner.filled) == replayed, "steps whose exchanges are counted are eager"
        static(llm, parallel)
        assert len(runner.filled) > replayed


def static(llm: LoneRankLLM, parallel: list[dict[str, Any]]) -> Any:
    return llm.run_batch(random.Random(1), 2 * groups_of(parallel), LENGTH, 8)


# ---- experts of other groups ---------------------------------------------------------------------


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_experts_have_the_tokens_of_all_groups(groups: int) -> None:
    """A share of the experts gets as many choices as one group makes, of different experts."""
    experts, chosen = 32, 4
    held = experts // groups
    generator = torch.Generator().manual_seed(groups)
    ids = torch.rand(5, experts, generator=generator).topk(chosen).indices
    for own in range(groups):
        choices = SpreadChoices((own, groups), experts, own * held, held, "cpu")
        local = choices.of(ids, 6)
        assert local.shape == (6 * groups, chosen) and local.max() < held
        assert (local >= 0).sum() == ids.numel(), "one share of all groups' choices"
        mine = ids - own * held
        mine = torch.where((mine >= 0) & (mine < held), mine, -1)
        assert torch.equal(local.view(groups, 6, chosen)[own, :5], mine)
        assert torch.equal(local.view(groups, 6, chosen)[:, 5], torch.full((groups, chosen), -1))
        everywhere = torch.bincount(local[local >= 0], minlength=held)
        folded = torch.bincount(ids.flatten() % held, minlength=held)
        assert torch.equal(everywhere, folded), "each group's choice is moved on by a share"


def test_groups_without_work_choose_no_expert() -> None:
    ids = torch.tensor([[0, 5], [3, -1]])
    choices = SpreadChoices((1, 4), 8, 2, 2, "cpu")
    table = choices.of(ids, 2).view(4, 2, 2)
    choices.set_busy(2)
    some = choices.of(ids, 2).view(4, 2, 2)
    assert torch.equal(some[1:3], table[1:3]) and (some[[0, 3]] == -1).all()
    choices.set_busy(4)
    assert torch.equal(choices.of(ids, 2).view(4, 2, 2), table)


@pytest.mark.parametrize(
    ("name", "routing"),
    [
        ("tp 8, ep 8", OWN),
        ("dp 8, ep 8", SPREAD),
        ("dp 2", MIRRORED),
        *((name, MIRRORED) for name in UNEVEN),
    ],
)
def test_the_record_states_how_other_groups_choose_experts(
    name: str, routing: str, folder: Path
) -> None:
    with rank_alone(1, config_of(folder, (LAYOUTS | UNEVEN)[name])) as llm:
        assert llm.run_batch(random.Random(0), 8, LENGTH, 4).batch == 8
        assert llm.control("alone")["routing"] == routing


def test_prompts_have_embeddings_on_the_rank(folder: Path) -> None:
    """Other tokens are zeros there, and would all choose the same experts."""
    with rank_alone(3, config_of(folder, LAYOUTS["tp 8"])) as llm:
        prompts = llm._prompts(random.Random(0), 4, 50)
    assert {id for ids in prompts for id in ids} == set(range(VOCAB * 3 // 8, VOCAB * 4 // 8))


# ---- the command ---------------------------------------------------------------------------------


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return bench.run(parser.parse_args(["one-batch", *words]))


def words_of(folder: Path, *more: str) -> list[str]:
    words = ["--model", str(folder), "--load-format", "dummy", "--device", "cpu", "--repeat", "1"]
    return [*words, "--dtype", "float32", "--input-len", "6", "--output-len", "6", *more]


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_record_of_a_rank_alone_says_so(
    batch: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"operation": name, "ranks": 8, "bytes": 4096, "us": 10.0}
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    ]
    rows.append({"operation": EXCHANGE, "ranks": 8, "bytes": 0, "tokens": 1, "us": 100.0})
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"rows": rows, "date": "today", "card": "none"}))
    saved = tmp_path / "saved.json"
    words = ["--tp", "8", "--ep-size", "8", "--dp-size", "8", "--alone", "5", "--batch-size"]
    words += [str(batch), "--exchange-times", str(times), "--save", str(saved)]
    assert run(*words_of(folder, *words)) == 0, capsys.readouterr().err
    ((found,)) = json.loads(saved.read_text())["results"]
    own = max(1, batch // 8)
    assert (found["alone"], found["rank"], found["ranks"]) == (True, 5, 8)
    assert (found["batch_size"], found["rows_of_rank"]) == (batch, own)
    assert "meaningless" in found["about"] and "copy of the same size" in found["about"]
    step = found["exchanges"]
    assert sum(one["count"] for one in step if one["operation"] == EXCHANGE) == 2
    assert found["copied_bytes"] == sum(
        one["bytes"] * one["count"] for one in step if one["axis"] != HOST
    )
    # the gather and the sum of the dense layer, and two exchanges of experts' tokens
    assert found["exchange_ms"] == pytest.approx((2 * 10 + 2 * 100 * own) / 1e3)
    assert found["decode_with_exchanges_ms"] == pytest.approx(
        found["decode_median_ms"] + found["exchange_ms"]
    )
    assert found["decode_tokens_per_s"] == pytest.approx(batch / found["decode_median_ms"] * 1e3)


def test_an_exchange_without_a_time_is_named() -> None:
    step = [{"operation": "all_to_all", "axis": "tp", "ranks": 8, "bytes": 8, "count": 1}]
    step[0] |= {"tokens": 0, "part_of": ""}
    times = ExchangeTimes([], "times.json")
    with pytest.raises(ValueError, match="has no all_to_all of 8 ranks"):
        exchange_seconds(step, times)
    assert exchange_seconds([step[0] | {"part_of": EXCHANGE}], times) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "the layout has one rank"),
        (("--tp", "8", "--alone", "8"), "--alone 8: the layout has 8 ranks; give 0 to 7"),
        (("--tp", "8", "--alone", "-1"), "--alone -1: the layout has 8 ranks; give 0 to 7"),
        (("--tp", "8", "--dp-size", "8", "--batch-size", "12"), "not a multiple of the 8 groups"),
        (("--tp", "8", "--nnodes", "2"), "the layout has 2 hosts"),
    ],
)
def test_what_a_rank_alone_cannot_run_is_refused(
    words: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words if "--alone" in words else ("--alone", *words)
    assert run(*words_of(folder, *given)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [("serve",), ("bench", "offline"), ("chat",)])
def test_only_the_benchmark_runs_a_rank_alone(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--model", "embedded", "--tp", "2", "--alone"])
    assert ended.value.code == 2
    assert "--alone: only `glowplug bench one-batch` runs one rank" in capsys.readouterr().err


def test_fewer_sequences_than_groups_need_an_exchange_of_tokens(folder: Path) -> None:
    """Without one, a rank computes the tokens of every group, with work or without."""
    with rank_alone(0, config_of(folder, LAYOUTS["dp 2"])) as llm:
        with pytest.raises(GlowplugError, match="smaller than the number of groups"):
            llm.run_batch(random.Random(0), 1, LENGTH, 4)
        assert llm.run_batch(random.Random(0), 2, LENGTH, 4).batch == 2


def test_an_exchange_through_peers_memory_is_refused() -> None:
    """It has no copy; a gather in its place would be another layout's work."""
    with pytest.raises(GlowplugError, match="has no such copy"):
        LoneRankCopies({"tp": 2, "ep": 2, "dp": 2}, 0).expert_rows("tp", 8, 2, 4, "float32")


def test_sums_in_a_norm_are_copied() -> None:
    copies: Any = LoneRankCopies({"tp": 2}, 0)
    reduce = copies.reduced_norm("plain", lambda terms, residual, weight, eps: (terms, residual))
    residual = torch.ones(3, 4)
    normed, total = reduce(torch.zeros(3, 4), "tp", residual, torch.ones(4), 1e-6)
    assert torch.equal(total, residual) and total.data_ptr() != residual.data_ptr()
    assert torch.equal(normed, torch.zeros(3, 4))
    summed = copies.reduce_scatter_exact(torch.ones(2, 3, 4, dtype=torch.bfloat16), "tp")
    assert summed.dtype == torch.float32 and torch.equal(summed, torch.full((3, 4), 2.0))
    assert not hasattr(LoneRankCopies({"tp": 2}, 0, ()), "reduced_norm")


def test_the_failure_of_a_rank_alone_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(LoneRankCopies, "all_reduce", fail)
    with (
        pytest.raises(EngineDead, match="made to fail"),
        rank_alone(0, config_of(folder, LAYOUTS["tp 2"])) as llm,
    ):
        run_static_batch(llm, [[1, 2]], 2)
