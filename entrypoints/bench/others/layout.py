"""Layouts of ranks for ``glowplug bench versus``, in the flags of every engine."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass

OURS = "glowplug"  #: this engine's name among the compared engines
ONE_GPU = "one_gpu"  #: this engine on one GPU, beside several
SGLANG = "sglang"
VLLM = "vllm"


@dataclass(frozen=True)
class RankLayout:
    """How the ranks of an engine share a model.

    Attributes:
        ranks: number of ranks, one on each GPU.
        expert_shares: number of shares into which the routed experts are divided.
        groups: number of groups of ranks with requests of their own (data-parallel attention).
    """

    ranks: int = 1
    expert_shares: int = 1
    groups: int = 1

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axis -> size; {} for one rank."""
        sizes = {"tp": self.ranks, "ep": self.expert_shares, "dp": self.groups}
        return {axis: size for axis, size in sizes.items() if size > 1}

    def ours(self) -> list[str]:
        """Return the flags of this engine."""
        sizes = {
            "--tp-size": self.ranks,
            "--ep-size": self.expert_shares,
            "--dp-size": self.groups,
        }
        return [word for name, size in sizes.items() if size > 1 for word in (name, str(size))]

    def sglang(self) -> list[str]:
        """Return the flags of SGLang's server and of its ``bench_one_batch``."""
        return self.ours() + (["--enable-dp-attention"] if self.groups > 1 else [])

    def vllm(self) -> list[str]:
        """Return the flags of vLLM's server; ``vllm_steps.py`` takes all but the groups."""
        sizes = {
            "--tensor-parallel-size": self.ranks // self.groups,
            "--data-parallel-size": self.groups,
        }
        words = [word for name, size in sizes.items() if size > 1 for word in (name, str(size))]
        return words + (["--enable-expert-parallel"] if self.expert_shares > 1 else [])


ONE_RANK = RankLayout()


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``layout_of``."""
    group = parser.add_argument_group("layout of all engines")
    group.add_argument(
        "--tp-size",
        "--tp",
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="RANKS",
        help="number of GPUs that every engine uses",
    )
    group.add_argument(
        "--ep-size",
        "--ep",
        "--expert-parallel-size",
        type=int,
        default=1,
        metavar="SHARES",
        help="shares into which the routed experts are divided",
    )
    group.add_argument(
        "--dp-size",
        "--dp",
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="GROUPS",
        help="groups of ranks with requests of their own (data-parallel attention); for serving",
    )


def layout_of(args: argparse.Namespace, engines: Collection[str], static: bool) -> RankLayout:
    """Return the layout of the options.

    Args:
        args: options of the command.
        engines: names of the engines.
        static: True: static batches are measured.

    Raises:
        ValueError: the sizes do not divide, or an engine or its tool does not have the layout.
    """
    found = RankLayout(args.tp_size, args.ep_size, args.dp_size)
    if min(found.ranks, found.expert_shares, found.groups) < 1:
        raise ValueError("--tp-size, --ep-size and --dp-size must be at least 1")
    for flag, size in (("--ep-size", found.expert_shares), ("--dp-size", found.groups)):
        if found.ranks % size:
            fitting = [str(n) for n in range(1, found.ranks + 1) if found.ranks % n == 0]
            raise ValueError(
                f"{flag} {size} does not divide the {found.ranks} ranks of --tp-size: give "
                f"{' or '.join(fitting)}"
            )
    if VLLM in engines and found.expert_shares not in (1, found.ranks):
        raise ValueError(
            f"vllm divides the experts among all {found.ranks} ranks or none, not in "
            f"{found.expert_shares} shares: give --ep-size {found.ranks}, or leave vllm out"
        )
    peers = sorted({SGLANG, VLLM} & set(engines))
    if static and found.groups > 1 and peers:
        raise ValueError(
            f"with --dp-size the tools of {' and '.join(peers)} for static batches give every "
            "group a batch of its own or have no groups: give --batch-size without a value, and "
            "--serving"
        )
    return found
