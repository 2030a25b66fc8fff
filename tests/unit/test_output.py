"""Text of one sequence: stop strings across token boundaries, held-back text, and independence of
the step sizes.
"""

from __future__ import annotations

import random
import time
from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from glowplug.core.step.request import SamplingParams
from glowplug.core.text.stop_strings import OutputProcessor, StopStrings
from glowplug.core.text.tokenizer import Tokenizer
from tests.support.pace import slowness, yardstick
from tests.support.tiny_tokenizer import EOS, TEXT, byte_level
from tests.support.work import lines


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(byte_level()))


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def bytes_of(text: str) -> list[int]:
    """Return one token a byte, so that every position, inside characters too, is a token
    boundary.
    """
    single = {
        tokenizer().token_bytes(token): token for token in range(tokenizer().vocab_size - 1, -1, -1)
    }
    return [single[bytes([byte])] for byte in text.encode()]


def processor(stop: list[str], **options: object) -> OutputProcessor:
    return OutputProcessor(tokenizer(), SamplingParams(stop=stop, max_tokens=10_000, **options))  # type: ignore[arg-type]


def run(
    ids: list[int], sizes: list[int], stop: list[str], **options: object
) -> tuple[list[str], str | None]:
    """Feed ``ids`` in steps of ``sizes``, finish, and return (deltas, stop reason)."""
    output, deltas, at = processor(stop, **options), [], 0
    for size in [*sizes, len(ids)]:
        if at < len(ids):
            step = output.feed(ids[at : at + size])
            deltas.append(step.text)
            at += size
            if step.finished:
                return deltas, step.stop_reason
    last = output.finish("length")
    assert last.finished
    return [*deltas, last.text], last.stop_reason


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return the first prefix that ends with a stop string, by definition; of several stop strings
    there, the longest counts.
    """
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            return text[: end if include else end - len(found)], found
    return text, None


# ---- stop strings --------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 5), max_size=30),
    include=st.booleans(),
)
def test_any_stop_strings_in_any_steps_match_the_definition(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    deltas, reason = run(bytes_of(text), sizes, stops, include_stop_str_in_output=include)
    assert ("".join(deltas), reason) == naive(text, stops, include)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("a é日👍\n", max_size=25),
    stops=st.lists(st.text("a é日👍\n", min_size=1, max_size=3), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 3), max_size=80),
)
def test_stops_and_characters_of_several_bytes(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    for ids in (bytes_of(text), ids_of(text)):
        deltas, reason = run(ids, sizes, stops)
        assert ("".join(deltas), reason) == naive(text, stops, False)


def test_no_part_of_a_stop_string_is_given_out_early() -> None:
    output, shown = processor(["</answer>"]), ""
    for token in bytes_of("text </answ and </answer>"):
        step = output.feed([token])
        shown += step.text
        assert "text </answ and ".startswith(shown)
    assert shown == "text </answ and " and step.finished and step.stop_reason == "</answer>"


@pytest.mark.parametrize(
    ("stops", "text", "shown", "reason"),
    [
        (["bcd", "c"], "abcd", "ab", "c"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["bc", "abc"], "xabcx", "x", "abc"),
        (["aab"], "aaaab", "aa", "aab"),
        (["abab"], "abaabab", "aba", "abab"),
        (["\n\n"], "one\n two\n\nthree", "one\n two", "\n\n"),
        (["é"], "caf\u00e9!", "caf", "é"),
        (["zzz"], "zzyzz", "zzyzz", None),
        (["a"], "a", "", "a"),
    ],
)
def test_overlaps(stops: list[str], text: str, shown: str, reason: str | None) -> None:
    for order in (stops, stops[::-1]):
        for size in (1, 2, 100):
            deltas, found = run(bytes_of(text), [size] * len(text), order)
            assert ("".join(deltas), found) == (shown, reason)


def test_include_stop_string() -> None:
    for size in (1, 3, 100):
        deltas, reason = run(
            bytes_of("one END two"), [size] * 20, ["END"], include_stop_str_in_output=True
        )
        assert ("".join(deltas), reason) == ("one END", "END")


def test_no_text_follows_the_end() -> None:
    output = processor(["b"])
    assert output.feed(bytes_of("abc")).text == "a"
    for step in (output.feed(bytes_of("abc")), output.finish("stop"), output.finish("stop")):
        assert (step.text, step.finished, step.stop_reason) == ("", True, "b")


def test_finish_gives_out_what_was_held_back() -> None:
    output = processor(["stop here"])
    assert output.feed(bytes_of("please stop")).text == "please "
    last = output.finish("length")
    assert (last.text, last.finished, last.stop_reason) == ("stop", True, None)
    assert output.finish("length").text == ""


def test_incomplete_character_at_the_end() -> None:
    for stop in ([], ["x"]):
        output = processor(stop)
        assert output.feed(bytes_of("ok 日")[:-1]).text == "ok "
        assert output.finish("length").text == "\ufffd"


def test_min_tokens_hold_off_stop_strings() -> None:
    ids = bytes_of("stop and stop")
    for size in (1, 2, 5, 100):
        for least, shown in (
            (0, ""),
            (3, "stop and "),
            (4, "stop and "),
            (9, "stop and "),
            (10, "stop and stop"),
        ):
            deltas, _ = run(ids, [size] * 20, ["stop"], min_tokens=least)
            assert "".join(deltas) == shown, (size, least)


def test_special_tokens() -> None:
    ids = [*ids_of("hi"), 1]
    assert "".join(run(ids, [1] * 5, [])[0]) == "hi"
    assert "".join(run(ids, [1] * 5, [], skip_special_tokens=False)[0]) == "hi" + EOS
    deltas, reason = run(ids, [1] * 5, [EOS], skip_special_tokens=False)
    assert ("".join(deltas), reason) == ("hi", EOS)
    assert run(ids, [1] * 5, [EOS])[1] is None


def test_automaton_against_its_definition() -> None:
    generator = random.Random(4)
    for _ in range(200):
        stops = [
            "".join(generator.choices("ab", k=generator.randint(1, 5)))
            for _ in range(generator.randint(1, 4))
        ]
        automaton, text, state = StopStrings(stops), "", 0
        for character in generator.choices("abc", k=30):
            text += character
            state = automaton.step(state, character)
            prefixes = {stop[:size] for stop in stops for size in range(len(stop) + 1)}
            assert automaton.depth[state] == max(
                len(prefix) for prefix in prefixes if text.endswith(prefix)
            )
            assert automaton.match[state] == max(
                (s for s in stops if text.endswith(s)), key=len, default=None
            )


# ---- speed ---------------------------------------------------------------------------------------


def rate(stop: list[str], tokens: int = 20_000) -> float:
    """Return tokens a second of processor time, one token a step."""
    ids = (ids_of(TEXT[0]) * (tokens // 10))[:tokens]
    best = 0.0
    for _ in range(3):
        output, start = processor(stop), time.process_time()
        for token in ids:
            output.feed((token,))
        best = max(best, tokens / (time.process_time() - start))
    return best


@pytest.mark.timing
def test_keeps_up_with_many_streams() -> None:
    paces = [yardstick()]
    plain = rate([])
    paces.append(yardstick())
    stopping = rate(["\n\n", "</answer>", "quick brown fox jumps over a", "User:"])
    paces.append(yardstick())
    assert plain > 200_000 / slowness(paces) and stopping > 50_000 / slowness(paces)


HOSTILE = ["a" * (1000 - i) + "b" for i in range(16)]
NEARLY = "a" * 999 + "c"  #: begins like all of them


def feed(output: OutputProcessor, ids: list[int]) -> None:
    for token in ids:
        output.feed([token])


def test_hostile_stop_strings_cost_linear_work() -> None:
    """Twice the text executes twice as many lines of Python, and only a few a character."""
    output, ids = processor(HOSTILE), bytes_of(NEARLY)
    first = lines(lambda: feed(output, ids))
    more = lines(lambda: feed(output, 4 * ids))
    assert more == pytest.approx(4 * first, rel=0.05)
    assert first < 100 * len(ids)


@pytest.mark.timing
def test_hostile_stop_strings_cost_little_time() -> None:
    paces, output, ids = [yardstick()], processor(HOSTILE), bytes_of(NEARLY * 20)
    start = time.process_time()
    feed(output, ids)
    spent = time.process_time() - start
    assert spent < 3.0 * slowness([*paces, yardstick()])
