"""Drafts in benchmarks: their acceptance in the results, and a simulated acceptance.

A simulated acceptance compares engines on checkpoints whose drafts have no meaning, such as random
ones. SGLang and vLLM have the same switch.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from glowplug.core.step.draft_counts import Acceptance, DraftCounts, rates_of_length, since

if TYPE_CHECKING:
    from glowplug.entrypoints.front.llm import LLM

LENGTH_FLAG = "--simulate-accept-length"
RATES_FLAG = "--simulate-accept-rates"
#: a counter of vLLM in Prometheus text: name, labels and value
VLLM_COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)_total\{([^}]*)\} (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')


# ---- results -------------------------------------------------------------------------------------


def acceptance(before: Sequence[DraftCounts], after: Sequence[DraftCounts]) -> dict[str, Any]:
    """Return the keys of a record about the drafts between two snapshots of the counters.

    ``accept_length`` is the mean number of tokens that a verify step of a sequence gained,
    ``accept_rates`` the share of them that accepted the draft at each position, and
    ``draft_shapes`` their number by shape of the drafts. All are None if nothing was drafted.
    """
    counts = since(after, before)
    found = Acceptance(counts)
    drafted = found.verify_steps > 0
    shapes = {one.shape: sum(one.accepted) for one in counts if sum(one.accepted)}
    return {
        "accept_length": found.length,
        "accept_rates": found.rates if drafted else None,
        "draft_shapes": shapes if drafted else None,
    }


def counted(llm: LLM) -> Sequence[DraftCounts]:
    """Return the counters of an engine of this process, up to date.

    NOTE: the reply to a control message brings the statistics of all steps before it.
    """
    llm.control("check")
    counts: Sequence[DraftCounts] = llm.stats.drafts
    return counts


def counted_by_server(info: Mapping[str, Any] | None) -> Sequence[DraftCounts] | None:
    """Return the counters in a server's answer of ``/server_info``; None if it has none."""
    import msgspec

    stats = (info or {}).get("stats")
    if not isinstance(stats, Mapping) or "drafts" not in stats:
        return None
    return msgspec.convert(stats["drafts"], list[DraftCounts])


def counted_by_vllm(metrics: str) -> Sequence[DraftCounts]:
    """Return the counters in the text of vLLM's ``/metrics``; () if it drafts nothing."""
    totals: dict[str, int] = {}
    accepted_at: dict[int, int] = {}
    for name, labels, value in VLLM_COUNTER.findall(metrics):
        position = POSITION.search(labels)
        if position is None:
            totals[name] = totals.get(name, 0) + int(float(value))
        elif name == "accepted_tokens_per_pos":
            at = int(position.group(1))
            accepted_at[at] = accepted_at.get(at, 0) + int(float(value))
    verified = totals.get("drafts", 0)
    if not verified or not accepted_at:
        return ()
    steps = len(accepted_at)
    reached = [verified, *(accepted_at[at] for at in range(steps)), 0]
    histogram = [more - fewer for more, fewer in zip(reached, reached[1:])]
    return (DraftCounts(steps, 1, steps + 1, 0, histogram),)


def server_acceptance(
    before: Sequence[DraftCounts],
    after: Sequence[DraftCounts],
    info: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the keys of ``acceptance`` for a server.

    Without counters, the accept length is the one since the server's start that SGLang reports in
    ``info``, the answer of ``/server_info`` after the run.
    """
    found = acceptance(before, after)
    if found["accept_length"] is None:
        states = (info or {}).get("internal_states") or [{}]
        found["accept_length"] = states[0].get("avg_spec_accept_length")
    return found


# ---- simulated acceptance ------------------------------------------------------------------------


def add_simulation_options(group: Any) -> None:
    """Add the options of ``simulated_rates`` to ``group``."""
    group.add_argument(
        LENGTH_FLAG,
        type=float,
        default=None,
        metavar="TOKENS",
        help="simulate drafts of which so many are accepted that a verify step gains this many "
        "tokens on average, whatever the model says; the answers are meaningless",
    )
    group.add_argument(
        RATES_FLAG,
        type=_rates,
        default=None,
        metavar="RATE,..",
        help="the same by position: probability that a draft is accepted if those before it are",
    )


def _rates(text: str) -> tuple[float, ...]:
    """Parse the value of ``--simulate-accept-rates``."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise argparse.ArgumentTypeError(
            f"expected probabilities such as 0.8,0.5, with a comma between them, not {text!r}"
        )
    return rates


def simulated_rates(args: argparse.Namespace) -> tuple[float, ...] | None:
    """Return the rates of the acceptance to simulate; None for the model's own.

    Raises:
        ValueError: both options are given, or the length is below 1.
    """
    if args.simulate_accept_length is None:
        rates: tuple[float, ...] | None = args.simulate_accept_rates
        return rates
    if args.simulate_accept_rates is not None:
        raise ValueError(f"give {LENGTH_FLAG} or {RATES_FLAG}, not both")
    try:
        return rates_of_length(args.simulate_accept_length)
    except ValueError as error:
        raise ValueError(f"{LENGTH_FLAG}: {error}") from None


def simulation_settings(rates: Sequence[float] | None) -> list[str]:
    """Return the assignments KEY=VALUE by which an engine simulates an acceptance; [] for None."""
    if rates is None:
        return []
    return [f"speculative.simulate_accept_rates={json.dumps(list(rates))}", "benchmark=true"]


def with_simulation(config: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return an engine's configuration with the acceptance that the options simulate, if any.

    Raises:
        ValueError: see ``simulated_rates``.
    """
    rates = simulated_rates(args)
    if rates is None:
        return dict(config)
    drafts = {**config.get("speculative", {}), "simulate_accept_rates": list(rates)}
    return {**config, "speculative": drafts, "benchmark": True}


def refuse_simulation(args: argparse.Namespace) -> None:
    """Raise ValueError if a benchmark that starts no engine is to simulate an acceptance."""
    for flag, value in (
        (LENGTH_FLAG, args.simulate_accept_length),
        (RATES_FLAG, args.simulate_accept_rates),
    ):
        if value is not None:
            raise ValueError(
                f"{flag}: the acceptance is simulated by the server, which this command does not "
                "start. Use `glowplug bench versus`, or start the server with --set "
                "benchmark=true --set speculative.simulate_accept_rates=[..] (SGLang: "
                "SGLANG_SIMULATE_ACC_LEN, vLLM: rejection_sample_method of --speculative-config)"
            )
