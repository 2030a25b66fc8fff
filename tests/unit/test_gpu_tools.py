"""The commands that run on a GPU machine: what of them a CPU can tell."""
from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from tests import gpu_logits, gpu_sanitize
from tests.tiny import write_config

LOG = """
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at _norm+0x120
..                                                                       [100%]
2 passed, 1 failed in 3.21s
launched kernels: norm._norm rope._rope
========= ERROR SUMMARY: 3 errors
"""


def test_every_kernel_is_known_to_the_sanitizer() -> None:
    kernels = gpu_sanitize.launchable()
    assert {"norm._norm", "mla_prologue._prologue", "moe_align._place"} <= set(kernels)
    assert not {"dependent.wait", "mla_absorbed_fp8.scaled_product", "mla_prologue._turn"} & set(kernels)


def test_what_the_sanitizer_said_is_read() -> None:
    found = gpu_sanitize.read("test_x.py", "memcheck", LOG, 4.0)
    assert (found.errors, found.passed, found.failed) == (3, 2, 1) and not found.clean
    assert gpu_sanitize.complaints(LOG) == ["Invalid __global__ read of size 4 bytes", "at _norm+0x120"]
    clean = gpu_sanitize.read("test_y.py", "memcheck", LOG.replace("3 errors", "0 errors").replace("1 failed", ""), 1.0)
    assert clean.clean and not gpu_sanitize.read("test_z.py", "initcheck", "killed", 1.0).clean
    report = gpu_sanitize.report([clean], 1.0)
    assert report["clean"] and report["tools"]["memcheck"]["tests"] == 2
    assert "norm._norm" in report["kernels"] and "route._route" in report["kernels_not_launched"]


def test_distances() -> None:
    want = {(0, 1): torch.tensor([1.0, 2.0, 5.0]), (0, 2): torch.tensor([0.0, 3.0, 1.0])}
    same = gpu_logits.distance(want, want)
    assert same.cosine_min == pytest.approx(1.0) and same.kl == 0.0 and same.top1 == 1.0 and same.positions == 2
    other = gpu_logits.distance(want, {**want, (0, 2): torch.tensor([3.0, 0.0, 1.0])})
    assert other.top1 == 0.5 and other.cosine_min < 0.2 and other.max_error == 3.0 and other.kl > 0.5
    with pytest.raises(AssertionError, match="positions"):
        gpu_logits.distance(want, {(0, 1): want[0, 1]})


def test_logits_of_a_small_model(tmp_path: Path) -> None:
    """The reference against itself in bfloat16, on the CPU: every position of every prompt, and the decode steps."""
    folder = write_config(tmp_path, "v3", max_position_embeddings=1024)
    options = argparse.Namespace(device="cpu", only="format: (bfloat16|cache of bfloat16)")
    lines = dict(gpu_logits.compare("v3", str(folder), options))
    json.dumps(lines)
    positions = sum(gpu_logits.LENGTHS) + gpu_logits.STEPS * len(gpu_logits.LENGTHS)
    for way in ("format: bfloat16", "format: cache of bfloat16"):
        line = lines[way]
        assert line["positions"] == positions and line["decode"]["positions"] == gpu_logits.STEPS * len(
            gpu_logits.LENGTHS)
        assert line["cosine_median"] > 0.999 and not gpu_logits.bad(way, line)
        assert way in gpu_logits.shown(way, line)
    assert lines["format: cache of bfloat16"]["max_error"] < lines["format: bfloat16"]["max_error"]
    assert 0.3 < lines["reference"]["deviation_of_logits"] < 3
