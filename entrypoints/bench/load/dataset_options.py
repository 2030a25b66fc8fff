"""Options of ``glowplug bench serving`` that choose the prompts, and the prompts they choose.

Names and aliases are those of vLLM's ``bench serve`` and SGLang's ``bench_serving``.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson

from glowplug.core.errors import RequestError
from glowplug.entrypoints.bench.load import datasets, shared_prefix, sharegpt
from glowplug.entrypoints.bench.load.backends import BACKENDS
from glowplug.entrypoints.bench.load.dataset_checks import (
    FROM_A_FILE,
    RANDOM,
    SHARED,
    check_dataset_options,
    check_text_options,
    option_field,
)
from glowplug.entrypoints.bench.load.shared_prefix import PrefixGroups

DEFAULT_COUNT = 100  #: prompts of a run
FALLBACK_VOCAB = 1000  #: token ids below this exist in every known vocabulary
#: options of the datasets with shared prefixes: default and meaning
SHARED_OPTIONS = {
    "--gsp-num-groups": (64, "prefixes of generated-shared-prefix"),
    "--gsp-prompts-per-group": (16, "prompts with the same prefix"),
    "--gsp-system-prompt-len": (2048, "tokens of a prefix"),
    "--gsp-question-len": (128, "tokens behind the prefix"),
    "--gsp-output-len": (256, "tokens to generate"),
    "--prefix-repetition-num-prefixes": (10, "prefixes of prefix_repetition"),
    "--prefix-repetition-prefix-len": (256, "tokens of a prefix"),
    "--prefix-repetition-suffix-len": (256, "tokens behind the prefix"),
    "--prefix-repetition-output-len": (128, "tokens to generate"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    _dataset(group)
    add_sharegpt_options(group)
    _text(group)
    _shared(parser.add_argument_group("prompts with a shared prefix"))


def _dataset(group: Any) -> None:
    """Add the command-line options of all datasets and of random prompts."""
    group.add_argument(
        "--dataset-name",
        choices=(*RANDOM, *SHARED, *FROM_A_FILE),
        default="random",
        help="custom and sharegpt read --dataset-path; sharegpt also needs --tokenizer; random-ids "
        "is another name of random",
    )
    group.add_argument(
        "--dataset-path",
        help='custom: JSON lines with "prompt" (or "conversations"), "output_tokens"; '
        'sharegpt: the published JSON list with "conversations"',
    )
    group.add_argument(
        "--num-prompts",
        type=int,
        nargs="+",
        help="requests per run; one value, or one for each --max-concurrency; default: "
        f"{DEFAULT_COUNT}, or all of generated-shared-prefix",
    )
    group.add_argument(
        "--random-input-len", "--random-input", "--input-len", type=int, default=1024
    )
    group.add_argument(
        "--random-output-len",
        "--random-output",
        "--output-len",
        type=int,
        default=128,
        help="tokens to generate; also the default for prompts of --dataset-name custom",
    )
    group.add_argument(
        "--random-prefix-len",
        type=int,
        default=0,
        help="tokens in front of --random-input-len that are the same in all random prompts",
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="lengths are uniform in [length * ratio, length]: 1 makes them equal",
    )
    group.add_argument(
        "--prompt-format",
        choices=("ids", "text"),
        default="ids",
        help="send random prompts as token ids where the route takes them, or as text",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        help="random ids are below this; default: the vocabulary size that the server reports",
    )
    group.add_argument("--seed", type=int, default=1)


def add_sharegpt_options(group: Any) -> None:
    """Add the command-line options that choose conversations of the ShareGPT file."""
    group.add_argument(
        "--sharegpt-output-len",
        type=int,
        help="tokens to generate for each ShareGPT prompt; default: the length of its answer",
    )
    group.add_argument(
        "--sharegpt-context-len",
        type=int,
        help="leave out conversations longer than this, in place of the published limits",
    )
    group.add_argument(
        "--disable-shuffle", action="store_true", help="take ShareGPT prompts in the file's order"
    )
    group.add_argument(
        "--no-oversample",
        action="store_true",
        help="send fewer requests than --num-prompts if the ShareGPT file has fewer prompts",
    )


def sharegpt_sampling(args: argparse.Namespace, seed: int) -> sharegpt.Sampling:
    """Return the choice of conversations that the options describe. ``seed``: of their order."""
    return sharegpt.Sampling(
        args.sharegpt_output_len,
        args.sharegpt_context_len,
        None if args.disable_shuffle else seed,
        args.no_oversample,
    )


def _text(group: Any) -> None:
    """Add the command-line options that change the texts of a file."""
    group.add_argument(
        "--custom-output-len",
        type=int,
        metavar="N",
        help="tokens to generate for a prompt of --dataset-name custom without output_tokens",
    )
    group.add_argument(
        "--prompt-suffix", default="", metavar="TEXT", help="text behind each prompt of a file"
    )
    group.add_argument(
        "--apply-chat-template",
        action="store_true",
        help="render each prompt of a file with the chat template of --tokenizer, a folder",
    )
    group.add_argument(
        "--chat-template-kwargs",
        type=orjson.loads,
        metavar="JSON",
        help="arguments of the template of --apply-chat-template",
    )
    group.add_argument(
        "--tokenize-prompt",
        action="store_true",
        help="send the prompts of a file as token ids of --tokenizer",
    )


def _shared(group: Any) -> None:
    """Add the command-line options of the datasets whose prompts share prefixes."""
    for name, (default, about) in SHARED_OPTIONS.items():
        group.add_argument(name, type=int, metavar="N", help=f"{about}; default: {default}")


def prompt_counts(args: argparse.Namespace) -> list[int]:
    """Return the numbers of prompts of the options, or the dataset's default."""
    if args.num_prompts:
        return list(args.num_prompts)
    whole = args.dataset_name == "generated-shared-prefix"
    return [_groups(args, 0).total if whole else DEFAULT_COUNT]


def _groups(args: argparse.Namespace, count: int) -> PrefixGroups:
    """Return the sizes of groups that share a prefix. ``count``: prompts of prefix_repetition."""

    def size(name: str) -> int:
        given: int | None = getattr(args, option_field(name))
        return SHARED_OPTIONS[name][0] if given is None else given

    if args.dataset_name == "generated-shared-prefix":
        return PrefixGroups(*(size(name) for name in SHARED_OPTIONS if name.startswith("--gsp-")))
    prefixes = size("--prefix-repetition-num-prefixes")
    return PrefixGroups(
        prefixes,
        math.ceil(count / max(1, prefixes)),
        size("--prefix-repetition-prefix-len"),
        size("--prefix-repetition-suffix-len"),
        size("--prefix-repetition-output-len"),
    )


def dataset_conditions(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """Return the settings of the prompts for a run's record. ``count``: number of prompts."""
    found = {
        "dataset_name": args.dataset_name,
        "num_prompts": count,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        "random_prefix_len": args.random_prefix_len,
        "random_range_ratio": args.random_range_ratio,
        "seed": args.seed,
    }
    if args.dataset_name in SHARED:
        found["shared_prefix"] = asdict(_groups(args, count))
    if args.dataset_name in FROM_A_FILE:
        found["apply_chat_template"] = args.apply_chat_template
    return found


def prompts_of(
    args: argparse.Namespace, count: int, server_vocab: int | None
) -> list[datasets.BenchPrompt]:
    """Return the prompts of a run.

    Args:
        args: the options.
        count: number of prompts.
        server_vocab: vocabulary size that the server reports; None: it reports none.

    Raises:
        OSError: a file cannot be read.
        ValueError: the options do not fit together, or a file has no prompts.
    """
    check_dataset_options(args)
    check_text_options(args)
    encode, decode, vocab = (
        datasets.file_tokenizer(args.tokenizer) if args.tokenizer else (None, None, None)
    )
    if args.dataset_name in FROM_A_FILE:
        return _file_prompts(args, count, encode)
    rng = random.Random(args.seed)
    vocab = args.vocab_size or server_vocab or vocab or FALLBACK_VOCAB
    if args.prompt_format == "ids" and BACKENDS[args.backend].takes_ids:
        decode = None
    elif decode is None:
        decode = datasets.word_decoder(args.seed)
    if args.dataset_name in SHARED:
        return shared_prefix.prompts(rng, count, _groups(args, count), vocab, decode)
    return datasets.random_prompts(
        rng,
        count,
        args.random_input_len,
        args.random_output_len,
        args.random_range_ratio,
        vocab,
        decode,
        args.random_prefix_len,
    )


def _file_prompts(
    args: argparse.Namespace, count: int, encode: datasets.Encode | None
) -> list[datasets.BenchPrompt]:
    """Return ``count`` prompts from the file of the options.

    ``encode``: the tokenizer of the options; None without one.
    """
    if not args.dataset_path:
        raise ValueError(f"--dataset-name {args.dataset_name} needs --dataset-path")
    path = Path(args.dataset_path)
    edit = _editor(args)
    if args.dataset_name == "custom":
        length = args.custom_output_len or args.random_output_len
        found = datasets.custom_prompts(path, count, length, encode, edit)
    else:
        sampling = sharegpt_sampling(args, args.seed)
        found = sharegpt.prompts(path, count, encode, sampling, edit)
    if not args.tokenize_prompt or encode is None:
        return found
    return [replace(one, ids=encode(one.text), text="") for one in found]


def _editor(args: argparse.Namespace) -> Callable[[str], str]:
    """Return the function that adds the suffix and the chat template to a text.

    Raises:
        ValueError: ``--tokenizer`` is no folder of a tokenizer with a chat template.
    """
    suffix: str = args.prompt_suffix
    if not args.apply_chat_template:
        return lambda text: text + suffix
    from glowplug.core.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(Path(args.tokenizer))
    arguments: dict[str, Any] = args.chat_template_kwargs or {}
    # NOTE: a server puts the first token in front of a text, but not in front of ids
    first = "" if args.tokenize_prompt else tokenizer.settings()["bos_token"] or ""

    def rendered(text: str) -> str:
        try:
            found = tokenizer.apply_chat_template(
                [{"role": "user", "content": text + suffix}], **arguments
            )
        except RequestError as error:
            raise ValueError(f"--apply-chat-template: {error}") from None
        return found.removeprefix(first)

    return rendered
