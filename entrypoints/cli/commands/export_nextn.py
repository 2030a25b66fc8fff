"""``glowplug export-nextn``: write a checkpoint's next-token layer to a folder of its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from glowplug.core.errors import FactsError, GlowplugError
from glowplug.core.facts.model_folder import locate_model, read_folder
from glowplug.entrypoints.checkpoints.nextn_export import export


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        "--model-path",
        "--input-dir",
        required=True,
        dest="model",
        metavar="FOLDER",
        help='checkpoint with a next-token layer: folder, downloaded hub id, or "embedded"',
    )
    parser.add_argument(
        "--output",
        "--output-dir",
        required=True,
        type=Path,
        dest="output",
        metavar="FOLDER",
        help="folder to write; must be empty or not exist",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing folder")


def run(args: argparse.Namespace) -> int:
    """Export the next-token layer; return 0, or 2 with the reason and the fix on standard error."""
    try:
        folder = Path(locate_model(args.model))
        facts = read_folder(folder) if folder.is_dir() else None
        if facts is None:
            raise FactsError(
                f"{folder} is not a model folder",
                "give a folder with config.json and safetensors files",
            )
        count, size = export(facts, args.output, force=args.force)
    except (GlowplugError, OSError) as error:
        fix = getattr(error, "fix", "")
        print(
            f"glowplug export-nextn: {error}" + (f"\n    fix: {fix}" if fix else ""),
            file=sys.stderr,
        )
        return 2
    print(
        f"{args.output}: {count} tensors, {size / 1e9:.3f} GB; to draft with it: "
        f"--speculative-algorithm NEXTN "
        f"--speculative-draft-model-path {args.output}"
    )
    return 0
