"""Training of EAGLE-3 heads for Llama models: the target in plain torch, and the whole script."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from glowplug import LLM, SamplingParams
from glowplug.core.facts.model_folder import embedded_path
from glowplug.core.plugin.registry import load_plugins
from glowplug.models.eagle.training import llama
from glowplug.models.eagle.training.grouped import GroupedHeadAttention, GroupedShape
from glowplug.models.eagle.training.head import HeadSizes, TrainingEagleHead
from glowplug.models.eagle.training.llama_target import LlamaTarget, weight_reader
from glowplug.models.eagle.training.trainer import HeadTrainer
from tests.support.eagle import PlainHead
from tests.support.parity import COMMON, write

VOCAB = 2048  #: of the embedded model's tokenizer
SIZES: dict[str, Any] = {
    **COMMON,
    "vocab_size": VOCAB,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random Llama with the embedded model's tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("llama")
    write(folder, "LlamaForCausalLM", seed=7, **SIZES)
    for file in embedded_path().glob("*token*"):
        shutil.copy(file, folder)
    for file in embedded_path().glob("*.jinja"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Write a folder with a page whose paragraphs are asked about."""
    folder = tmp_path / "text"
    folder.mkdir()
    parts = [
        f"Paragraph {number} states that a number follows {number - 1}." for number in range(9)
    ]
    (folder / "page.md").write_text("# Title\n\n" + "\n\n".join(one * 3 for one in parts))
    return folder


def test_the_target_in_plain_torch_is_the_model(target: Path) -> None:
    """Hidden states and features are transformers', for a folder read by its weight source."""
    from transformers import AutoModelForCausalLM

    with LLM(str(target), **ENGINE) as llm:
        plan = llm.plan
    plain = LlamaTarget(plan.facts.model, weight_reader(plan, load_plugins([])), "cpu")
    assert plain.feature_layers == (2, 2, 2)
    tokens = torch.randint(2, VOCAB, (2, 17), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 1, 17, 17, dtype=torch.bool).tril()
    embedded, features, normed = plain.states(tokens, mask)
    model = AutoModelForCausalLM.from_pretrained(target, torch_dtype=torch.float32)
    with torch.no_grad():
        wanted = model.model(tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(embedded, wanted[0])
    torch.testing.assert_close(features, torch.cat([wanted[2]] * 3, -1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(normed, wanted[-1], rtol=1e-4, atol=1e-5)


def head_of(plan: Any) -> TrainingEagleHead:
    facts = plan.facts.model
    return TrainingEagleHead(
        HeadSizes(facts.hidden_size, 96, 3, 1e-6), GroupedHeadAttention(GroupedShape.of(facts))
    )


def test_the_training_head_is_the_published_head(target: Path) -> None:
    """The first pass after each token is that of the published form in plain torch."""
    with LLM(str(target), **ENGINE) as llm:
        plan = llm.plan
    torch.manual_seed(5)
    head = head_of(plan)
    for weight in (head.self_attn.o_proj.weight, head.mlp.down_proj.weight):
        torch.nn.init.normal_(weight, std=0.1)
    facts = plan.facts.model
    plain_target = LlamaTarget(facts, weight_reader(plan, load_plugins([])), "cpu")
    tokens = torch.randint(2, VOCAB, (1, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    states = plain_target.states(tokens, mask)
    chosen = torch.arange(11)[None]
    with torch.no_grad():
        (first,) = head(*states[:2], plain_target.frequencies, mask, chosen, 1)
    named = {
        name if name.startswith(("fc.", "norm.")) else f"midlayer.{name}": tensor.detach()
        for name, tensor in head.state_dict().items()
    }
    config = {**llama.head_config(facts, 96, plain_target.feature_layers)}
    weights = load_file(target / "model.safetensors")
    embedding, output = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    plain = PlainHead(config, named, embedding, output)
    outputs = plain.run(plain.states(states[2][0], states[1][0])[:-1], tokens[0, 1:].tolist())
    torch.testing.assert_close(first[0] @ output.t(), plain.logits(outputs), rtol=1e-3, atol=1e-4)


def test_the_loss_falls(target: Path) -> None:
    with LLM(str(target), **ENGINE) as llm:
        plan = llm.plan
    reader = weight_reader(plan, load_plugins([]))
    torch.manual_seed(0)
    trainer = HeadTrainer(
        LlamaTarget(plan.facts.model, reader, "cpu"), head_of(plan), "cpu", 2e-2, torch.float32
    )
    rng = torch.Generator().manual_seed(1)
    made = [torch.randint(2, VOCAB, (40,), generator=rng).tolist() for _ in range(3)]
    source = llama.GeneratedConversations([(ids[:8], ids[8:]) for ids in made], 64, seed=2)
    rows = source.rows(2, 64)
    assert rows.weights.sum() == 2 * 32, "weights where the model answers"
    before = trainer.accept_length(rows)
    losses = [float(trainer.step(rows, 1.0)) for _ in range(16)]
    # the loss cannot fall below the entropy of the random target, which is most of it
    assert losses[-1] < losses[0] - 2 and losses[-1] < min(losses[:8]), losses
    assert before < trainer.accept_length(rows) <= 4


def test_the_script_writes_a_head_that_drafts(target: Path, text: Path, tmp_path: Path) -> None:
    """The whole run with a tiny budget; the head it writes changes no token."""
    head = tmp_path / "head"
    words = ["--model", str(target), "--out", str(head), "--device", "cpu", "--text", str(text)]
    words += ["--tokens", "200", "--answer-tokens", "8", "--batch", "32", "--steps", "2"]
    words += ["--rows", "2", "--length", "48", "--context", "256"]
    words += ["--record", str(tmp_path / "record.json")]
    record = llama.run(llama.parser().parse_args(words))
    assert record == json.loads((tmp_path / "record.json").read_text())
    assert record["training"]["steps"] == 2 and record["generation"]["tokens"] >= 150
    assert 1 <= record["measurement"]["accept_length"] <= 4
    config = json.loads((head / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert {one.dtype for one in load_file(head / "model.safetensors").values()} == {torch.bfloat16}
    drafts = {"use": "eagle", "steps": 2, "adaptive": False, "draft_model": str(head)}
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for more in ({}, {"speculative": drafts}):
        with LLM(str(target), **ENGINE, **more) as llm:
            found.append([one.token_ids for one in llm.generate([[3, 5, 7]], greedy)])
            drafted = llm.stats.drafted_tokens
    assert found[0] == found[1] and drafted > 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "scales its rotary embedding"),
        ({"attention_bias": True}, "has biases"),
    ],
)
def test_targets_that_are_not_built(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    write(tmp_path / "target", "LlamaForCausalLM", seed=7, **{**SIZES, **changes})
    with LLM(str(tmp_path / "target"), skip_tokenizer=True, **ENGINE) as llm:
        plan = llm.plan
    with pytest.raises(ValueError, match=reason):
        LlamaTarget(plan.facts.model, weight_reader(plan, load_plugins([])), "cpu")
