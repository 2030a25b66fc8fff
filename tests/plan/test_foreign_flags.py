"""Flags of SGLang and vLLM: those with an equivalent are accepted, the others are refused as
foreign flags.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import PlanRefused
from glowplug.core.plugin.registry import PluginSet
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.cli.flags.command_line import CommandLine, read_command_line
from glowplug.entrypoints.cli.flags.flag import byte_count
from glowplug.entrypoints.cli.flags.foreign import ALTERNATIVES, BOTH, unsupported
from glowplug.entrypoints.cli.flags.foreign_sglang import SGLANG
from glowplug.entrypoints.cli.flags.foreign_vllm import VLLM
from glowplug.entrypoints.cli.flags.parser import Parser
from glowplug.entrypoints.cli.flags.table import ALWAYS_ON, FLAGS


def given(plugins: PluginSet | None, *words: str) -> CommandLine:
    parser = Parser(prog="glowplug serve")
    add_engine_options(parser)
    return read_command_line(parser.parse_args(list(words)), plugins)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the output of ``glowplug serve`` for a command line that it refuses."""
    parser = Parser(prog="glowplug serve")
    add_engine_options(parser)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(list(words))
    assert caught.value.code == 2
    return capsys.readouterr().err.strip().removeprefix("glowplug serve: ")


BOTH_HAVE = "is a flag of SGLang and vLLM that glowplug does not support"
SGLANG_HAS = "is a flag of SGLang that glowplug does not support"
VLLM_HAS = "is a flag of vLLM that glowplug does not support"
RECORD = (
    "record the load (GET /expert_load), then use --init-expert-location FILE and "
    "--ep-num-redundant-experts N"
)
#: flags as in published commands, and the one line of the answer
REFUSED: list[tuple[list[str], str]] = [
    (["--enable-lora"], f"--enable-lora {BOTH_HAVE}; merge the adapter into the checkpoint"),
    (
        ["--swap-space", "4"],
        f"--swap-space {VLLM_HAS}; leave it out: preempted sequences are recomputed",
    ),
    (
        ["--swap_space=4"],
        f"--swap-space {VLLM_HAS}; leave it out: preempted sequences are recomputed",
    ),
    (
        ["--cpu-offload-gb", "10"],
        f"--cpu-offload-gb {BOTH_HAVE}; weights and cache stay on the devices; --tp-size spreads "
        "them over several",
    ),
    (
        ["--max-num-batched-tokens", "8192"],
        f"--max-num-batched-tokens {VLLM_HAS}; --chunked-prefill-size limits the prompt tokens of "
        "a step",
    ),
    (
        ["--pp-size", "2"],
        f"--pp-size {SGLANG_HAS}; --tp-size, --ep-size and --enable-dp-attention spread a model "
        "over devices",
    ),
    (
        ["--moe-runner-backend", "triton"],
        f"--moe-runner-backend {SGLANG_HAS}; use --set quantization.experts=NAME",
    ),
    (
        ["--tokenizer-revision", "main"],
        f"--tokenizer-revision {VLLM_HAS}; nothing is downloaded: use --model FOLDER, or run "
        "glowplug download first",
    ),
    (["--enable-eplb"], f"--enable-eplb {BOTH_HAVE}; {RECORD}"),
    (
        ["--eplb-config.num-redundant-experts", "8"],
        f"--eplb-config.num-redundant-experts {VLLM_HAS}; {RECORD}",
    ),
    (
        ["--expert-distribution-recorder-mode", "stat"],
        f"--expert-distribution-recorder-mode {SGLANG_HAS}; {RECORD}",
    ),
    (
        ["--compilation-config.mode", "3"],
        f"--compilation-config.mode {VLLM_HAS}; use --enable-torch-compile and --cuda-graph-bs",
    ),
    (["--no-enforce-eager"], "unknown flag --no-enforce-eager: leave --enforce-eager out"),
    (
        ["--no-enable-chunked-prefill"],
        "unknown flag --no-enable-chunked-prefill: prompts are always computed in "
        "chunks of at most --chunked-prefill-size tokens",
    ),
    (
        ["--lora-paths", "a=b", "c=d", "--port", "1", "--scheduler-recv-interval", "-1"],
        f"--lora-paths {SGLANG_HAS}; merge the adapter into the checkpoint; "
        f"--scheduler-recv-interval {SGLANG_HAS}; leave it out",
    ),
]


@pytest.mark.parametrize(
    ("words", "line"),
    REFUSED,
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_flag_of_another_engine_is_refused_as_one(
    capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert said(capsys, *words) == line


def test_typos_are_still_typos(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--tensor-paralel-size", "2") == (
        "unknown flag --tensor-paralel-size, did you mean --tensor-parallel-size?"
    )
    assert said(capsys, "stray", "--enable-lora") == (
        "unexpected argument 'stray'; " + unsupported("--enable-lora", ())
    )
    assert (
        said(capsys, "--frobnicate=3", "stray")
        == "unknown flag --frobnicate; unexpected argument 'stray'"
    )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("--enable-radix-cache", ": leave --disable-radix-cache out"),
        ("--enable-cuda-graph", ": leave --disable-cuda-graph out"),
        ("--disable-prefix-caching", ", did you mean --no-enable-prefix-caching?"),
        ("--no-prefix-caching", ", did you mean --no-enable-prefix-caching?"),
        ("--prefix-caching", ", did you mean --enable-prefix-caching?"),
        ("--no-enable-prefix-cachin", ", did you mean --no-enable-prefix-caching?"),
    ],
)
def test_a_flag_of_the_opposite_sense_is_not_suggested(
    capsys: pytest.CaptureFixture[str], name: str, advice: str
) -> None:
    assert said(capsys, name) == f"unknown flag {name}{advice}"


def test_the_lists_contain_no_flag_of_this_engine() -> None:
    ours = {name.removeprefix("--") for flag in FLAGS for name in flag.names} | {
        name[2:] for name in ALWAYS_ON
    }
    assert not ours & (BOTH | SGLANG | VLLM)
    assert not SGLANG & VLLM and not BOTH & (SGLANG | VLLM)
    assert len(SGLANG | BOTH) > 450 and len(VLLM | BOTH) > 300
    assert all(name == name.lower() and name[0] != "-" for name in BOTH | SGLANG | VLLM)
    assert {
        "enable-two-batch-overlap",
        "hicache-ratio",
        "schedule-conservativeness",
    } <= SGLANG
    assert {
        "guided-decoding-backend",
        "limit-mm-per-prompt",
        "kv-transfer-config",
        "enable-sleep-mode",
    } <= VLLM


def test_every_piece_of_advice_belongs_to_a_flag_and_names_flags_that_are_there() -> None:
    import re

    names = BOTH | SGLANG | VLLM
    known = {name for flag in FLAGS for name in flag.names} | {"--plugin", "--set"}
    for pattern, text in ALTERNATIVES:
        assert any(re.search(pattern, name) for name in names), pattern
        assert set(re.findall(r"--[a-z][a-z-]+", text)) <= known, text


def test_a_command_without_a_flag_does_not_call_it_foreign(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        Parser(prog="glowplug version").parse_args(["--tp", "2"])
    assert capsys.readouterr().err == "glowplug version: unknown flag --tp\n"


# ---- flags with an equivalent --------------------------------------------------------------------

TAKEN: list[tuple[list[str], dict[str, Any]]] = [
    (["--enable-prefix-caching"], {"cache": {"use": "radix"}}),
    (["--no-enable-prefix-caching"], {"cache": {"use": "none"}}),
    (["--async-scheduling"], {"scheduler": {"overlap": True}}),
    (["--no-async-scheduling"], {"scheduler": {"overlap": False}}),
    (["--enable-mixed-chunk"], {"scheduler": {"mixed": True}}),
    (["--kv-cache-memory-bytes", "25G"], {"memory": {"kv_bytes": 25 << 30}}),
    (["--sampling-backend", "pytorch"], {"sampling": {"use": "torch"}}),
    (["--grammar-backend", "xgrammar"], {"grammar": {"use": "xgrammar"}}),
    (["--allowed-origins", '["https://a.org"]'], {"server": {"cors_origins": ["https://a.org"]}}),
    (["--shutdown-timeout", "5"], {"server": {"drain_timeout": 5.0}}),
    (["--disable-log-stats"], {"log": {"stats_interval": 0.0}}),
    (
        ["--attn-dp-size", "2", "--tp", "2"],
        {"parallel": [{"use": "tensor", "size": 2}, {"use": "dp_attention", "size": 2}]},
    ),
    (["--spec-method", "mtp", "--spec-tokens", "2"], {"speculative": {"use": "nextn", "steps": 2}}),
    (
        ["--max-num-queued-reqs", "8", "--distributed-timeout-seconds", "60"],
        {"scheduler": {"max_queued_requests": 8}, "collectives": {"timeout": 60.0}},
    ),
    (
        ["--cuda-graph-bs-decode", "1", "2"],
        {"graphs": {"use": "cuda_graph", "batch_sizes": [1, 2]}},
    ),
]


@pytest.mark.parametrize(
    ("words", "config"),
    TAKEN,
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_flag_with_an_equivalent_is_taken(
    plugins: PluginSet, words: list[str], config: dict[str, Any]
) -> None:
    found = given(plugins, *words)
    assert found.config == config and not found.layer.refusals


@pytest.mark.parametrize("off", ["--no-enable-prefix-caching", "--disable-radix-cache"])
def test_prefix_caching_on_and_off_contradict(plugins: PluginSet, v3: Path, off: str) -> None:
    for words in (("--enable-prefix-caching", off), (off, "--enable-prefix-caching")):
        with pytest.raises(PlanRefused) as caught:
            given(
                plugins, "--model", str(v3), "--load-format", "dummy", "--facts", "cpu", *words
            ).plan()
        (refusal,) = caught.value.refusals
        assert refusal.reason == f"{words[0]} and {words[1]} contradict each other"


def test_prefix_caching_on_wins_over_a_file(plugins: PluginSet, v3: Path, tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('[cache]\nuse = "none"\n')
    words = ["--model", str(v3), "--load-format", "dummy", "--facts", "cpu", "--config", str(file)]
    assert given(plugins, *words).plan().choice("cache").name == "none"
    plan = given(plugins, *words, "--enable-prefix-caching").plan()
    decision = next(decision for decision in plan.decisions if decision.field == "cache.use")
    assert (decision.value, decision.by, decision.why) == (
        "radix",
        "operator",
        "--enable-prefix-caching",
    )


@pytest.mark.parametrize("name", sorted(ALWAYS_ON))
def test_a_flag_for_what_is_always_so_is_a_remark(plugins: PluginSet, v3: Path, name: str) -> None:
    words = ["--model", str(v3), "--load-format", "dummy", "--facts", "cpu", name, name]
    found = given(plugins, *words)
    assert found.config == given(plugins, *words[:6]).config
    remarks = [decision for decision in found.plan().decisions if decision.field == name]
    assert [(one.value, one.by, one.why) for one in remarks] == [
        ("no effect", "operator", ALWAYS_ON[name])
    ]


def test_sizes_with_units() -> None:
    sizes = {"5": 5, "1k": 1000, "1K": 1024, "25.5g": 25_500_000_000, "2T": 2 << 40, "1m": 10**6}
    for text, value in sizes.items():
        assert byte_count(text) == value
    for text in ("", "-1", "1kb", "many", "1 G x"):
        with pytest.raises(ValueError):
            byte_count(text)


@pytest.mark.parametrize(
    "words",
    [
        ["--allowed-origins", "https://a.org"],
        ["--allowed-origins", "[1]"],
        ["--kv-cache-memory-bytes", "much"],
    ],
)
def test_a_value_of_another_form_ends_with_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert words[0] in said(capsys, *words)


@pytest.mark.parametrize(
    ("words", "collectives"),
    [
        (("--facts", "8xh200", "--tp", "2"), "peer_memory"),
        (("--facts", "8xh200", "--tp", "2", "--disable-custom-all-reduce"), "nccl"),
        (("--facts", "cpu", "--tp", "2", "--disable-custom-all-reduce"), "gloo"),
        (("--facts", "1xh200", "--disable-custom-all-reduce"), "local"),
    ],
)
def test_own_all_reduces_can_be_turned_off(
    v3: Path, words: tuple[str, ...], collectives: str
) -> None:
    found = given(None, "--model", str(v3), "--load-format", "dummy", "--dtype", "bfloat16", *words)
    assert found.plan().choice("collectives").name == collectives
