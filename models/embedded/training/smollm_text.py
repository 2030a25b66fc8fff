"""Generate short questions and answers with SmolLM2-135M-Instruct (Apache-2.0) on glowplug.

    python -m glowplug.models.embedded.training.smollm_text --out FILE \\
        --model SmolLM2-135M-Instruct.Q4_1.gguf --wordnet DIR

The script uses glowplug's Llama model and needs the glowplug-gguf package of tests/thirdparty. It
uses the engine as a user does and therefore imports the offline entry point (inside `main`). Only
this module and score.py may do so: other modules of this package import no entry point.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

from glowplug.models.embedded.training.wordnet import WordNet
from glowplug.models.embedded.training.words import NOUNS

NOUN_ASKS = (
    "Tell me something about {x}.", "What is {x} used for?", "Why is {x} important?",
    "Describe {x}.", "What do people do with {x}?", "Where can you find {x}?",
    "Write a sentence about {x}.", "What do you know about {x}?",
)  # fmt: skip
VERB_ASKS = (
    "Why do people {x}?",
    "How do you {x}?",
    "What does it take to {x}?",
    "When do people {x}?",
)
SYSTEM = "You are a helpful assistant. Answer in one short, simple sentence."
ANSWER_CHARACTERS_MAX = 160
CHATTY_PATTERN = r"\b(I|I'm|I am|my|me|we|you're|AI|digital|Python|Awesome|Sure|Here)\b|\d\."


def questions(wordnet: WordNet, seed: int = 3) -> Iterator[str]:
    """Yield questions about frequent nouns and verbs, in random order, without end."""
    rng = random.Random(seed)
    nouns = (
        list(NOUNS)
        + [word for _, word, synset in wordnet.common[:6000] if synset.part == "noun"][:1200]
    )
    verbs = [word for _, word, synset in wordnet.common[:3000] if synset.part == "verb"][:300]
    while True:
        asks, words = (NOUN_ASKS, nouns) if rng.random() < 0.85 else (VERB_ASKS, verbs)
        yield rng.choice(asks).format(x=rng.choice(words))


def first_sentences(text: str) -> str | None:
    """Return the answer up to its last whole sentence within the length limit.

    Returns:
        At most `LONGEST` characters; None if there is no whole sentence or the text is not plain.
    """
    text = re.sub(r"\s+", " ", text).strip()
    ends = [
        match.end()
        for match in re.finditer(r"[.!?](?=\s|$)", text)
        if match.end() <= ANSWER_CHARACTERS_MAX
    ]
    if not ends or not text.isascii() or re.search(r"[*#\[\]{}<>|]|As an AI|\bI'm sorry\b", text):
        return None
    return text[: ends[-1]]


def keeps(question: str, answer: str) -> bool:
    """Return True if a generated answer names the question's subject and is not chatty."""
    word = question.rstrip(".?").split()[-1] if " used for" not in question else question.split()[2]
    word = question.split()[2] if question.endswith("important?") else word
    return word[:4].lower() in answer.lower() and re.search(CHATTY_PATTERN, answer) is None


def main() -> None:
    from glowplug import LLM, SamplingParams

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--plugin", action="append", default=[], help="plugin module to load if it is not installed"
    )
    parser.add_argument("--wordnet", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=0, help="stop after this many batches")
    options = parser.parse_args()
    engine = LLM(model=options.model, plugins=options.plugin, context_length=1024,
                 scheduler={"max_running_requests": options.batch})  # fmt: skip
    asks = questions(WordNet(options.wordnet))
    ends = time.monotonic() + options.minutes * 60
    rounds = 0
    kept = 0
    seen = set()
    with options.out.open("w", encoding="utf-8") as file:
        while time.monotonic() < ends and rounds != (options.rounds or -1):
            batch = [next(asks) for _ in range(options.batch)]
            chats = [
                [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ask}]
                for ask in batch
            ]
            params = SamplingParams(temperature=0.6, top_p=0.9, max_tokens=48, seed=rounds)
            for ask, output in zip(batch, engine.chat(chats, params), strict=True):
                answer = first_sentences(output.text)
                if answer and keeps(ask, answer) and (ask, answer) not in seen:
                    seen.add((ask, answer))
                    file.write(json.dumps({"question": ask, "answer": answer}) + "\n")
                    kept += 1
            rounds += 1
            file.flush()
            print(f"round {rounds}: {kept} kept", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
