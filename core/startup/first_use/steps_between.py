"""Steps of prompts beside decoding rows, run before any request so that kernels are compiled.

A request whose step needs a new variant of a kernel waits for the compiler, 0.6 to 1.2 s on an
H200. Which variants a step needs depends on its number of tokens, on the number of its decoding
rows and on the size of their drafts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from glowplug.core.engine.runner import Runner
from glowplug.core.plan.plan import EnginePlan, Sizes
from glowplug.core.plugin.byte_costs import ROUND_TOKENS
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.modes import Mode
from glowplug.core.startup.warmup import SHORT_TOKENS, scratch_batch, spread_ids
from glowplug.core.step.batch import Batch, shape_of

#: most steps with prompts between the captured and the largest ones; each has one decoding row more
#: than the next smaller one
STEPS_BETWEEN = 24
#: divisor of the chunk size: steps run from this part of it if steps of whole chunks are captured
UNCAPTURED_PART = 4
#: token counts divisible by this are run too: kernels have a specialised variant for them
SPECIALIZED_DIVISOR = 16


def steps_between(runner: Runner, plan: EnginePlan) -> None:
    """Run the prefill steps of ``counts_between``, then decoding rows beside a short prompt.

    From step to step both the number of tokens and the number of decoding rows fall, because both
    decide which kernels run and how they are compiled. With drafts, the steps alternate among the
    draft shapes, and each shape then runs with all row counts of ``rows_beside``. Without drafts,
    the rows of ``rows_beside`` have the longest caches, because attention chooses its number of KV
    splits by the number and the length of the rows.

    NOTE: the largest step runs first. If steps grew, their tensors would not fit into the
    allocator's blocks of earlier steps.
    """
    steps = _Steps(runner, plan)
    shapes = plan.sizes.step_shapes
    for number, (decodes, tokens) in enumerate(reversed(counts_between(plan.sizes))):
        shape = shapes[-1 - number % len(shapes)]
        steps.run(shape, decodes, tokens - decodes * shape.tokens)
    short = min(SHORT_TOKENS, plan.sizes.chunk_size)
    held = plan.sizes.context_length if plan.sizes.width == 1 else 0
    for shape in reversed(shapes):
        for decodes in reversed(rows_beside(plan.sizes)):
            steps.run(shape, decodes, short, held)


def counts_between(sizes: Sizes) -> list[tuple[int, int]]:
    """Return (decoding rows, tokens) of the steps with prompts to run, ascending.

    The token counts lie between the largest captured one and the chunk size. If steps of whole
    chunks are captured, they begin at a part of the chunk size (``UNCAPTURED_PART``), because the
    last layer is not captured with those steps. They are all multiples of ROUND_TOKENS in this
    range, and counts between these multiples, alternately odd and divisible by
    SPECIALIZED_DIVISOR.
    """
    least = sizes.pass_tokens[-1] if sizes.pass_tokens else 0
    if least >= sizes.chunk_size:
        least = sizes.chunk_size // UNCAPTURED_PART
    steps = min(STEPS_BETWEEN, sizes.max_running - 1)
    first = least // ROUND_TOKENS * ROUND_TOKENS + ROUND_TOKENS
    rounds = set(range(first, sizes.chunk_size, ROUND_TOKENS))
    found = rounds | set(_counts_beside(rounds, least, sizes.chunk_size, steps))
    decodes = [min(number, steps) for number in range(1, len(found) + 1)]
    return [
        (rows, tokens)
        for rows, tokens in zip(decodes, sorted(found))
        if tokens > rows * sizes.width
    ]


def _counts_beside(rounds: set[int], least: int, most: int, steps: int) -> Iterator[int]:
    """Yield up to ``steps`` token counts between ``least`` and ``most``, ascending.

    Every second count is odd. The others are divisible by SPECIALIZED_DIVISOR; of these, counts
    close to a number in ``rounds`` are left out.
    """
    for number in range(1, steps + 1):
        tokens = least + (most - least) * number // STEPS_BETWEEN
        near = round(tokens / ROUND_TOKENS) * ROUND_TOKENS
        if number % 2 == 0:
            yield tokens - 1 + tokens % 2
        elif near not in rounds or abs(near - tokens) * STEPS_BETWEEN >= most - least:
            yield tokens // SPECIALIZED_DIVISOR * SPECIALIZED_DIVISOR


def rows_beside(sizes: Sizes) -> list[int]:
    """Return the numbers of decoding rows that run beside a short prompt, ascending.

    These are the powers of two above STEPS_BETWEEN and, with drafts, all numbers up to
    STEPS_BETWEEN. Without drafts, the steps of ``counts_between`` have those numbers of rows.
    """
    most = sizes.max_running - 1  # one row is the prompt's
    powers = (1 << bit for bit in range(STEPS_BETWEEN.bit_length(), most.bit_length()))
    few = range(1, min(STEPS_BETWEEN, most) + 1) if sizes.width > 1 else ()
    return [*few, *(rows for rows in powers if rows <= most)]


class _Steps:
    """Runs steps of prompts beside decoding rows over the scratch page.

    With drafts, the device keeps the lengths of the rows, which grow in each step. The decoding
    rows therefore continue short prompts, which are computed again before the rows get too long.
    """

    def __init__(self, runner: Runner, plan: EnginePlan) -> None:
        self._runner = runner
        self._plan = plan
        self._prompted = 0  # rows that continue a prompt
        self._longest = 0  # most tokens of one of these rows

    def run(self, shape: DraftShape, decodes: int, prompt_tokens: int, held: int = 0) -> None:
        """Run a step of ``decodes`` rows with drafts of ``shape`` beside ``prompt_tokens`` tokens.

        The results are not checked, because the tokens are garbage.

        Args:
            held: least number of tokens in the cache of a decoding row; without drafts only.
        """
        sizes = self._plan.sizes
        if sizes.width > 1 and decodes:
            if self._prompted < decodes or self._longest + sizes.width > sizes.context_length:
                self._prompt(decodes)
            self._prompted = decodes  # the prompts of this step take the later rows
            self._longest += shape.tokens
        self._runner.launch(self._mixed(shape, decodes, prompt_tokens, held)).wait()

    def _prompt(self, rows: int) -> None:
        """Compute a short prompt in each of the first ``rows`` rows."""
        sizes = self._plan.sizes
        length = max(1, min(SHORT_TOKENS, sizes.chunk_size, sizes.context_length - sizes.width))
        for first in range(0, rows, max(1, sizes.chunk_size // length)):
            numbers = np.arange(
                first, min(rows, first + sizes.chunk_size // length), dtype=np.int32
            )
            ids = spread_ids(self._plan, len(numbers) * length)
            batch = scratch_batch(self._plan, Mode.PREFILL, len(numbers), length, length, ids)
            batch.rows = numbers
            batch.next_ids = np.zeros(len(numbers), np.int32)
            batch.agreed = shape_of(batch)
            self._runner.launch(batch).wait()
        self._longest = length

    def _mixed(self, shape: DraftShape, decodes: int, tokens: int, held: int) -> Batch:
        """Return a step of ``decodes`` decoding rows and ``tokens`` prompt tokens; see ``run``."""
        sizes = self._plan.sizes
        chunks = self._chunks(sizes.max_running - decodes, tokens)
        held = max(chunks[0], self._longest, held)
        batch = scratch_batch(
            self._plan,
            Mode.PREFILL,
            decodes + len(chunks),
            1,
            held,
            spread_ids(self._plan, sum(chunks)),
        )
        batch.num_decodes = decodes
        batch.query_lens = np.array([shape.tokens] * decodes + chunks, np.int32)
        batch.kv_lens = np.array([held] * decodes + chunks, np.int32)
        batch.samples[decodes:] = False
        batch.next_ids = np.zeros(len(chunks), np.int32)
        if sizes.draft_shapes and decodes:
            batch.draft_shape = shape
        batch.agreed = shape_of(batch)
        return batch

    def _chunks(self, rows: int, tokens: int) -> list[int]:
        """Cut ``tokens`` into chunks of at most ``rows`` prompts, none of which ends its prompt."""
        sizes = self._plan.sizes
        most = min(sizes.chunk_size, sizes.context_length - sizes.width)
        whole, rest = divmod(tokens, most)
        return ([most] * whole + [rest] * (rest > 0))[:rows]
