"""Every admitted combination of plugins on one GPU, each started on a small random model and
compared with plain torch.

In 16 and 8 bits greedy tokens may differ at a near tie, so the reference (float32, torch, eager, no
speculation) scores a combination's tokens in the same context. Tokens of a correct engine are the
reference's best or nearly as good, and its log-probabilities differ from the reference's only by
the error of the number format.

``python -m tests.gpu.combinations --output docs/benchmarks/gpu-combinations.json --jobs 6`` runs
all of them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glowplug import LLM, SamplingParams
from tests.gpu.cells import AGREEING, DENSE, KINDS, KV_TOKENS, VOCAB, Cell, matrix, write_models
from tests.gpu.matrix_run import Done, Matrix, Outcome, arguments, run_matrix

PAGE, TOKENS = 64, 24


def prompts() -> list[list[int]]:
    """Return prompts of lengths around the page size, half of them with a common beginning of more
    than a page.
    """
    rng = np.random.default_rng(11)
    shared = rng.integers(2, VOCAB, 2 * PAGE).tolist()
    lengths = (1, 5, PAGE - 1, PAGE, PAGE + 1, 100, 2 * PAGE + 3, 20)
    return [
        (shared[: length - 1] + rng.integers(2, VOCAB, length).tolist())[:length]
        if i % 2
        else rng.integers(2, VOCAB, length).tolist()
        for i, length in enumerate(lengths)
    ]


class Reference:
    """Plain torch in float32, one engine for each model and format of its weights; it scores the
    tokens of other engines.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._engines: dict[str, LLM] = {}
        self._known: dict[tuple[str, tuple[int, ...]], list[tuple[float, float]]] = {}

    def engine(self, cell: Cell) -> LLM:
        """Return the engine for ``cell``'s weights; quantising while loading gives weights of
        its own.
        """
        model, name = cell.model, cell.weights
        if name not in self._engines:
            config = Cell(
                model,
                "torch_mha" if model in KINDS else "torch_mla",
                ops="torch",
                radix=False,
                overlap=False,
            ).config(self._folder, self._device)
            config |= {"dtype": "float32", "memory": {"kv_tokens": 4 * KV_TOKENS}}
            for scheme in (scheme for word, scheme in DENSE.items() if word in name):
                config["quantization"] = scheme
            self._engines[name] = LLM(**config, plugins=AGREEING)
        return self._engines[name]

    def score(self, cell: Cell, prompt: list[int], tokens: list[int]) -> list[tuple[float, float]]:
        """Return (log-probability, the best one) at each of ``tokens`` after ``prompt``."""
        return self.scores(cell, [(prompt, tokens)])[0]

    def scores(
        self, cell: Cell, answers: Sequence[tuple[list[int], list[int]]]
    ) -> list[list[tuple[float, float]]]:
        """Return, for each (prompt, tokens), what ``score`` returns; all are scored at once."""
        keys = [(cell.weights, (*prompt, *tokens)) for prompt, tokens in answers]
        firsts = dict(zip(keys, (len(prompt) - 1 for prompt, _ in answers)))
        new = [key for key in firsts if key not in self._known]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
        found = self.engine(cell).generate([list(text) for _, text in new], params) if new else []
        for key, one in zip(new, found, strict=True):
            scored = one.prompt_logprobs
            assert scored is not None
            first = firsts[key]
            self._known[key] = [
                (own, best[0]) for own, best in zip(scored.token[first:], scored.top[first:])
            ]
        return [self._known[key] for key in keys]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()


@dataclass(frozen=True)
class Answers:
    """The answers of an engine to two waves of the same prompts.

    Attributes:
        first: the tokens of the first wave, by prompt.
        again: those of the second wave, which requests log-probabilities.
        logprobs: the log-probabilities of ``again``.
        drafted: verified drafts.
        accepted: accepted drafts.
    """

    first: list[list[int]]
    again: list[list[int]]
    logprobs: list[list[float]]
    drafted: int
    accepted: int


def judge(cell: Cell, answers: Answers, reference: Reference, device: str) -> Outcome:
    """Compare the answers to ``prompts()`` with the reference's.

    Raises:
        AssertionError: an answer is too short, or further from the reference than the cell's bound.
    """
    asked = prompts()
    for tokens in (*answers.first, *answers.again):
        assert len(tokens) == TOKENS, f"{cell.name}: a request ended early"
    plain = reference.scores(cell, list(zip(asked, answers.first, strict=True)))
    scored = reference.scores(cell, list(zip(asked, answers.again, strict=True)))
    regrets = [best - own for known in plain for own, best in known]
    shifts = [
        abs(said - own)
        for saids, known in zip(answers.logprobs, scored, strict=True)
        for said, (own, _) in zip(saids, known, strict=True)
    ]
    verified = answers.drafted / max(1, cell.steps)
    outcome = Outcome(
        float(np.mean(np.array(regrets) < 1e-6)),
        float(np.mean(regrets)),
        float(np.median(shifts)),
        1 + answers.accepted / verified if verified else 1.0,
    )
    bound = cell.bound(device)
    assert outcome.regret <= bound.regret, (
        f"{cell.name}: tokens are {outcome.regret:.3f} worse than the reference's"
    )
    assert outcome.shift <= bound.shift, (
        f"{cell.name}: log-probabilities are {outcome.shift:.3f} off"
    )
    return outcome


def run(cell: Cell, reference: Reference, folder: Path, device: str) -> Outcome:
    """Start an engine, serve two waves of prompts and compare. Raise AssertionError, or any error
    of the engine.
    """
    asked = prompts()
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(**cell.config(folder, device), plugins=AGREEING) as llm:
        first = llm.generate(asked, greedy)
        again = llm.generate(asked, greedy.replace(logprobs=1))
        stats = llm.stats
        llm.control("check")
    logprobs = [one.logprobs.token for one in again if one.logprobs is not None]
    answers = Answers(
        [one.token_ids for one in first],
        [one.token_ids for one in again],
        logprobs,
        stats.drafted_tokens,
        stats.accepted_tokens,
    )
    return judge(cell, answers, reference, device)


# ---- the whole matrix ----------------------------------------------------------------------------

_state: dict[str, Any] = {}


def _prepare(device: str) -> None:
    folder = write_models(Path(tempfile.mkdtemp(prefix="glowplug-cells-")), small=device == "cpu")
    _state.update(folder=folder, device=device, reference=Reference(folder, device))


def attempt(cell: Cell) -> Done:
    try:
        return cell, run(cell, _state["reference"], _state["folder"], _state["device"]), ""
    except Exception as error:
        return cell, None, f"{type(error).__name__}: {error}"[:400]


MATRIX = Matrix(
    "tests.gpu.combinations",
    AGREEING,
    matrix,
    _prepare,
    attempt,
    ("model", "attention", "graphs", "steps", "quantization"),
)


def main() -> int:
    return run_matrix(MATRIX, arguments(__doc__).parse_args())


if __name__ == "__main__":
    sys.exit(main())
