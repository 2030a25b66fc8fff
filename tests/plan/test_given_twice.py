"""One key with two values on a command line is refused with the names of both; the same value twice
is accepted.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.plugin.registry import PluginSet
from glowplug.entrypoints.cli.flags.flag import Flag, count_or_auto
from glowplug.entrypoints.cli.flags.table import FLAGS
from tests.plan.test_flags import given

VALUES = {
    int: ("1", "2"),
    count_or_auto: ("2", "auto"),
    float: ("0.25", "0.5"),
    str: ("one", "two"),
}
VALUED = [flag for flag in FLAGS if flag.convert in VALUES]


def reasons(plugins: PluginSet, *words: str) -> list[str]:
    return [refusal.reason for refusal in given(plugins, *words).layer.refusals]


@pytest.mark.parametrize("flag", VALUED, ids=lambda flag: flag.names[0])
def test_a_flag_given_two_values_is_refused_under_every_pair_of_names(
    plugins: PluginSet, flag: Flag
) -> None:
    for first, second in itertools.product(flag.names, repeat=2):
        for one, other in (VALUES[flag.convert], VALUES[flag.convert][::-1]):
            found = reasons(plugins, first, one, second, other)
            assert len(found) == 1 and first in found[0] and second in found[0], found
            assert "contradict each other" in found[0] or "given twice, differently" in found[0]


@pytest.mark.parametrize("flag", VALUED, ids=lambda flag: flag.names[0])
def test_the_same_value_twice_is_one_decision(plugins: PluginSet, flag: Flag) -> None:
    for value in VALUES[flag.convert]:
        once = given(plugins, flag.names[0], value)
        twice = given(plugins, flag.names[0], value, flag.names[-1], value)
        assert not twice.layer.refusals and twice.config == once.config


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if flag.convert is None], ids=lambda flag: flag.names[0]
)
def test_a_switch_given_twice_is_one_decision(plugins: PluginSet, flag: Flag) -> None:
    once, twice = given(plugins, flag.names[0]), given(plugins, flag.names[0], flag.names[-1])
    assert not twice.layer.refusals and twice.config == once.config


CHUNK = "--set scheduler.chunk_size"


@pytest.mark.parametrize(
    ("words", "first", "second"),
    [
        ("--tp 1 --tensor-parallel-size 2", "--tp 1", "--tensor-parallel-size 2"),
        ("--tp 4 --ep 1 --ep-size 4", "--ep 1", "--ep-size 4"),
        ("--tp 4 --dp-size 2 --data-parallel-size 1", "--dp-size 2", "--data-parallel-size 1"),
        ("--tp 2 --set parallel.0.size=4", "--tp 2", "--set parallel.0.size"),
        (
            "--tp 1 --set parallel.0.use=tensor --set parallel.0.size=2",
            "--tp 1",
            "--set parallel.0.size",
        ),
        ('--tp 1 --set parallel=[{"use":"tensor","size":2}]', "--tp 1", "--set parallel"),
        ('--tp 2 --set parallel=[{"use":"ep_moe","size":2}]', "--tp 2", "--set parallel"),
        (
            "--disable-overlap-schedule --set scheduler.overlap=true",
            "--disable-overlap-schedule",
            "--set scheduler.overlap",
        ),
        (
            "--enable-piecewise-cuda-graph --disable-piecewise-cuda-graph",
            "--enable-piecewise-cuda-graph",
            "--disable-piecewise-cuda-graph",
        ),
        ("--disable-radix-cache --set cache.use=radix", "--disable-radix-cache", "--set cache.use"),
        (
            "--cuda-graph-bs 1 2 --disable-cuda-graph --cuda-graph-bs 4",
            "--cuda-graph-bs 1 2",
            "--cuda-graph-bs 4",
        ),
        (
            "--reasoning-parser a --reasoning-parser b",
            "--reasoning-parser a",
            "--reasoning-parser b",
        ),
        ("--reasoning-parser a --set outputs=[]", "--reasoning-parser a", "--set outputs"),
        (
            '--chunked-prefill-size 64 --set scheduler={"chunk_size":128}',
            "--chunked-prefill-size 64",
            "--set scheduler",
        ),
        (
            '--set scheduler={"chunk_size":64} --set scheduler.chunk_size=128',
            "--set scheduler",
            CHUNK,
        ),
        ("--set outputs=[] --set outputs.0.use=a", "--set outputs", "--set outputs.0.use"),
        ("--set seed=3 --set seed.deep=4", "--set seed", "--set seed.deep"),
    ],
)
def test_two_spellings_of_one_key_contradict(
    plugins: PluginSet, words: str, first: str, second: str
) -> None:
    assert reasons(plugins, *words.split()) == [f"{first} and {second} contradict each other"]


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (
            ("--chunked-prefill-size", "64", "--set", 'scheduler={"max_running_requests": 8}'),
            {"scheduler": {"chunk_size": 64, "max_running_requests": 8}},
        ),
        (
            (
                "--set",
                'scheduler={"chunk_size": 64}',
                "--set",
                'scheduler={"max_running_requests": 8}',
            ),
            {"scheduler": {"chunk_size": 64, "max_running_requests": 8}},
        ),
        (
            ("--tp", "2", "--set", 'parallel=[{"size": 2}]'),
            {"parallel": [{"use": "tensor", "size": 2}]},
        ),
        (
            ("--set", "scheduler={}", "--set", "scheduler.chunk_size=3"),
            {"scheduler": {"chunk_size": 3}},
        ),
    ],
)
def test_a_section_set_as_a_whole_is_joined_with_its_other_keys(
    plugins: PluginSet, words: tuple[str, ...], config: dict[str, Any]
) -> None:
    found = given(plugins, *words)
    assert not found.layer.refusals and found.config == config


@pytest.mark.parametrize("size", ["--ep-size", "--dp-size"])
def test_a_size_of_one_is_not_replaced_by_the_ranks(plugins: PluginSet, size: str) -> None:
    switch = {"--ep-size": "--enable-ep-moe", "--dp-size": "--enable-dp-attention"}[size]
    for words in ((switch, size, "1"), (size, "1", switch)):
        found = given(plugins, "--tp", "4", *words)
        assert found.config == {"parallel": [{"use": "tensor", "size": 4}]}
        assert [(note.field, note.value) for note in found.notes if note.value == "no effect"] == [
            (switch, "no effect")
        ]


def test_one_rank_on_the_command_line_wins_over_the_file(
    plugins: PluginSet, v3: Path, tmp_path: Path
) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(
        f'model = "{v3}"\n[weights]\nuse = "random"\n[[parallel]]\nuse = "tensor"\nsize = 2\n'
    )
    assert given(plugins, "--config", str(file), "--facts", "cpu").plan().ranks == 2
    plan = given(plugins, "--config", str(file), "--facts", "cpu", "--tp", "1").plan()
    assert plan.ranks == 1
    assert [
        (d.value, d.by, d.why) for d in plan.decisions if d.field == "parallel[tensor].size"
    ] == [(1, "operator", "--tp 1")]


@pytest.mark.parametrize("name", ["--config", "--facts"])
def test_the_same_file_may_be_named_twice(plugins: PluginSet, tmp_path: Path, name: str) -> None:
    (tmp_path / "engine.toml").write_text("seed = 4\n")
    value = {"--config": str(tmp_path / "engine.toml"), "--facts": "cpu"}[name]
    found = given(plugins, name, value, name, value)
    assert found.config == ({"seed": 4} if name == "--config" else {})
