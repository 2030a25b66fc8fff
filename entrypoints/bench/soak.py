"""``glowplug bench soak``: hours of mixed requests on the engine in this process, which must stay as it was.

Requests of all lengths, ways of sampling and shared beginnings run together, more of them than fit; some are given up,
some are refused. In pauses nothing runs, and then every page must be free, memory must be where it was, and the same
questions must get the same answers. One JSON document says whether all of that held.
"""
from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import GlowplugError, RequestError
from glowplug.entrypoints.bench import report
from glowplug.entrypoints.bench.conditions import conditions
from glowplug.entrypoints.bench.engine_options import add_engine_options, engine_config
from glowplug.entrypoints.bench.soak_requests import Mix, Wanted

if TYPE_CHECKING:
    from glowplug.entrypoints.front import Stream
    from glowplug.entrypoints.llm import LLM

QUESTIONS, ANSWER = 4, 16  #: prompts asked again in every pause, and tokens of each answer
SHOWN = 20  #: errors kept word for word
WARM = 1 / 3  #: of the pauses, those before memory must be level


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("soak")
    group.add_argument("--minutes", type=float, default=20.0)
    group.add_argument("--pauses", type=int, default=20, help="how often it stops and looks")
    group.add_argument("--in-flight", type=int, default=None, help="requests at once (default: 1.25 times what runs)")
    group.add_argument("--abort-share", type=float, default=0.1, help="share of requests that are given up")
    group.add_argument("--shared-share", type=float, default=0.3, help="share that begin like others")
    group.add_argument("--device-growth-mib", type=float, default=32.0, help="most that device memory may grow")
    group.add_argument("--host-growth-mib", type=float, default=64.0, help="most that host memory may grow")
    group.add_argument("--exact", action="store_true", help="an answer that changes is a failure, too")
    group.add_argument("--result-filename", "--output-file", default=None, metavar="FILE", help="write JSON here")
    group.add_argument("--load-seed", type=int, default=0, help="seed of the requests")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when all held, 1 when something did not, 2 when it could not start."""
    from glowplug.entrypoints.llm import LLM

    try:
        llm = LLM(**{"skip_tokenizer": True, **engine_config(args)})
    except (GlowplugError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    with llm:
        soak = Soak(llm, args)
        soak.run()
        found = soak.result()
    for key in ("minutes", "requests", "ends", "preemptions", "cached_tokens", "output_tokens", "least_free_share",
                "growth_mib", "answers_changed", "failures"):
        print(report.line(key, found[key]))
    if args.result_filename:
        report.write_json(Path(args.result_filename), {"conditions": conditions(llm.plan.device), **found})
    return 1 if found["failures"] else 0


@dataclass
class Sample:
    """One pause. Bytes; ``pages`` as the control "check" says."""

    seconds: float
    host: int
    device_held: int
    device_claimed: int
    device_used: int
    pages: dict[str, int] = field(default_factory=dict)


class Soak:
    """Drives one engine. ``failures``: what did not hold, in words."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self.llm, self.args = llm, args
        sizes = llm.plan.sizes
        self.in_flight = args.in_flight or max(2, sizes.max_running * 5 // 4)
        self.mix = Mix(random.Random(args.load_seed), llm.plan, args.abort_share, args.shared_share)
        self.samples: list[Sample] = []
        self.failures: list[str] = []
        self.ends: Counter[str] = Counter()
        self.least_free, self.answers_changed = sizes.num_pages - 1, 0
        self._running: dict[Stream, Wanted] = {}
        self._answers: list[list[int]] = []

    # ---- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the time is up, or too much has failed. A failing engine ends it too, and is one of the failures."""
        self._started = time.monotonic()
        seconds = self.args.minutes * 60
        try:
            self._pause()
            for index in range(self.args.pauses):
                self._load_until(self._started + seconds * (index + 1) / self.args.pauses)
                self._pause()
                if len(self.failures) >= SHOWN:
                    return
        except (GlowplugError, AssertionError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def _load_until(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            while len(self._running) < self.in_flight:
                self._submit()
            self._poll()
        while self._running:
            self._poll()

    def _submit(self) -> None:
        wanted = self.mix.next()
        try:
            stream = self.llm.submit(wanted.prompt, wanted.params)
        except RequestError as error:
            self.ends["refused"] += 1
            if not wanted.refused:
                self.failures.append(f"refused: {error}")
            return
        if wanted.refused:
            self.failures.append("a prompt longer than the context was taken")
        self._running[stream] = wanted

    def _poll(self) -> None:
        for stream, delta in self.llm.poll():
            wanted = self._running.get(stream)
            if wanted is None:
                continue
            wanted.seen += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._ended(stream, wanted, delta.finish_reason, delta.error)
            elif wanted.abort_after is not None and wanted.seen >= wanted.abort_after:
                self.llm.abort([stream])
                self._ended(stream, wanted, "given up", None)
        self.least_free = min(self.least_free, self.llm.stats.pages_free)

    def _ended(self, stream: Stream, wanted: Wanted, reason: str, error: str | None) -> None:
        del self._running[stream]
        self.ends[reason] += 1
        if reason not in ("stop", "length", "given up"):
            self.failures.append(f"ended with {reason!r}: {error}")
        elif reason == "length" and wanted.seen != wanted.params.max_tokens:
            self.failures.append(f"{wanted.seen} tokens instead of {wanted.params.max_tokens}")

    # ---- pauses -----------------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        pages = self.llm.control("check")
        if pages["free"] + pages["evictable"] != pages["total"]:
            self.failures.append(f"nothing runs, and {pages['free']} pages are free and {pages['evictable']} to be had "
                                 f"of {pages['total']}")
        self.llm.control("flush")
        pages = self.llm.control("check")
        if pages["free"] != pages["total"]:
            self.failures.append(f"the cache is empty, and {pages['free']} pages are free of {pages['total']}")
        self._ask_again()
        self.llm.control("flush")
        memory = self.llm.control("memory")
        self.samples.append(Sample(time.monotonic() - self._started, memory["host"], memory["device_held"],
                                   memory["device_claimed"], memory["device_used"], pages))

    def _ask_again(self) -> None:
        from glowplug.core.request import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        answers = [done.token_ids for done in self.llm.generate(self.mix.questions(QUESTIONS, ANSWER), params)]
        self._answers = self._answers or answers
        changed = sum(one != other for one, other in zip(answers, self._answers, strict=True))
        self.answers_changed += changed
        if changed and self.args.exact:
            self.failures.append(f"{changed} of {QUESTIONS} questions were answered otherwise than at first")

    # ---- the result -------------------------------------------------------------------------------------------------

    def growth(self) -> dict[str, float]:
        """MiB from the first level sample to the largest of the last third, by kind of memory."""
        if len(self.samples) < 3:
            return {}
        first = self.samples[max(1, int(len(self.samples) * WARM))]
        late = self.samples[-max(1, len(self.samples) // 3):]
        return {name: (max(getattr(one, name) for one in late) - getattr(first, name)) / 2**20
                for name in ("host", "device_held", "device_claimed", "device_used")}

    def result(self) -> dict[str, Any]:
        growth, stats = self.growth(), self.llm.stats
        for name, value in growth.items():
            most = self.args.host_growth_mib if name == "host" else self.args.device_growth_mib
            if value > most:
                self.failures.append(f"{name} memory grew by {value:.1f} MiB")
        return {
            "minutes": round((self.samples[-1].seconds if self.samples else 0.0) / 60, 3),
            "in_flight": self.in_flight, "requests": self.ends.total(), "ends": dict(self.ends),
            "preemptions": stats.preemptions, "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens, "output_tokens": stats.output_tokens,
            "drafted_tokens": stats.drafted_tokens, "accepted_tokens": stats.accepted_tokens,
            "least_free_share": self.least_free / max(1, stats.pages_total), "growth_mib": growth,
            "answers_changed": self.answers_changed, "failures": self.failures[:SHOWN],
            "samples": [asdict(sample) for sample in self.samples],
        }
