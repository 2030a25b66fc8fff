"""Output text of one sequence: incremental decoding and stop strings.

The result does not depend on how the stream is divided into steps: it is the text up to the stop
string that is complete first (the longest of those complete at the same character), or all of the
text. Text that may be part of a stop string is held back until this is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from glowplug.core.step.request import SamplingParams
from glowplug.core.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Output:
    """A piece of a sequence's output text.

    Attributes:
        text: new text.
        finished: no text follows.
        stop_reason: the stop string that matched, or None.
    """

    text: str
    finished: bool = False
    stop_reason: str | None = None


class StopStrings:
    """An Aho-Corasick automaton (CACM 18:6, 1975) over stop strings.

    Matching takes one step per character for any number of strings. State 0 is the root.

    Attributes:
        depth: for each state, the number of characters of the longest prefix of a stop string at
            the text's end.
        match: for each state, the longest stop string at the text's end, or None.
        first: first characters of the stop strings.
    """

    __slots__ = ("_fail", "_next", "depth", "first", "match")

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.match: list[str | None] = [None]
        for text in strings:
            self._add(text)
        self._link()
        self.first = frozenset(self._next[0])

    def _add(self, text: str) -> None:
        state = 0
        for character in text:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = self._next[state][character]
        self.match[state] = text

    def _link(self) -> None:
        """Set the failure links, breadth first.

        A state's link is the state to continue from when the next character does not match.
        """
        queue = list(self._next[0].values())
        for state in queue:
            for character, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], character)
                self.match[child] = self.match[child] or self.match[self._fail[child]]
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """Return the state after ``character``."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)


@lru_cache(maxsize=256)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """Return the automaton of ``strings``; requests and choices with equal strings share it."""
    return StopStrings(strings)


class OutputProcessor:
    """The output text of one sequence.

    ``feed`` takes the committed ids of a step; ``finish`` returns the text that was held back. Stop
    strings are matched only in the text of tokens after the first ``min_tokens``. A matched stop
    string is removed unless ``include_stop_str_in_output`` is set. After the end both methods
    return empty, finished outputs.
    """

    __slots__ = (
        "_finished",
        "_held",
        "_include",
        "_reason",
        "_state",
        "_stops",
        "_stream",
        "_unchecked",
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._stream = tokenizer.stream(params.skip_special_tokens)
        self._stops = stop_strings(tuple(params.stop)) if params.stop else None
        self._include = params.include_stop_str_in_output
        self._unchecked = params.min_tokens if params.stop else 0
        self._held = ""
        self._state = 0
        self._finished = False
        self._reason: str | None = None

    def feed(self, ids: Sequence[int]) -> Output:
        """Return the new text of ``ids``; the output is finished if a stop string is complete."""
        if self._finished:
            return Output("", True, self._reason)
        if not ids:
            return Output("")
        if self._stops is None:
            return Output(self._stream.feed(ids))
        early = ""
        if self._unchecked:
            early = self._stream.feed(ids[: self._unchecked])
            count = self._unchecked
            self._unchecked = max(0, count - len(ids))
            ids = ids[count:]
        output = self._match(self._stream.feed(ids) if ids else "")
        output.text = early + output.text
        return output

    def finish(self, reason: str) -> Output:
        """End the sequence and return the rest of its text.

        Args:
            reason: reason of the end ("stop", "length", "abort", ...).
        """
        if self._finished:
            return Output("", True, self._reason)
        text = self._stream.finish()
        output = self._match(text) if self._stops is not None else Output(text)
        if not output.finished:
            output.text += self._held
            self._finished = True
            output.finished = True
        return output

    def _match(self, text: str) -> Output:
        """Match stop strings in new text; hold back text that may be part of one."""
        stops = self._stops
        assert stops is not None
        if not self._state and stops.first.isdisjoint(text):
            return Output(text)
        state = self._state
        text = self._held + text
        for at in range(len(self._held), len(text)):
            state = stops.step(state, text[at])
            found = stops.match[state]
            if found is not None:
                self._finished = True
                self._reason = found
                self._held = ""
                return Output(text[: at + 1 if self._include else at + 1 - len(found)], True, found)
        settled = len(text) - stops.depth[state]
        self._state = state
        self._held = text[settled:]
        return Output(text[:settled])
