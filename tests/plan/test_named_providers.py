"""A named GEMM provider that is not installed: the plan reports it once, and each of its fixes
leads to a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from glowplug.core.errors import PlanRefused
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.testing.harness.fakes import write_model
from tests.plan.test_bad_input import A100, H200, LIBRARIES, LITE, make  # noqa: F401

NO_TRITON = {**LIBRARIES, "triton": ""}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
WIDE = {
    "block_fp8": {"activations": "none"},
    "w8a8_int8": {"activations": "none"},
    "awq": {"dequantize": True},
}
NAMED = [
    ("block_fp8", "gemm", "triton"),
    ("block_fp8", "experts", "triton"),
    ("w8a8_int8", "gemm", "triton"),
    ("awq", "gemm", "triton"),
    ("awq", "gemm", "cublas"),
]


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A function from (scheme, its options) to a configuration with a model that the scheme
    reads.
    """

    def config(scheme: str, **options: Any) -> dict[str, Any]:
        stated = {"quantization_config": AWQ} if scheme == "awq" else {}
        model = write_model(tmp_path / scheme, {**msgspec.json.decode(LITE.read_bytes()), **stated})
        return {"model": str(model), "quantization": {"use": scheme, **options}}

    return config


def refused(make: Callable[..., EnginePlan], *given: Any) -> list[Any]:  # noqa: F811
    with pytest.raises(PlanRefused) as caught:
        make(*given)
    return list(caught.value.refusals)


@pytest.mark.parametrize(("scheme", "option", "value"), NAMED)
def test_a_missing_triton_is_reported_once(
    make: Callable[..., EnginePlan],  # noqa: F811
    asked: Callable[..., dict[str, Any]],
    scheme: str,
    option: str,
    value: str,
) -> None:
    (refusal,) = refused(make, asked(scheme, **{option: value}), H200, NO_TRITON)
    assert refusal.field == "quantization.use" and 'pip install "triton>=3.5"' in refusal.fix
    assert f'and quantization.{option} = "auto"' in refusal.fix
    assert (
        make(asked(scheme, **{option: value}), H200, LIBRARIES).choice("quantization").name
        == scheme
    )
    followed = asked(scheme, **WIDE[scheme], **{option: "auto"})
    assert make(followed, H200, NO_TRITON).choice("quantization").name == scheme


@pytest.mark.parametrize(("scheme", "option", "value"), NAMED)
def test_a_missing_triton_is_reported_once_for_unquantised_weights(
    make: Callable[..., EnginePlan],  # noqa: F811
    asked: Callable[..., dict[str, Any]],
    scheme: str,
    option: str,
    value: str,
) -> None:
    (refusal,) = refused(make, asked(scheme, **WIDE[scheme], **{option: value}), H200, NO_TRITON)
    assert (
        refusal.field == f"quantization.{option}"
        and f'quantization.{option} = "auto"' in refusal.fix
    )
    assert (
        make(asked(scheme, **WIDE[scheme]), H200, NO_TRITON).choice("quantization").name == scheme
    )


def test_a_card_that_a_scheme_is_not_for_is_the_reason_whatever_is_named(
    make: Callable[..., EnginePlan],  # noqa: F811
    asked: Callable[..., dict[str, Any]],
) -> None:
    """Installing a library would not help there."""
    without = {**LIBRARIES, "sgl-deep-gemm": ""}
    (refusal,) = refused(make, asked("block_fp8", experts="deep_gemm_masked"), A100, without)
    assert refusal.field == "quantization.use" and "SM80" in refusal.reason
    followed = asked("block_fp8", activations="none", experts="auto")
    assert 'and quantization.experts = "auto"' in refusal.fix and make(followed, A100, without)
