"""The embedded model's EAGLE-3 head: its folder, its drafts in the engine and in the training
network, and the training script.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from glowplug import LLM, SamplingParams
from glowplug.core.facts.model_folder import embedded_path
from glowplug.models.eagle.training.head import TrainingEagleHead
from glowplug.models.eagle.training.trainer import PASSES
from glowplug.models.embedded.tasks import held_out_tasks
from glowplug.models.embedded.training import eagle, tokenizer
from glowplug.models.embedded.training.eagle_head import HeadShape, latent_head, target_states
from glowplug.models.embedded.training.shape import NetworkShape

FOLDER = embedded_path().parent / "eagle3"
STEPS = 3
ANSWER = SamplingParams(temperature=0.0, max_tokens=48)
BASE: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
#: every step drafts, however long it takes
HEAD = {**BASE, "speculative": {"use": "eagle", "steps": STEPS, "adaptive": False}}


def test_the_folder_is_small_and_in_the_published_form() -> None:
    weights = FOLDER / "model.safetensors"
    assert weights.stat().st_size <= 2_000_000
    tensors = load_file(weights)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert {"fc.weight", "norm.weight", "midlayer.hidden_norm.weight"} <= tensors.keys()
    config = json.loads((FOLDER / "config.json").read_text())
    assert config == json.loads(json.dumps(eagle.head_config(NetworkShape(), HeadShape())))


def test_it_drafts_better_than_the_next_token_layer() -> None:
    """On held-out chat the answers stay the same and take fewer verify steps."""
    chats = [[{"role": "user", "content": task.prompt}] for task in held_out_tasks(20)]
    with LLM("embedded", **BASE) as llm:
        want = llm.chat(chats, ANSWER)
    lengths = {}
    for name in ("eagle", "nextn"):
        config = {**BASE, "speculative": {"use": name, "steps": STEPS, "adaptive": False}}
        with LLM("embedded", **config) as llm:
            got = llm.chat(chats, ANSWER)
            stats = llm.stats
        assert [one.token_ids for one in got] == [one.token_ids for one in want]
        verified = sum(len(one.token_ids) - 1 for one in got)  # the prompt's step yields one token
        lengths[name] = verified / (stats.drafted_tokens / STEPS)
    assert lengths["eagle"] > max(2.2, lengths["nextn"]), lengths


def trained_head() -> TrainingEagleHead:
    """Return the training network's head with the shipped weights."""
    head = latent_head(NetworkShape(), HeadShape())
    stored = load_file(FOLDER / "model.safetensors")
    head.load_state_dict(
        {name.removeprefix("midlayer."): tensor.float() for name, tensor in stored.items()}
    )
    return head.eval()


@torch.no_grad()
def trained_drafts(head: TrainingEagleHead, ids: list[int]) -> Tensor:
    """Return the most likely drafts of each pass after each token, int64 [passes, T]."""
    target = eagle.load_target(embedded_path(), NetworkShape())
    tokens = torch.tensor([ids])
    mask = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool).tril()
    embedded, features, _ = target_states(target, tokens, mask)
    chosen = torch.arange(len(ids))[None]
    passes = head(embedded, features, target.frequencies, mask, chosen, STEPS)
    found = [(hidden[0] @ target.lm_head.weight.t()).argmax(-1) for hidden in passes]
    return torch.stack(found)


def test_the_engine_drafts_as_the_training_network_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft that follows accepted ones is the training network's, which has no cache."""
    coder = tokenizer.load(embedded_path())
    head = trained_head()
    same = total = 0
    with LLM("embedded", cache={"use": "none"}, **HEAD) as llm:
        executor: Any = llm._executor
        algorithm = executor._engine.runner.speculative
        draft = algorithm.draft
        steps: list[list[int]] = []

        def noted(batch: Any) -> Tensor:
            made: Tensor = draft(batch)
            steps.extend(made.tolist())
            return made

        monkeypatch.setattr(algorithm, "draft", noted)
        for task in held_out_tasks(6):
            text = tokenizer.prompt_text((), task.prompt)
            prompt = coder.encode(text, add_special_tokens=False).ids
            steps.clear()
            (one,) = llm.generate([prompt], ANSWER)
            ids = prompt + one.token_ids
            wanted = trained_drafts(head, ids)
            at = len(prompt)  # the newest token's position
            for newest, *drafts in steps:
                assert at >= len(ids) or ids[at] == newest
                for number, token in enumerate(drafts):
                    if at + number >= len(ids):
                        break
                    same += int(wanted[number, at - 1] == token)
                    total += 1
                    if at + number + 1 >= len(ids) or ids[at + number + 1] != token:
                        break
                accepted = 0
                while (
                    accepted < len(drafts)
                    and at + accepted + 1 < len(ids)
                    and ids[at + accepted + 1] == drafts[accepted]
                ):
                    accepted += 1
                at += accepted + 1
    assert total > 30 and same >= 0.97 * total, (same, total)


def test_a_short_training_improves_the_head_and_writes_a_folder(tmp_path: Path) -> None:
    trainer = eagle.embedded_trainer("cpu", 3e-3)
    rows = eagle.Conversations(0).rows(2, 96)
    first = float(trainer.step(rows, 1.0))
    for _ in range(6):
        last = float(trainer.step(rows, 1.0))
    assert last < 0.7 * first
    assert 1 <= trainer.accept_length(rows) <= 1 + PASSES
    options = argparse.Namespace(
        out=tmp_path / "head", minutes=0.01, steps=0, rows=1, length=96, rate=3e-3, warm=0.0,
        hold=0.5, threads=0, report=100, seed=1,
    )  # fmt: skip
    eagle.run(options)
    with LLM(
        "embedded",
        **BASE,
        speculative={"use": "eagle", "steps": 2, "draft_model": str(tmp_path / "head")},
    ) as llm:
        assert llm.generate([[0, 5, 7]], ANSWER.replace(max_tokens=4))[0].token_ids


def test_held_out_tasks_are_not_trained_on() -> None:
    """ConversationRows have whole conversations, and weights only where the assistant writes."""
    rows = eagle.Conversations(3).rows(4, 128)
    held = eagle.Conversations(3, held_out=True).rows(4, 128)
    assert rows.tokens.shape == (4, 128) and not torch.equal(rows.tokens, held.tokens)
    assert 0.05 < float(rows.weights.mean()) < 0.6
    assert (rows.tokens[:, 0] == tokenizer.BOS_ID).all()
