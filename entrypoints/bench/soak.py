"""``glowplug bench soak``: hours of mixed requests on the engine in this process, with leak checks.

By default more requests are in flight than the engine runs at once. Their lengths, sampling
settings and shared prefixes are mixed; some are aborted, some refused. In regular pauses nothing
runs: every page must be free, memory back at its former level, and repeated questions must get the
same answers. A JSON document with the result is written in every pause. Device memory is that of
this process if the driver reports it, else that of the whole device.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glowplug.core.errors import GlowplugError, RequestError
from glowplug.entrypoints.bench.load import soak_http
from glowplug.entrypoints.bench.load.soak_memory import Sample, device_scope, growth, summed
from glowplug.entrypoints.bench.load.soak_requests import RequestMix, WantedRequest
from glowplug.entrypoints.bench.others import report
from glowplug.entrypoints.bench.others.conditions import conditions, conditions_apart
from glowplug.entrypoints.bench.others.drafts import acceptance
from glowplug.entrypoints.bench.others.engine_options import engine_config
from glowplug.entrypoints.bench.others.process_memory import ProcessMemory
from glowplug.entrypoints.cli.flags.arguments import add_engine_options

if TYPE_CHECKING:
    from glowplug.entrypoints.front.front import Stream
    from glowplug.entrypoints.front.llm import LLM

QUESTION_COUNT = 4  #: prompts that are repeated in every pause
ANSWER_TOKENS = 16  #: tokens of the answer to a repeated prompt
FAILURES_MAX = 20  #: failed checks after which the soak ends; as many are reported
#: share of the pages, at least one, that may be available in a full cache
FULL_FREE_SHARE = 0.01
HOLD_POLL = 0.2  #: seconds between two checks whether the file of --hold still exists
#: seconds that running requests have to end when a hold begins; then they are aborted
HOLD_PATIENCE = 5.0


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("soak")
    group.add_argument("--minutes", type=float, default=20.0)
    group.add_argument("--pauses", type=int, default=20, help="number of pauses with checks")
    group.add_argument(
        "--in-flight",
        type=int,
        default=None,
        help="requests at once (default: 1.25 times what can run)",
    )
    group.add_argument(
        "--abort-share", type=float, default=0.1, help="share of requests that are aborted"
    )
    group.add_argument(
        "--shared-share", type=float, default=0.3, help="share of requests with a shared prefix"
    )
    group.add_argument(
        "--device-growth-mib", type=float, default=32.0, help="most growth of device memory"
    )
    group.add_argument(
        "--host-growth-mib", type=float, default=64.0, help="most growth of host memory"
    )
    group.add_argument("--exact", action="store_true", help="also fail if an answer changes")
    group.add_argument(
        "--expect-full",
        action="store_true",
        help="also fail if the KV cache was never full",
    )
    group.add_argument(
        "--hold",
        type=Path,
        default=None,
        metavar="FILE",
        help="pause, and run nothing, while this file exists; --minutes counts only the time "
        "under load",
    )
    group.add_argument(
        "--result-filename",
        "--output-file",
        default=None,
        metavar="FILE",
        help="write JSON here, in every pause and at the end",
    )
    group.add_argument(
        "--requests",
        type=int,
        default=0,
        help="send so many mixed HTTP requests to a server process instead",
    )
    group.add_argument(
        "--growth-per-request",
        type=float,
        default=1024.0,
        help="most growth of the server's memory in bytes per request",
    )
    group.add_argument("--load-seed", type=int, default=0, help="seed of the requests")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run an engine under mixed load for the given time and print the results of the checks.

    Returns:
        Exit status 0 if all checks held; 1 if one failed; 2 if the engine did not start.
    """
    from glowplug.entrypoints.front.llm import LLM

    if args.requests:
        return soak_http.run(args, engine_config(args), conditions_apart())
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


class Soak:
    """A long run of mixed load on one engine, with checks; ``failures`` lists the failed checks."""

    def __init__(
        self, llm: LLM, args: argparse.Namespace, conditions: Mapping[str, Any] | None = None
    ) -> None:
        self.llm = llm
        self.args = args
        self.conditions = conditions or {}
        sizes = llm.plan.sizes
        self.in_flight = args.in_flight or max(2, sizes.groups * sizes.max_running * 5 // 4)
        self.mix = RequestMix(
            random.Random(args.load_seed), llm.plan, args.abort_share, args.shared_share
        )
        self.samples: list[Sample] = []
        self.failures: list[str] = []
        self.ends: Counter[str] = Counter()
        self.least_free = self._pages
        self.answers_changed = 0
        self.loaded = 0.0  #: seconds under load
        self.held = 0.0  #: seconds on hold
        self.memory = ProcessMemory()
        self._running: dict[Stream, WantedRequest] = {}
        self._answers: list[list[int]] = []

    # ---- the run ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until the time is up, too many checks have failed, or the engine fails."""
        self._started = time.monotonic()
        seconds = self.args.minutes * 60
        try:
            self._pause()
            for index in range(self.args.pauses):
                while not self._load_until(seconds * (index + 1) / self.args.pauses):
                    self._pause()
                self._pause()
                if len(self.failures) >= FAILURES_MAX:
                    return
        except (GlowplugError, AssertionError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def _load_until(self, loaded: float) -> bool:
        """Run requests until the run has had ``loaded`` seconds of load.

        Returns:
            False if a hold (see ``_hold``) ended the load earlier, else True.
        """
        began = time.monotonic()
        deadline = began + loaded - self.loaded
        held = False
        while time.monotonic() < deadline and not held:
            while len(self._running) < self.in_flight:
                self._submit()
            self._poll()
            held = self._hold_requested()
        patience = time.monotonic() + HOLD_PATIENCE
        while self._running:
            self._poll()
            if held and time.monotonic() > patience:
                self._give_up()
        self.loaded += time.monotonic() - began
        return not held

    def _give_up(self) -> None:
        """Abort all running requests."""
        running = list(self._running.items())
        self.llm.abort([stream for stream, _ in running])
        for stream, wanted in running:
            self._ended(stream, wanted, "given up", None)

    def _hold_requested(self) -> bool:
        return self.args.hold is not None and self.args.hold.exists()

    def _hold(self) -> None:
        """Pause the run for as long as the file named by ``--hold`` exists.

        Meanwhile the result file has the key ``holding``.
        """
        began = time.monotonic()
        if self._hold_requested():
            self.write(holding=True)
            print(f"held after {self.loaded:.0f} s of load", flush=True)
            while self._hold_requested():
                time.sleep(HOLD_POLL)
            self.held += time.monotonic() - began

    def _submit(self) -> None:
        """Submit the next request, which the engine has to accept or refuse as expected."""
        wanted = self.mix.next()
        try:
            stream = self.llm.submit(wanted.prompt, wanted.params)
        except RequestError as error:
            self.ends["refused"] += 1
            if not wanted.refused:
                self.failures.append(f"refused: {error}")
            return
        if wanted.refused:
            self.failures.append("a prompt longer than the context was accepted")
        self._running[stream] = wanted

    def _poll(self) -> None:
        """Receive new tokens, and abort the requests that have reached ``abort_after``."""
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
        if stats.pages_total:  # reported from the first step on
            self.least_free = min(self.least_free, stats.pages_free + stats.pages_evictable)

    def _ended(self, stream: Stream, wanted: WantedRequest, reason: str, error: str | None) -> None:
        """Record the end of a request and check it against ``wanted``."""
        del self._running[stream]
        self.ends[reason] += 1
        if reason not in ("stop", "length", "given up"):
            self.failures.append(f"ended with {reason!r}: {error}")
        elif reason == "length" and wanted.seen != wanted.params.max_tokens:
            self.failures.append(f"{wanted.seen} tokens instead of {wanted.params.max_tokens}")

    # ---- pauses ----------------------------------------------------------------------------------

    def _pause(self) -> None:
        """Check pages, memory and answers while nothing runs, and write the results so far."""
        pages = summed(self.llm.control("check"))
        if pages["free"] + pages["evictable"] != pages["total"]:
            self.failures.append(
                f"nothing runs, but only {pages['free']} pages are free and {pages['evictable']} "
                f"evictable of {pages['total']}"
            )
        self.llm.control("flush")
        pages = summed(self.llm.control("check"))
        if pages["free"] != pages["total"]:
            self.failures.append(
                f"the cache is empty, but only {pages['free']} of {pages['total']} pages are free"
            )
        self._repeat_questions()
        self.llm.control("flush")
        memory = summed(self.llm.control("memory"))
        own = self.memory.bytes() if self.llm.plan.device == "cuda" else None
        seconds = time.monotonic() - self._started
        self.samples.append(Sample(seconds, self.loaded, **memory, device_process=own, pages=pages))
        self.write()
        self._hold()

    def _repeat_questions(self) -> None:
        """Repeat the questions and count the answers that differ from those of the first time."""
        from glowplug.core.step.request import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        answers = [
            done.token_ids
            for done in self.llm.generate(
                self.mix.questions(QUESTION_COUNT, ANSWER_TOKENS), params, use_tqdm=False
            )
        ]
        self._answers = self._answers or answers
        changed = sum(one != other for one, other in zip(answers, self._answers, strict=True))
        self.answers_changed += changed
        if changed and self.args.exact:
            self.failures.append(
                f"{changed} of {QUESTION_COUNT} answers differ from the first ones"
            )

    # ---- the result ------------------------------------------------------------------------------

    def write(self, finished: bool = False, holding: bool = False) -> dict[str, Any]:
        """Return the results so far, and write them to the result file."""
        found = {
            "conditions": self.conditions,
            "finished": finished,
            "holding": holding,
            **self.result(finished),
        }
        if self.args.result_filename:
            report.write_json(Path(self.args.result_filename), found)
        return found

    def not_held(self, finished: bool) -> list[str]:
        """Describe the failed checks; ``--expect-full`` is checked only if ``finished``."""
        found = list(self.failures)
        for name, value in growth(self.samples).items():
            most = self.args.host_growth_mib if name == "host" else self.args.device_growth_mib
            if value > most:
                found.append(f"{name} memory grew by {value:.1f} MiB")
        if finished and self.args.expect_full and not self._was_full():
            found.append(
                f"the KV cache was never full: at least {self._least_share():.1%} of its pages "
                f"were available, {self.llm.stats.preemptions} preemptions"
            )
        return found[:FAILURES_MAX]

    @property
    def _pages(self) -> int:
        sizes = self.llm.plan.sizes
        return sizes.groups * (sizes.num_pages - 1)

    def _least_share(self) -> float:
        return self.least_free / max(1, self._pages)

    def _was_full(self) -> bool:
        return (
            self.least_free <= max(1, FULL_FREE_SHARE * self._pages)
            and self.llm.stats.preemptions > 0
        )

    def result(self, finished: bool = True) -> dict[str, Any]:
        """Return the figures of the run so far."""
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
            **acceptance((), stats.drafts),
            "pages": self._pages,
            "least_free_share": self._least_share(),
            "was_full": self._was_full(),
            "device_memory": device_scope(self.samples, self.memory.missing),
            "growth_mib": growth(self.samples),
            "answers_changed": self.answers_changed,
            "failures": self.not_held(finished),
            "samples": [asdict(sample) for sample in self.samples],
        }
