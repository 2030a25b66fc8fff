"""Prose and questions about common words from WordNet 3.0's database files.

Source: Debian's `wordnet-base` (files data.*, index.* and cntlist.rev), WordNet 3.0 licence.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PARTS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
PART_NAMES = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
PART_CODES = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
COUNTED_CODES = {"1", "2", "3", "4", "5"}
HYPERNYM = "@"


@dataclass(frozen=True, slots=True)
class Synset:
    """One meaning in WordNet, shared by one or more words.

    Attributes:
        part: part of speech.
        words: words with this meaning.
        definition: definition.
        examples: example sentences.
        points: (relation, offset) of related meanings.
    """

    part: str
    words: tuple[str, ...]
    definition: str
    examples: tuple[str, ...]
    points: tuple[tuple[str, str], ...]

    @property
    def prose(self) -> str:
        """A dictionary entry of one or two lines."""
        quoted = "".join(f' For example: "{example}".' for example in self.examples)
        return f"{', '.join(self.words)} ({PART_NAMES[self.part]}): {self.definition}.{quoted}"


def _parse(part: str, line: str) -> tuple[str, Synset]:
    head, _, gloss = line.partition(" | ")
    fields = head.split()
    count = int(fields[3], 16)
    words = tuple(
        re.sub(r"\(.*\)$", "", word).replace("_", " ") for word in fields[4 : 4 + 2 * count : 2]
    )
    rest = fields[4 + 2 * count :]
    points = tuple((rest[1 + 4 * i], rest[2 + 4 * i]) for i in range(int(rest[0])))
    examples = tuple(example.strip() for example in re.findall(r'"([^"]+)"', gloss))
    definition = re.sub(r'[;,]?\s*"[^"]*"', "", gloss).strip().rstrip(";:. ")
    return fields[0], Synset(part, words, definition, examples, points)


class WordNet:
    """WordNet's database: every meaning by (part of speech, offset in its data file)."""

    def __init__(self, folder: Path) -> None:
        self.synsets: dict[tuple[str, str], Synset] = {}
        for part in PARTS:
            for line in (folder / f"data.{part}").read_text(encoding="latin-1").splitlines():
                if not line.startswith(" "):
                    offset, synset = _parse(part, line)
                    self.synsets[part, offset] = synset
        self.common = self._common(folder)

    def _common(self, folder: Path) -> list[tuple[int, str, Synset]]:
        """Return the one-word lemmas of WordNet, the most frequent in tagged text first.

        Returns:
            (tag count, word, first meaning) of each.
        """
        counts: dict[tuple[str, str], int] = {}
        for line in (folder / "cntlist.rev").read_text(encoding="latin-1").splitlines():
            key, _, count = line.split()
            lemma, _, sense = key.partition("%")
            if sense[0] in COUNTED_CODES:
                name = (PART_CODES[sense[0]], lemma)
                counts[name] = counts.get(name, 0) + int(count)
        found = []
        for part in PARTS:
            for line in (folder / f"index.{part}").read_text(encoding="latin-1").splitlines():
                fields = line.split()
                if line.startswith(" ") or not re.fullmatch(r"[a-z]{2,}", fields[0]):
                    continue
                pointers = int(fields[3])
                uses = counts.get((part, fields[0]), 0)
                found.append((uses, fields[0], self.synsets[part, fields[6 + pointers]]))
        return sorted(found, key=lambda item: (-item[0], item[1]))

    def prose(self) -> Iterator[str]:
        """Return an iterator over every synset as a dictionary entry."""
        return (synset.prose for synset in self.synsets.values())

    def hypernym(self, synset: Synset) -> str | None:
        """Return the first word of the nearest more general meaning; None if there is none."""
        for relation, offset in synset.points:
            if relation == HYPERNYM and (synset.part, offset) in self.synsets:
                return self.synsets[synset.part, offset].words[0]
        return None

    def questions(self, most: int) -> Iterator[tuple[list[str], str]]:
        """Yield (ways to ask, answer) about the `most` frequent words.

        The answer is about the most frequent meaning of the word.
        """
        asked: set[str] = set()
        for _, word, synset in self.common[: most * 2]:
            if word in asked or len(asked) >= most or len(synset.definition) > 150:
                continue
            asked.add(word)
            yield from self._about(word, synset)

    def _about(self, word: str, synset: Synset) -> Iterator[tuple[list[str], str]]:
        article = "An" if word[0] in "aeiou" else "A"
        asks = [f"Define {word}.", f"What does {word} mean?", f"What is the meaning of {word}?",
                f"Give me a definition of {word}.", f"What does the word {word} mean?"]  # fmt: skip
        if synset.part == "noun":
            asks += [
                f"What is {article.lower()} {word}?",
                f"What is {word}?",
                f"Tell me what {word} means.",
            ]
            general = self.hypernym(synset)
            if general:
                answer = f"{article} {word} is a kind of {general}."
                yield [f"What kind of thing is {article.lower()} {word}?"], answer
        yield asks, f"{word.capitalize()} ({PART_NAMES[synset.part]}): {synset.definition}."
        others = [other for other in synset.words if other.lower() != word]
        if others:
            answer = f"A synonym of {word} is {others[0]}."
            yield [f"What is a synonym of {word}?", f"Give me a synonym of {word}.",
                   f"Another word for {word}?"], answer  # fmt: skip
