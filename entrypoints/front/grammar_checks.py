"""Checks of requests' grammars, before the engine compiles them: limits, and a first compilation.

The compilation runs in worker processes (``grammar_worker``), which are killed after a time.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections import OrderedDict
from queue import SimpleQueue
from threading import Lock

import msgspec

from glowplug.core.errors import RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import PluginSet
from glowplug.core.startup.grammars import grammar_kinds, grammar_options
from glowplug.core.step.request import SamplingParams
from glowplug.core.step.structured import GrammarSpec, nesting
from glowplug.entrypoints.front.grammar_worker import frame, read_frame

START_SECONDS = 120.0  #: time limit for the start of a worker
KEPT_ANSWERS = 4096  #: answers that are remembered
KEPT_BYTES = 16 << 20  #: bytes of the grammars of these answers
CODE = "invalid_grammar"  #: error code of a refused grammar
#: the worker's program; it imports modules from where this process does
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from glowplug.entrypoints.front.grammar_worker import main; main()"
)


class CheckWorker:
    """A worker process, which is started again after it was killed."""

    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan.to_json()
        self._ready = False
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert process.stdin is not None
        process.stdin.write(frame(self._plan))
        return process

    def compile(self, spec: GrammarSpec, seconds: float) -> str:
        """Compile a grammar; return why it is refused, "" if it is good."""
        if self._process.poll() is not None:
            self._restart()
        if not self._ready and self._answer(START_SECONDS) is None:
            self._restart()
            raise RequestError("the process that compiles grammars does not start", status=503)
        self._ready = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frame(msgspec.msgpack.encode(spec)))
            answer = self._answer(seconds)
        except OSError:
            answer = None
        if answer is not None:
            return answer
        slow = self._process.poll() is None
        self._restart()
        return (
            f"the grammar takes longer than {seconds:g} s to compile"
            if slow
            else "the grammar needs too much memory or is too deep"
        )

    def _answer(self, seconds: float) -> str | None:
        """Return the worker's next answer; None if it has ended, or after ``seconds``."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        if not select.select([descriptor], [], [], seconds)[0]:
            return None
        try:
            return read_frame(descriptor).decode()
        except EOFError:
            self._process.wait()
            return None

    def _restart(self) -> None:
        self.close()
        self._ready = False
        self._process = self._start()

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class GrammarChecks:
    """Checks the grammars of requests. All methods may be called from several threads.

    Args:
        plan: the engine's plan.
        plugins: the plan's plugins; None: no grammar is served.
    """

    def __init__(self, plan: EnginePlan, plugins: PluginSet | None) -> None:
        self.options = grammar_options(plan)
        self._plan = plan
        self._name = next((choice.name for choice in plan.choices_in("grammar")), "none")
        self._kinds = grammar_kinds(plan, plugins)
        self._simulated = any(
            choice.options.get("simulate_accept_rates") for choice in plan.choices_in("speculative")
        )
        self._answers: OrderedDict[tuple[str, str, bool], str] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        self._workers: list[CheckWorker] = []
        self._free: SimpleQueue[CheckWorker] = SimpleQueue()

    def known(self, params: SamplingParams) -> bool:
        """Return whether the parameters need no worker; check them as far as this goes.

        Raises:
            RequestError: the grammar is refused.
        """
        spec = params.grammar
        if spec is None:
            return True
        self._check_limits(spec)
        with self._lock:
            answer = self._answers.get(spec.key)
            if answer is None:
                return False
            self._answers.move_to_end(spec.key)
        self._refuse(answer)
        return True

    def check(self, params: SamplingParams) -> None:
        """Check the grammar of a request, and wait for its compilation if it is new.

        Raises:
            RequestError: the grammar is refused.
        """
        spec = params.grammar
        if spec is None or self.known(params):
            return
        worker = self._take()
        try:
            answer = worker.compile(spec, self.options.compile_seconds)
        finally:
            self._free.put(worker)
        with self._lock:
            self._keep(spec, answer)
        self._refuse(answer)

    def close(self) -> None:
        """Kill the workers."""
        with self._lock:
            for worker in self._workers:
                worker.close()
            self._workers = []

    def _check_limits(self, spec: GrammarSpec) -> None:
        if spec.kind not in self._kinds:
            have = ", ".join(sorted(self._kinds))
            why = f"it supports {have}" if have else "install llguidance, and a tokenizer"
            raise RequestError(
                f"structured output of kind {spec.kind!r} is not available in this engine "
                f"(grammar.use = {self._name}): {why}",
                code="unsupported_parameter",
            )
        if self._simulated:
            raise RequestError(
                "structured output is refused while the acceptance of drafts is simulated",
                code="unsupported_parameter",
            )
        size = len(spec.text.encode())
        if size > self.options.max_bytes:
            self._refuse(f"the grammar has {size} bytes, and at most {self.options.max_bytes} may")
        depth = nesting(spec)
        if depth > self.options.max_depth:
            self._refuse(
                f"the grammar nests {depth} levels deep, and at most {self.options.max_depth} may"
            )

    def _refuse(self, answer: str) -> None:
        if answer:
            raise RequestError(answer, code=CODE)

    def _take(self) -> CheckWorker:
        """Wait for a worker; the first call starts them all."""
        with self._lock:
            while len(self._workers) < self.options.workers:
                self._workers.append(CheckWorker(self._plan))
                self._free.put(self._workers[-1])
        return self._free.get()

    def _keep(self, spec: GrammarSpec, answer: str) -> None:
        if spec.key not in self._answers:
            self._answers[spec.key] = answer
            self._bytes += len(spec.text)
        while len(self._answers) > KEPT_ANSWERS or self._bytes > KEPT_BYTES:
            (_, text, _), _ = self._answers.popitem(last=False)
            self._bytes -= len(text)
