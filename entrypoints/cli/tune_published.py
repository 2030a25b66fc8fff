"""Options of SGLang's tuning scripts, for ``glowplug tune``.

``tuning_fused_moe_triton.py`` and ``tuning_block_wise_fp8.py`` are the tuners "fused_moe_triton"
and "block_wise_fp8", which stand for this engine's tuners. Their options are translated into
options of this command and of the engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glowplug.core.plugin.registry import PluginSet
from glowplug.entrypoints.cli.flags.engine_table import DTYPES
from glowplug.entrypoints.cli.flags.flag import GivenFlag
from glowplug.entrypoints.cli.flags.table import FLAGS

MOE_SCRIPT = "fused_moe_triton"  #: name of the script for routed experts
GEMM_SCRIPT = "block_wise_fp8"  #: name of the script for linear layers
#: script -> the tuner that does its work on block FP8
FP8_TUNERS = {MOE_SCRIPT: "fp8-moe", GEMM_SCRIPT: "fp8-gemm"}
#: tuner of routed experts -> the one for weights in the compute dtype
DENSE_TUNERS = {MOE_SCRIPT: "moe"}
BLOCK = 128  #: rows and columns of a weight block, for which kernels are written
#: value of the scripts' ``--dtype`` for weights and activations in FP8
FP8_WEIGHTS = "fp8_w8a8"
#: other values of ``--dtype`` that name formats of weights
OTHER_WEIGHTS = frozenset({"int8_w8a8", "int8_w8a16", "int4_w4a16"})
#: model and ranks of the script for linear layers, whose shapes are those of DeepSeek-V3
GEMM_MODEL = Path(__file__).parents[2] / "models" / "shapes" / "deepseek-v3.json"
GEMM_RANKS = 8


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the scripts that neither this command nor the engine has."""
    group = parser.add_argument_group(
        "options of SGLang's tuning scripts", "for the tuners fused_moe_triton and block_wise_fp8"
    )
    group.add_argument("--tune", action="store_true", help="measure, which is the default")
    group.add_argument(
        "--out-dtype", choices=("float32", *DTYPES, "float16", "bfloat16"), help="compute dtype"
    )
    group.add_argument(
        "--input-type", choices=("fp8", "int8"), help="format of weights and activations: fp8"
    )
    for name in ("--block-n", "--block-k"):
        group.add_argument(name, type=int, help=f"size of a weight block: {BLOCK}")


def given_options(args: argparse.Namespace) -> list[str]:
    """Return the options of the scripts that are set, besides ``--dtype``."""
    given = {
        "--tune": args.tune,
        "--out-dtype": args.out_dtype,
        "--input-type": args.input_type,
        "--block-n": args.block_n,
        "--block-k": args.block_k,
    }
    return [name for name, value in given.items() if value]


def translate(args: argparse.Namespace) -> None:
    """Replace the options of the scripts in ``args`` by those of this command and of the engine.

    Raises:
        ValueError: an option needs kernels or tables that this engine does not have.
    """
    if args.tune and args.only_list:
        raise ValueError("--tune and --list contradict each other: write one of them")
    if args.tuner == GEMM_SCRIPT and not _given(args, "model"):
        _set(args, "--model", str(GEMM_MODEL))
        if not _given(args, "parallel[tensor].size"):
            _set(args, "--tp-size", GEMM_RANKS)
    weights = _take_weight_format(args)
    _refuse_formats(args, weights)
    if args.out_dtype:
        _set(args, "--dtype", args.out_dtype)
    if weights == FP8_WEIGHTS or args.tuner == GEMM_SCRIPT:
        args.tuner = FP8_TUNERS.get(_script(args.tuner), args.tuner)
        if not _given(args, "quantization.use"):
            _set(args, "--quantization", "fp8")


def choose_tuner(args: argparse.Namespace, config: Mapping[str, Any], plugins: PluginSet) -> None:
    """Replace a script's name in ``args`` by a tuner, and its batch sizes by rows.

    The tuner is that of block FP8 if the weights are, or become, FP8.

    Raises:
        FactsError: the model cannot be read.
    """
    args.rows += args.batch_size or []
    args.batch_size = None
    if args.tuner not in FP8_TUNERS:
        return
    chosen = config.get("quantization", {}).get("use", "auto")
    stored = plugins.read_model(str(config.get("model", "embedded"))).facts.quant_method
    dense = chosen in ("auto", "none") and stored == "none" and args.tuner in DENSE_TUNERS
    args.tuner = (DENSE_TUNERS if dense else FP8_TUNERS)[args.tuner]


def _script(tuner: str | None) -> str:
    """Return the script whose work a tuner does; "" if none."""
    if tuner in FP8_TUNERS:
        return tuner
    return MOE_SCRIPT if tuner in DENSE_TUNERS.values() else ""


def _take_weight_format(args: argparse.Namespace) -> str:
    """Remove a format of weights that ``--dtype`` names from the engine's flags, and return it.

    The result is "" if ``--dtype`` is absent or names a compute dtype.
    """
    flags = list(getattr(args, "engine_flags", None) or ())
    taken = [
        one
        for one in flags
        if one.flag.path == "dtype" and one.value in {FP8_WEIGHTS, *OTHER_WEIGHTS}
    ]
    args.engine_flags = [one for one in flags if one not in taken]
    return str(taken[0].value) if taken else ""


def _refuse_formats(args: argparse.Namespace, weights: str) -> None:
    """Raise ValueError for formats and blocks for which this engine has no kernels to tune."""
    if weights in OTHER_WEIGHTS:
        raise ValueError(
            f"--dtype {weights}: routed experts in this format have no tables: use --dtype "
            f"{FP8_WEIGHTS}, or leave it out for weights in the compute dtype"
        )
    if args.input_type == "int8":
        raise ValueError(
            "--input-type int8: int8 weights have a scale for each row here, not for blocks: use "
            "glowplug tune int8-gemm"
        )
    for name in ("block_n", "block_k"):
        size = getattr(args, name)
        if size not in (None, BLOCK):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} {size}: blocks have {BLOCK} rows and columns: leave it out")


def _given(args: argparse.Namespace, path: str) -> bool:
    """Return whether a flag for the configuration field ``path`` is given."""
    return any(one.flag.path == path for one in getattr(args, "engine_flags", None) or ())


def _set(args: argparse.Namespace, name: str, value: Any) -> None:
    """Add an engine flag to ``args``, as if it were on the command line."""
    flag = next(flag for flag in FLAGS if name in flag.names)
    args.engine_flags = [*getattr(args, "engine_flags", ()), GivenFlag(flag, name, value)]
