"""The process that compiles grammars of requests before the engine sees them.

A grammar that takes too long or too much memory, or that breaks the library, ends this process
only. Frames on its standard input and output are a length of four bytes and msgpack.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np

from glowplug.core.engine.blame import failure_of
from glowplug.core.engine.constraint import SequenceGrammar, forbid_token
from glowplug.core.errors import RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import Masks, Worker, words_of
from glowplug.core.startup.components import load_plugins_for
from glowplug.core.startup.grammars import grammar_builder, grammar_options
from glowplug.core.step.structured import GrammarSpec

LENGTH = 4  #: bytes of the length of a frame
KB = 1024
READY = "ready"  #: the first answer, once the library and the tokenizer are loaded
STEPS = 24  #: tokens for which a new grammar is followed
NICE = 10  #: lower priority of the process: the engine and the front go first
STRIDE = 7919  #: distance between the choices among the allowed tokens
#: processor time of one mask from which on a grammar is refused: the engine makes masks between
#: steps, and each request with the grammar would stop all others for as long. Masks of random
#: schemas and common patterns take up to 2 ms for 2,048 tokens (200 schemas), 12 for 129,000 (60)
FILL_SECONDS = 0.1
EMPTY = GrammarSpec("json_schema", '{"type":"null"}')  #: the first grammar, which loads them


def frame(data: bytes) -> bytes:
    """Return ``data`` with its length before it."""
    return len(data).to_bytes(LENGTH, "little") + data


def read_exactly(descriptor: int, count: int) -> bytes:
    """Read ``count`` bytes.

    Raises:
        EOFError: the other end has closed the pipe.
    """
    found = b""
    while len(found) < count:
        part = os.read(descriptor, count - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def read_frame(descriptor: int) -> bytes:
    """Read a frame and return its data.

    Raises:
        EOFError: the other end has closed the pipe.
    """
    return read_exactly(descriptor, int.from_bytes(read_exactly(descriptor, LENGTH), "little"))


def compiler_of(plan: EnginePlan) -> Callable[[GrammarSpec], str]:
    """Return a function that compiles a grammar, and returns why it is refused or ""."""
    builder = grammar_builder(plan, load_plugins_for(plan), Worker())
    mask = np.zeros(words_of(builder.vocab), np.int32)

    def compiled(spec: GrammarSpec) -> str:
        try:
            return walk(builder.build(spec), mask)
        except RequestError as error:
            return str(error)
        except MemoryError:  # the limit of this process; the front starts another one
            raise
        except Exception as error:
            return failure_of(error, plan, "follow a request's grammar")

    return compiled


def walk(
    grammar: SequenceGrammar, mask: Masks, clock: Callable[[], float] = time.thread_time
) -> str:
    """Follow a grammar for ``STEPS`` tokens; return why it is refused, "" if it is not.

    Some libraries find only then that a grammar exceeds their limits. Tokens that end a sequence
    are not followed, because those behind them would never be tried.

    Args:
        grammar: the compiled grammar.
        mask: memory of a mask, [words].
        clock: returns seconds; by default the processor time of this thread, which other work on
            the machine does not change.
    """
    matcher = grammar.compiled.matcher()
    for step in range(STEPS):
        begun = clock()
        matcher.fill(mask)
        seconds = clock() - begun
        if matcher.error():
            return matcher.error()
        if seconds > FILL_SECONDS:
            return f"the tokens that may follow take {seconds:.2g} s to find after {step} tokens"
        if not mask.any():
            return "" if step else "the grammar allows no first token"
        for end in grammar.eos:
            forbid_token(mask, end)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            return ""
        if not matcher.accept(int(allowed[step * STRIDE % len(allowed)])):
            return matcher.error()
    return ""


def limit_memory(count: int) -> None:
    """Let this process take at most ``count`` bytes more than now."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + count, hard))


def main() -> None:
    """Compile the grammars that arrive on standard input, until it is closed."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not reach the frames
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan = EnginePlan.from_json(read_frame(0))
    options = grammar_options(plan)
    compiled = compiler_of(plan)
    compiled(EMPTY)
    limit_memory(options.compile_bytes)
    os.nice(NICE)  # not before, because a request may wait for the start
    os.write(answers, frame(READY.encode()))
    decoder = msgspec.msgpack.Decoder(GrammarSpec)
    while True:
        try:
            spec = decoder.decode(read_frame(0))
        except EOFError:
            return
        # the front kills this process first, unless it has gone itself
        signal.alarm(int(2 * options.compile_seconds) + 1)
        try:
            answer = compiled(spec)
        except MemoryError:
            sys.exit(1)
        signal.alarm(0)
        os.write(answers, frame(answer.encode("utf-8", "replace")))


if __name__ == "__main__":
    main()
