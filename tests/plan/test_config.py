"""Reading the configuration: unknown keys with "did you mean", wrong types, locations, files in
three formats.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from glowplug.core.config.files import Layer, merge, read_config, set_path
from glowplug.core.config.schema import config_class
from glowplug.core.errors import ConfigError, PlanRefused
from glowplug.core.plugin.registry import PluginSet

# ---- keys and values -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "field", "said"),
    [
        ({"dtpye": "float32"}, "dtpye", "did you mean 'dtype'?"),
        (
            {"scheduler": {"max_runing_requests": 4}},
            "scheduler.max_runing_requests",
            "'max_running_requests'",
        ),
        (
            {"max_running_requests": 4},
            "max_running_requests",
            "did you mean 'scheduler.max_running_requests'?",
        ),
        ({"server": {"prot": 3}}, "server.prot", "did you mean 'port'?"),
        ({"attention": {"use": "torch_mhaa"}}, "attention.use", "did you mean 'torch_mha'?"),
        ({"dtype": "float23"}, "dtype", "did you mean 'float32'?"),
        ({"attention": {"absorb": False}}, "attention.absorb", 'write attention.use = "torch_mla"'),
        ({"speculative": {"steps": 3}}, "speculative.steps", 'write speculative.use = "nextn"'),
        ({"parallel": [{"use": "single", "sise": 1}]}, "parallel.0.sise", "did you mean 'size'?"),
        (
            {"parallel": [{"use": "tensor", "size": 2}, {"use": "pipe", "size": 8}]},
            "parallel.1.use",
            "leave it out",
        ),
        ({"outputs": [{"opening": "auto"}]}, "outputs.0", "deepseek_r1"),
        ({"server": {"port": "30000"}}, "server.port", "write a whole number for server.port"),
        ({"server": {"port": 70000}}, "server.port", "write a number <= 65535 for server.port"),
        ({"seed": True}, "seed", "a whole number"),
        ({"seed": 1.5}, "seed", "a whole number"),
        ({"attention": "torch_mla"}, "attention", 'write attention.use = "torch_mla"'),
        ({"attention": "torch_ml"}, "attention", "a section with keys"),
        ({"memory": {"growing_segments": "True"}}, "memory.growing_segments", "did you mean true?"),
        (
            {"memory": {"growing_segments": "on"}},
            "memory.growing_segments",
            "one of 'auto', true or false",
        ),
        (
            {"graphs": {"use": "eager", "prefill": True}},
            "graphs.prefill",
            "write false for graphs.prefill",
        ),
        ({"scheduler": None}, "scheduler", "a section with keys"),
        ({"log": {"format": "xml"}}, "log.format", "one of 'human' or 'json'"),
        ({"skip_tokenizer": "yes"}, "skip_tokenizer", "true or false"),
        ({"server": {"cors_origins": "a"}}, "server.cors_origins", "a list"),
        ({"model": 7}, "model", "text"),
        ({"model": ""}, "model", "model"),
    ],
)
def test_an_error_states_the_fault_and_the_remedy(refused, config, field, said) -> None:
    found = refused(config)
    assert list(found) == [field], found
    assert said in found[field].fix, found[field]


def test_all_errors_at_once_each_with_its_line(refused) -> None:
    found = refused(
        {
            "dtpye": 1,
            "server": {"prot": 1, "port": "x"},
            "attention": {"use": "fa3"},
            "parallel": [{"use": "pipe", "size": 8}],
        },
        source="engine.yaml",
        lines={"dtpye": 3, "server": 4, "server.prot": 5, "attention.use": 9, "parallel.0": 11},
    )
    assert {field: refusal.reason.partition(": ")[0] for field, refusal in found.items()} == {
        "dtpye": "engine.yaml:3",
        "server.prot": "engine.yaml:5",
        "server.port": "engine.yaml:4",
        "attention.use": "engine.yaml:9",
        "parallel.0.use": "engine.yaml:11",
    }


def test_a_message_reads_as_promised(planned) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(
            {"scheduler": {"max_runing_requests": 4}},
            source="engine.yaml",
            lines={"scheduler.max_runing_requests": 12},
        )
    assert str(caught.value).splitlines() == [
        "PlanRefused: 1 problem with engine.yaml (nothing was loaded)",
        " 1. scheduler.max_runing_requests: engine.yaml:12: unknown key",
        "    by config (built in) | fix: did you mean 'max_running_requests'?",
    ]


def test_a_secret_is_never_in_a_message(planned) -> None:
    with pytest.raises(ConfigError) as caught:
        planned({"server": {"api_key": ["very-secret"]}})
    assert "very-secret" not in str(
        caught.value
    ) and "the value given should be a valid string" in str(caught.value)


@pytest.mark.parametrize("key", ["api_key", "admin_api_key"])
def test_an_empty_key_does_not_leave_the_server_open(planned, refused, key: str) -> None:
    assert refused({"server": {key: ""}})[f"server.{key}"].fix == f"write text for server.{key}"
    assert planned({"server": {key: "k"}})


def test_the_parsed_configuration_is_frozen(plugins: PluginSet, v3: Path) -> None:
    config = config_class(plugins).model_validate({"model": str(v3)})
    with pytest.raises(ValueError, match="frozen"):
        config.dtype = "float16"  # type: ignore[misc]


JUNK = [
    None,
    True,
    -1,
    0,
    3,
    1 << 70,
    0.5,
    float("inf"),
    "",
    "auto",
    "torch_mla",
    "\ud800",
    "a" * 300,
    [],
    [[]],
    [None],
    {},
    {"use": None},
    {"use": "auto"},
    {"use": ["x"]},
    [{"use": "single"}],
    [{"use": 3}],
    {"": {"": 1}},
]


def test_no_configuration_brings_the_planner_down(planned, plugins: PluginSet) -> None:
    """With any values, the answer is a plan or a complete refusal."""
    from glowplug.core.config.errors import leaf_paths

    rng = random.Random(23)
    known = leaf_paths(plugins, config_class(plugins))
    outcomes = {"plan": 0, "refused": 0}
    for _ in range(700):
        config: dict[str, object] = {}
        for _ in range(rng.randint(1, 4)):
            try:
                set_path(
                    config,
                    rng.choice([*known, "parallel.0.size", "nonsense", "server.x.y"]),
                    rng.choice(JUNK),
                )
            except ValueError:
                pass
        try:
            planned(config)
            outcomes["plan"] += 1
        except PlanRefused as refused:
            outcomes["refused"] += 1
            assert refused.refusals and all(
                r.by and r.field and r.reason and r.fix for r in refused.refusals
            ), config
    assert min(outcomes.values()) > 5, outcomes


# ---- files ---------------------------------------------------------------------------------------

TOML = '''# a comment with [brackets] and a = sign
model = "x" # [not.a.table]
text = """
server = 1
[server]
"""
[attention]
use = "torch_mla"  # why
"kv_dtype" = 'auto'
[[parallel]]
use = "single"
sizes = [
  1, # ]
  2]
after = 2
[[parallel]]
use = "two"
[server]
cors_origins = ["a#b", '[']
port = 1
log.level = "x"
'''
YAML = """model: x
server:
  port: 1
  cors_origins:
    - a
parallel:
  - use: single
    size: 2
  - use: two
"""
JSON = """{
  "model": "x",
  "server": {"port": 1,
    "cors_origins": ["a", "b:{"]},
  "parallel": [
    {"use": "single",
     "size": 2},
    {"use": "tw\\"o"}]
}
"""


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        (
            "c.toml",
            TOML,
            {
                "model": 2,
                "text": 3,
                "attention": 7,
                "attention.use": 8,
                "attention.kv_dtype": 9,
                "parallel.0": 10,
                "parallel.0.use": 11,
                "parallel.0.sizes": 12,
                "parallel.0.after": 15,
                "parallel.1": 16,
                "parallel.1.use": 17,
                "server": 18,
                "server.cors_origins": 19,
                "server.port": 20,
                "server.log.level": 21,
            },
        ),
        (
            "c.yaml",
            YAML,
            {
                "model": 1,
                "server": 2,
                "server.port": 3,
                "server.cors_origins": 4,
                "parallel": 6,
                "parallel.0.use": 7,
                "parallel.0.size": 8,
                "parallel.1.use": 9,
            },
        ),
        (
            "c.json",
            JSON,
            {
                "model": 2,
                "server": 3,
                "server.port": 3,
                "server.cors_origins": 4,
                "parallel": 5,
                "parallel.0.use": 6,
                "parallel.0.size": 7,
                "parallel.1.use": 8,
            },
        ),
    ],
)
def test_lines_of_keys(
    plugins: PluginSet, tmp_path: Path, name: str, text: str, lines: dict[str, int]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    layer = read_config(path, plugins)
    assert not layer.refusals and layer.data["model"] == "x"
    found = {key: int(place.rpartition(":")[2]) for key, place in layer.origins.items()}
    assert {key: found.get(key) for key in lines} == lines
    if name == "c.toml":
        assert found == lines


def test_the_three_formats_give_the_same_configuration(plugins: PluginSet, tmp_path: Path) -> None:
    import yaml

    rng = random.Random(11)
    data = {
        "model": "m",
        "seed": rng.randrange(9),
        "server": {"port": rng.randrange(9999), "cors_origins": ["a", "b"]},
        "parallel": [{"use": "single", "size": rng.randrange(8)}, {"use": "x"}],
    }
    toml = (
        f'model = "m"\nseed = {data["seed"]}\n[server]\nport = {data["server"]["port"]}\n'
        f'cors_origins = ["a", "b"]\n[[parallel]]\nuse = "single"\n'
        f"size = {data['parallel'][0]['size']}\n"
        '[[parallel]]\nuse = "x"\n'
    )
    for name, text in (
        ("a.toml", toml),
        ("a.yml", yaml.safe_dump(data)),
        ("a.json", json.dumps(data)),
    ):
        (tmp_path / name).write_text(text)
        assert read_config(tmp_path / name, plugins).data == data


@pytest.mark.parametrize(
    ("name", "text", "field", "line"),
    [
        ("d.yaml", "model: x\nserver:\n  port: 3\n  port: 4\n", "server.port", 4),
        ("d.json", '{"model": "x",\n "seed": 1,\n "seed": 2}', "seed", 3),
    ],
)
def test_duplicate_keys_are_reported_with_the_rest(
    plugins: PluginSet, refused, tmp_path: Path, name: str, text: str, field: str, line: int
) -> None:
    path = tmp_path / name
    path.write_text(text)
    layer = read_config(path, plugins)
    assert [(r.field, r.reason) for r in layer.refusals] == [
        (field, f"{name}:{line}: the key is written twice")
    ]
    found = refused({"device": "cuda"}, prior=layer.refusals)
    assert set(found) == {field, "device"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("b.toml", "model = 'x\n", "b.toml:"),
        ("b.toml", "seed = 1\nseed = 2\n", "b.toml:2"),
        ("b.toml", "model = \n", "b.toml:1"),
        ("b.yaml", "a: [1\nb: 3\n", "b.yaml:2"),
        ("b.yaml", "a: !!python/object/apply:os.system ['true']\n", "b.yaml:1"),
        ("b.yaml", "&a [*a]\n", "32 deep"),
        (
            "b.yaml",
            "\n".join(
                ["a: &a [{x: 1}]"]
                + [f"{c}: &{c} [{', '.join(['*' + p] * 9)}]" for p, c in zip("abcdefg", "bcdefgh")]
            ),
            "more than 10000 keys",
        ),
        ("b.json", '{"a": 1,}', "b.json:1"),
        ("b.json", "[" * 100_000, "b.json"),
        ("b.json", "[1]", "list"),
        ("b.yaml", "- 1\n", "list"),
        ("b.toml", b"\xff\xfe", "UTF-8"),
        ("b.ini", "a = 1", "no plugin reads"),
        ("missing.toml", None, "could not be read"),
    ],
)
def test_broken_files_are_refused_by_name(
    plugins: PluginSet, tmp_path: Path, name: str, text: str | bytes | None, said: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_config(path, plugins)
    assert said in str(caught.value) and all(r.fix for r in caught.value.refusals)


def test_variables_of_the_environment(
    plugins: PluginSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "v.yaml"
    path.write_text(
        "server:\n  api_key: ${TEST_KEY}\n  served_model_name: a ${TEST_KEY}\nmodel: ${TEST_NONE}\n"
    )
    monkeypatch.setenv("TEST_KEY", "k")
    monkeypatch.delenv("TEST_NONE", raising=False)
    layer = read_config(path, plugins)
    assert layer.data["server"] == {"api_key": "k", "served_model_name": "a ${TEST_KEY}"}
    assert [r.field for r in layer.refusals] == ["model"] and "v.yaml:4" in layer.refusals[0].reason


# ---- layers --------------------------------------------------------------------------------------


def test_the_command_line_takes_precedence_over_the_file() -> None:
    file = Layer(
        {
            "seed": 1,
            "server": {"port": 1, "host": "a"},
            "attention": {"use": "x", "kernel": 2},
            "parallel": [{"use": "p", "size": 2, "other": 1}, {"use": "q"}],
        },
        {"seed": "f:1", "server.port": "f:2", "parallel.0.size": "f:5", "parallel.1.use": "f:7"},
    )
    line = Layer(
        {
            "server": {"port": 9},
            "attention": {"use": "y"},
            "parallel": [{"use": "r"}, {"use": "p", "size": 4}],
        },
        {"server.port": "--port 9", "parallel.0.use": "--r", "parallel.1.size": "--p 4"},
    )
    merged = merge(line, file)
    assert merged.data == {
        "seed": 1,
        "server": {"port": 9, "host": "a"},
        "attention": {"use": "y"},
        "parallel": [{"use": "p", "size": 4, "other": 1}, {"use": "q"}, {"use": "r"}],
    }
    assert merged.origins["server.port"] == "--port 9" and merged.origins["seed"] == "f:1"
    assert (
        merged.origins["parallel.0.size"] == "--p 4" and merged.origins["parallel.2.use"] == "--r"
    )
    assert merged.origins["parallel.1.use"] == "f:7"


def test_set_path() -> None:
    data: dict[str, object] = {}
    for path, value in (
        ("a.b.c", 1),
        ("a.d", 2),
        ("l.0.x", 3),
        ("l.0.y", 4),
        ("l.1.x", 5),
        ("n.0", 6),
    ):
        set_path(data, path, value)
    assert data == {"a": {"b": {"c": 1}, "d": 2}, "l": [{"x": 3, "y": 4}, {"x": 5}], "n": [6]}
    for path in ("a.d.e", "l.7.x", "", "a..b", "l.x"):
        with pytest.raises(ValueError):
            set_path(data, path, 0)
