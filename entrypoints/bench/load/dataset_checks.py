"""Checks of the options that choose the prompts of a bench: an option without effect is refused."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from glowplug.entrypoints.bench.load.backends import BACKENDS

RANDOM = ("random", "random-ids")
SHARED = ("generated-shared-prefix", "prefix_repetition")
FROM_A_FILE = ("custom", "sharegpt")
#: options of some datasets only, by the beginning of their names
DATASETS_OF_OPTIONS = {
    "--dataset-path": FROM_A_FILE,
    "--custom-": ("custom",),
    "--sharegpt-": ("sharegpt",),
    "--disable-shuffle": ("sharegpt",),
    "--no-oversample": ("sharegpt",),
    "--random-prefix-len": RANDOM,
    "--gsp-": ("generated-shared-prefix",),
    "--prefix-repetition-": ("prefix_repetition",),
}


def option_field(name: str) -> str:
    """Return the field of the parsed arguments that an option sets."""
    return name.removeprefix("--").replace("-", "_")


def check_dataset_options(args: argparse.Namespace) -> None:
    """Raise ValueError if an option is given that the chosen dataset does not use."""
    for start, names in DATASETS_OF_OPTIONS.items():
        if args.dataset_name in names:
            continue
        for field, value in vars(args).items():
            if value in (None, False, 0) or not field.startswith(option_field(start)):
                continue
            option = "--" + field.replace("_", "-")
            raise ValueError(
                f"{option} has no effect with --dataset-name {args.dataset_name}: leave the option "
                f"out, or choose --dataset-name {' or '.join(names)}"
            )


def check_text_options(args: argparse.Namespace) -> None:
    """Raise ValueError if an option for texts of a file has no effect, or no tokenizer."""
    named: Sequence[tuple[str, object]] = (
        ("--apply-chat-template", args.apply_chat_template),
        ("--tokenize-prompt", args.tokenize_prompt),
        ("--prompt-suffix", args.prompt_suffix),
    )
    given = [name for name, value in named if value]
    if given and args.dataset_name not in FROM_A_FILE:
        raise ValueError(f"{given[0]} is for prompts of a file: --dataset-name custom or sharegpt")
    if args.chat_template_kwargs is not None and not args.apply_chat_template:
        raise ValueError("--chat-template-kwargs needs --apply-chat-template")
    takes_ids = BACKENDS[args.backend].takes_ids
    for name in (one for one in given if one != "--prompt-suffix"):
        if not args.tokenizer:
            raise ValueError(f"{name} needs --tokenizer")
        if not takes_ids:
            raise ValueError(f"{name}: the server applies its chat template, leave the option out")
