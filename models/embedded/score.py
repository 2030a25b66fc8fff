"""Scores of the embedded model: exact match on held-out tasks and agreement of its MTP layer.

    python -m glowplug.models.embedded.score [--model DIR] [--count 500] [--speculative eagle]

scores a checkpoint folder through the engine, and measures the accept length of its drafts. The
functions below score the training network without a KV cache.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from glowplug.models.embedded.tasks import Task, held_out_tasks, is_correct, make_task, score
from glowplug.models.embedded.training import tokenizer
from glowplug.models.embedded.training.data import HELD_OUT, read_pairs
from glowplug.models.embedded.training.network import Network

SAMPLES = (
    "What is the capital of France?", "Who are you?", "What is 123 + 456?", "What is a dog?",
    "Define happy.", "What is the opposite of hot?", "Sort these numbers: 9, 4, 27, 1",
    "What does textwrap.fill do in Python?", "Why is the sky blue?",
    "Tell me something about cats.",
)  # fmt: skip
THINK_TOKENS_MAX = 160  #: most tokens of an answer in think form
PLAIN_TOKENS_MAX = 48  #: most tokens of any other answer


@torch.no_grad()
def greedy(model: Network, prompts: Sequence[list[int]], most: int) -> list[list[int]]:
    """Return the greedy continuation of each prompt, at most ``most`` tokens long.

    All prompts form one right-padded batch, which is computed anew for every token.
    """
    device = model.frequencies.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    width = (max(map(len, prompts)) + most + 63) // 64 * 64
    ids = torch.full((len(prompts), width), tokenizer.PAD_ID, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    rows = torch.arange(len(prompts), device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for _ in range(most):
        hidden, _ = _hidden(model, ids[:, : int(lengths.max())])
        chosen = model.lm_head(hidden[rows, lengths - 1]).float().argmax(-1)
        ids[rows, lengths] = torch.where(ended, tokenizer.PAD_ID, chosen)
        lengths += (~ended).long()
        ended |= chosen == tokenizer.EOS_ID
        if bool(ended.all()):
            break
    return [ids[row, len(p) : int(lengths[row])].tolist() for row, p in enumerate(prompts)]


def _hidden(model: Network, ids: Tensor) -> tuple[Tensor, Tensor]:
    device = ids.device.type
    was_training = model.training
    model.eval()
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        # NOTE: eager, since a compiled block would be recompiled for the new length of every step.
        with torch.compiler.set_stance("force_eager"):
            hidden, ahead = model(ids, torch.zeros_like(ids))
    model.train(was_training)
    return hidden.float(), ahead.float()


def complete(model: Network, folder: Path, tasks: Sequence[Task]) -> list[str]:
    """Return the network's greedy answers to ``tasks``; ``folder`` contains the tokenizer."""
    coder = tokenizer.load(folder)
    texts = [""] * len(tasks)
    for think, most in ((False, PLAIN_TOKENS_MAX), (True, THINK_TOKENS_MAX)):
        indices = [index for index, task in enumerate(tasks) if task.think == think]
        prompts = [tokenizer.prompt_text((), tasks[index].prompt, think=think) for index in indices]
        encoded = [coder.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
        for index, ids in zip(
            indices, greedy(model, encoded, most) if encoded else (), strict=True
        ):
            texts[index] = coder.decode(ids)
    return texts


def task_scores(model: Network, folder: Path, count: int) -> dict[str, float]:
    """Return the percentage of exact answers to ``count`` held-out tasks, per kind and in all."""
    tasks = held_out_tasks(count)
    return score(tasks, complete(model, folder, tasks))


def answer(model: Network, folder: Path, question: str, *, think: bool = False) -> str:
    """Return the network's greedy answer to one question."""
    return complete(model, folder, [Task("chat", "", question, "", "", think)])[0]


def held_out_chats(folder: Path, count: int = 400, seed: int = 7) -> list[str]:
    """Return ``count`` held-out conversations as text: half tasks, half question-answer pairs."""
    rng = random.Random(seed)
    tasks = [make_task(rng, test=True) for _ in range(count // 2)]
    chats = [tokenizer.prompt_text((), t.prompt, think=t.think) + t.completion for t in tasks]
    pairs = read_pairs(folder / HELD_OUT)
    chosen = rng.sample(pairs, min(count - len(chats), len(pairs)))
    return [
        *chats,
        *(tokenizer.prompt_text((), rng.choice(p.questions)) + p.answer for p in chosen),
    ]


@torch.no_grad()
def agreement(model: Network, folder: Path, count: int = 400) -> dict[str, float]:
    """Return the percentage of positions at which the MTP layer and the main model agree.

    From hidden state i and the true token id i + 1 the MTP layer predicts id i + 2; the main model
    predicts this id from hidden state i + 1. The most likely ids are compared at all positions of
    held-out chats ("all"), and separately at the positions of the answers ("answers").
    """
    coder = tokenizer.load(folder)
    same: dict[str, list[Tensor]] = {"all": [], "answers": []}
    for text in held_out_chats(folder, count):
        ids = coder.encode(text + tokenizer.EOS, add_special_tokens=False).ids
        row = torch.tensor([ids], device=model.frequencies.device)
        hidden, ahead = _hidden(model, row)
        main = F.linear(hidden, model.lm_head.weight.float())[0, 1:-1].argmax(-1)
        draft = F.linear(ahead, model.lm_head.weight.float())[0, :-2].argmax(-1)
        mask = torch.tensor(tokenizer.answer_mask(ids)[2:], device=row.device)
        same["all"].append(main == draft)
        same["answers"].append((main == draft)[mask])
    return {name: 100.0 * float(torch.cat(marks).float().mean()) for name, marks in same.items()}


def main() -> None:
    """Score a checkpoint on the held-out tasks through the engine, and print the result."""
    # NOTE: the only import of an entry point, needed only when run as a script.
    from glowplug import LLM, SamplingParams

    options = parsed_options()
    tasks = held_out_tasks(options.count)
    prompts = [tokenizer.prompt_text((), task.prompt, think=task.think) for task in tasks]
    drafts = {"use": options.speculative or "none"}
    if options.speculative:
        drafts["steps"] = options.steps
    engine = LLM(model=options.model, speculative=drafts)
    coder = engine.tokenizer
    if coder is None:
        raise SystemExit(f"{options.model} has no tokenizer")
    ids = [coder.encode(prompt, add_special_tokens=False) for prompt in prompts]
    outputs = engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=THINK_TOKENS_MAX))
    if options.speculative:
        stats = engine.stats
        rounds = stats.drafted_tokens / options.steps
        print(f"accept length {1 + stats.accepted_tokens / rounds:.3f} of {options.steps} drafts")
    engine.close()
    print_scores(tasks, [output.text for output in outputs], options.show)


def parsed_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--show", type=int, default=10, help="wrong answers to print")
    parser.add_argument("--speculative", help="speculative algorithm, for example nextn or eagle")
    parser.add_argument("--steps", type=int, default=3, help="tokens drafted after each step")
    return parser.parse_args()


def print_scores(tasks: Sequence[Task], texts: Sequence[str], show: int) -> None:
    """Print the scores of answers, and the first ``show`` wrong ones."""
    print(json.dumps({name: round(value, 2) for name, value in score(tasks, texts).items()}))
    wrong = [
        (t.prompt, t.answer, text)
        for t, text in zip(tasks, texts, strict=True)
        if not is_correct(t, text)
    ]
    for line in wrong[:show]:
        print(line)


if __name__ == "__main__":
    main()
