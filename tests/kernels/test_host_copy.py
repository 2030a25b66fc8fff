"""Copies of small arrays by a kernel, in the interpreter or on a GPU with pinned memory: whole and
strided arrays of odd sizes, and those that the copy engine takes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from glowplug.kernels.launch import host_copy
from tests.support import uninterpreted

GPU = torch.cuda.is_available()
SCRIPT = """
from tests.support.compiled import build
from glowplug.kernels.launch import host_copy
build(host_copy._copy, dict(source="*u8", target="*u8"), dict(BLOCK=host_copy.BLOCK), num_warps=4)
"""


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def on_both_sides(given: Tensor, copied: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return (source, target) of both directions; without a GPU, both are on the host."""
    if not GPU:
        return [(given, copied)]
    return [(given.pin_memory(), copied.cuda()), (given.cuda(), copied.pin_memory())]


@pytest.mark.parametrize("size", [1, 3, 4, 13, 4 * host_copy.BLOCK + 6, host_copy.BYTES_MAX])
def test_a_copy_of_bytes_ends_where_the_array_ends(size: int) -> None:
    memory = torch.full((size + 16,), 7, dtype=torch.uint8)
    for source, target in on_both_sides(random_bytes(size), memory):
        host_copy.copy_by_kernel(source, target[:size])
        torch.cuda.synchronize() if GPU else None
        assert torch.equal(target[:size].cpu(), source.cpu())
        assert (target[size:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(), (5,), (7, 3), (0, 3)])
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = torch.randint(0, 2, shape).to(dtype)
    for source, target in on_both_sides(given, torch.zeros(shape, dtype=dtype)):
        host_copy.copy_by_kernel(source, target)
        torch.cuda.synchronize() if GPU else None
        assert torch.equal(target.cpu(), given)


def test_rows_of_a_wider_table_are_copied_and_others_kept() -> None:
    table = torch.full((9, 40), -1, dtype=torch.int32)
    given = torch.randint(0, 1000, (6, 17), dtype=torch.int32)
    for source, target in on_both_sides(given, table):
        host_copy.copy_by_kernel(source, target[:6, :17])
        torch.cuda.synchronize() if GPU else None
        assert torch.equal(target[:6, :17].cpu(), given)
        assert (target[6:] == -1).all() and (target[:, 17:] == -1).all()


@pytest.mark.parametrize(
    ("large", "start", "reached"),
    [(False, 0, True), (True, 0, True), (False, 1, True), (False, 0, False)],
    ids=["few bytes", "many bytes", "within a word", "host memory out of reach"],
)
def test_the_copy_engine_takes_what_the_kernel_cannot(
    monkeypatch: pytest.MonkeyPatch, large: bool, start: int, reached: bool
) -> None:
    by_kernel: list[int] = []
    monkeypatch.setattr(host_copy, "_reaches_host_memory", lambda device: reached)
    monkeypatch.setattr(host_copy, "copy_by_kernel", lambda *parts: by_kernel.append(1))
    source = random_bytes(host_copy.BYTES_MAX + large + start)[start:]
    target = torch.zeros_like(source)
    host_copy.copy_small(source, target)
    assert bool(by_kernel) == (not large and start == 0 and reached)
    assert by_kernel or torch.equal(source, target)


@pytest.mark.gpu
def test_kernels_reach_pinned_memory() -> None:
    assert host_copy._reaches_host_memory(torch.device("cuda"))


def test_the_kernel_compiles_for_hopper() -> None:
    assert uninterpreted.printed("-c", SCRIPT).split() == ["_copy"]
