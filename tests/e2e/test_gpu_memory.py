"""Memory on a GPU: the plan's predictions, the measurements and the use; full caches without
running out.

Run each case in a process of its own (``-k lite``, ``-k deepseek-v3``): code of kernels and
libraries stays on the device until a process ends, so only its first engine's "cuda runtime" is
judged. While other processes use the device, that line and "graphs" are shown and not judged,
because both are differences of the device's free memory.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glowplug import LLM, SamplingParams
from tests.support.layouts import layout
from tests.support.source_tree import ROOT
from tests.support.tiny import VOCAB, write_config

pytestmark = pytest.mark.gpu
Lines = dict[str, dict[str, Any]]  #: bytes (or None) of each named line: planned, measured, served
NEAR = 0.05  #: relative difference of prediction and measurement
SMALL = (
    32 << 20
)  #: absolute tolerance in bytes: the allocator takes 20 MiB at a time, and the driver 2
RESERVE = 0.02  #: of the device, which is left free unless memory.fraction sets another share
PLANNED = (
    "weights",
    "draft weights",
    "rotary tables",
    "activations",
    "logits",
    "sampling state",
    "page states",
    "attention buffers",
)
WORDS = ("measured", "served")
AGAIN = ("activations", "logits")  #: measured, then measured again over the whole pool
EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    logprobs=5,
    max_tokens=8,
    ignore_eos=True,
)
STARTED: list[str] = []  #: engines of this process
#: options of engines whose caches take all the memory that is left
FULL_CACHE: dict[str, Any] = {
    "device": "cuda",
    "weights": {"use": "random"},
    "skip_tokenizer": True,
    "context_length": 32768,
    "scheduler": {"max_running_requests": 512},
}


def long_prompts() -> list[list[int]]:
    """Return 512 random prompts of up to 2,000 tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(2, 1000, int(n)).tolist() for n in rng.integers(1, 2000, 512)]


def shape(folder: Path, name: str, **changes: Any) -> Path:
    """Write a published shape with a few of its layers."""
    config = json.loads((ROOT / "models" / "shapes" / f"{name}.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def processes() -> int:
    """Return the number of processes that use the device; -1 where it cannot be found."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
            text=True,
            capture_output=True,
            timeout=60,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return -1
    return len(found.split())


def near(one: int | None, other: int | None) -> bool:
    """Return whether two sizes agree; None stands for a missing line, as of page states without
    drafts.
    """
    one, other = one or 0, other or 0
    return abs(one - other) <= max(NEAR * max(one, other), SMALL)


def lines_off(memory: Lines, kv_bytes: int, alone: bool, first: bool) -> Lines:
    """Return the named lines that differ from the plan, or in service from the measurement, by kind
    of fault.

    With ``first``, no other engine has been in this process: memory that the driver and libraries
    took for an earlier one is not taken again.
    """
    off = {
        line: memory[line]
        for line in PLANNED
        if line in memory and not near(memory[line]["planned"], memory[line]["measured"])
    }
    off |= {
        f"{line}, again": memory[line]
        for line in AGAIN
        if not near(*(memory[line][w] for w in WORDS))
    }
    if not near(kv_bytes, memory["kv cache"]["measured"]):
        off["kv cache"] = memory["kv cache"]
    if alone and first:
        if "graphs" in memory and not near(
            memory["graphs"]["planned"], memory["graphs"].get("served")
        ):
            off["graphs"] = memory["graphs"]
        off |= {
            f"cuda runtime, {word}": memory["cuda runtime"]
            for word in WORDS
            if not near(memory["cuda runtime"]["planned"], memory["cuda runtime"][word])
        }
    return off


def step_as_measured(memory: Lines) -> bool:
    """Return whether no step in service took more than the largest measured one."""
    step = memory["step"]
    return bool(step["served"] <= step["measured"] * (1 + NEAR) + SMALL)


def given_back() -> tuple[int, int]:
    """Return how often this process's allocator gave memory back before an allocation, and how
    often an allocation failed even so.
    """
    found = torch.cuda.memory_stats() if torch.cuda.is_initialized() else {}
    return int(found.get("num_alloc_retries", 0)), int(found.get("num_ooms", 0))


def show(name: str, memory: Lines) -> None:
    for line, found in memory.items():
        cells = " ".join(
            f"{word} {(found.get(word) or 0) / 2**20:10.1f}"
            for word in ("planned", "measured", "served")
        )
        print(f"{name:12} {line:14} {cells} MiB")


def checked(name: str, llm: LLM, alone: bool, share: float, before: tuple[int, int]) -> None:
    """Check that every named line is as planned, that service repeats the measurements, and that
    memory never ran out.

    With expandable segments the device's ``share`` is kept too, and no step waits for memory to be
    given back; blocks of fixed sizes leave more unused the more token counts steps have had.
    ``before`` is the result of ``given_back`` before the engine.
    """
    info = llm.control("info")
    memory, used = info["memory"], llm.control("memory")["device_used"]
    retries, failures = (now - then for now, then in zip(given_back(), before))
    alone = alone and processes() in (-1, 1)
    STARTED.append(name)
    show(name, memory)
    seconds = {phase: round(taken, 2) for phase, taken in info["startup_seconds"].items()}
    total = torch.cuda.mem_get_info()[1]
    print(
        name,
        info["max_total_num_tokens"],
        "tokens",
        seconds,
        "alone" if alone else "not alone",
        f"used {used / 2**20:.0f} of {total * share / 2**20:.0f} MiB, the allocator gave back",
        retries,
        "times",
    )
    off = lines_off(memory, info["kv_bytes"], alone, STARTED == [name])
    assert not off, off
    assert not failures, "out of memory in a step"
    assert step_as_measured(memory), memory["step"]
    if llm.plan.expandable_segments:
        assert not retries, "the allocator had to give memory back in a step"
        assert not alone or used <= total * share + SMALL


@pytest.mark.parametrize(
    ("name", "steps"), [("v2", 0), ("v3", 0), ("v3", 2), ("v3_fp8", 0), ("llama", 0)]
)
def test_lines_of_tiny_models(name: str, steps: int, tmp_path: Path) -> None:
    changes = {"num_nextn_predict_layers": 1} if steps else {}
    config: dict[str, Any] = (
        {"speculative": {"use": "nextn", "adaptive": False, "steps": steps}} if steps else {}
    )
    folder, alone = write_config(tmp_path, name, **changes), processes() <= bool(STARTED)
    before = given_back()
    with LLM(
        model=str(folder),
        device="cuda",
        weights={"use": "random"},
        skip_tokenizer=True,
        dtype="bfloat16",
        memory={"fraction": 0.5},
        **config,
    ) as llm:
        rng = np.random.default_rng(0)
        llm.generate([rng.integers(2, VOCAB, 50).tolist() for _ in range(300)], EVERYTHING)
        checked(f"{name}+{steps}", llm, alone, 0.5, before)
    assert torch.cuda.memory_reserved() <= (2 + len(STARTED)) * SMALL, (
        "an engine's memory is freed with it"
    )


@pytest.mark.parametrize(("name", "layers"), [("deepseek-v2-lite", 4), ("deepseek-v3", 5)])
def test_lines_of_published_shapes_with_a_full_cache(
    name: str, layers: int, tmp_path: Path
) -> None:
    """512 requests run over a pool of all remaining memory: no error, and no step beyond the
    measurement.
    """
    folder, alone = (
        shape(tmp_path, name, num_hidden_layers=layers, num_nextn_predict_layers=0),
        processes() <= 0,
    )
    before = given_back()
    with LLM(
        model=str(folder),
        **FULL_CACHE,
    ) as llm:
        done = llm.generate(long_prompts(), EVERYTHING)
        short = [
            (i, c.finish_reason, c.error, len(c.prompt_token_ids), c.token_ids)
            for i, c in enumerate(done)
            if len(c.token_ids) != EVERYTHING.max_tokens
        ]
        assert not short, (len(short), short[:4])
        checked(name, llm, alone, 1 - RESERVE, before)
        free, total = torch.cuda.mem_get_info()
        kept = llm.control("info")["memory"]["step"]["measured"] + RESERVE * total
        assert not alone or free <= 1.1 * kept + (4 << 30), "the pool takes all remaining memory"


@pytest.mark.parametrize(
    ("name", "layers", "groups"),
    [("deepseek-v2-lite", 27, 0), ("deepseek-v3", 5, 0), ("deepseek-v3", 5, 2)],
)
def test_lines_of_two_ranks_with_a_full_cache(
    name: str, layers: int, groups: int, tmp_path: Path
) -> None:
    """512 requests run over the pools of two GPUs, with tensor parallelism or with two groups that
    share the experts. Every rank is a new process, whose lines are all judged.
    """
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    folder = shape(tmp_path, name, num_hidden_layers=layers, num_nextn_predict_layers=0)
    alone = processes() <= 0
    with LLM(
        model=str(folder),
        **FULL_CACHE,
        parallel=layout(2, groups, groups),
    ) as llm:
        done = llm.generate(long_prompts(), EVERYTHING)
        assert {len(one.token_ids) for one in done} == {EVERYTHING.max_tokens}
        alone = alone and processes() in (-1, 2)
        off: dict[str, Lines] = {}
        for rank, info in enumerate(llm.control("info")["ranks"]):
            memory, title = info["memory"], f"{name} {groups or 1} groups, rank {rank}"
            show(title, memory)
            print(title, info["max_total_num_tokens"], "tokens", "alone" if alone else "not alone")
            if found := lines_off(memory, info["kv_bytes"], alone, True):
                off[title] = found
            if not step_as_measured(memory):
                off[f"{title}, step"] = {"step": memory["step"]}
    assert not off, off


def test_a_pool_that_does_not_fit_is_refused_before_the_port_opens(tmp_path: Path) -> None:
    """The plan finds room in the engine's share of the device, but another process has taken all of
    it meanwhile.
    """
    from glowplug.core.errors import GlowplugError

    share = 0.03
    other = torch.empty(int(share * torch.cuda.mem_get_info()[1]), dtype=torch.uint8, device="cuda")
    with pytest.raises(
        GlowplugError, match=r"0 B of .* are left for the KV cache, which needs .*measured against"
    ):
        LLM(
            model=str(write_config(tmp_path, "v3")),
            device="cuda",
            weights={"use": "random"},
            skip_tokenizer=True,
            dtype="bfloat16",
            memory={"fraction": share},
        )
    assert other.is_cuda
