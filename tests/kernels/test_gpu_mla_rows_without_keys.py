"""Rows of a padded step may have no keys: every kernel that merges KV splits gives zeros for them
instead of old values.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tests.kernels.test_gpu_mla_decode import SIZES, chosen
from tests.kernels.test_triton_mla_decode import Case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "heads,ring,splits,fp8",
    [
        (16, False, 2, False),
        (16, True, 2, False),
        (16, True, 2, True),
        (16, True, 16, False),
        (128, True, 2, False),
    ],
)
def test_they_are_zeros(heads: int, ring: bool, splits: int, fp8: bool) -> None:
    case = Case([20, 0, 700, 0], heads=heads, page=64, dtype=torch.bfloat16, seed=splits, **SIZES)
    if fp8:
        case.kv = case.kv.to(torch.float8_e4m3fn)
    case.check(replace(chosen(case, ring), splits=splits), 2e-2)
    assert not case.run(replace(chosen(case, ring), splits=splits))[1::2].any()
