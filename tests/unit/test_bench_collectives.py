"""`bench kernels --collectives`: exchanges of real ranks, checked, timed and refused."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from glowplug.core.errors import EngineDead, PlanRefused
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import PluginSet, load_plugins
from glowplug.core.protocols import Quantized
from glowplug.core.step.messages import Control, Reply, decode_inbound, encode
from glowplug.entrypoints import bench
from glowplug.entrypoints.bench.ranks import collectives, measured_rank, rank_processes, timing
from glowplug.entrypoints.bench.ranks.collectives import (
    Planner,
    measured_providers,
)
from glowplug.entrypoints.bench.ranks.exchange_times import (
    ALL_GATHER,
    ALL_REDUCE,
    EXCHANGE,
    REDUCE_SCATTER,
)
from glowplug.entrypoints.bench.ranks.expert_exchanges import ExchangedTokens
from glowplug.entrypoints.bench.ranks.operations import ADD_NORM
from glowplug.entrypoints.bench.ranks.rank_processes import MeasuredProvider, Ranks, captures
from glowplug.entrypoints.checkpoints.cut_model import write_cut
from glowplug.plugins.collectives.torch_distributed_runtime import Gloo
from glowplug.plugins.parallel.ep_moe import EpMoeOptions
from glowplug.plugins.parallel.ep_moe_runtime import EXCHANGES
from tests.support.source_tree import ROOT
from tests.support.tiny import write_config

pytestmark = pytest.mark.usefixtures("quick_switches")
CPU = ("--model", "tiny-v3", "--device", "cpu", "--set", "executor.oversubscribe=true")
SUMS = {ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ADD_NORM}


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return load_plugins(entry_points=False)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args(["kernels", "--collectives", *words])


def test_two_rank_processes_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c.json"
    words = [*CPU, "--tp", "2", "--collective-bytes", "4096", "--exchange-tokens", "3"]
    status = bench.run(parsed(*words, "--output-file", str(out)))
    shown = capsys.readouterr()
    assert status == 0, shown.err
    record = json.loads(out.read_text())
    assert (record["failed"], record["mesh"]) == ({}, {"tp": 2})
    assert record["command"] and record["date"] and record["card"] and record["packages"]["torch"]
    rows = record["rows"]
    assert {row["operation"] for row in rows} == SUMS | {EXCHANGE}
    assert all(row["us"] > 0 and row["ranks"] == 2 and not row["captured"] for row in rows)
    exchanges = [row for row in rows if row["operation"] == EXCHANGE]
    values = get_args(EpMoeOptions.model_fields[collectives.EXCHANGE_OPTION].annotation)
    measured = {row["provider"] for row in exchanges}
    assert measured >= {"gloo all_gather", "gloo all_to_all", "gloo all_to_all_static"}
    assert measured | set(record["refused"]) == {f"gloo {name}" for name in values}
    for row in exchanges:
        assert (row["tokens"], row["mesh"]) == (3, {"tp": 2, "ep": 2, "dp": 2})
    for row in (row for row in rows if row["operation"] == ALL_REDUCE):
        assert row["gb_s"] == pytest.approx(4096 / row["us"] / 1e3)
    assert "all_reduce, 2 ranks along tp" in shown.out and "gloo GB/s" in shown.out


def test_every_way_of_a_backend_is_measured(plugins: PluginSet, tmp_path: Path) -> None:
    """The ways are the values of its provider options, unless the operator names one."""
    config: dict[str, Any] = {
        "model": str(write_config(tmp_path, "v3")),
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "dtype": "bfloat16",
        "parallel": [{"use": "tensor", "size": 4}],
    }
    args = parsed("--collective-bytes", "4096", "--exchange-tokens")
    sheet = read_sheet("8xh200")
    base = make_plan(config, plugins=plugins, hardware=sheet)
    ways = {f"peer_memory all_reduce={way}" for way in ("one_shot", "two_shot")}
    assert {one.label for one in measured_providers(base, config, plugins, args)} == {
        "nccl",
        "peer_memory",
        *ways,
    }
    for one in measured_providers(base, config, plugins, args):
        plan = make_plan({**config, **one.overrides}, plugins=plugins, hardware=sheet)
        value = plan.choice("collectives").options.get("all_reduce")
        assert (one.label in ways) == (value in ("one_shot", "two_shot"))
    named = config | {"collectives": {"use": "peer_memory", "all_reduce": "two_shot"}}
    labels = [one.label for one in measured_providers(base, named, plugins, args)]
    assert labels == ["peer_memory"]


def test_the_times_are_kept_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOWPLUG_CONFIG_DIR", str(tmp_path))
    record = {
        "rows": [],
        "refused": {},
        "failed": {},
        "mesh": {"tp": 2},
        "dtype": "float32",
        "hidden": 64,
        "chosen": "peer_memory",
        "gpu": "cpu",
    }
    monkeypatch.setattr(collectives, "measure", lambda *_: record)
    assert bench.run(parsed("--tp", "2", "--save-table")) == 0
    assert "no table" in capsys.readouterr().out
    row = {"operation": ALL_REDUCE, "axis": "tp", "ranks": 2, "bytes": 4096, "tokens": 0}
    row |= {"us": 3.0, "gb_s": 1.0, "captured": False, "provider": "gloo"}
    record["rows"] = [row]
    assert bench.run(parsed("--tp", "2")) == 0
    assert not list(tmp_path.iterdir()), "only where it is asked for"
    assert bench.run(parsed("--tp", "2", "--save-table")) == 0
    (path,) = tmp_path.iterdir()
    assert f"table: {path}" in capsys.readouterr().out
    assert json.loads(path.read_text())["all_reduce"] == {"4096": {"gloo": 3.0}}
    record["chosen"] = "gloo"
    assert bench.run(parsed("--tp", "2", "--save-table")) == 0
    assert "gloo chooses nothing by measured times" in capsys.readouterr().out


# ---- ranks as threads ----------------------------------------------------------------------------


class Layout:
    """The plans of a layout of the tiny model."""

    def __init__(self, plugins: PluginSet, folder: Path, *sizes: tuple[str, int]) -> None:
        self.plugins = plugins
        self.folder = folder
        self.config: dict[str, Any] = {
            "device": "cpu",
            "parallel": [{"use": use, "size": size} for use, size in sizes],
            "executor": {"oversubscribe": True},
        }
        args = parsed(*CPU, "--collective-bytes", "40", "6000", "--exchange-tokens", "1", "5")
        self.planner = Planner(args, self.config, plugins, write_config(folder / "model", "v3"))
        base = self.planner.plan(MeasuredProvider("auto"))
        self.providers = list(measured_providers(base, self.config, plugins, args))

    def replies(self, provider: MeasuredProvider) -> list[Reply]:
        """Return the replies of rank 0 to one measurement by ranks in threads."""
        plan = self.planner.plan(provider)
        # NOTE: msgspec crashes if several threads are the first to decode a type
        assert EnginePlan.from_json(plan.to_json()) == plan
        work = {**self.planner.work(provider), "captured": False, "plan": plan.to_json().decode()}
        address = f"file://{self.folder}/{provider.label}-{provider.exchanges}"

        def one(rank: int) -> list[Any]:
            held = measured_rank.build(
                plan, rank, self.plugins, lambda *progress: None, address, lambda text: None
            )
            try:
                frames = [encode([Control(7, "measure", work)])] if rank == 0 else []
                return held.turn(frames) or []
            finally:
                held.close()

        with ThreadPoolExecutor(plan.ranks) as pool:
            found = list(pool.map(one, range(plan.ranks)))
        assert not any(found[1:]), "only rank 0 replies"
        return found[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(timing, "HOST_CALLS", (1, 1))


@pytest.mark.parametrize(
    "sizes",
    [
        (("tensor", 4),),
        (("tensor", 4), ("ep_moe", 2), ("dp_attention", 2)),
        (("tensor", 4), ("dp_attention", 2)),
    ],
    ids=str,
)
def test_results_of_four_ranks_are_right(
    sizes: tuple[tuple[str, int], ...], plugins: PluginSet, tmp_path: Path, quick: None
) -> None:
    layout = Layout(plugins, tmp_path, *sizes)
    axes = {("tp", 4)} | ({("dp", 2), ("attn_tp", 2)} if len(sizes) > 1 else set())
    refused = []
    for provider in layout.providers:
        try:
            (reply,) = layout.replies(provider)
        except PlanRefused:
            refused.append(provider.label)
            continue
        assert reply.ok, (provider.label, reply.error)
        rows = reply.data["rows"]
        assert all(row["error"] < 1e-6 for row in rows)
        if provider.exchanges:
            assert [row["tokens"] for row in rows] == [1, 5]
        else:
            assert {(row["axis"], row["ranks"]) for row in rows} == axes
            assert {row["operation"] for row in rows} == SUMS
    split = ("ep_moe", 2) in sizes
    whole = [label for label in refused if "all_to_all" in label]
    assert whole == (["gloo all_to_all", "gloo all_to_all_static"] if split else [])


def test_tensors_are_at_least_one_number_of_each_rank(
    plugins: PluginSet, tmp_path: Path, quick: None
) -> None:
    layout = Layout(plugins, tmp_path, ("tensor", 2))
    (reply,) = layout.replies(layout.providers[0])
    sizes = {row["bytes"] for row in reply.data["rows"] if row["operation"] != ADD_NORM}
    assert sizes == {40, 6000}
    norms = [row["tokens"] for row in reply.data["rows"] if row["operation"] == ADD_NORM]
    assert norms == [1, 2, 4, 8, 16], "6000 bytes are 23 tokens of 64 numbers"


@pytest.mark.parametrize(
    ("method", "wrong", "said"),
    [
        ("all_reduce", lambda x: x * 1.01, "wrong result: all_reduce of 40 bytes differs"),
        ("all_gather", lambda x: x.roll(1, 0), "wrong result: all_gather of 40 bytes differs"),
        ("reduce_scatter", lambda x: x * float("nan"), "wrong result: reduce_scatter of 40 bytes"),
    ],
)
def test_a_wrong_result_is_not_timed(
    method: str,
    wrong: Callable[[torch.Tensor], torch.Tensor],
    said: str,
    plugins: PluginSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick: None,
) -> None:
    right = getattr(Gloo, method)
    monkeypatch.setattr(Gloo, method, lambda self, *given: wrong(right(self, *given)))
    layout = Layout(plugins, tmp_path, ("tensor", 2))
    (reply,) = layout.replies(layout.providers[0])
    assert not reply.ok and said in reply.error and reply.data == {"wrong": True}


def test_tokens_that_reach_no_expert_are_a_wrong_result(
    plugins: PluginSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    exchange = EXCHANGES["all_gather"]
    right = exchange.dispatch  # type: ignore[attr-defined]

    def lossy(self: Any, *given: Any) -> Any:
        x, ids, weights = right(self, *given)
        return x, ids.masked_fill(ids == 0, -1), weights

    monkeypatch.setattr(exchange, "dispatch", lossy)
    layout = Layout(plugins, tmp_path, ("tensor", 2))
    provider = next(one for one in layout.providers if one.label == "gloo all_gather")
    (reply,) = layout.replies(provider)
    assert "wrong result: expert exchange" in reply.error


def test_a_backend_that_another_replaces_is_not_measured(
    plugins: PluginSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    why = "GPU 0 has no access to the memory of GPU 1"
    monkeypatch.setattr(Gloo, "replaced", why, raising=False)
    layout = Layout(plugins, tmp_path, ("tensor", 2))
    (reply,) = layout.replies(layout.providers[0])
    assert (reply.ok, reply.error, reply.data) == (False, why, {"wrong": False})


class Pushing:
    """An exchange of one rank that sends quantised tokens as they are."""

    def sends_quantized(self, input_format: str, batch: Any) -> bool:
        return input_format == "tens" and batch.agreed.tokens == len(batch.rows)

    def dispatch_quantized(
        self, x: Quantized, ids: torch.Tensor, weights: torch.Tensor, batch: Any
    ) -> tuple[Quantized, torch.Tensor, torch.Tensor]:
        return x, ids, weights

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        return y


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_tokens_in_the_experts_format_are_checked_too(factor: float) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([[0.25, 0.75]]).expand(5, 2)
    tokens = ExchangedTokens(Pushing(), x, torch.zeros(5, 2, dtype=torch.int64), weights)

    def cast(y: torch.Tensor) -> Quantized:
        """Tenths, and two scales for each token, of channels 0 to 3 and of 4 and 5."""
        return Quantized((y * 10).round(), torch.tensor([[0.1, 0.1 * factor]]).expand(len(y), 2))

    assert tokens.quantizes("tens") and not tokens.quantizes("plain")
    sent = tokens.cast(cast)
    assert (sent.error(1) < 0.05) == (factor == 1.0)
    assert sent.run().shape == (5, 6)


# ---- the starting process ------------------------------------------------------------------------


class FakeRanks:
    """An executor whose ranks fail at the plans with certain collectives options."""

    def __init__(self, starts: list[int], fails: int) -> None:
        self.starts, self.fails = starts, fails
        self.replies: list[bytes | None] = []

    def start(self, plan: Any, build: Any) -> None:
        assert build is measured_rank.build
        self.starts.append(plan.ranks)

    def submit(self, data: bytes) -> None:
        ((message,)) = decode_inbound(data)
        if message.id == self.fails:
            self.replies = []
        elif message.id == self.fails + 1:
            wrong = Reply(message.id, False, {"wrong": True}, "wrong result")
            self.replies = [None, encode([wrong])]
        else:
            self.replies = [encode([Reply(message.id, True, {"rows": [{"us": 1.0}]})])]

    def outputs(self, timeout: float | None) -> bytes | None:
        if not self.replies:
            raise EngineDead("rank 1 ended")
        return self.replies.pop(0)

    def stop(self) -> None:
        self.starts.append(0)


def test_a_rank_that_fails_ends_its_provider_only(
    plugins: PluginSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[int] = []
    monkeypatch.setattr(
        rank_processes, "make_executor", lambda plan, plugins: FakeRanks(starts, fails=2)
    )
    config = {
        "model": "tiny-v3",
        "device": "cpu",
        "parallel": [{"use": "tensor", "size": 2}],
        "executor": {"oversubscribe": True},
    }
    found = collectives.measure(parsed(*CPU), config, plugins, tmp_path)
    assert found["failed"] == {"gloo auto": "rank 1 ended", "gloo all_gather": "wrong result"}
    assert [row["provider"] for row in found["rows"]] == [
        "gloo",
        "gloo all_to_all",
        "gloo all_to_all_static",
    ]
    assert starts == [2, 0, 2, 0], "the ranks are started anew after a failure, and ended"


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*given: Any) -> None:
        raise AssertionError("no rank may be started")

    monkeypatch.setattr(Ranks, "send", refuse)
    yield


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "one rank exchanges nothing"),
        (("--tp", "1"), "fix: --tp 2, or more"),
        (("--tp", "3"), "num_attention_heads of 4 does not split over 3 ranks"),
        (("--tp", "2", "--collective-bytes", "0"), "must be at least 1"),
        (("--tp", "2", "--exchange-tokens", "-1"), "must be at least 1"),
        (("--tp", "2", "--set", "collectives.use=nccl"), "nccl runs on cuda, the device is cpu"),
        (("--tp", "2"), "2 ranks are more than the 1 cores of this machine"),
        (("--tp", "2", "--collective-bytes", "--exchange-tokens"), "nothing to measure"),
    ],
)
def test_layouts_that_cannot_be_measured_are_refused_before_any_rank_starts(
    words: tuple[str, ...],
    said: str,
    no_start: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = collectives.this_machine
    monkeypatch.setattr(collectives, "this_machine", lambda: replace(here(), cpu_cores=1))
    assert bench.run(parsed("--model", "tiny-v3", "--device", "cpu", *words)) == 2
    assert said in capsys.readouterr().err


def test_exchanges_on_gpus_are_captured_where_the_plan_captures_steps(
    plugins: PluginSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the exchange whose row counts the host reads is not, and it is still measured."""
    sheet = read_sheet("4xh200")
    monkeypatch.setattr(collectives, "this_machine", lambda: sheet)
    config = {"parallel": [{"use": "tensor", "size": 4}]}
    shape = json.loads((ROOT / "models/shapes/deepseek-v3.json").read_text())
    write_cut(shape, tmp_path)
    args = parsed("--model", "v3", "--tp", "4")
    planner = Planner(args, config, plugins, tmp_path)
    base = planner.plan(MeasuredProvider("auto"))
    captured = {}
    for provider in measured_providers(base, config, plugins, args):
        try:
            plan = planner.plan(provider)
        except PlanRefused:
            continue
        captured[provider.label] = captures(plan, plugins)
        assert plan.sizes.max_step_tokens >= 4 * 1024
    eager = {label for label, found in captured.items() if not found}
    assert base.choice("collectives").name == "peer_memory"
    assert {"peer_memory", "nccl", "nccl all_gather"} <= set(captured) - eager
    assert eager == {"peer_memory all_to_all", "nccl all_to_all"}


@pytest.mark.gpu
def test_exchanges_of_two_gpus_are_captured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 devices")
    out = tmp_path / "c.json"
    words = ["--model", "v3slice", "--tp", "2", "--collective-bytes", "4096", "1048576"]
    words += ["--exchange-tokens", "1", "8", "--output-file", str(out)]
    assert bench.run(parsed(*words)) == 0, capsys.readouterr().err
    record = json.loads(out.read_text())
    assert record["failed"] == {}
    providers = {row["provider"] for row in record["rows"] if row["operation"] == ALL_REDUCE}
    assert providers == {"nccl", "peer_memory"}
    for row in record["rows"]:
        assert row["captured"] or row["provider"].endswith(" all_to_all"), row
    assert any(row["operation"].startswith(f"{ADD_NORM} (") for row in record["rows"])
