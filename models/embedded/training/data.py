"""Build the training data: a tokenizer, a stream of prose ids, and question-answer pairs.

    python -m glowplug.models.embedded.training.data --wordnet DIR --pydocs DIR --out DIR \\
        [--generated FILE]

`--generated` is the output of smollm_text.py: one JSON object per line, with "question" and
"answer".
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from glowplug.models.embedded.tasks import make_task
from glowplug.models.embedded.training import facts, pydocs, tokenizer
from glowplug.models.embedded.training.wordnet import WordNet

PROSE = "prose.npy"
PAIRS = "pairs.jsonl"
HELD_OUT = "held_out.jsonl"
HELD_OUT_BUCKETS = 50
DEFINED_WORDS = 4000


@dataclass(frozen=True, slots=True)
class Pair:
    """An answer that the model should learn, and the questions for it.

    Attributes:
        source: name of the data source.
        questions: wordings of one question, all with this answer.
        answer: the answer.
    """

    source: str
    questions: tuple[str, ...]
    answer: str

    @property
    def held_out(self) -> bool:
        """True if the pair is kept for evaluation and not trained on.

        A fixed share of each source's pairs is kept, but none of the source "facts".
        """
        digest = hashlib.blake2b(self.questions[0].encode(), digest_size=8).digest()
        return self.source != "facts" and int.from_bytes(digest, "big") % HELD_OUT_BUCKETS == 0


def collect_pairs(wordnet: WordNet, generated: Path | None) -> list[Pair]:
    """Return the question-answer pairs of every source; ``generated`` is left out if None."""
    pairs = [Pair("facts", tuple(questions), answer) for questions, answer in facts.questions()]
    pairs += [
        Pair("wordnet", tuple(questions), answer)
        for questions, answer in wordnet.questions(DEFINED_WORDS)
    ]
    pairs += [Pair("python", tuple(questions), answer) for questions, answer in pydocs.questions()]
    if generated:
        for line in generated.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            pairs.append(Pair("generated", (entry["question"],), entry["answer"]))
    return pairs


def collect_prose(wordnet: WordNet, manual: Path) -> list[str]:
    """Return the prose documents of every source, shuffled."""
    documents = [*wordnet.prose(), *pydocs.documents(manual)]
    documents += [f"{name}\n{text}" for name, text in pydocs.docstrings()]
    random.Random(0).shuffle(documents)
    return documents


def tokenizer_sample(prose: Sequence[str], pairs: Sequence[Pair], size: int = 30_000) -> list[str]:
    """Return texts on which to train the tokenizer: similar numbers of prose, pairs and tasks."""
    rng = random.Random(1)
    texts = rng.sample(list(prose), min(size, len(prose)))
    texts += [f"{rng.choice(pair.questions)}\n{pair.answer}" for pair in rng.choices(pairs, k=size)]
    tasks = (make_task(rng) for _ in range(size))
    return texts + [f"{task.prompt}\n{task.reasoning}\n{task.answer}" for task in tasks]


def encode_stream(texts: Iterable[str], coder: Tokenizer) -> np.ndarray:
    """Return all documents concatenated as uint16 ids, each from BOS to EOS."""
    encoded = coder.encode_batch([f"{text}{tokenizer.EOS}" for text in texts])
    return np.concatenate([np.asarray(e.ids, dtype=np.uint16) for e in encoded])


def write_pairs(file: Path, pairs: Iterable[Pair]) -> None:
    lines = (
        json.dumps([p.source, p.questions, p.answer], ensure_ascii=False) + "\n" for p in pairs
    )
    file.write_text("".join(lines), encoding="utf-8")


def read_pairs(file: Path) -> list[Pair]:
    rows = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    return [Pair(source, tuple(questions), answer) for source, questions, answer in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--wordnet",
        type=Path,
        required=True,
        help="folder of the database (data.noun and the other files)",
    )
    parser.add_argument("--pydocs", type=Path, required=True, help="folder of the manual's HTML")
    parser.add_argument("--generated", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, help="folder of a tokenizer to use instead of training one"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wordnet = WordNet(options.wordnet)
    pairs = collect_pairs(wordnet, options.generated)
    prose = collect_prose(wordnet, options.pydocs)
    if options.tokenizer:
        coder = tokenizer.load(options.tokenizer)
    else:
        coder = tokenizer.train(tokenizer_sample(prose, pairs))
    options.out.mkdir(parents=True, exist_ok=True)
    coder.save(str(options.out / "tokenizer.json"))
    stream = encode_stream(prose, coder)
    np.save(options.out / PROSE, stream)
    write_pairs(options.out / PAIRS, (p for p in pairs if not p.held_out))
    write_pairs(options.out / HELD_OUT, (p for p in pairs if p.held_out))
    print(f"{len(stream)} ids of prose, {len(pairs)} pairs, vocabulary {coder.get_vocab_size()}")


if __name__ == "__main__":
    main()
