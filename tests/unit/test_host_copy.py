"""Copies of results to the host: buffers take turns and grow, and each copy keeps its own
values.
"""

from __future__ import annotations

import time

import pytest
import torch

from glowplug.core.step.to_host import BUFFERS, Copy, HostCopier

pytest.importorskip("triton")
from glowplug.kernels.launch.host_copy import copy_small


def begin(copier: HostCopier, tensors: list[torch.Tensor]) -> Copy:
    copier.mark()
    return copier.begin(tensors)


@pytest.fixture(params=["engine", "kernel"])
def copier(request: pytest.FixtureRequest) -> HostCopier:
    return HostCopier(copy_small if request.param == "kernel" else None)


@pytest.mark.gpu
def test_copies_keep_their_values_while_others_are_under_way(copier: HostCopier) -> None:
    for size in (1, 5, 300):
        sent = [
            [
                torch.full((size, 2), turn, device="cuda"),
                torch.arange(size, device="cuda") % 2 == turn % 2,
                torch.rand(0, 3, device="cuda"),
            ]
            for turn in range(BUFFERS)
        ]
        copies = [begin(copier, tensors) for tensors in sent]
        for tensors in sent:
            tensors[0].zero_()  # after the copy
        for turn, copy in enumerate(copies):
            number, flag, none = copy.wait()
            assert number.shape == (size, 2) and (number == turn).all()
            assert flag.tolist() == [i % 2 == turn % 2 for i in range(size)] and none.shape == (
                0,
                3,
            )


@pytest.mark.gpu
def test_beginning_does_not_wait_for_the_device(copier: HostCopier) -> None:
    tensor = torch.ones(4, device="cuda")
    for _ in range(BUFFERS):
        begin(copier, [tensor]).wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy = begin(copier, [tensor])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert copy.wait()[0].tolist() == [1, 1, 1, 1]


@pytest.mark.gpu
@pytest.mark.timing
def test_the_device_says_how_long_it_stood_still(copier: HostCopier) -> None:
    tensor = torch.rand(4096, 4096, device="cuda")
    assert begin(copier, [tensor[:1]]).waited() == 0.0
    waits = []
    for pause in (0.0, 0.02, 0.0):
        before = begin(copier, [tensor[:1]])
        if pause:
            before.wait()
            time.sleep(pause)
        copier.mark()
        for _ in range(20):
            tensor = tensor @ tensor / 4096
        copy = copier.begin([tensor[:1]])
        before.wait()
        copy.wait()
        waits.append(copy.waited())
    assert waits[1] > 0.019 and waits[0] < 0.005 and waits[2] < 0.005, waits
