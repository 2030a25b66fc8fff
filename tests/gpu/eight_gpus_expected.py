"""Prediction of decode steps of DeepSeek-V3 whole on eight GPUs, made before any run.

The floor of a decode step is the time to read its bytes, and that of its exchanges. The bytes are
those of ``step_bytes``. A rank of eight receives more in an exchange than a rank of two: each shot
of an exchange is taken to last as long as the measured all-reduce of two GPUs in which a rank
receives as many bytes. The expected time is the floor divided by the share of its floor that the
slice of V3 reached on two GPUs with as many sequences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.entrypoints.bench.others.floor import COPY_BANDWIDTH, step_bytes
from glowplug.entrypoints.bench.ranks.exchange_times import (
    ALL_REDUCE,
    CountedExchange,
    ExchangeTimes,
    step_exchanges,
)
from tests.gpu.eight_gpus import ACCEPT_LENGTH, MODELS, SHAPES, V3, V3_SLICE, layouts
from tests.support.published_commands import plugins
from tests.support.source_tree import ROOT

RECORD = ROOT / "docs" / "benchmarks" / "several-gpus.json"
RANK_RECORD = RECORD.with_name("lone-rank-h200.json")
BANDWIDTH = COPY_BANDWIDTH["H200"]
RANKS = 8
CONTEXT = 1024 + 256 // 2  #: tokens of a sequence half-way through its answer
SLICE_CONTEXT = 512 + 64 // 2  #: the same in the runs of the slice
BATCHES = (1, 8, 32, 128, 256, 1024)
#: bars of the project: what, layout, sequences, with drafts, tokens per second
BARS = (
    ("one user, without drafts", f"tp {RANKS}", 1, False, 75),
    ("one user, one draft", f"tp {RANKS}", 1, True, 158),
    ("concurrency 1024, without drafts", f"dp {RANKS}, ep {RANKS}", 1024, False, 11489),
)


@dataclass(frozen=True)
class Expected:
    """The prediction of a decode step.

    Attributes:
        gigabytes: bytes that a rank reads, in 10 ** 9.
        read_ms: time to read them.
        exchange_ms: time of the exchanges.
        share: share of its floor that the step is expected to reach.
        tokens: tokens that a sequence gains in the step, on average.
        batch: number of sequences.
    """

    gigabytes: float
    read_ms: float
    exchange_ms: float
    share: float
    tokens: float
    batch: int

    @property
    def floor_ms(self) -> float:
        return self.read_ms + self.exchange_ms

    @property
    def expected_ms(self) -> float:
        return self.floor_ms / self.share

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of all sequences in steps of the expected time."""
        return self.batch * self.tokens / self.expected_ms * 1e3


@cache
def record() -> dict[str, Any]:
    """Return the record of the runs on two GPUs."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


@cache
def facts(name: str) -> ModelFacts:
    """Return the facts of a model of ``MODELS`` that is a shape without changes."""
    return plugins().read_model(str(SHAPES / MODELS[name][0])).facts


def two_gpu_times() -> ExchangeTimes:
    """Return the measured times of all-reduces of two GPUs through peers' memory."""
    rows = (
        {
            "operation": ALL_REDUCE,
            "ranks": 2,
            "bytes": row["bytes"],
            "us": min(row["nccl"], row["peer_memory"]),
        }
        for row in record()["all_reduce_us"]["rows"]
    )
    return ExchangeTimes(rows, RECORD.name)


def one_exchange(exchange: CountedExchange, times: ExchangeTimes) -> float:
    """Return the seconds of one exchange, from the times of two GPUs.

    An all-reduce is the shorter of one shot, in which every rank sends its whole tensor to all
    others, and two shots, in each of which it sends the other ranks' parts.
    """

    def while_received(size: int) -> float:
        return times.seconds(CountedExchange(ALL_REDUCE, 2, size, 1))

    others = exchange.ranks - 1
    parts = while_received(others * exchange.size // exchange.ranks)
    if exchange.operation != ALL_REDUCE:
        return parts
    return min(while_received(others * exchange.size), 2 * parts)


def exchange_seconds(model: ModelFacts, mesh: Mapping[str, int], tokens: int) -> float:
    """Return the seconds of all exchanges of a step of ``tokens`` tokens.

    Tokens of groups are gathered and scattered, as ``parallel.ep_moe.exchange = "auto"`` does.
    """
    times = two_gpu_times()
    gathered = {axis: size for axis, size in mesh.items() if axis != "ep" or "dp" not in mesh}
    return sum(
        one.count * one_exchange(one, times) for one in step_exchanges(model, gathered, tokens)
    )


def slice_shares() -> dict[int, float]:
    """Return the shares of their floor that steps of the slice reached on two GPUs, by batch."""
    (ran,) = (one for one in record()["ran"] if one["model"] == V3_SLICE and "decode_ms" in one)
    model = facts(V3_SLICE)
    mesh = {"tp": 2}
    return {
        int(batch): floor_seconds(model, mesh, int(batch), SLICE_CONTEXT) / (measured / 1e3)
        for batch, measured in ran["decode_ms"].items()
    }


def floor_seconds(model: ModelFacts, mesh: Mapping[str, int], batch: int, context: int) -> float:
    """Return the floor of a decode step of ``batch`` sequences of ``context`` tokens."""
    read = step_bytes(model, batch, context, mesh=mesh).seconds(BANDWIDTH)
    return read + exchange_seconds(model, mesh, batch)


def draft_layer(model: ModelFacts) -> ModelFacts:
    """Return the checkpoint's next-token layer, with the head, as a model of one layer."""
    return replace(model, num_layers=1, sizes=replace(model.sizes, routed=(True,)))


def expected(layout: str, batch: int, drafts: bool) -> Expected:
    """Return the prediction of a step of ``batch`` sequences in a layout of ``layouts(RANKS)``.

    With one draft a step verifies two tokens of each sequence and passes them through the draft's
    layer.
    """
    model = facts(V3)
    mesh = layouts(RANKS)[layout].mesh
    tokens = batch * (2 if drafts else 1)
    kv = step_bytes(model, batch, CONTEXT, mesh=mesh).kv
    weights = step_bytes(model, tokens, 0, mesh=mesh).total
    sent = exchange_seconds(model, mesh, tokens)
    if drafts:
        layer = draft_layer(model)
        kv += step_bytes(layer, batch, CONTEXT, mesh=mesh).kv
        weights += step_bytes(layer, tokens, 0, mesh=mesh).total
        sent += exchange_seconds(layer, mesh, tokens)
    shares = slice_shares()
    share = shares[max(one for one in shares if one <= batch)]
    read = weights + kv
    return Expected(
        read / 1e9,
        read / BANDWIDTH * 1e3,
        sent * 1e3,
        share,
        ACCEPT_LENGTH if drafts else 1.0,
        batch,
    )


# ---- the page ------------------------------------------------------------------------------------

Table = Callable[..., str]

HEAD = """# DeepSeek-V3 whole on eight GPUs

**Nothing on this page was measured on eight GPUs.** It states what is planned, and a prediction
made before any run, to be compared with the runs. `python -m tests.gpu.whole_v3` makes them.

## Plans

[eight-gpus-plan.json](eight-gpus-plan.json) has the plan of each setup, made from fact sheets:
bytes of each rank by name, KV tokens, graphs, and the exchanges of a decode step.
"""
PREDICTION = f"""## Prediction

Decode steps of DeepSeek-V3 (61 layers, block FP8) on eight H200, sequences of {CONTEXT} tokens:

- *Read*: the bytes of a step (`step_bytes` in `entrypoints/bench/others/floor.py`: weights of
  attention, dense layers and the experts that uniform routing is expected to choose, and the KV
  cache), at {BANDWIDTH / 1e12:.1f} TB/s, what a copy reaches on an H200.
- *Exchanges*: no exchange of eight GPUs has been measured. Each shot of an exchange is taken to
  last as long as an all-reduce of two GPUs ([several-gpus.json](several-gpus.json)) in which a
  rank receives as many bytes; an all-reduce takes one shot or two, whichever is shorter. That
  eight GPUs wait longer for each other than two is not in it.
- *Share*: the share of its floor that a step of V3's slice reached on two H200, with as many
  sequences (128 for more). *Expected* is the time of reads and exchanges divided by it.
- Drafts: one by the next-token layer, with which a step gains {ACCEPT_LENGTH:g} tokens on average.
  The draft's projection of its two inputs is not counted.
- Tokens/s are those of decode steps alone: the time of prompts, which a server computes in
  between, is not in it.
"""
ALONE = """## One rank on one GPU

`python -m tests.gpu.lone_rank --folder /tmp/v3 --tokenizer /models/v3 --output FILE` measures rank
0 of each layout without drafts on one H200, with random weights: its slices of all layers, at batch
1, 8, 32 and 128. Exchanges are replaced by copies of the same size
([how](../ranks.md#one-rank-without-the-others)). It takes one H200, because the rank's weights
need {weights}. For each layout and batch FILE then has

- `alone_ms`: the measured decode step of the rank, with the copies;
- `exchange_ms`: the time of the exchanges that the step would have made, from records of
  `bench kernels --collectives` on eight GPUs (`--exchange-times`); without any, the prediction of
  this page for the bytes of each exchange;
- `host_ms`: the host's exchanges, as [measured](rank-turns.json) for eight ranks;
- `step_ms` and `tokens_per_s`: the step of all ranks by these three. Waiting for slower ranks is
  not in it.

`--dry` writes the commands, the bytes of a rank and this page's prediction, without a GPU;
`--small --ranks 2` runs a tiny model on a CPU.
"""
TAIL = """## Bars

"""


def page(table: Table) -> str:
    """Return the page. ``table``: function from (head, rows) to a Markdown table."""
    parts = [HEAD, table(_PLAN_HEAD, _plan_rows()), PREDICTION]
    for layout in layouts(RANKS):
        for drafts in (False, True):
            parts.append(f"### {layout}{', one draft' if drafts else ''}\n")
            parts.append(table(_STEP_HEAD, [_step_row(layout, b, drafts) for b in BATCHES]))
    parts += [
        ALONE.format(weights=_weights()),
        *_measured_alone(table),
        TAIL,
        table(("load", "layout", "bar, tokens/s", "expected"), _bar_rows()),
    ]
    return "\n".join(parts)


def _measured_alone(table: Table) -> list[str]:
    """Return the paragraphs and tables of the measured steps of one rank."""
    found = json.loads(RANK_RECORD.read_text(encoding="utf-8"))
    parts = []
    for layout, steps in found["steps"].items():
        ratios = sorted(
            one["step_ms"] / expected(layout, one["batch"], False).expected_ms for one in steps
        )
        parts += [
            f"Measured at {found['commit']} ([{RANK_RECORD.name}]({RANK_RECORD.name})), {layout}; "
            f"the steps take {ratios[0]:.2f} to {ratios[-1]:.2f} times as long as expected:\n",
            table(_RANK_HEAD, [_rank_row(layout, one) for one in steps]),
        ]
    missing = "; ".join(f"{what}: {why}" for what, why in found["not_measured"].items())
    return [*parts, f"Not measured: {missing}.\n"]


def _rank_row(layout: str, step: Mapping[str, Any]) -> tuple[str, ...]:
    wanted = expected(layout, step["batch"], False)
    return (
        str(step["batch"]),
        str(step["rows_of_rank"]),
        f"{step['alone_ms']:.1f}",
        f"{wanted.read_ms / step['alone_ms']:.0%}",
        f"{step['exchange_ms']:.2f}",
        f"{step['step_ms']:.1f}",
        f"{wanted.expected_ms:.1f}",
        f"{step['tokens_per_s']:,.0f}",
    )


_RANK_HEAD = (
    "sequences",
    "rows of the rank",
    "rank alone, ms",
    "share of its floor",
    "exchanges, ms (predicted)",
    "step, ms",
    "expected step, ms",
    "tokens/s",
)
_PLAN_HEAD = ("setup", "weights a rank", "total a rank", "KV tokens a group", "groups")
_STEP_HEAD = (
    "sequences",
    "read, GB a rank",
    "read, ms",
    "exchanges, ms",
    "share",
    "expected step, ms",
    "expected tokens/s",
)


def _plans() -> dict[str, Any]:
    """Return the record of plans, by setup."""
    path = ROOT / "docs" / "benchmarks" / "eight-gpus-plan.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["plans"]
    return found


def _weights() -> str:
    """Return the least and the most bytes of a rank's weights in the layouts, as text."""
    every = [_plans()[f"{V3}, {name}"]["bytes_per_rank"]["weights"] for name in layouts(RANKS)]
    return f"{min(every) / 2**30:.1f} to {max(every) / 2**30:.1f} GiB"


def _plan_rows() -> list[tuple[str, ...]]:
    """Return the setups of V3 whole in the record of plans; the rows of the ablation are many."""
    return [
        (
            name,
            f"{one['bytes_per_rank']['weights'] / 2**30:.1f} GiB",
            f"{one['total_bytes_per_rank'] / 2**30:.1f} GiB",
            f"{one['kv_tokens_per_group']:,}",
            str(one["groups"]),
        )
        for name, one in _plans().items()
        if not name.startswith("S0")
    ]


def _step_row(layout: str, batch: int, drafts: bool) -> tuple[str, ...]:
    one = expected(layout, batch, drafts)
    return (
        str(batch),
        f"{one.gigabytes:.1f}",
        f"{one.read_ms:.2f}",
        f"{one.exchange_ms:.2f}",
        f"{one.share:.0%}",
        f"{one.expected_ms:.2f}",
        f"{one.tokens_per_second:,.0f}",
    )


def _bar_rows() -> list[tuple[str, ...]]:
    return [
        (what, layout, f"{bar:,}", f"{expected(layout, batch, drafts).tokens_per_second:,.0f}")
        for what, layout, batch, drafts, bar in BARS
    ]
