"""Speed against transformers' generate on the shipped model, in one run on this machine.

Guards against regressions, with room for a noisy two-core machine: the figures themselves, and how far they are from
what is asked (2x, 8x, a tenth), stand in docs/benchmarks with the conditions they were taken under.
"""
from __future__ import annotations

import argparse
import time
from typing import Any

import pytest
import torch

from glowplug.core.request import SamplingParams
from glowplug.entrypoints.bench import compare
from glowplug.entrypoints.llm import LLM


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    compare.configure(parser)
    args = parser.parse_args(["--input-len", "48", "--output-len", "48", "--concurrency", "16", "--repeat", "3",
                              "--reference-requests", "4"])
    return compare.compare(args, {"model": "embedded", "dtype": "float32", "device": "cpu"})


@pytest.mark.timing
@pytest.mark.timeout(900)
def test_one_request_is_faster(measured: dict[str, Any]) -> None:
    assert measured["speedup_batch1"] >= 1.5, measured


@pytest.mark.timing
def test_sixteen_requests_are_eight_times_as_fast(measured: dict[str, Any]) -> None:
    assert measured["speedup_concurrent"] >= 8.0, measured


@pytest.mark.timing
def test_serving_costs_little(measured: dict[str, Any]) -> None:
    assert measured["serving_cost"] <= 0.25, measured


QUESTIONS = ("What is 317 + 425?", "What is the capital of France?", "Count from 3 to 19.", "Tell me about cats.")


@pytest.mark.timing
def test_drafting_one_token_at_batch_one_costs_little() -> None:
    """No more than 15% over no drafts on free text, where few drafts are accepted (1.69 tokens a step).

    On held-out chat ``tests/draft_gains.py`` finds it faster, by less than a shared machine's noise.

    The best CPU time of each answer, in turns in one process with one thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with LLM("embedded", dtype="float32", device="cpu") as plain, \
                LLM("embedded", dtype="float32", device="cpu", speculative={"use": "nextn", "steps": 1}) as drafting:
            best: dict[tuple[int, str], float] = {}
            for _ in range(6):
                for number, question in enumerate(QUESTIONS):
                    for name, llm in (("none", plain), ("nextn", drafting)):
                        best[number, name] = min(best.get((number, name), 99.0), _answer(llm, question))
    finally:
        torch.set_num_threads(threads)
    none, nextn = (sum(best[number, name] for number in range(len(QUESTIONS))) for name in ("none", "nextn"))
    assert nextn <= 1.15 * none, (none, nextn)


def _answer(llm: LLM, question: str) -> float:
    """CPU seconds for 100 tokens."""
    llm.control("flush")
    start = time.process_time()
    llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    return time.process_time() - start
