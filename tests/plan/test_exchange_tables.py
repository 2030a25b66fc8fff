"""Measured tables of exchanges between ranks: thresholds, the experts' exchange and bad files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.kernels.collectives.exchange_tables import fastest_up_to, file_name
from glowplug.kernels.launch import tuned_tables
from glowplug.plugins.collectives.peer_sizes import (
    LIBRARY,
    ONE_SHOT,
    TWO_SHOT,
    TWO_SHOT_BYTES,
    WAYS,
    peer_sizes,
    sum_limits,
)
from glowplug.plugins.collectives.saved_table import save_table
from glowplug.plugins.parallel.ep_moe import PUSHED_ROWS_MAX
from tests.support.tables import forget

CARD = "NVIDIA H200"
H200 = read_sheet("8xh200")
KIB = 1 << 10
TP = {"use": "tensor", "size": 4}
EP = {"use": "ep_moe", "size": 4}
DP = {"use": "dp_attention", "size": 2}
#: microseconds by KiB: one shot is fastest to 64 KiB, two shots to 256
SUMS = {
    4: (2.0, 3.0, 10.0),
    64: (5.0, 6.0, 12.0),
    256: (20.0, 11.0, 13.0),
    1024: (80.0, 40.0, 18.0),
}
#: microseconds by tokens of a rank: push is faster to 64
EXCHANGES = {8: (9.0, 6.0), 64: (12.0, 11.0), 512: (40.0, 60.0)}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's folder and a packaged one, both empty."""
    monkeypatch.setenv(tuned_tables.VARIABLE, str(tmp_path / "own"))
    monkeypatch.setattr(tuned_tables, "FOLDER", tmp_path / "packaged")
    for name in ("own", "packaged"):
        (tmp_path / name).mkdir()
    forget()
    yield
    forget()


def contents(hidden: int, **measured: Any) -> dict[str, Any]:
    ways = (*WAYS.values(), LIBRARY)
    return {
        "measured": {"card": CARD, "ranks": 4, "dtype": "bfloat16", "hidden": hidden, **measured},
        "all_reduce": {str(n * KIB): dict(zip(ways, row)) for n, row in SUMS.items()},
        "expert exchange": {
            str(n): dict(zip(("all_gather", "push"), row)) for n, row in EXCHANGES.items()
        },
    }


def put(folder: Path, found: Any, ranks: int = 4) -> Path:
    path = folder / file_name(CARD, ranks, "bfloat16")
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    forget()
    return path


@pytest.fixture
def plan_of(planned: Any) -> Any:
    def plan(*parallel: dict[str, Any], **more: Any) -> EnginePlan:
        config = {"dtype": "bfloat16", "parallel": list(parallel), **more}
        found: EnginePlan = planned(config, hardware=H200)
        return found

    return plan


def stated(plan: EnginePlan, field: str) -> list[tuple[Any, str]]:
    return [(one.value, one.why) for one in plan.decisions if one.field == field]


def buffers(plan: EnginePlan) -> int:
    return sum(line.bytes for line in plan.budget if line.name == "exchange buffers")


def test_without_a_table_the_defaults_apply(plan_of: Any) -> None:
    ((value, why),) = stated(plan_of(TP), "collectives.all_reduce")
    assert value == "4 ranks: one-shot to 384 KiB, two-shot to 16384 KiB, then NCCL"
    assert why == "no table for NVIDIA H200, 4 ranks, bfloat16: default"
    ((value, why),) = stated(plan_of(TP, EP, DP), "parallel.1.exchange")
    assert value == "all_gather" and "no table for NVIDIA H200, 4 ranks, bfloat16: default" in why


def test_a_table_gives_the_sizes_of_sums(plan_of: Any, tmp_path: Path) -> None:
    before = buffers(plan_of(TP))
    put(tmp_path / "own", contents(64))
    plan = plan_of(TP)
    ((value, why),) = stated(plan, "collectives.all_reduce")
    assert value == "4 ranks: one-shot to 64 KiB, two-shot to 256 KiB, then NCCL"
    assert why == "measured on NVIDIA H200, 4 ranks, bfloat16"
    limits = sum_limits(4, "auto", CARD, "bfloat16")
    sizes = peer_sizes(4, plan.facts.model.hidden_size, plan.sizes.max_step_tokens, limits)
    assert buffers(plan) == sizes.bytes(4) < before
    assert stated(plan_of(TP, dtype="float16"), "collectives.all_reduce")[0][1].startswith("no tab")


def test_the_groups_of_a_layout_have_tables_of_their_own(plan_of: Any, tmp_path: Path) -> None:
    put(tmp_path / "own", contents(64))
    plan = plan_of(TP | {"size": 8}, DP)
    ((value, why),) = stated(plan, "collectives.all_reduce")
    assert value.startswith("4 ranks: one-shot to 64 KiB") and "; 8 ranks: one-shot to 128" in value
    assert "measured on NVIDIA H200, 4 ranks" in why and "no table for NVIDIA H200, 8 ranks" in why


def test_two_ranks_use_one_shot_whatever_was_measured(plan_of: Any, tmp_path: Path) -> None:
    before = plan_of(TP | {"size": 2})
    put(tmp_path / "own", contents(64, ranks=2), ranks=2)
    after = plan_of(TP | {"size": 2})
    assert stated(after, "collectives.all_reduce") == []
    assert buffers(after) == buffers(before)


def test_the_way_that_is_fastest_at_the_largest_size_is_taken_beyond_it(tmp_path: Path) -> None:
    found = contents(64)
    del found["all_reduce"][str(1024 * KIB)]
    put(tmp_path / "own", found)
    assert sum_limits(4, "auto", CARD, "bfloat16")[:2] == (64 * KIB, TWO_SHOT_BYTES)


def test_a_table_without_every_way_of_a_sum_is_not_used(plan_of: Any, tmp_path: Path) -> None:
    found = contents(64)
    for row in found["all_reduce"].values():
        del row[WAYS[TWO_SHOT]]
    put(tmp_path / "own", found)
    ((value, why),) = stated(plan_of(TP), "collectives.all_reduce")
    assert "one-shot to 384 KiB" in value and why.endswith("without sums of every way: default")


def test_a_named_way_has_buffers_of_its_own_and_no_line_of_a_table(plan_of: Any) -> None:
    for way, limits in ((ONE_SHOT, (TWO_SHOT_BYTES, 0)), (TWO_SHOT, (0, TWO_SHOT_BYTES))):
        plan = plan_of(TP, collectives={"use": "peer_memory", "all_reduce": way})
        assert [value for value, _ in stated(plan, "collectives.all_reduce")] == [way]
        found = sum_limits(4, way)
        assert found[:2] == limits
        sizes = peer_sizes(4, plan.facts.model.hidden_size, plan.sizes.max_step_tokens, found)
        assert buffers(plan) == sizes.bytes(4) and (sizes.terms.capacity > 0) == (way == TWO_SHOT)


def test_a_table_gives_the_exchange_of_experts(plan_of: Any, tmp_path: Path) -> None:
    before = plan_of(TP, EP, DP)
    hidden = before.facts.model.hidden_size
    put(tmp_path / "own", contents(hidden // 2))
    plan = plan_of(TP, EP, DP)
    ((value, why),) = stated(plan, "parallel.1.exchange")
    assert value == "push"
    assert why.startswith("measured on NVIDIA H200, 4 ranks, bfloat16: faster up to 32 tokens"), why
    named = plan_of(TP, EP | {"exchange": "push"}, DP)
    most = buffers(named) - buffers(plan_of(TP, EP | {"exchange": "all_gather"}, DP))
    own = buffers(plan) - buffers(plan_of(TP, EP | {"exchange": "all_gather"}, DP))
    assert 0 < own <= most * 32 // PUSHED_ROWS_MAX
    nccl = plan_of(TP, EP, DP, collectives={"use": "nccl"})
    assert stated(nccl, "parallel.1.exchange")[0][0] == "all_gather", "it cannot push"


def test_an_exchange_that_is_slower_for_few_tokens_is_not_chosen(
    plan_of: Any, tmp_path: Path
) -> None:
    found = contents(64)
    found["expert exchange"]["8"] = {"all_gather": 5.0, "push": 6.0}
    put(tmp_path / "own", found)
    ((value, why),) = stated(plan_of(TP, EP, DP), "parallel.1.exchange")
    assert (value, "faster than push for few tokens" in why) == ("all_gather", True)


def falling() -> dict[str, Any]:
    found = contents(64)
    found["all_reduce"][str(256 * KIB)][LIBRARY] = 1.0
    return found


def negative() -> dict[str, Any]:
    found = contents(64)
    found["expert exchange"]["8"]["push"] = -1.0
    return found


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (json.dumps(contents(64))[:200], "is not a table of measurements"),
        ("[]", "is not a table of measurements"),
        (contents(64, card="NVIDIA H100"), "states card 'NVIDIA H100', not 'NVIDIA H200'"),
        (contents(64, ranks=8), "states ranks 8, not 4"),
        (contents(64, dtype="float16"), "states dtype 'float16', not 'bfloat16'"),
        (contents(0), "states no hidden size"),
        (contents(64) | {"all_reduce": {"big": {}}}, "all_reduce of big"),
        (falling(), "has times that fall: all_reduce by nccl of 262144 takes 1 us, of 65536 12 us"),
        (negative(), "no table of exchanges: expert exchange of 8"),
        (contents(64) | {"measured": []}, "it maps nothing to objects"),
        (contents(64) | {"all_reduce": "fast"}, "it maps nothing to objects"),
        (contents(64) | {"expert exchange": {"8": [6.0]}}, "expert exchange of 8"),
        (contents(64) | {"expert exchange": {"8": {"push": None}}}, "expert exchange of 8"),
        (contents(64) | {"all_reduce": {"8": {LIBRARY: 10**400}}}, "all_reduce of 8"),
        (contents(64) | {"all_reduce": {"9" * 5000: {}}}, "all_reduce of 999999999999999999"),
        (contents(True), "states no hidden size"),  # type: ignore[arg-type]
        ('{"a":' * 50_000, "is not a table of measurements: maximum recursion depth"),
    ],
    ids=[
        *("truncated", "list", "card", "ranks", "dtype", "hidden", "size", "falling", "negative"),
        *("measured is a list", "part is a text", "row is a list", "time is null", "time is huge"),
        *("size is huge", "hidden is a truth value", "deep"),
    ],
)
def test_a_bad_table_is_ignored_and_the_plan_says_so(
    found: Any, reason: str, plan_of: Any, tmp_path: Path
) -> None:
    path = put(tmp_path / "own", found)
    ((value, why),) = stated(plan_of(TP), "collectives.all_reduce")
    assert "one-shot to 384 KiB" in value
    assert str(path) in why and reason in why and why.endswith(": default")
    put(tmp_path / "packaged", contents(64))
    ((value, why),) = stated(plan_of(TP), "collectives.all_reduce")
    assert "one-shot to 64 KiB" in value and why.startswith("measured on") and reason in why


def test_the_users_table_comes_before_the_packaged_one(plan_of: Any, tmp_path: Path) -> None:
    put(tmp_path / "packaged", contents(64))
    own = contents(64)
    del own["all_reduce"][str(64 * KIB)]
    put(tmp_path / "own", own)
    assert "one-shot to 4 KiB" in stated(plan_of(TP), "collectives.all_reduce")[0][0]


def test_a_way_is_fastest_up_to_the_first_size_at_which_it_is_not() -> None:
    times = {1: {"a": 1.0, "b": 2.0}, 2: {"a": 3.0, "b": 2.0}, 4: {"a": 3.0, "b": 4.0}}
    assert fastest_up_to(times, "a", ["b"]) == 1
    assert fastest_up_to(times, "b", ["a"]) == 0
    assert fastest_up_to(times, "a", ["b"], above=2) == 4
    assert fastest_up_to(times, "c", ["a"]) == 0


def test_a_measured_record_is_kept_as_a_table(plan_of: Any, tmp_path: Path) -> None:
    def row(operation: str, provider: str, spent: float, **more: Any) -> dict[str, Any]:
        known = {"bytes": 0, "tokens": 0, "ranks": 4, **more}
        return {"operation": operation, "provider": provider, "us": spent, **known}

    ways = (*WAYS.values(), LIBRARY)
    rows = [
        row("all_reduce", way, spent, bytes=n * KIB)
        for n, times in SUMS.items()
        for way, spent in zip(ways, times)
    ]
    for tokens, (gathered, pushed) in EXCHANGES.items():
        rows += [
            row("expert exchange", "peer_memory all_gather", gathered, tokens=tokens),
            row("expert exchange", "peer_memory push", 2 * pushed, tokens=tokens),
            row("expert exchange (fp8_block)", "peer_memory push", pushed, tokens=tokens),
            row("expert exchange", "nccl all_gather", 1.0, tokens=tokens),
        ]
    rows += [row("all_reduce", LIBRARY, 0.1, bytes=4 * KIB, ranks=2), row("all_gather", "x", 1.0)]
    record = {
        "mesh": {"tp": 4},
        "dtype": "bfloat16",
        "hidden": 64,
        "chosen": "peer_memory",
        "gpu": CARD,
        "date": "2026-11-27",
        "rows": rows,
    }
    path = save_table(record)
    assert path == tmp_path / "own" / file_name(CARD, 4, "bfloat16")
    kept = json.loads(path.read_text())
    assert kept["measured"].pop("date") == "2026-11-27" and kept == contents(64)
    ((value, _),) = stated(plan_of(TP), "collectives.all_reduce")
    assert "one-shot to 64 KiB, two-shot to 256 KiB" in value
    assert save_table(record | {"rows": []}) is None
