"""The embedded model's task generator and scorer, its tokenizer's chat form, and its FP8
rounding.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from glowplug.models.embedded.tasks import (
    KINDS,
    Task,
    final_answer,
    held_out,
    held_out_tasks,
    is_correct,
    make_task,
    score,
)
from glowplug.models.embedded.training import tokenizer


def expected(task: Task) -> str | None:
    """Return the answer derived from the key alone, by other means than the generator's; None where
    the key lacks it.
    """
    if task.kind in ("add", "subtract"):
        a, b = map(int, task.key.split(","))
        return str(a + b if task.kind == "add" else a - b)
    if task.kind == "copy":
        return task.key
    if task.kind == "reverse":
        return (
            ", ".join(task.key.split(", ")[::-1])
            if ", " in task.key
            else "".join(reversed(task.key))
        )
    if task.kind == "sort":
        items = task.key.removeprefix("down ").split(", ")
        key = int if items[0].isdigit() else str
        return ", ".join(sorted(items, key=key, reverse=task.key.startswith("down ")))
    if task.kind == "count":
        word, found, listed = task.key.partition(": ")
        return str(listed.split(", ").count(word)) if found else str(task.key.count(",") + 1)
    return None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("test", [False, True])
def test_answers_are_right_and_splits_are_kept(kind: str, test: bool) -> None:
    rng = random.Random()
    for _ in range(300):
        task = make_task(rng, kind=kind, test=test)
        assert held_out(task.kind, task.key) == test
        if kind != "lookup":
            assert task.answer == expected(task)
        else:
            table, _, key = task.key.lower().rpartition("|")
            rows = [
                row.removeprefix("the ")
                for row in table.replace("=", " ").replace(":", " ").split(", ")
            ]
            entry = next(row.split() for row in rows if row.split()[0] == key)
            assert task.answer in entry
        assert task.prompt.isascii() and task.prompt.strip() == task.prompt


def test_splits_share_no_content() -> None:
    tested = {(task.kind, task.key) for task in held_out_tasks(500)}
    assert len(tested) == 500
    rng = random.Random()
    trained = {(task.kind, task.key) for task in (make_task(rng) for _ in range(5000))}
    assert not tested & trained


def test_the_evaluation_set_is_fixed_and_mixed() -> None:
    tasks = held_out_tasks(500)
    assert tasks == held_out_tasks(500)
    assert {task.kind for task in tasks} == set(KINDS)
    assert 0.02 < sum(task.think for task in tasks) / len(tasks) < 0.12


def test_scoring_is_exact() -> None:
    task = Task("add", "1,2", "What is 1 + 2?", "3", "Ones: 1 + 2 = 3.")
    assert is_correct(task, " 3\n") and not is_correct(task, "3.") and not is_correct(task, "13")
    thinking = replace(task, think=True)
    assert is_correct(thinking, thinking.completion)
    assert not is_correct(thinking, "3")  # the reasoning never ended
    assert final_answer("a</think>\n\n3") == "3"
    assert score([task, thinking], ["3", "4"]) == {"all": 50.0, "add": 50.0, "think": 0.0}


def test_every_task_asks_for_its_answer_in_think_form() -> None:
    rng = random.Random()
    for kind in KINDS:
        task = make_task(rng, kind=kind, think=True)
        reasoning, _, answer = task.completion.partition("\n</think>\n\n")
        assert reasoning == task.reasoning and answer == task.answer


def test_answer_mask_covers_what_the_assistant_writes() -> None:
    user, assistant, think, eos = (
        tokenizer.USER_ID,
        tokenizer.ASSISTANT_ID,
        tokenizer.THINK_ID,
        tokenizer.EOS_ID,
    )
    newline, text = 90, 100
    ids = [
        tokenizer.BOS_ID,
        user,
        text,
        assistant,
        text,
        eos,
        user,
        text,
        assistant,
        think,
        newline,
        text,
        eos,
    ]
    wanted = [4, 5, 11, 12]
    assert [place for place, mine in enumerate(tokenizer.answer_mask(ids)) if mine] == wanted


def test_fake_rounding_equals_what_is_stored() -> None:
    from glowplug.models.embedded.training import fp8

    weight = torch.randn(256, 384, requires_grad=True)
    stored, scales = fp8.quantize_blocks(weight.detach())
    assert stored.dtype == torch.float8_e4m3fn and scales.shape == (2, 3)
    rounded = fp8.fake_weight(weight)
    torch.testing.assert_close(
        rounded.detach(), fp8.dequantize_blocks(stored, scales), rtol=1e-6, atol=1e-6
    )
    error = (rounded - weight).detach().norm() / weight.detach().norm()
    assert 0 < error < 0.04  # E4M3 has three mantissa bits
    rounded.sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones_like(weight))
    with pytest.raises(ValueError, match="cannot be divided into"):
        fp8.quantize_blocks(torch.zeros(130, 128))


def test_training_network_is_the_published_architecture() -> None:
    from glowplug.models.embedded.training.network import Network
    from glowplug.models.embedded.training.shape import NetworkShape

    shape = NetworkShape(vocab=64, layers=2, dense_width=128)
    torch.manual_seed(random.randrange(10**6))
    network = Network(shape).eval()
    tokens = torch.randint(0, shape.vocab, (2, 9))
    with torch.no_grad():
        hidden, _ = network(tokens, torch.zeros_like(tokens))
        changed = tokens.clone()
        changed[:, -1] = (changed[:, -1] + 1) % shape.vocab
        again, _ = network(changed, torch.zeros_like(tokens))
        torch.testing.assert_close(hidden[:, :-1], again[:, :-1])  # causal
        weights = network.layers[1].mlp.gate(hidden)
    chosen = weights > 0
    assert (chosen.sum(-1) == shape.top_experts).all()
    per_group = chosen.unflatten(-1, (shape.groups, -1)).any(-1).sum(-1)
    assert (per_group <= shape.top_groups).all()
    torch.testing.assert_close(weights.sum(-1), torch.full(weights.shape[:-1], shape.routed_scale))
