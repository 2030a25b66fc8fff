"""``glowplug checkpoint random OUT``: a complete model folder with seeded random weights.

It serves tests, benchmarks and plans of models that are too large to download or not yet
downloaded. This module declares the command; ``writer.py``, which needs torch, writes the files.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from glowplug.core.errors import GlowplugError
from glowplug.entrypoints.checkpoints.tokenizer_files import BYTES, NONE
from glowplug.entrypoints.cli.usage import without_command

COMMANDS = {"random": "write a checkpoint of random weights"}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def shapes() -> dict[str, Path]:
    """Return the config.json files of the model shapes that are shipped here, by name."""
    folder = Path(__file__).absolute().parents[2] / "models" / "shapes"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="checkpoint_command", metavar="COMMAND")
    random = commands.add_parser(
        "random",
        help=COMMANDS["random"],
        description="Write a complete model folder with seeded random weights.",
    )
    random.add_argument("out", type=Path, help="folder to write; must be empty or not exist")
    source = random.add_mutually_exclusive_group(required=True)
    source.add_argument("--shape", choices=list(shapes()), help="name of a shipped shape")
    source.add_argument("--config", type=Path, help="config.json, or a folder that contains one")
    random.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights; default: the config's torch_dtype",
    )
    random.add_argument(
        "--quantization",
        choices=("fp8", NONE),
        help="quantization of the weights; default: the config's",
    )
    random.add_argument("--layers", type=int, help="number of layers; default: the config's")
    random.add_argument("--seed", type=int, default=0)
    random.add_argument(
        "--shard-mb", type=int, default=4096, help="maximum size of a file in MiB (default 4096)"
    )
    random.add_argument(
        "--tokenizer",
        default=BYTES,
        metavar="bytes|none|FOLDER",
        help="byte-level tokenizer with a chat template (default), none, or a folder to copy from",
    )


def run(args: argparse.Namespace) -> int:
    """Write a checkpoint of random weights; return 0, or 2 with the reason on standard error."""
    if args.checkpoint_command is None:
        return without_command("glowplug checkpoint", COMMANDS)
    try:
        config = read_config(args)
        from glowplug.entrypoints.checkpoints.writer import write_random

        total = write_random(
            args.out,
            config,
            seed=args.seed,
            shard_bytes=args.shard_mb << 20,
            tokenizer=args.tokenizer,
        )
    except (GlowplugError, OSError) as error:
        print(f"glowplug checkpoint: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {config['architectures'][0]}, {total / 1e9:.3f} GB of weights")
    return 0


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config.json that the options name, with their changes applied.

    Raises:
        GlowplugError: the file or an option is invalid.
    """
    path: Path = shapes()[args.shape] if args.shape else args.config
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise GlowplugError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise GlowplugError(f"{path} names no architecture")
    _check_sizes(args)
    if args.dtype:
        config.pop("dtype", None)
        config["torch_dtype"] = args.dtype
    if args.layers is not None:
        config["num_hidden_layers"] = args.layers
    if args.quantization:
        config.pop("quantization_config", None)
    if args.quantization == "fp8":
        config["quantization_config"] = dict(FP8)
    if args.tokenizer == BYTES:
        config |= {"bos_token_id": 0, "eos_token_id": 1}
    return config


def _check_sizes(args: argparse.Namespace) -> None:
    """Raise GlowplugError if a number among the options is too small."""
    for name, value in (("--layers", args.layers), ("--shard-mb", args.shard_mb)):
        if value is not None and value < 1:
            raise GlowplugError(f"{name} must be at least 1, got {value}")
