"""The command line: every published flag and alias, hyphens or underscores, precedence,
contradictions, typos.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.config.schema import config_class
from glowplug.core.errors import PlanRefused
from glowplug.core.plugin.registry import PluginSet
from glowplug.entrypoints.cli.flags.arguments import add_engine_options
from glowplug.entrypoints.cli.flags.command_line import CommandLine, read_command_line
from glowplug.entrypoints.cli.flags.flag import byte_count, count_or_auto, text_list
from glowplug.entrypoints.cli.flags.layer import command_line_layer, literal
from glowplug.entrypoints.cli.flags.parser import Parser
from glowplug.entrypoints.cli.flags.speculative import speculative_config
from glowplug.entrypoints.cli.flags.table import FLAGS, NO_EFFECT_WITH, NO_EFFECT_WITHOUT


def given(plugins: PluginSet, *words: str) -> CommandLine:
    parser = Parser(prog="glowplug serve")
    add_engine_options(parser)
    return read_command_line(parser.parse_args(list(words)), plugins)


#: every engine flag in the DeepSeek recipes, as written there, and the configuration it must give
PUBLISHED: list[tuple[list[str], dict[str, Any]]] = [
    (["--model", "m"], {"model": "m"}),
    (["--model-path", "m"], {"model": "m"}),
    (["--tp", "8"], {"parallel": [{"use": "tensor", "size": 8}]}),
    (["--tp-size", "8"], {"parallel": [{"use": "tensor", "size": 8}]}),
    (["--tp", "1"], {}),
    (["--enable-ep-moe", "--ep-size", "8"], {"parallel": [{"use": "ep_moe", "size": 8}]}),
    (["--ep-size", "8", "--enable-ep-moe"], {"parallel": [{"use": "ep_moe", "size": 8}]}),
    (
        ["--tp", "8", "--enable-dp-attention", "--dp-size", "8"],
        {"parallel": [{"use": "tensor", "size": 8}, {"use": "dp_attention", "size": 8}]},
    ),
    (["--trust-remote-code"], {"trust_remote_code": True}),
    (["--dtype", "float16"], {"dtype": "float16"}),
    (["--dtype", "half"], {"dtype": "float16"}),
    (["--quantization", "fp8"], {"quantization": {"use": "fp8"}}),
    (["--kv-cache-dtype", "fp8_e5m2"], {"attention": {"kv_dtype": "fp8_e5m2"}}),
    (["--disable-mla"], {"attention": {"use": "torch_mla", "absorb": False}}),
    (["--enable-flashinfer-mla"], {"attention": {"use": "flashinfer_mla"}}),
    (["--attention-backend", "fa3"], {"attention": {"use": "fa3_mla"}}),
    (["--attention-backend", "flashmla"], {"attention": {"use": "flashmla"}}),
    (["--disable-cuda-graph"], {"graphs": {"use": "eager"}}),
    (
        ["--cuda-graph-bs", "1", "2", "4"],
        {"graphs": {"use": "cuda_graph", "batch_sizes": [1, 2, 4]}},
    ),
    (["--cuda-graph-max-bs", "8"], {"graphs": {"use": "cuda_graph", "max_batch": 8}}),
    (["--disable-piecewise-cuda-graph"], {"graphs": {"prefill": False}}),
    (
        ["--enable-piecewise-cuda-graph", "--piecewise-cuda-graph-max-tokens", "768"],
        {"graphs": {"use": "cuda_graph", "prefill": True, "max_prefill_tokens": 768}},
    ),
    (
        ["--piecewise-cuda-graph-tokens", "16", "64"],
        {"graphs": {"use": "cuda_graph", "prefill_tokens": [16, 64]}},
    ),
    (
        ["--enable-torch-compile", "--torch-compile-max-bs", "4"],
        {"ops": {"use": "torch_compile", "max_batch": 4}},
    ),
    (["--disable-radix-cache"], {"cache": {"use": "none"}}),
    (["--disable-overlap-schedule"], {"scheduler": {"overlap": False}}),
    (
        [
            "--speculative-algorithm",
            "NEXTN",
            "--speculative-draft-model-path",
            "d",
            "--speculative-num-steps",
            "3",
            "--speculative-eagle-topk",
            "1",
            "--speculative-num-draft-tokens",
            "4",
        ],
        {
            "speculative": {
                "use": "nextn",
                "draft_model": "d",
                "steps": 3,
                "topk": 1,
                "draft_tokens": 4,
            }
        },
    ),
    (
        ["--speculative-algorithm", "NEXTN", "--speculative-token-map", "32768"],
        {"speculative": {"use": "nextn", "draft_vocabulary": "32768"}},
    ),
    (
        ["--speculative-algo", "EAGLE", "--speculative-draft", "d"],
        {"speculative": {"use": "nextn", "draft_model": "d"}},
    ),
    (
        ["--enable-dp-attention", "--enable-ep-moe", "--tp", "8", "--dp-size", "2"],
        {
            "parallel": [
                {"use": "tensor", "size": 8},
                {"use": "ep_moe", "size": 8},
                {"use": "dp_attention", "size": 2},
            ]
        },
    ),
    (
        ["--ep-size", "4", "--dp", "8", "--tp-size", "8"],
        {
            "parallel": [
                {"use": "tensor", "size": 8},
                {"use": "ep_moe", "size": 4},
                {"use": "dp_attention", "size": 8},
            ]
        },
    ),
    (["--tp", "1", "--enable-ep-moe"], {}),
    (
        ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "a:1"],
        {"executor": {"hosts": 2, "host_rank": 1, "address": "a:1"}},
    ),
    (["--max-running-requests", "768"], {"scheduler": {"max_running_requests": 768}}),
    (["--mem-fraction-static", "0.7"], {"memory": {"static_fraction": 0.7}}),
    (["--gpu-memory-utilization", "0.7"], {"memory": {"fraction": 0.7}}),
    (["--dist-timeout", "3600"], {"collectives": {"timeout": 3600.0}}),
    (["--host", "0.0.0.0", "--port", "30000"], {"server": {"host": "0.0.0.0", "port": 30000}}),
    (
        ["--served-model-name", "x", "--api-key", "k"],
        {"server": {"served_model_name": "x", "api_key": "k"}},
    ),
    (["--context-length", "32768"], {"context_length": 32768}),
    (["--chunked-prefill-size", "4096"], {"scheduler": {"chunk_size": 4096}}),
    (["--schedule-policy", "lpm"], {"policy": {"use": "longest_prefix"}}),
    (["--reasoning-parser", "deepseek-r1"], {"outputs": [{"use": "deepseek-r1"}]}),
    (
        ["--reasoning-parser", "a", "--tool-call-parser", "b"],
        {"outputs": [{"use": "a"}, {"use": "b"}]},
    ),
    (
        ["--tool-call-parser", "hermes"],
        {"outputs": [{"use": "hermes"}]},
    ),
    (["--chat-template", "t.jinja"], {"chat_template": "t.jinja"}),
    (
        ["--tokenizer-path", "t", "--skip-tokenizer-init"],
        {"tokenizer": "t", "skip_tokenizer": True},
    ),
    (["--random-seed", "7"], {"seed": 7}),
    (["--page-size", "64"], {"attention": {"page_size": 64}}),
    (["--device", "cpu"], {"device": "cpu"}),
    (["--load-format", "dummy"], {"weights": {"use": "random"}}),
    (["--disable-log-requests"], {"log": {"requests": False}}),
    (["--no-enable-log-requests"], {"log": {"requests": False}}),
    (["--enable-log-requests"], {"log": {"requests": True}}),
    (["--log-requests"], {"log": {"requests": True}}),
]


@pytest.mark.parametrize(
    ("words", "config"),
    PUBLISHED,
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
@pytest.mark.parametrize("underscores", [False, True])
def test_published_flags(
    plugins: PluginSet, words: list[str], config: dict[str, Any], underscores: bool
) -> None:
    if underscores:
        words = [
            "--" + word[2:].replace("-", "_") if word.startswith("--") else word for word in words
        ]
    found = given(plugins, *words)
    assert found.config == config and not found.layer.refusals


def test_the_list_above_is_complete() -> None:
    """Every flag of the recipes is in the table, and every flag of the table sets its own field."""
    named = {word for words, _ in PUBLISHED for word in words if word.startswith("--")}
    known = {name for flag in FLAGS for name in flag.names}
    assert named <= known
    assert len(known) == sum(len(flag.names) for flag in FLAGS), "a spelling belongs to one flag"
    rules = {**NO_EFFECT_WITH, **NO_EFFECT_WITHOUT}
    assert all(flag in known for name, (other, _) in rules.items() for flag in (name, other))


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.names[0])
def test_every_flag_sets_its_field_under_every_name(plugins: PluginSet, flag) -> None:
    value = {
        int: "3",
        float: "0.5",
        None: None,
        byte_count: "3G",
        count_or_auto: "3",
        text_list: '["*"]',
        speculative_config: '{"method": "mtp", "num_speculative_tokens": 3}',
    }.get(flag.convert, "word")
    for name in flag.names:
        words = [name] if value is None else [name, value]
        if flag.names[0] == "--torch-compile-max-bs":
            words.append("--enable-torch-compile")
        found = given(plugins, *words)
        assert not found.layer.refusals and not found.notes
        head = flag.path.partition("[")[0].split(".")[0]
        assert head in found.config
        assert any(place.startswith(name) for place in found.layer.origins.values())


def test_config_fields_exist(plugins: PluginSet) -> None:
    """Every flag sets a field that the built-ins have, spelled as they spell it."""
    from glowplug.core.config.errors import leaf_paths

    known = set(leaf_paths(plugins, config_class(plugins)))
    for flag in FLAGS:
        for path in (flag.path, *flag.also):
            plain = path.partition("[")[0] + "." + path.rpartition(".")[2] if "[" in path else path
            assert plain in known, path


# ---- precedence, contradictions, notes -----------------------------------------------------------


def test_command_line_over_file_over_contributed_over_default(
    plugins: PluginSet, v3: Path, tmp_path: Path
) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(
        f'model = "{v3}"\nseed = 5\n[weights]\nuse = "random"\n[policy]\nuse = "priority"\n'
    )
    found = given(
        plugins,
        "--config",
        str(file),
        "--random-seed",
        "6",
        "--set",
        "scheduler.chunk_size=128",
        "--facts",
        "cpu",
    )
    plan = found.plan({"policy.use": "fcfs", "scheduler.chunk_size": 64, "cache.use": "none"})
    places = {d.field: (d.value, d.by, d.why) for d in plan.decisions}
    assert places["seed"] == (6, "operator", "--random-seed 6")
    assert places["policy.use"] == ("priority", "operator", "engine.toml:6")
    assert places["scheduler.chunk_size"] == (128, "operator", "--set scheduler.chunk_size")
    assert places["cache.use"] == ("none", "entry point", "contributed default")
    assert places["scheduler.use"][1] == "default"


def test_contradictions_name_both_flags(plugins: PluginSet) -> None:
    found = given(plugins, "--disable-mla", "--attention-backend", "fa3")
    assert [(r.field, r.reason) for r in found.layer.refusals] == [
        ("attention.use", "--disable-mla and --attention-backend fa3 contradict each other")
    ]
    assert not given(plugins, "--disable-mla", "--attention-backend", "torch_mla").layer.refusals


@pytest.mark.parametrize(
    ("words", "use"),
    [
        (("--attention-backend", "flashinfer", "--enable-flashinfer-mla"), "flashinfer_mla"),
        (("--attention-backend", "torch", "--disable-mla"), "torch_mla"),
    ],
)
def test_two_names_of_one_backend_do_not_contradict(
    plugins: PluginSet, v3: Path, words: tuple[str, ...], use: str
) -> None:
    for order in (words, (words[2], *words[:2])):
        found = given(plugins, "--model", str(v3), *order)
        assert not found.layer.refusals and found.config["attention"]["use"] == use


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--attention-backend", "triton", "--disable-mla"), "attention.use"),
        (("--attention-backend", "triton_mla", "--disable-mla"), "attention.use"),
        (("--disable-cuda-graph", "--enable-piecewise-cuda-graph"), "graphs.use"),
    ],
)
def test_a_flag_that_contradicts_sets_nothing(
    plugins: PluginSet, v3: Path, words: tuple[str, ...], field: str
) -> None:
    with pytest.raises(PlanRefused) as caught:
        given(
            plugins, "--model", str(v3), "--load-format", "dummy", "--facts", "cpu", *words
        ).plan()
    said = [
        (r.field, r.reason) for r in caught.value.refusals if " cpu" not in r.reason
    ]  # as the backends for CUDA state
    assert [where for where, _ in said] == [field] and "contradict each other" in said[0][1]


def test_set_contradicts_as_a_flag_does(plugins: PluginSet) -> None:
    rows = "scheduler.max_running_requests"
    for words in (
        ["--max-running-requests", "5", "--set", f"{rows}=6"],
        ["--set", f"{rows}=5", "--set", f"{rows}=6"],
    ):
        found = given(plugins, *words).layer
        assert [(r.field, r.fix) for r in found.refusals] == [(rows, "write one of them")]
        assert f"--set {rows}" in found.refusals[0].reason
    same = given(plugins, "--max-running-requests", "5", "--set", f"{rows}=5").layer
    assert not same.refusals and same.data["scheduler"] == {"max_running_requests": 5}


def test_set_finds_a_component_in_a_list_by_its_name(plugins: PluginSet) -> None:
    exchange = "parallel.ep_moe.exchange"
    found = given(plugins, "--tp", "2", "--ep-size", "2", "--set", f"{exchange}=push").layer
    assert {"use": "ep_moe", "size": 2, "exchange": "push"} in found.data["parallel"]
    at = [one["use"] for one in found.data["parallel"]].index("ep_moe")
    assert found.origins[f"parallel.{at}.exchange"] == f"--set {exchange}"
    found = given(plugins, "--set", "parallel.tensor.size=2").layer
    assert found.data["parallel"] == [{"use": "tensor", "size": 2}]
    found = given(plugins, "--tp", "2", "--set", "parallel.tensor.size=4").layer
    assert "--tp 2 and --set parallel.tensor.size" in found.refusals[0].reason


@pytest.mark.parametrize("name", ["--config", "--facts"])
def test_files_are_given_once(
    plugins: PluginSet, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit):
        given(plugins, name, "a", name, "b")
    assert f"{name}: given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--disable-cuda-graph", "--cuda-graph-max-bs", "1"],
        ["--cuda-graph-bs", "1", "2", "--disable_cuda_graph"],
        ["--disable-piecewise-cuda-graph", "--piecewise-cuda-graph-max-tokens", "64"],
        ["--torch-compile-max-bs", "1"],
    ],
)
def test_flags_without_effect_are_decisions(plugins: PluginSet, v3: Path, words: list[str]) -> None:
    plan = given(plugins, "--model", str(v3), "--load-format", "dummy", *words).plan()
    notes = [d for d in plan.decisions if d.value == "no effect"]
    assert len(notes) == 1 and notes[0].field in words and notes[0].why
    assert plan.choice("graphs").name == "eager"


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["--speculative-algorithm", "DFLASH"], {"speculative.use"}),
        (["--enable-ep-moe"], {"parallel.0.use"}),
        (
            ["--enable-flashinfer-mla", "--kv-cache-dtype", "fp8_e5m2"],
            {"attention.use", "attention.kv_dtype", "dtype"},
        ),
        (["--attention-backend", "fa4"], {"attention.use"}),
        (["--cuda-graph-max-bs", "8"], {"graphs.use"}),
        (["--schedule-policy", "dfs-weight"], {"policy.use"}),
        (["--tool-call-parser", "deepseekv9"], {"outputs.0.use"}),
        (["--set", "scheduler.chunk_sizes=3"], {"scheduler.chunk_sizes"}),
        (["--set", "nonsense"], {"--set nonsense"}),
        (["--facts", "9xh900"], {"--facts"}),
    ],
)
def test_a_flag_that_no_plugin_supports_is_refused(
    plugins: PluginSet, v3: Path, words: list[str], fields: set[str]
) -> None:
    with pytest.raises(PlanRefused) as caught:
        given(plugins, "--model", str(v3), "--load-format", "dummy", *words).plan()
    assert {r.field for r in caught.value.refusals} == fields
    for refusal in caught.value.refusals:
        assert refusal.reason and refusal.fix
        if refusal.by == "config" and not refusal.field.startswith("--"):
            assert any(word in refusal.reason for word in words if word.startswith("--")), refusal


def test_trust_remote_code_is_explained(plugins: PluginSet, v3: Path) -> None:
    plan = given(
        plugins, "--model", str(v3), "--load-format", "dummy", "--trust-remote-code"
    ).plan()
    (note,) = (d for d in plan.decisions if d.field == "trust_remote_code")
    assert (note.value, note.by) == (True, "operator")
    assert note.why == "--trust-remote-code; no effect: code from a model folder is never run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--modell", "x"], "did you mean --model?"),
        (["--tensor-paralel-size", "2"], "did you mean --tensor-parallel-size?"),
        (["--mod", "x"], "unknown flag --mod"),
        (["--port", "many"], "invalid int value"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_typos_end_with_code_2(
    plugins: PluginSet, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        given(plugins, *words)
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_dashes_alone_make_no_flag_alike(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        Parser(prog="demo").parse_args(["--tp"])
    assert caught.value.code == 2 and capsys.readouterr().err == "demo: unknown flag --tp\n"
    with pytest.raises(SystemExit):
        Parser(prog="demo").parse_args(["--hepl"])
    assert "did you mean --help?" in capsys.readouterr().err


def test_a_secret_is_not_shown(plugins: PluginSet) -> None:
    layer = given(plugins, "--api-key", "very-secret", "--admin-api-key", "more-secret").layer
    assert "secret" not in str(layer.origins)


def test_literals() -> None:
    for text, value in (
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ("fa3", "fa3"),
        ('"3"', "3"),
        ('{"a": 1}', {"a": 1}),
        ("", ""),
        ("/a/b", "/a/b"),
    ):
        assert literal(text) == value and type(literal(text)) is type(value)
    layer, _ = command_line_layer(
        [], ['parallel=[{"use": "tensor", "size": 2}]', "attention.kernel=fa3"]
    )
    assert layer.data == {
        "parallel": [{"use": "tensor", "size": 2}],
        "attention": {"kernel": "fa3"},
    }


def test_flags_fit_beside_a_commands_own(plugins: PluginSet) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int)
    add_engine_options(parser)
    args = parser.parse_args(["--batch-size", "4", "--tp", "2"])
    assert (
        args.batch_size == 4 and read_command_line(args, plugins).config["parallel"][0]["size"] == 2
    )


def test_one_word_for_a_library_is_the_backend_for_the_models_kind(
    plugins: PluginSet, v3: Path, llama: Path, tmp_path: Path
) -> None:
    def asked(model: Path, name: str, *more: str) -> Any:
        return given(plugins, "--model", str(model), "--attention-backend", name, *more).config[
            "attention"
        ]["use"]

    for name in ("fa3", "triton", "torch"):
        assert (asked(v3, name), asked(llama, name)) == (f"{name}_mla", f"{name}_mha")
    assert (
        asked(v3, "flashinfer") == "flashinfer_mla" and asked(llama, "flashinfer") == "flashinfer"
    )
    assert asked(llama, "fa3_mla") == "fa3_mla", (
        "a name that there is stays, and the plan refuses it"
    )
    file = tmp_path / "engine.toml"
    file.write_text(f'model = "{llama}"\n')
    assert (
        given(plugins, "--config", str(file), "--attention-backend", "fa3").config["attention"][
            "use"
        ]
        == "fa3_mha"
    )


def test_a_model_that_cannot_be_read_leaves_the_librarys_name_unrefused(
    plugins: PluginSet, tmp_path: Path
) -> None:
    for name, fields in (
        ("fa3", {"model"}),
        ("torch", {"model"}),
        ("fa9", {"model", "attention.use"}),
    ):
        words = ["--model", str(tmp_path / "none"), "--attention-backend", name]
        with pytest.raises(PlanRefused) as caught:
            given(plugins, *words).plan()
        assert {refusal.field for refusal in caught.value.refusals} == fields
