"""Synthetic chat tasks with one exact answer each, their held-out split, and the scorer.

Imports no torch. A task is held out if a hash of its *content* (kind and operands, not its wording)
is in a fixed bucket. The training and held-out sets are therefore disjoint for all seeds.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from glowplug.models.embedded.training.words import (
    ADJECTIVES,
    COLOURS,
    LETTERS,
    NAMES,
    NOUNS,
    VERBS,
    plural,
)

HELD_OUT_BUCKETS = 40  # one content in this many is held out from training
THINK_SHARE = 0.06


@dataclass(frozen=True, slots=True)
class Task:
    """One question and its answer.

    Attributes:
        kind: a key of ``MAKERS``.
        key: the content of the question, independent of its wording.
        prompt: the question.
        answer: the exact answer.
        reasoning: the short reasoning text that precedes the answer in think form.
        think: True if the question is asked in think form.
    """

    kind: str
    key: str
    prompt: str
    answer: str
    reasoning: str
    think: bool = False

    @property
    def completion(self) -> str:
        """The assistant's text after the generation prompt."""
        return f"{self.reasoning}\n</think>\n\n{self.answer}" if self.think else self.answer


TaskTexts = tuple[str, str, str, str]  # key, prompt, answer, reasoning


def held_out(kind: str, key: str) -> bool:
    """Return True if the content ``key`` of this kind belongs to the held-out set."""
    digest = hashlib.blake2b(f"{kind}|{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_BUCKETS == 0


def _operand(rng: random.Random) -> int:
    digits = rng.choices((1, 2, 3), (1, 3, 6))[0]
    return rng.randrange(10**digits)


COLUMNS = ("Ones", "Tens", "Hundreds")


def _add_working(a: int, b: int) -> str:
    steps = []
    carry = 0
    for column in range(max(len(str(a)), len(str(b)))):
        x = a // 10**column % 10
        y = b // 10**column % 10
        total = x + y + carry
        carried = f" + {carry}" if carry else ""
        carry = total // 10
        steps.append(
            f"{COLUMNS[column]}: {x} + {y}{carried} = {total}, write {total % 10}, carry {carry}."
        )
    return " ".join([*steps, f"So {a} + {b} = {a + b}."])


def _subtract_working(a: int, b: int) -> str:
    if a < b:
        return (
            f"{b} is larger than {a}, so the answer is negative. "
            f"{b} - {a} = {b - a}. So {a} - {b} = {a - b}."
        )
    steps = []
    borrow = 0
    for column in range(len(str(a))):
        x = a // 10**column % 10
        y = b // 10**column % 10
        digit = x - y - borrow
        borrowed = f" - {borrow}" if borrow else ""
        borrow = int(digit < 0)
        steps.append(
            f"{COLUMNS[column]}: {x} - {y}{borrowed} = {digit}, "
            f"write {digit % 10}, borrow {borrow}."
        )
    return " ".join([*steps, f"So {a} - {b} = {a - b}."])


ADD = (
    "What is {a} + {b}?", "{a} + {b} = ?", "{a} + {b}", "Calculate {a} + {b}.",
    "What is {a} plus {b}?", "Add {a} and {b}.", "Please add {a} to {b}.",
    "What is the sum of {a} and {b}?", "How much is {a} + {b}?", "Compute {a} plus {b}.",
    "Can you add {a} and {b}?", "What's {a} + {b}?",
    "I have {a} coins and get {b} more. How many coins do I have?", "{a}+{b}", "{a}+{b}=",
    "{a}+{b}=?", "What is {a}+{b}?", "What's {a}+{b}?", "Calculate {a}+{b}", "{a} plus {b}",
    "what is {a}+{b}", "{a} + {b} =",
)  # fmt: skip
SUBTRACT = (
    "What is {a} - {b}?", "{a} - {b} = ?", "{a} - {b}", "Calculate {a} - {b}.",
    "What is {a} minus {b}?", "Subtract {b} from {a}.", "Please subtract {b} from {a}.",
    "How much is {a} - {b}?", "Compute {a} minus {b}.", "What's {a} - {b}?",
    "What is the difference of {a} and {b}?", "Can you subtract {b} from {a}?", "{a}-{b}",
    "{a}-{b}=", "{a}-{b}=?", "What is {a}-{b}?", "What's {a}-{b}?", "Calculate {a}-{b}",
    "{a} minus {b}", "what is {a}-{b}", "{a} - {b} =",
)  # fmt: skip


def _add(rng: random.Random) -> TaskTexts:
    a = _operand(rng)
    b = _operand(rng)
    return f"{a},{b}", rng.choice(ADD).format(a=a, b=b), str(a + b), _add_working(a, b)


def _subtract(rng: random.Random) -> TaskTexts:
    a = _operand(rng)
    b = _operand(rng)
    if a < b and rng.random() < 0.85:
        a, b = b, a
    return f"{a},{b}", rng.choice(SUBTRACT).format(a=a, b=b), str(a - b), _subtract_working(a, b)


def _sentence(rng: random.Random) -> str:
    noun, other = rng.sample(NOUNS, 2)
    forms = (
        f"The {rng.choice(ADJECTIVES)} {noun} {rng.choice(VERBS)}.",
        f"{rng.choice(NAMES)} {rng.choice(VERBS)} near the {noun}.",
        f"The {noun} and the {rng.choice(ADJECTIVES)} {other} are {rng.choice(ADJECTIVES)}.",
        f"{rng.choice(NAMES)} has {rng.randrange(2, 100)} {rng.choice(ADJECTIVES)} {plural(noun)}.",
    )
    return rng.choice(forms)


def _items(rng: random.Random, low: int, high: int) -> list[str]:
    """Return distinct random words, letters or numbers: at least ``low``, at most ``high``."""
    size = rng.randint(low, high)
    pool: Sequence[str] = rng.choice(
        (NOUNS, NOUNS, LETTERS.upper(), NAMES, [str(n) for n in range(100)])
    )
    return rng.sample(list(pool), size)


def _listed(rng: random.Random, items: Sequence[str]) -> str:
    """Return the items as one text, separated in one of the ways in which users write lists.

    In answers and keys of tasks, lists always have a comma and a space.
    """
    return rng.choices((", ", " ", ",", " and "), (16, 3, 1, 1))[0].join(items)


COPY = (
    "Repeat this: {x}", "Repeat after me: {x}", "Copy this text: {x}",
    "Copy the following exactly: {x}", "Say: {x}", "Please repeat: {x}", "Write this again: {x}",
    "Echo this text: {x}", "Can you repeat this? {x}",
)  # fmt: skip


def _copy(rng: random.Random) -> TaskTexts:
    form = rng.randrange(4)
    if form == 0:
        text = _sentence(rng)
    elif form == 1:
        text = " ".join(rng.choices(NOUNS + ADJECTIVES + VERBS, k=rng.randint(2, 8)))
    elif form == 2:
        text = "".join(rng.choices("0123456789", k=rng.randint(3, 10)))
    else:
        text = ", ".join(_items(rng, 2, 7))
    return text, rng.choice(COPY).format(x=text), text, "I only need to write the same text again."


REVERSE = (
    "Reverse this list: {x}", "Reverse the order of this list: {x}",
    "Write this list backwards: {x}", "Please reverse: {x}", "Put these in reverse order: {x}",
    "What is this list in reverse order? {x}", "Can you reverse this list? {x}",
    "List these from last to first: {x}",
)  # fmt: skip
DIGITS = (
    "Reverse the digits of {x}.",
    "Write the number {x} backwards.",
    "What is {x} with its digits reversed?",
)


def _reverse(rng: random.Random) -> TaskTexts:
    if rng.random() < 0.2:
        number = str(rng.randrange(10**6)) if rng.random() < 0.5 else str(rng.randrange(10**4))
        return (
            number,
            rng.choice(DIGITS).format(x=number),
            number[::-1],
            f"The digits are {' '.join(number)}.",
        )
    items = _items(rng, 2, 7)
    text = ", ".join(items)
    answer = ", ".join(reversed(items))
    asked = rng.choice(REVERSE).format(x=_listed(rng, items))
    return text, asked, answer, f"The last is {items[-1]} and the first is {items[0]}."


ASCENDING = (
    "Sort these numbers: {x}", "Sort this list: {x}", "Put these numbers in order: {x}",
    "Sort these numbers from smallest to largest: {x}", "Sort in ascending order: {x}",
    "Please sort: {x}", "Can you sort these numbers? {x}",
    "Order these numbers from low to high: {x}",
)  # fmt: skip
DESCENDING = (
    "Sort these numbers from largest to smallest: {x}", "Sort in descending order: {x}",
    "Order these numbers from high to low: {x}",
)  # fmt: skip
ALPHABET = (
    "Sort these letters: {x}", "Put these letters in alphabetical order: {x}",
    "Sort these letters from A to Z: {x}", "Sort this list: {x}", "Please sort: {x}",
)  # fmt: skip


def _sort(rng: random.Random) -> TaskTexts:
    size = rng.randint(2, 6)
    if rng.random() < 0.25:
        letters = rng.sample(LETTERS.upper(), size)
        text = ", ".join(letters)
        answer = ", ".join(sorted(letters))
        asked = rng.choice(ALPHABET).format(x=_listed(rng, letters))
        return text, asked, answer, f"The first in the alphabet is {min(letters)}."
    top = rng.choice((10, 100, 100, 1000))
    numbers = rng.sample(range(top), size)
    text = ", ".join(map(str, numbers))
    shown = _listed(rng, [str(number) for number in numbers])
    if rng.random() < 0.25:
        answer = ", ".join(map(str, sorted(numbers, reverse=True)))
        return (
            f"down {text}",
            rng.choice(DESCENDING).format(x=shown),
            answer,
            f"The largest is {max(numbers)}.",
        )
    answer = ", ".join(map(str, sorted(numbers)))
    return text, rng.choice(ASCENDING).format(x=shown), answer, f"The smallest is {min(numbers)}."


COUNT = (
    "How many items are in this list? {x}", "Count the items: {x}", "How many items are there: {x}",
    "Count these: {x}", "How many words are here? {x}", "Count the words: {x}",
    "How long is this list? {x}", "Please count: {x}",
)  # fmt: skip
OCCURRENCES = (
    "How many times does {w} appear in this list? {x}", "Count how often {w} occurs: {x}",
    "How many times is {w} in this list: {x}",
)  # fmt: skip


def _count(rng: random.Random) -> TaskTexts:
    if rng.random() < 0.4:
        kinds = rng.sample(NOUNS, rng.randint(2, 3))
        items = rng.choices(kinds, k=rng.randint(2, 8))
        text = ", ".join(items)
        word = kinds[0]
        working = (
            f"I look for {word}: "
            + " ".join("yes" if item == word else "no" for item in items)
            + "."
        )
        return (
            f"{word}: {text}",
            rng.choice(OCCURRENCES).format(w=word, x=text),
            str(items.count(word)),
            working,
        )
    items = rng.sample(NOUNS, rng.randint(1, 10))
    text = ", ".join(items)
    working = " ".join(f"{place}: {item}." for place, item in enumerate(items, 1))
    return text, rng.choice(COUNT).format(x=_listed(rng, items)), str(len(items)), working


def _lookup(rng: random.Random) -> TaskTexts:
    size = rng.randint(2, 6)
    form = rng.randrange(4)
    asks: tuple[str, ...]
    if form in (0, 1):
        keys = rng.sample(NOUNS, size)
        values = [str(n) for n in rng.sample(range(100), size)]
        wanted = rng.randrange(size)
        table = ", ".join(
            f"{k}={v}" if form else f"{k}: {v}" for k, v in zip(keys, values, strict=True)
        )
        asks = ("{t}. What is {k}?", "Given {t}. What is the value of {k}?",
                "Look up {k} in this list: {t}",
                "In this list, what is {k}? {t}", "List: {t}. Find {k}.")  # fmt: skip
    elif form == 2:
        keys = rng.sample(NAMES, size)
        values = rng.choices([str(n) for n in range(2, 100)], k=size)
        wanted = rng.randrange(size)
        thing = plural(rng.choice(NOUNS))
        table = ", ".join(f"{k} has {v} {thing}" for k, v in zip(keys, values, strict=True))
        asks = (f"{{t}}. How many {thing} does {{k}} have?",)
    else:
        keys = rng.sample(NOUNS, size)
        values = rng.choices(COLOURS, k=size)
        wanted = rng.randrange(size)
        table = ", ".join(f"the {k} is {v}" for k, v in zip(keys, values, strict=True)).capitalize()
        asks = ("{t}. What color is the {k}?", "{t}. Which color is the {k}?")
    key = keys[wanted]
    value = values[wanted]
    return (
        f"{table}|{key}",
        rng.choice(asks).format(t=table, k=key),
        value,
        f"I look for {key} and find {value}.",
    )


MAKERS: dict[str, Callable[[random.Random], TaskTexts]] = {
    "add": _add, "subtract": _subtract, "copy": _copy, "reverse": _reverse,
    "sort": _sort, "count": _count, "lookup": _lookup,
}  # fmt: skip
KINDS: tuple[str, ...] = tuple(MAKERS)


def make_task(
    rng: random.Random, *, kind: str | None = None, test: bool = False, think: bool | None = None
) -> Task:
    """Return a random task of the training set, or of the held-out set if ``test``.

    ``kind``, ``think``: kind and form of the task; None: drawn at random too.
    """
    kind = kind or rng.choice(KINDS)
    while True:
        key, prompt, answer, reasoning = MAKERS[kind](rng)
        if held_out(kind, key) == test:
            thinking = rng.random() < THINK_SHARE if think is None else think
            return Task(kind, key, prompt, answer, reasoning, thinking)


def held_out_tasks(count: int = 500, seed: int = 2026) -> list[Task]:
    """Return the fixed evaluation set of ``count`` tasks with distinct contents.

    Kinds follow each other in turn; a few tasks are in think form.
    """
    return list(_distinct(random.Random(seed), count))


def _distinct(rng: random.Random, count: int) -> Iterator[Task]:
    seen: set[tuple[str, str]] = set()
    while len(seen) < count:
        task = make_task(rng, kind=KINDS[len(seen) % len(KINDS)], test=True)
        if (task.kind, task.key) not in seen:
            seen.add((task.kind, task.key))
            yield task


def final_answer(text: str) -> str:
    """Return the text after `</think>`, without surrounding white space."""
    return text.rpartition("</think>")[2].strip()


def is_correct(task: Task, text: str) -> bool:
    """Return True if the final answer in ``text`` equals the task's answer.

    In think form, ``text`` must also close its reasoning.
    """
    closed = not task.think or "</think>" in text
    return closed and final_answer(text) == task.answer


def score(tasks: Sequence[Task], texts: Sequence[str]) -> dict[str, float]:
    """Return the percentage of correct ``texts`` for each kind of task, and for all under "all"."""
    hits: dict[str, list[bool]] = {"all": []}
    for task, text in zip(tasks, texts, strict=True):
        for name in ("all", task.kind, *(("think",) if task.think else ())):
            hits.setdefault(name, []).append(is_correct(task, text))
    return {name: 100.0 * sum(marks) / len(marks) for name, marks in hits.items()}
