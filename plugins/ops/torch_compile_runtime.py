"""Runtime of ``ops.torch_compile``: compiled norms, activation and gates.

The other ops are those of ``ops.torch`` on a CPU and of ``ops.triton`` on CUDA.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from glowplug.core.errors import GlowplugError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Parts, Worker
from glowplug.kernels.elementwise.norm_reference import rms_norm_reference
from glowplug.kernels.launch.sums import sum_of_pairs
from glowplug.kernels.moe import route_reference
from glowplug.plugins.ops.compiled import Compiled
from glowplug.plugins.ops.torch_ops import TorchOpsOptions
from glowplug.plugins.ops.torch_ops_runtime import TorchOps

if TYPE_CHECKING:
    from glowplug.plugins.ops.torch_compile import TorchCompileOptions


class TorchCompileOps:
    """``Ops`` for one rank, compiled by torch.compile for small steps.

    On CUDA the fused gate and the ops that return quantised activations stay Triton kernels.
    """

    def __init__(self, options: TorchCompileOptions, plan: EnginePlan, worker: Worker) -> None:
        keep_programs(options.cache_dir, worker.device)
        base = _base(plan, worker)
        max_tokens = options.max_batch * plan.sizes.width
        self.rms_norm = Compiled(_rms_norm, base.rms_norm, max_tokens)
        self.silu_and_mul = Compiled(_silu_and_mul, base.silu_and_mul, max_tokens)
        self.topk_softmax = Compiled(route_reference.topk_softmax, base.topk_softmax, max_tokens)
        self.topk_sigmoid = Compiled(
            route_reference.topk_sigmoid_reference, base.topk_sigmoid, max_tokens
        )
        self._add = Compiled(_add_rms_norm, base.add_rms_norm, max_tokens, varying=2)
        self._add_pairs = Compiled(
            _add_pairs_rms_norm, _with_pairs(base.add_rms_norm), max_tokens, varying=3
        )
        self.adds_parts = base.adds_parts
        self.rope_table = base.rope_table
        self.rope_at = base.rope_at
        self.rope = base.rope
        self.fused: Mapping[tuple[str, str], Callable[..., Any]] = base.fused
        self.route = base.route
        self.route_and_set_ready = base.route_and_set_ready

    def add_rms_norm(
        self, x: Tensor | Parts, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if isinstance(x, Parts):
            return self._add_pairs(  # type: ignore[no-any-return]
                x.rows.view(*x.ids.shape, residual.shape[1]), x.ids, residual, weight, eps
            )
        return self._add(x, residual, weight, eps)  # type: ignore[no-any-return]


def keep_programs(folder: str | None, device: str) -> None:
    """Set the folders in which inductor and Triton keep compiled programs.

    Inductor reads its folder from the environment only.

    Raises:
        GlowplugError: inductor's folder cannot be written, or not be used on this device.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # NOTE: inductor writes its default, a folder in /tmp, into the environment at the first lookup
    unset = os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir()
    if folder is not None or unset:
        kept = (
            Path.home() / ".cache" / "glowplug" / "inductor"
            if folder is None
            else Path(folder).absolute()
        )
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(kept)
    _check_folder(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), device)
    if device != "cpu":
        from triton import knobs

        # NOTE: otherwise inductor would point Triton to a folder of inductor's, without the kernels
        # that Triton has compiled before
        os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)


def _check_folder(folder: Path, device: str) -> None:
    """Refuse a folder in which programs cannot be kept, before a model is loaded for it.

    NOTE: on a CPU inductor splits its command line for g++ at every space, also in file names.
    """
    if device == "cpu" and " " in str(folder):
        raise GlowplugError(
            f"programs cannot be compiled in {str(folder)!r}: inductor takes no folder with a "
            "space in its name; set ops.cache_dir to another one"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise GlowplugError(
            f"compiled programs cannot be kept in {folder}: {error.strerror}; set ops.cache_dir "
            'to a folder that can be written, or ops.use = "auto"'
        ) from None


def _base(plan: EnginePlan, worker: Worker) -> TorchOps:
    """Return the ops that run where torch.compile is not used: plain torch or Triton."""
    if worker.device == "cpu":
        return TorchOps(TorchOpsOptions(), plan, worker)
    from glowplug.plugins.ops.triton_ops import TritonOpsOptions
    from glowplug.plugins.ops.triton_ops_runtime import TritonOps

    return TritonOps(TritonOpsOptions(), plan, worker)


# ---- compiled functions --------------------------------------------------------------------------


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm_reference(x, weight, eps)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return rms_norm_reference(total, weight, eps), total


def _add_pairs_rms_norm(
    rows: Tensor, ids: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add the K rows of each token, [T, K, N], to the residual, and normalise the sum.

    Rows whose id in ``ids`` [T, K] is negative are left out. The sum is returned too.
    """
    total = (sum_of_pairs(rows, ids) + residual).to(residual.dtype)
    return rms_norm_reference(total, weight, eps), total


def _silu_and_mul(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


def _with_pairs(add_rms_norm: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``add_rms_norm`` as a function with the parameters of ``_add_pairs_rms_norm``."""

    def add(rows: Tensor, ids: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        return add_rms_norm(Parts(rows.view(-1, rows.shape[-1]), ids), residual, weight, eps)

    return add
