"""Packed training batches, made by worker processes.

Rows of equal length mix tasks, chat pairs and prose.
"""

import multiprocessing as mp
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glowplug.models.embedded.tasks import Task, make_task
from glowplug.models.embedded.training import tokenizer
from glowplug.models.embedded.training.data import PAIRS, PROSE, Pair, read_pairs
from glowplug.models.embedded.training.words import COLOURS, NAMES, NOUNS

# Arithmetic needs most practice, and so does finding a key by its name, the core of lookup and
# counting.
TASK_WEIGHTS = {
    "add": 3.0,
    "subtract": 4.0,
    "sort": 4.0,
    "reverse": 1.5,
    "count": 4.0,
    "copy": 2.0,
    "lookup": 4.0,
}
PAIR_WEIGHTS = {"facts": 2.5, "wordnet": 3.0, "python": 0.7, "generated": 2.0}
PROMPT_WEIGHT = 0.1  # loss weight of the ids that the user writes
SYSTEMS = (
    "You are a helpful assistant.",
    "You are Glowplug.",
    "Be brief.",
    "You are a helpful AI assistant.",
)
PROSE_PIECE = 160
THINK_SHARE = 0.06
STATEMENT_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class TaskMix:
    """Shares of tasks, question-answer pairs, prose and recall drills in the training text."""

    tasks: float = 0.6
    pairs: float = 0.26
    prose: float = 0.1
    recall: float = 0.04


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One packed batch.

    Attributes:
        ids: int16 [rows, length].
        documents: int16 [rows, length], the number of each id's document within its row.
        weights: float16 [rows, length], loss weights of predicting each id.
    """

    ids: np.ndarray
    documents: np.ndarray
    weights: np.ndarray


class TextSource:
    """Source of random training documents, each as (token ids, loss weights)."""

    def __init__(self, folder: Path, mix: TaskMix, seed: int) -> None:
        self.rng = random.Random(seed)
        self.coder = tokenizer.load(folder)
        self.prose = np.load(folder / PROSE, mmap_mode="r")
        self.pairs: dict[str, list[Pair]] = {}
        for pair in read_pairs(folder / PAIRS):
            self.pairs.setdefault(pair.source, []).append(pair)
        self.sources = list(self.pairs)
        self.source_weights = [PAIR_WEIGHTS[name] for name in self.sources]
        self.mix = mix

    def piece(self, length: int) -> tuple[list[int], list[float]]:
        """Return ``length`` ids of the prose stream, which may span several documents."""
        start = self.rng.randrange(len(self.prose) - length)
        return self.prose[start : start + length].tolist(), [1.0] * length

    def _task_turn(self) -> tuple[str, str, bool]:
        kind = self.rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()))[0]
        task: Task = make_task(self.rng, kind=kind)
        return task.prompt, task.completion, task.think

    def _pair_turn(self) -> tuple[str, str, bool]:
        pair = self.rng.choice(self.pairs[self.rng.choices(self.sources, self.source_weights)[0]])
        ask = self.rng.choice(pair.questions)
        think = self.rng.random() < THINK_SHARE
        if self.rng.random() < 0.1:  # users do not always write neatly
            ask = ask.rstrip("?.")
        if self.rng.random() < 0.1:
            ask = ask[0].lower() + ask[1:]
        reasoning = "The user asks a question that I can answer directly.\n</think>\n\n"
        return ask, reasoning + pair.answer if think else pair.answer, think

    def conversation(self) -> tuple[list[int], list[float]]:
        """Return a conversation of one to three turns, only the last of which may reason."""
        share = self.mix.tasks / (self.mix.tasks + self.mix.pairs)
        past: list[tuple[str, str]] = []
        while True:
            turn = self._task_turn if self.rng.random() < share else self._pair_turn
            ask, answer, think = turn()
            if think or len(past) == 2 or self.rng.random() < 0.8:
                break
            past.append((ask, answer))
        system = self.rng.choice(SYSTEMS) if self.rng.random() < 0.08 else ""
        prompt = tokenizer.prompt_text(past, ask, think=think, system=system)
        ids = self.coder.encode(f"{prompt}{answer}{tokenizer.EOS}", add_special_tokens=False).ids
        return ids, [1.0 if wanted else PROMPT_WEIGHT for wanted in tokenizer.answer_mask(ids)]

    def recall(self) -> tuple[list[int], list[float]]:
        """Return a recall drill: named values, then the same entries in another order.

        It trains the model to find a value by its name.
        """
        size = self.rng.randint(2, 8)
        values = self.rng.choice((COLOURS * 2, [str(n) for n in range(100)], NOUNS))
        sign = self.rng.choice(("=", ": ", " is ", " has "))
        names = self.rng.sample(self.rng.choice((NOUNS, NOUNS, NAMES)), size)
        entries = [
            f" {name}{sign}{value}"
            for name, value in zip(names, self.rng.choices(values, k=size), strict=True)
        ]
        again = self.rng.sample(entries, size)
        coder = self.coder
        first = coder.encode(f"{tokenizer.BOS}{','.join(entries)}.", add_special_tokens=False).ids
        second = coder.encode(f"{','.join(again)}.{tokenizer.EOS}", add_special_tokens=False).ids
        return first + second, [0.1] * len(first) + [1.0] * len(second)

    def document(self) -> tuple[list[int], list[float]]:
        kind = self.rng.random()
        if kind < self.mix.prose:
            return self.piece(PROSE_PIECE)
        if kind < self.mix.prose + self.mix.recall:
            return self.recall()
        return self.statement() if self.rng.random() < STATEMENT_SHARE else self.conversation()

    def statement(self) -> tuple[list[int], list[float]]:
        """Return a text that states a fact outside a conversation: token ids and loss weights."""
        text = f"{tokenizer.BOS}{self.rng.choice(self.pairs['facts']).answer}{tokenizer.EOS}"
        ids = self.coder.encode(text, add_special_tokens=False).ids
        return ids, [1.0] * len(ids)

    def row(self, length: int) -> tuple[list[int], list[int], list[float]]:
        """Return (ids, document numbers, loss weights) of one row of ``length`` ids.

        The row has whole documents until one no longer fits, then prose. The first id of a
        document has loss weight 0.
        """
        ids: list[int] = []
        numbers: list[int] = []
        weights: list[float] = []
        number = 0
        while len(ids) < length:
            piece, loss = self.document()
            if len(piece) > length - len(ids):
                piece, loss = self.piece(length - len(ids))
            ids += piece
            weights += [0.0, *loss[1:]]
            numbers += [number] * len(piece)
            number += 1
        return ids, numbers, weights

    def batch(self, rows: int, length: int) -> TrainingBatch:
        made = [self.row(length) for _ in range(rows)]
        ids, numbers, weights = (np.array(part) for part in zip(*made, strict=True))
        return TrainingBatch(
            ids.astype(np.int16), numbers.astype(np.int16), weights.astype(np.float16)
        )


def _work(
    folder: Path, mix: TaskMix, seed: int, rows: int, length: int, queue: "mp.Queue[TrainingBatch]"
) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source = TextSource(folder, mix, seed)
    while True:
        queue.put(source.batch(rows, length))


def stream(
    folder: Path, *, mix: TaskMix, rows: int, length: int, seed: int, workers: int
) -> Iterator[TrainingBatch]:
    """Yield batches of ``rows`` rows without end; the worker processes end with this process."""
    context = mp.get_context("spawn")
    queue: mp.Queue[TrainingBatch] = context.Queue(maxsize=2 * workers)
    for number in range(workers):
        arguments = (folder, mix, seed * 1000 + number, rows, length, queue)
        context.Process(target=_work, args=arguments, daemon=True).start()
    while True:
        yield queue.get()
