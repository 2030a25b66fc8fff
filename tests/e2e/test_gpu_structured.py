"""Structured output on one GPU: answers follow their schemas, and masks travel beside the pass."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from glowplug import LLM, SamplingParams
from glowplug.core.step.mask_memory import MaskBuffer
from glowplug.kernels.sampling import reference
from tests.e2e.structured import QUESTION, run
from tests.e2e.structured_record import DRAFTS

pytestmark = pytest.mark.gpu
WORDS = 4
ROWS = 5
HALF_A_SECOND = 1_000_000_000  #: cycles of the device, about
GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {"use": "eager"},
    "captured": {"use": "cuda_graph", "batch_sizes": [1, 2, 4, 8]},
}


@pytest.mark.parametrize("graphs", list(GRAPHS))
@pytest.mark.parametrize("drafts", list(DRAFTS))
def test_every_finished_answer_follows_its_schema(drafts: str, graphs: str) -> None:
    config: dict[str, Any] = {
        "device": "cuda",
        "context_length": 1024,
        "memory": {"kv_tokens": 8192},
        "scheduler": {"max_running_requests": 8},
        "graphs": GRAPHS[graphs],
        **DRAFTS[drafts],
    }
    with LLM("embedded", **config) as llm:
        whole = run(llm, range(12), streamed=False, thinking=False)
        thought = run(llm, range(4), streamed=True, thinking=True)
        free = SamplingParams(temperature=0.0, max_tokens=12)
        word = SamplingParams(regex="[ab]{3}c{2,4}", max_tokens=40, seed=5)
        alone = llm.chat(QUESTION, free)[0].text
        mixed = llm.chat([QUESTION] * 2, [free, word], enable_thinking=False)
        assert llm.stats.masked_steps > 0
        assert llm.control("check")
    for found in (whole, thought):
        assert found.wrong == [] and found.finished > 0
    assert mixed[1].finish_reason == "stop" and alone


def buffers() -> list[MaskBuffer]:
    device = torch.device("cuda")
    side = torch.cuda.Stream(device)
    return [MaskBuffer(WORDS, device, side) for _ in range(2)]


def fill(buffer: MaskBuffer, number: int) -> Tensor:
    """Fill the masks of a step, and return the tokens that stay allowed, bool [ROWS, V]."""
    places, masks = buffer.take(ROWS)
    places[:] = np.arange(ROWS)
    masks[:] = np.random.default_rng(number).integers(-(2**31), 2**31, (ROWS, WORDS))
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(bits == 1)


def test_masks_of_steps_in_flight_do_not_mix() -> None:
    """The device is busy, so that the copies and the pass of several steps are enqueued at once."""
    pair = buffers()
    results = []
    for number in range(6):
        pair.reverse()
        logits = torch.zeros(ROWS, 32 * WORDS, device="cuda")
        torch.cuda._sleep(HALF_A_SECOND // 20)  # type: ignore[no-untyped-call]
        logits += 1  # the pass; a mask that is applied too early would be overwritten
        pair[0].passed()
        allowed = fill(pair[0], number)

        def forbid(places: Tensor, masks: Tensor, logits: Tensor = logits) -> None:
            reference.forbid(logits, places, masks)

        pair[0].apply(forbid)
        results.append((logits, allowed))
    for logits, allowed in results:
        assert torch.equal(logits.cpu() == 1, allowed)
        assert torch.isneginf(logits.cpu()[~allowed]).all()


def test_the_wait_of_the_device_is_seen_and_measured() -> None:
    first, second = buffers()
    for buffer in (first, second):  # allocates
        fill(buffer, 0)
        buffer.passed()
        buffer.apply(lambda places, masks: None)
    torch.cuda.synchronize()
    fill(first, 1)
    torch.cuda._sleep(HALF_A_SECOND)  # type: ignore[no-untyped-call]
    first.passed()
    assert not first.late()
    first.apply(lambda places, masks: None)
    torch.cuda.synchronize()
    early = first.waited()
    fill(second, 2)
    second.passed()
    time.sleep(0.05)
    assert second.late()
    second.apply(lambda places, masks: None)
    assert second.waited() > 0.04 > early


def test_applying_masks_does_not_synchronise() -> None:
    pair = buffers()
    logits = torch.zeros(ROWS, 32 * WORDS, device="cuda")

    def step(number: int) -> None:
        pair.reverse()
        pair[0].passed()
        fill(pair[0], number)
        pair[0].late()
        pair[0].apply(lambda places, masks: logits.masked_fill_(masks[:, :1] == 0, 0.0))

    for number in range(2):
        step(number)  # allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(4):
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
