"""``glowplug download``: a model from a hub into the local cache, for ``--model ID``.

The library ``huggingface_hub`` downloads. Its own variables count: HF_ENDPOINT for the address of
the hub, HF_TOKEN for models behind a login, HF_HOME and HF_HUB_CACHE for the cache.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from glowplug.core.errors import PlanRefused, Refusal
from glowplug.core.facts.hub_cache import HUB_ID, missing_files
from glowplug.core.facts.machine import installed
from glowplug.entrypoints.cli.exit_codes import FAILED, OK

PACKAGE = "huggingface-hub"
#: files that the engine reads; code and pickled weights are never read
PATTERNS = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "LICENSE*",
    "README.md",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="ID", help="id of the model, such as ORG/NAME")
    parser.add_argument("--revision", help="branch, tag or commit; default: main")
    parser.add_argument(
        "--include",
        action="append",
        metavar="PATTERN",
        help="files to download, in place of weights, configuration and tokenizer; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Download the model, print its folder and return the exit code."""
    _check(args.model)
    import huggingface_hub
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    name = args.model
    try:
        folder = huggingface_hub.snapshot_download(
            args.model, revision=args.revision, allow_patterns=args.include or list(PATTERNS)
        )
    except errors.RevisionNotFoundError:
        return _fail(f"{name} has no revision {args.revision!r}", "give a branch or tag of it")
    except errors.GatedRepoError:
        return _fail(f"{name} needs a login at {endpoint}", "set HF_TOKEN to a token for it")
    except errors.RepositoryNotFoundError:
        return _fail(
            f"{endpoint} has no model {name!r}, or it needs a login",
            "check the id, or set HF_TOKEN to a token for it",
        )
    except Exception as error:  # NOTE: releases of the library raise errors of several HTTP clients
        return _fail(
            f"{name} could not be downloaded from {endpoint}: {_cause(error)}",
            "check the network, set HF_ENDPOINT to the address of a mirror, or copy the folder "
            "from another machine and use --model FOLDER",
        )
    missing = [] if args.include else missing_files(Path(folder))
    if missing:
        return _fail(f"{name} lacks {', '.join(missing)}", "the engine cannot read this model")
    print(folder)
    return OK


def _check(model: str) -> None:
    """Check the id and the library.

    Raises:
        PlanRefused: ``model`` is no id of a model, or the library is not installed.
    """
    refusals = []
    if not HUB_ID.fullmatch(model):
        refusals.append(
            Refusal("download", "ID", f"{model[:200]!r} is not the id of a model", "ORG/NAME")
        )
    if not installed(PACKAGE):
        refusals.append(
            Refusal(
                "download",
                PACKAGE,
                f"downloads need {PACKAGE} (not installed)",
                'pip install "glowplug[hub]", or copy the folder and use --model FOLDER',
            )
        )
    if refusals:
        raise PlanRefused(refusals, "the command line")


def _cause(error: BaseException) -> str:
    """Return the first line of the error at the end of the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _fail(reason: str, fix: str) -> int:
    """Print a failure with its fix and return the exit code."""
    print(f"glowplug download: {reason}\n    fix: {fix}", file=sys.stderr)
    return FAILED
