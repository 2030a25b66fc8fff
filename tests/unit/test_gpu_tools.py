"""The parts of the GPU machine's commands that can be tested on a CPU."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glowplug.kernels.formats import fp8_triton as fp8_quant
from glowplug.kernels.moe import align as moe_align
from tests.gpu import (
    combinations as gpu_combinations,
    draft_rounds,
    logits as gpu_logits,
    matrix_run,
    sanitize as gpu_sanitize,
)
from tests.support import gate_choices
from tests.support.tiny import write_config

LOG = """
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at _norm+0x120
..                                                                       [100%]
2 passed, 1 failed in 3.21s
launched kernels: elementwise.norm._norm elementwise.rope._rope
left out, no time: test_a[1] test_b
========= ERROR SUMMARY: 3 errors
========= ERROR SUMMARY: 1 errors were not printed. \
Use --print-limit option to adjust the number of printed errors
"""


def test_every_kernel_is_known_to_the_sanitizer() -> None:
    kernels = gpu_sanitize.launchable()
    assert {"elementwise.norm._norm", "mla.prologue._prologue", "moe.align._place"} <= set(kernels)
    assert not {
        "launch.dependent_launch.wait",
        "mla.absorbed_fp8.scaled_product",
        "mla.prologue._turn",
    } & set(kernels)


def test_the_sanitizers_report_is_read() -> None:
    found = gpu_sanitize.read("test_x.py", "memcheck", LOG, 4.0)
    assert (found.errors, found.passed, found.failed) == (3, 2, 1) and not found.clean
    assert gpu_sanitize.complaints(LOG) == [
        "Invalid __global__ read of size 4 bytes",
        "at _norm+0x120",
    ]
    assert found.kernels == ("elementwise.norm._norm", "elementwise.rope._rope")
    assert found.left_out == ("test_a[1]", "test_b")
    right = (
        LOG.partition("========= ERROR")[0].replace("1 failed", "")
        + "========= ERROR SUMMARY: 0 errors\n"
    )
    clean = gpu_sanitize.read("test_y.py", "memcheck", right, 1.0)
    assert clean.clean and not gpu_sanitize.read("test_z.py", "initcheck", "killed", 1.0).clean
    asked = [(Path("test_y.py"), "memcheck", False), (Path("test_y.py"), "memcheck", True)]
    cut = gpu_sanitize.report([clean], 1.0, asked)
    assert not cut["clean"] and cut["not_run"] == ["memcheck test_y.py, captured"]
    report = gpu_sanitize.report([clean], 1.0, asked[:1])
    assert report["clean"] and report["complete"] and report["tools"]["memcheck"]["tests"] == 2
    assert (
        "elementwise.norm._norm" in report["kernels"]
        and "moe.route._route" in report["kernels_not_launched"]
    )


LIBRARIES = """
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void cublasLt::splitKreduce_kernel<(int)32, (int)16, float>\
(cublasLt::Params<T6>, const T4 *)+0xff0
=========     by thread (1,0,0) in block (2,0,0)
========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::<unnamed>::CatArrayBatchedCopy\
<at::native::<unnamed>::Opaque<(int)2>>(T1 *)+0xbc0
========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::<unnamed>::CatArrayBatchedCopy\
<at::native::<unnamed>::Opaque<(int)2>>(T1 *)+0xbc0
2 passed in 3.21s
"""


def test_reports_of_libraries_are_counted_apart() -> None:
    """Errors in our code, and errors without a report, are not attributed to libraries."""
    found = gpu_sanitize.read(
        "test_x.py", "initcheck", LIBRARIES + "========= ERROR SUMMARY: 3 errors\n", 1.0
    )
    assert found.clean and found.errors == 0
    named = {"cublasLt::splitKreduce_kernel": 1, "at::native::CatArrayBatchedCopy": 2}
    assert found.in_libraries == named
    said = gpu_sanitize.report([found], 1.0, [(Path("test_x.py"), "initcheck", False)])
    assert said["tools"]["initcheck"]["in_libraries"] == named and said["clean"]
    more = gpu_sanitize.read(
        "test_x.py", "initcheck", LIBRARIES + "========= ERROR SUMMARY: 9 errors\n", 1.0
    )
    assert more.errors == 6 and not more.clean
    ours = gpu_sanitize.read("test_x.py", "initcheck", LOG, 1.0)
    assert ours.errors == 3 and not ours.in_libraries
    assert gpu_sanitize.read("test_x.py", "initcheck", LIBRARIES, 1.0).errors is None


def test_gemms_on_the_host_agree_with_torch() -> None:
    """GEMMs in half precision give torch's results in any output; other dtypes are left alone."""
    generator = torch.Generator().manual_seed(4)
    x, w = (torch.randn(3, 5, 5, generator=generator).bfloat16() for _ in range(2))
    wanted = torch.bmm(x.float(), w.float())
    with gpu_sanitize.OnHost("cpu"):
        wide = torch.mm(x[0], w[0], out_dtype=torch.float32)
        whole, strided = x @ w, torch.zeros(3, 5, 9, dtype=torch.bfloat16)[..., 2:7]
        torch.bmm(x, w, out=strided)
        added = torch.addmm(x[1], x[0], w[0], alpha=2)
        turned = torch.nn.functional.linear(x[0], w[0])
        other = torch.mm(x[0].double(), w[0].double())
    assert (
        torch.equal(wide, wanted[0])
        and torch.equal(whole, wanted.bfloat16())
        and torch.equal(strided, whole)
    )
    assert torch.equal(
        added, torch.addmm(x[1].float(), x[0].float(), w[0].float(), alpha=2).bfloat16()
    )
    assert (
        torch.equal(turned, (x[0].float() @ w[0].float().t()).bfloat16())
        and other.dtype == torch.float64
    )


class _Item:
    """The attributes of a pytest item that are read."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid, self.function = nodeid, test_distances


def test_every_function_has_a_turn_before_one_has_two() -> None:
    items: list[object] = [
        _Item(f"f.py::{name}[{n}]") for name in ("test_a", "test_b", "test_c") for n in range(4)
    ]
    items.append(_Item("f.py::test_d"))
    gpu_sanitize.Few(1.0, False).pytest_collection_modifyitems(None, items)  # type: ignore[arg-type]
    turns = [item.nodeid.partition("[")[0][-1] for item in items]  # type: ignore[attr-defined]
    assert "".join(turns) == "abcdabc"


def test_tensors_that_are_filled_under_initcheck() -> None:
    """Only tensors of the listed makers are filled, and all of these makers exist; in a test of
    kernels torch fills every tensor.
    """
    for maker in gpu_sanitize.PADDED:
        module, _, name = maker.rpartition(".")
        assert callable(getattr(importlib.import_module(f"glowplug.kernels.{module}"), name))
    empty, given = torch.empty, []
    modes = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with gpu_sanitize.only_padded_filled():
            given += fp8_quant.empty_quantized(3, 128, torch.device("cpu"))
            given += moe_align.align(torch.zeros(1, 1, dtype=torch.int32), 2, 4)
            filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])
    assert torch.isnan(given[0].float()).all() and torch.isnan(given[1]).all() and not filling
    assert given[2].tolist() == [0, 1, 1, 1] and torch.empty is empty
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def _captured() -> object:
    return torch.cuda.CUDAGraph()


def _calls_what_captures() -> object:
    return _captured()


def test_tests_that_capture_graphs_are_recognised() -> None:
    assert gpu_sanitize.captures(_captured) and gpu_sanitize.captures(_calls_what_captures)
    assert not gpu_sanitize.captures(test_distances)
    found = [
        (file.name, tool)
        for file, tool, captured in gpu_sanitize.jobs(["memcheck", "initcheck"], "")
        if captured
    ]
    assert {tool for _, tool in found} == {"memcheck"}
    assert {f"test_gpu_replays{part}.py" for part in ("", "_attention", "_experts")} < {
        file for file, _ in found
    }
    assert not gpu_sanitize.jobs(["initcheck"], "gpu_replays")


def test_a_stopped_run_keeps_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stop in the middle, the file has the cell that ran and the cell that failed, and is
    marked incomplete.
    """
    right = matrix_run.Outcome(1.0, 0.0, 0.0, 1.0)

    def stopped(
        _: object, cells: Sequence[gpu_combinations.Cell], *__: object
    ) -> Iterator[gpu_combinations.Done]:
        yield cells[0], right, ""
        yield cells[1], None, "AssertionError: other tokens"
        raise KeyboardInterrupt

    monkeypatch.setattr(matrix_run, "whole", stopped)
    file = tmp_path / "cells.json"
    monkeypatch.setattr(
        "sys.argv",
        ["cells", "--device", "cpu", "--only", "^llama-torch_mha", "--output", str(file)],
    )
    with pytest.raises(KeyboardInterrupt):
        gpu_combinations.main()
    found = json.loads(file.read_text())
    assert (found["run"], found["failed"], found["complete"]) == (2, 1, False) and found[
        "admitted"
    ] > 2
    assert len(found["not_run"]) == found["admitted"] - 2
    assert list(found["failures"].values()) == ["AssertionError: other tokens"] and not list(
        tmp_path.glob("*.tmp")
    )
    monkeypatch.setattr(
        matrix_run, "whole", lambda _, cells, *__: ((cell, right, "") for cell in cells)
    )
    monkeypatch.setattr(
        "sys.argv",
        [
            "cells",
            "--device",
            "cpu",
            "--only",
            "^llama-torch_mha",
            "--left-by",
            str(file),
            "--output",
            str(tmp_path / "rest.json"),
        ],
    )
    assert gpu_combinations.main() == 0
    rest = json.loads((tmp_path / "rest.json").read_text())
    assert rest["complete"] and rest["run"] == found["admitted"] - 1, (
        "what was not reached, and what had failed"
    )
    assert rest["passed_before"] == 1


def test_distances() -> None:
    want = {(0, 1): torch.tensor([1.0, 2.0, 5.0]), (0, 2): torch.tensor([0.0, 3.0, 1.0])}
    same = gpu_logits.distance(want, want)
    assert (
        same.cosine_min == pytest.approx(1.0)
        and same.kl == 0.0
        and same.top1 == 1.0
        and same.positions == 2
    )
    other = gpu_logits.distance(want, {**want, (0, 2): torch.tensor([3.0, 0.0, 1.0])})
    assert (
        other.top1 == 0.5 and other.cosine_min < 0.2 and other.max_error == 3.0 and other.kl > 0.5
    )
    with pytest.raises(AssertionError, match="positions"):
        gpu_logits.distance(want, {(0, 1): want[0, 1]})


def test_logits_of_a_small_model(tmp_path: Path) -> None:
    """The reference against itself in bfloat16, on the CPU: every position of every prompt, and the
    decode steps.
    """
    folder = write_config(tmp_path, "v3", max_position_embeddings=1024)
    options = argparse.Namespace(device="cpu", only="format: (bfloat16|cache of bfloat16)")
    lines = dict(gpu_logits.compare("v3", str(folder), options))
    json.dumps(lines)
    positions = sum(gpu_logits.LENGTHS) + gpu_logits.STEPS * len(gpu_logits.LENGTHS)
    for way in ("format: bfloat16", "format: cache of bfloat16"):
        line = lines[way]
        assert line["positions"] == positions and line["decode"][
            "positions"
        ] == gpu_logits.STEPS * len(gpu_logits.LENGTHS)
        assert line["cosine_median"] > 0.999 and not gpu_logits.bad(way, line)
        assert way in gpu_logits.shown(way, line)
    assert lines["format: cache of bfloat16"]["max_error"] < lines["format: bfloat16"]["max_error"]
    assert 0.3 < lines["reference"]["deviation_of_logits"] < 3


def _fp8_runs(folder: Path) -> tuple[gpu_logits.Run, gpu_logits.Run, gpu_logits.Run]:
    """Run a reference, one that rounds activations, and one that rounds with the first one's
    experts.
    """
    common = gpu_logits.base(str(folder), "cpu", "random")
    rounds = common | gpu_logits.reference(True, quantization=gpu_logits.DYNAMIC)
    want = gpu_logits.run(common | gpu_logits.reference(True))
    return want, gpu_logits.run(rounds), gpu_logits.run(rounds, want.choices)


def test_flipped_gates_are_distinguished_from_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_logits, "LENGTHS", (1, 40, 64, 130))
    want, rounded, follows = _fp8_runs(
        write_config(tmp_path, "v3_fp8", max_position_embeddings=1024)
    )
    assert want.watched and rounded.watched and follows.watched
    line, forced = gpu_logits.compared(want, rounded), gpu_logits.compared(want, follows)
    assert (
        0 < line["gates"]["flipped"] < line["positions"] // 4 and line["gates"]["unexplained"] == 0
    )
    assert line["gates"]["gap_median"] < line["gates"]["gap_of_all"] / 4
    assert line["same_experts"]["positions"] == line["positions"] - line["gates"]["flipped"]
    assert forced["gates"]["flipped"] == 0
    assert (
        forced["cosine_min"] > 0.99 > line["cosine_min"]
        and line["same_experts"]["cosine_min"] > 0.99
    )
    assert "same experts" in gpu_logits.shown("a way", line | {"plan": "", "seconds": 0})


def test_a_watched_gate_still_sets_the_ready_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``ready`` of ``StartedExperts`` reaches the gate, also outside of steps and where another
    choice is forced.
    """
    told: list[torch.Tensor | None] = []
    sizes = gate_choices.MoeSizes(hidden=2, width=1, experts=3, topk=1, shared=0, sigmoid=False)

    def plain(
        x: torch.Tensor, ready: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        told.append(ready)
        return torch.ones(len(x), 1), torch.zeros(len(x), 1, dtype=torch.int64)

    gate = SimpleNamespace(
        name="gate",
        sizes=sizes,
        forward=plain,
        weight=torch.eye(3, 2),
        bias=None,
        fused_shared=0,
        _route=None,
    )
    monkeypatch.setattr(gate_choices, "gates", lambda model: [gate])
    forced = {
        "gate": gate_choices.Chosen(sizes, [(0, 1)], [torch.tensor([[2]])], [torch.zeros(1, 3)])
    }
    watch = gate_choices.Watch(SimpleNamespace(model=None, _forward=None), forced)  # type: ignore[arg-type]
    x, ready = torch.ones(1, 2), torch.zeros(2, dtype=torch.int32)
    assert gate.forward(x, ready)[1].tolist() == [[0]] and not watch.choices["gate"].keys
    watch._keys = [(0, 1)]
    assert gate.forward(x, ready)[1].tolist() == [[2]] == watch.choices["gate"].experts[0].tolist()
    assert gate.forward(x)[1].tolist() == [[2]]
    assert told[0] is ready and told[1] is ready and told[2] is None


def test_the_gap_to_another_choice() -> None:
    sizes = {"hidden": 1, "width": 1, "experts": 6, "topk": 2, "shared": 0}
    plain = gate_choices.MoeSizes(**sizes, sigmoid=False)
    assert float(
        gate_choices.gap(torch.tensor([[0.1, 0.9, 0.5, 0.45, 0.0, 0.2]]), plain)
    ) == pytest.approx(0.05)
    grouped = gate_choices.MoeSizes(**sizes, sigmoid=True, groups=3, topk_groups=1)
    scores = torch.tensor(
        [[0.9, 0.1, 0.48, 0.48, 0.3, 0.2]]
    )  # sums 1.0, 0.96, 0.5; the first choice has both of the best experts
    assert float(gate_choices.gap(scores, grouped)) == pytest.approx(0.02)


def test_a_choice_that_its_scores_do_not_explain_is_counted() -> None:
    sizes = gate_choices.MoeSizes(hidden=1, width=1, experts=3, topk=1, shared=0, sigmoid=False)

    def chosen(expert: int) -> gate_choices.Choices:
        return {
            "gate": gate_choices.Chosen(
                sizes, [(0, 1)], [torch.tensor([[expert]])], [torch.tensor([[0.6, 0.3, 0.1]])]
            )
        }

    assert gate_choices.flips(chosen(0), chosen(0)) == (
        gate_choices.Flips(1, 0, 0.0, 0.0, pytest.approx(0.3), 0.0, 0),
        set(),
    )
    said, keys = gate_choices.flips(chosen(0), chosen(1))
    assert (said.flipped, said.unexplained, keys) == (1, 1, {(0, 1)})


def test_rounds_of_drafts_are_measured_in_both_ways(tmp_path: Path) -> None:
    """The program runs on a CPU over functions; there, its counts are those of graphs."""
    folder = write_config(tmp_path / "v3", "v3", num_nextn_predict_layers=1, num_hidden_layers=2)
    record = tmp_path / "x.json"
    given = f"--model {folder} --weights random --device cpu --dtype float32 --output {record}"
    sizes = "--steps 2 --batch 1 2 --input-len 5 --output-len 6 --vocabulary 60"
    draft_rounds.main(f"{given} {sizes}".split())
    found = json.loads(record.read_text())
    assert found["command"].startswith("python -m tests.gpu.draft_rounds --model")
    launches = [
        (row["way"], row["batch"], row["launches_of_a_round"], row["launches_of_a_step"])
        for row in found["rows"]
    ]
    one, each = draft_rounds.WAYS
    assert launches == [(one, 1, 1, 3), (one, 2, 1, 3), (each, 1, 3, 5), (each, 2, 3, 5)]
    assert all(row["step_ms"] > 0 for row in found["rows"])
