"""``glowplug bench soak``: hours of mixed requests on the engine in this process, which must stay
as it was.

Requests of all lengths, ways of sampling and shared beginnings run together, more of them than fit;
some are given up, some are refused. In pauses nothing runs, and then every page must be free,
memory must be where it was, and the same questions must get the same answers. One JSON document,
written anew in every pause, says whether all of that held. Device memory is this process's own
where the driver tells it, otherwise the whole device's.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import GlowplugError, RequestError
from glowplug.entrypoints.bench.load.soak_requests import Mix, Wanted
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.conditions import conditions
from glowplug.entrypoints.bench.others.engine_options import add_engine_options, engine_config
from glowplug.entrypoints.bench.others.process_memory import ProcessMemory

if TYPE_CHECKING:
    from glowplug.entrypoints.front.front import Stream
    from glowplug.entrypoints.front.llm import LLM

#: prompts asked again in every pause, and tokens of each answer
QUESTIONS = 4
ANSWER = 16
SHOWN = 20  #: errors kept word for word
WARM = 1 / 3  #: of the pauses, those before memory must be level
FULL = 0.01  #: share of the pages, at least one, that may be left in a cache that is called full
LOOK = 0.2  #: seconds between two looks at the file of --hold
PATIENCE = (
    5.0  #: seconds that requests have to end in when it is told to hold; the others are given up
)


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("soak")
    group.add_argument("--minutes", type=float, default=20.0)
    group.add_argument("--pauses", type=int, default=20, help="how often it stops and looks")
    group.add_argument(
        "--in-flight",
        type=int,
        default=None,
        help="requests at once (default: 1.25 times what runs)",
    )
    group.add_argument(
        "--abort-share", type=float, default=0.1, help="share of requests that are given up"
    )
    group.add_argument(
        "--shared-share", type=float, default=0.3, help="share that begin like others"
    )
    group.add_argument(
        "--device-growth-mib", type=float, default=32.0, help="most that device memory may grow"
    )
    group.add_argument(
        "--host-growth-mib", type=float, default=64.0, help="most that host memory may grow"
    )
    group.add_argument(
        "--exact", action="store_true", help="an answer that changes is a failure, too"
    )
    group.add_argument(
        "--expect-full",
        action="store_true",
        help="a KV cache that never was full is a failure, too",
    )
    group.add_argument(
        "--hold",
        type=Path,
        default=None,
        metavar="FILE",
        help="while this file exists nothing runs: it stops for a pause and stays in it; --minutes "
        "count the time under load alone",
    )
    group.add_argument(
        "--result-filename",
        "--output-file",
        default=None,
        metavar="FILE",
        help="write JSON here, in every pause and at the end",
    )
    group.add_argument("--load-seed", type=int, default=0, help="seed of the requests")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when all held, 1 when something did not, 2 when it could not start."""
    from glowplug.entrypoints.front.llm import LLM

    try:
        llm = LLM(**{"skip_tokenizer": True, **engine_config(args)})
    except (GlowplugError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    with llm:
        soak = Soak(llm, args, conditions(llm.plan.device))
        soak.run()
        found = soak.write(finished=True)
    for key in (
        "minutes",
        "held_minutes",
        "requests",
        "ends",
        "preemptions",
        "cached_tokens",
        "output_tokens",
        "least_free_share",
        "was_full",
        "device_memory",
        "growth_mib",
        "answers_changed",
        "failures",
    ):
        print(report.line(key, found[key]))
    return 1 if found["failures"] else 0


@dataclass
class Sample:
    """One pause, ``seconds`` after the start, ``loaded`` of them under load. Bytes; ``device_used``
    is everybody's on the device, ``device_process`` ours where the driver says it; ``pages`` as the
    control "check" says.
    """

    seconds: float
    loaded: float
    host: int
    device_held: int
    device_claimed: int
    device_used: int
    device_process: int | None
    pages: dict[str, int] = field(default_factory=dict)


class Soak:
    """Drives one engine. ``failures``: what did not hold, in words."""

    def __init__(
        self, llm: LLM, args: argparse.Namespace, conditions: Mapping[str, Any] | None = None
    ) -> None:
        self.llm = llm
        self.args = args
        self.conditions = conditions or {}
        sizes = llm.plan.sizes
        self.in_flight = args.in_flight or max(2, sizes.max_running * 5 // 4)
        self.mix = Mix(random.Random(args.load_seed), llm.plan, args.abort_share, args.shared_share)
        self.samples: list[Sample] = []
        self.failures: list[str] = []
        self.ends: Counter[str] = Counter()
        self.least_free = self._pages
        self.answers_changed = 0
        # seconds
        self.loaded = 0.0
        self.held = 0.0
        self.memory = ProcessMemory()
        self._running: dict[Stream, Wanted] = {}
        self._answers: list[list[int]] = []

    # ---- the run ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the time is up, or too much has failed. A failing engine ends it too, and is one of
        the failures.
        """
        self._started = time.monotonic()
        seconds = self.args.minutes * 60
        try:
            self._pause()
            for index in range(self.args.pauses):
                while not self._load_until(seconds * (index + 1) / self.args.pauses):
                    self._pause()
                self._pause()
                if len(self.failures) >= SHOWN:
                    return
        except (GlowplugError, AssertionError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def _load_until(self, loaded: float) -> bool:
        """Load until there were ``loaded`` seconds of it, all requests ended. False when it was
        told to hold before.
        """
        began = time.monotonic()
        deadline = began + loaded - self.loaded
        held = False
        while time.monotonic() < deadline and not held:
            while len(self._running) < self.in_flight:
                self._submit()
            self._poll()
            held = self._told_to_hold()
        patience = time.monotonic() + PATIENCE
        while self._running:
            self._poll()
            if held and time.monotonic() > patience:
                self._give_up()
        self.loaded += time.monotonic() - began
        return not held

    def _give_up(self) -> None:
        """All that run."""
        running = list(self._running.items())
        self.llm.abort([stream for stream, _ in running])
        for stream, wanted in running:
            self._ended(stream, wanted, "given up", None)

    def _told_to_hold(self) -> bool:
        return self.args.hold is not None and self.args.hold.exists()

    def _hold(self) -> None:
        """Nothing runs until the file has gone. What is written meanwhile says so."""
        began = time.monotonic()
        if self._told_to_hold():
            self.write(holding=True)
            print(f"held after {self.loaded:.0f} s of load", flush=True)
            while self._told_to_hold():
                time.sleep(LOOK)
            self.held += time.monotonic() - began

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
        stats = self.llm.stats
        if stats.pages_total:  # said with the first step
            self.least_free = min(self.least_free, stats.pages_free + stats.pages_evictable)

    def _ended(self, stream: Stream, wanted: Wanted, reason: str, error: str | None) -> None:
        del self._running[stream]
        self.ends[reason] += 1
        if reason not in ("stop", "length", "given up"):
            self.failures.append(f"ended with {reason!r}: {error}")
        elif reason == "length" and wanted.seen != wanted.params.max_tokens:
            self.failures.append(f"{wanted.seen} tokens instead of {wanted.params.max_tokens}")

    # ---- pauses ----------------------------------------------------------------------------------

    def _pause(self) -> None:
        pages = self.llm.control("check")
        if pages["free"] + pages["evictable"] != pages["total"]:
            self.failures.append(
                f"nothing runs, and {pages['free']} pages are free and {pages['evictable']} to be had "
                f"of {pages['total']}"
            )
        self.llm.control("flush")
        pages = self.llm.control("check")
        if pages["free"] != pages["total"]:
            self.failures.append(
                f"the cache is empty, and {pages['free']} pages are free of {pages['total']}"
            )
        self._ask_again()
        self.llm.control("flush")
        memory = self.llm.control("memory")
        own = self.memory.bytes() if self.llm.plan.device == "cuda" else None
        self.samples.append(
            Sample(
                time.monotonic() - self._started,
                self.loaded,
                memory["host"],
                memory["device_held"],
                memory["device_claimed"],
                memory["device_used"],
                own,
                pages,
            )
        )
        self.write()
        self._hold()

    def _ask_again(self) -> None:
        from glowplug.core.step.request import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        answers = [
            done.token_ids
            for done in self.llm.generate(self.mix.questions(QUESTIONS, ANSWER), params)
        ]
        self._answers = self._answers or answers
        changed = sum(one != other for one, other in zip(answers, self._answers, strict=True))
        self.answers_changed += changed
        if changed and self.args.exact:
            self.failures.append(
                f"{changed} of {QUESTIONS} questions were answered otherwise than at first"
            )

    # ---- the result ------------------------------------------------------------------------------

    def write(self, finished: bool = False, holding: bool = False) -> dict[str, Any]:
        """What is known by now, also into the file."""
        found = {
            "conditions": self.conditions,
            "finished": finished,
            "holding": holding,
            **self.result(finished),
        }
        if self.args.result_filename:
            report.write_json(Path(self.args.result_filename), found)
        return found

    def judged(self) -> tuple[str, ...]:
        """The kinds of memory that must not grow: this process's own on the device if each sample
        knows it.
        """
        known = self.samples and all(sample.device_process is not None for sample in self.samples)
        return "host", "device_held", "device_claimed", "device_process" if known else "device_used"

    def growth(self) -> dict[str, float]:
        """MiB from the first level sample to the largest of the last third, by kind of memory."""
        if len(self.samples) < 3:
            return {}
        first = self.samples[max(1, int(len(self.samples) * WARM))]
        late = self.samples[-max(1, len(self.samples) // 3) :]
        return {
            name: (max(getattr(one, name) for one in late) - getattr(first, name)) / 2**20
            for name in self.judged()
        }

    def not_held(self, finished: bool) -> list[str]:
        """What did not hold. Only at the end is it asked whether the cache was full."""
        found = list(self.failures)
        for name, value in self.growth().items():
            most = self.args.host_growth_mib if name == "host" else self.args.device_growth_mib
            if value > most:
                found.append(f"{name} memory grew by {value:.1f} MiB")
        if finished and self.args.expect_full and not self._was_full():
            found.append(
                f"the KV cache never was full: {self._least_share():.1%} of its pages were always to be had, "
                f"{self.llm.stats.preemptions} preemptions"
            )
        return found[:SHOWN]

    @property
    def _pages(self) -> int:
        return self.llm.plan.sizes.num_pages - 1

    def _least_share(self) -> float:
        return self.least_free / max(1, self._pages)

    def _was_full(self) -> bool:
        return self.least_free <= max(1, FULL * self._pages) and self.llm.stats.preemptions > 0

    def _device_memory(self) -> str:
        """Whose memory on the device was judged."""
        if self.judged()[-1] == "device_process":
            return "this process's"
        return "the whole device's" + (f": {self.memory.missing}" if self.memory.missing else "")

    def result(self, finished: bool = True) -> dict[str, Any]:
        stats = self.llm.stats
        return {
            "minutes": round(self.loaded / 60, 3),
            "held_minutes": round(self.held / 60, 3),
            "in_flight": self.in_flight,
            "requests": self.ends.total(),
            "ends": dict(self.ends),
            "preemptions": stats.preemptions,
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "output_tokens": stats.output_tokens,
            "drafted_tokens": stats.drafted_tokens,
            "accepted_tokens": stats.accepted_tokens,
            "pages": self._pages,
            "least_free_share": self._least_share(),
            "was_full": self._was_full(),
            "device_memory": self._device_memory(),
            "growth_mib": self.growth(),
            "answers_changed": self.answers_changed,
            "failures": self.not_held(finished),
            "samples": [asdict(sample) for sample in self.samples],
        }
