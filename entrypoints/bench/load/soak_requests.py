"""The random requests of a soak: mixed lengths, sampling settings and shared prefixes."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from glowplug.core.plan.plan import EnginePlan
from glowplug.core.step.request import SamplingParams

PREFIX_COUNT = 8  #: number of prefixes that requests share
REFUSED_SHARE = 0.01  #: share of requests that are too long and must be refused
CONTEXT_MIN = 8  #: shortest context in tokens in which lengths can be mixed


@dataclass
class WantedRequest:
    """One request of a soak run with the expected reaction of the engine.

    Attributes:
        prompt: token ids.
        params: sampling parameters.
        abort_after: number of tokens after which the request is aborted; None: not aborted.
        refused: the request is too long, so the engine must refuse it.
        seen: tokens received so far.
    """

    prompt: list[int]
    params: SamplingParams
    abort_after: int | None = None
    refused: bool = False
    seen: int = 0


class RequestMix:
    """Source of random requests: most fit ``plan``'s engine, a few are too long for it."""

    def __init__(
        self, rng: random.Random, plan: EnginePlan, abort_share: float, shared_share: float
    ) -> None:
        self._rng = rng
        self._abort = abort_share
        self._shared = shared_share
        self._vocab = plan.facts.model.vocab_size
        pool = (plan.sizes.num_pages - 1) * plan.sizes.page_size
        self._context = min(plan.sizes.context_length, pool)
        if self._context < CONTEXT_MIN:
            raise ValueError(
                f"a context of {self._context} tokens is too short for requests of mixed lengths"
            )
        self._prefixes = [self._ids(self._context // 2) for _ in range(PREFIX_COUNT)]
        self._questions: list[list[int]] = []

    def next(self) -> WantedRequest:
        """Return the next random request."""
        rng = self._rng
        if rng.random() < REFUSED_SHARE:
            return WantedRequest(
                self._ids(self._context + 1), SamplingParams(max_tokens=1), refused=True
            )
        prompt = self._prompt(self._length(self._context - 2))
        tokens = self._length(self._context - 1 - len(prompt))
        params = self._sampled(tokens)
        abort = rng.randint(1, tokens) if rng.random() < self._abort else None
        return WantedRequest(prompt, params, abort)

    def questions(self, count: int, tokens: int) -> list[list[int]]:
        """Return ``count`` prompts, equal at every call, that leave room for ``tokens`` tokens."""
        if not self._questions:
            room = max(1, self._context - tokens)
            self._questions = [
                self._ids(max(1, room * (index + 1) // (2 * count))) for index in range(count)
            ]
        return self._questions

    def _length(self, most: int) -> int:
        """Return a random length from 1 to ``most``, log-uniformly distributed."""
        return max(1, min(most, round(math.exp(self._rng.random() * math.log(max(1, most))))))

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(count)]

    def _prompt(self, length: int) -> list[int]:
        if self._rng.random() >= self._shared:
            return self._ids(length)
        prefix = self._rng.choice(self._prefixes)[: max(1, length - 1)]
        return prefix + self._ids(length - len(prefix))

    def _sampled(self, tokens: int) -> SamplingParams:
        """Return random sampling parameters that generate at most ``tokens`` tokens.

        The sampling is greedy, seeded, or with top-p, top-k, penalties, logprobs or stop tokens.
        """
        rng = self._rng
        kind = rng.choice(
            ("greedy", "greedy", "seeded", "top_p", "top_k", "penalised", "scored", "stops")
        )
        if kind == "greedy":
            return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        if kind == "seeded":
            return SamplingParams(
                temperature=1.0, max_tokens=tokens, seed=rng.getrandbits(32), ignore_eos=True
            )
        if kind == "top_p":
            return SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, max_tokens=tokens)
        if kind == "top_k":
            return SamplingParams(temperature=1.2, top_k=min(40, self._vocab), max_tokens=tokens)
        if kind == "penalised":
            return SamplingParams(
                temperature=0.7, repetition_penalty=1.1, presence_penalty=0.5, max_tokens=tokens
            )
        if kind == "scored":
            return SamplingParams(
                temperature=0.0, logprobs=min(3, self._vocab), max_tokens=tokens, ignore_eos=True
            )
        stops = self._ids(6)
        return SamplingParams(temperature=1.0, stop_token_ids=stops, max_tokens=tokens)
