"""Plans of DeepSeek-V3 on one host of eight H200 and on two such hosts: graphs, the way tensors are
exchanged, and bytes of each rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glowplug.core.facts.machine import read_sheet

V3 = str(Path(__file__).parents[2] / "models" / "shapes" / "deepseek-v3.json")
GB = 1e9
WHOLE = 671.0  #: GB of V3's weights without the next-token layer
NEXTN = 11.5  #: GB of the next-token layer


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("layout", ["tp", "tp ep", "tp ep dp"])
@pytest.mark.parametrize(("sheet", "ranks"), [("8xh200", 8), ("2x8xh200", 16)])
def test_every_rank_captures_and_fits(
    sheet: str, ranks: int, layout: str, steps: int, planned: Any
) -> None:
    uses = {"tp": "tensor", "ep": "ep_moe", "dp": "dp_attention"}
    config: dict[str, Any] = {
        "model": V3,
        "parallel": [{"use": uses[name], "size": ranks} for name in layout.split()],
    }
    if steps:
        config["speculative"] = {"use": "nextn", "steps": steps}
    hardware = read_sheet(sheet)
    plan = planned(config, hardware=hardware)
    assert plan.choice("graphs").name == "cuda_graph"
    assert plan.hosts == ranks // 8
    assert plan.choice("collectives").name == ("peer_memory" if ranks == 8 else "nccl")
    assert plan.choice("executor").name == ("multiprocess" if ranks == 8 else "torchrun")
    lines = {line.name: line.bytes for line in plan.budget}
    assert sum(lines.values()) <= hardware.devices[0].memory
    assert ("exchange buffers" in lines) == (ranks == 8)
    assert ("draft weights" in lines) == bool(steps)
    assert lines["graphs"] > 0 and lines["kv cache"] > 20 * GB
    _check_weights(lines, ranks, whole_attention="dp" in layout)


def _check_weights(lines: dict[str, int], ranks: int, whole_attention: bool) -> None:
    """Experts are split in every layout; attention is whole with groups of one rank."""
    split = WHOLE / ranks
    found = lines["weights"] / GB
    if whole_attention:
        assert split + 10 < found < split + 20
    else:
        assert split < found < 1.06 * split
    if "draft weights" in lines:
        assert NEXTN / ranks < lines["draft weights"] / GB < NEXTN / ranks + 1


@pytest.mark.parametrize(
    ("sheet", "ranks", "tokens"), [("8xh200", 8, 750e3), ("2x8xh200", 16, 1300e3)]
)
def test_more_ranks_leave_more_memory_to_the_cache(
    sheet: str, ranks: int, tokens: float, planned: Any
) -> None:
    config = {"model": V3, "parallel": [{"use": "tensor", "size": ranks}]}
    sizes = planned(config, hardware=read_sheet(sheet)).sizes
    assert sizes.num_pages * sizes.page_size > tokens
