"""Train the embedded model's EAGLE-3 head and write its folder.

    python -m glowplug.models.embedded.training.eagle --out DIR [--minutes 45] [--threads 1]

The target is the shipped checkpoint, which stays as it is. The head learns the target's own
distribution on tasks and facts, several passes deep ("training-time test" of EAGLE-3, arXiv
2503.01840). A CPU is enough; with a GPU the same run needs fewer minutes.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from glowplug.models.embedded.tasks import make_task
from glowplug.models.embedded.training import facts, tokenizer
from glowplug.models.embedded.training.batches import TASK_WEIGHTS
from glowplug.models.embedded.training.eagle_head import (
    FEATURE_LAYERS,
    HeadShape,
    TrainingEagleHead,
    taken,
    target_states,
)
from glowplug.models.embedded.training.export import EXPERTS, published_name
from glowplug.models.embedded.training.fp8 import dequantize_blocks
from glowplug.models.embedded.training.network import Network
from glowplug.models.embedded.training.optim import Optimizer
from glowplug.models.embedded.training.shape import NetworkShape
from glowplug.models.embedded.training.train import learning_rate

CHECKPOINT = Path(__file__).parents[1] / "checkpoint"
PASSES = 3  #: draft passes of a round in training
DECAY = 0.8  #: loss weight of a pass, relative to the pass before
TASK_SHARE = 0.8  #: share of tasks in the training text; facts are the rest


class ConversationRows(NamedTuple):
    """Packed conversations.

    Attributes:
        tokens: int64 [B, T].
        documents: int64 [B, T], number of each token's conversation in its row.
        weights: float32 [B, T], loss weight of predicting each token.
    """

    tokens: Tensor
    documents: Tensor
    weights: Tensor


class Conversations:
    """Random conversations of one question each, as tokens."""

    def __init__(self, seed: int, *, held_out: bool = False) -> None:
        self._rng = random.Random(seed)
        self._coder: Tokenizer = tokenizer.load(CHECKPOINT)
        self._facts = facts.questions()
        self._held_out = held_out

    def rows(self, count: int, length: int) -> ConversationRows:
        """Return ``count`` rows of ``length`` tokens, each filled with whole conversations."""
        made = [self._row(length) for _ in range(count)]
        tokens, documents, weights = zip(*made, strict=True)
        return ConversationRows(
            torch.tensor(tokens), torch.tensor(documents), torch.tensor(weights)
        )

    def _row(self, length: int) -> tuple[list[int], list[int], list[float]]:
        tokens: list[int] = []
        documents: list[int] = []
        weights: list[float] = []
        number = 0
        while True:
            ids = self._conversation()
            if len(tokens) + len(ids) > length:
                rest = length - len(tokens)
                padding = [tokenizer.PAD_ID] * rest
                return tokens + padding, documents + [number] * rest, weights + [0.0] * rest
            tokens += ids
            documents += [number] * len(ids)
            weights += [float(own) for own in tokenizer.answer_mask(ids)]
            number += 1

    def _conversation(self) -> list[int]:
        if self._held_out or self._rng.random() < TASK_SHARE:
            kind = self._rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()))[0]
            task = make_task(self._rng, kind=kind, test=self._held_out)
            prompt = tokenizer.prompt_text((), task.prompt, think=task.think)
            text = f"{prompt}{task.completion}"
        else:
            asked, answer = self._rng.choice(self._facts)
            text = f"{tokenizer.prompt_text((), self._rng.choice(asked))}{answer}"
        ids: list[int] = self._coder.encode(f"{text}{tokenizer.EOS}", add_special_tokens=False).ids
        return ids


def load_target(folder: Path, shape: NetworkShape) -> Network:
    """Return the network with the weights of a checkpoint in block FP8, dequantised."""
    stored = load_file(folder / "model.safetensors")

    def read(name: str) -> Tensor:
        scales = stored.get(f"{name}_scale_inv")
        return stored[name].float() if scales is None else dequantize_blocks(stored[name], scales)

    network = Network(shape)
    state = {}
    for own in network.state_dict():
        name = published_name(own, shape.layers)
        stem, _, last = name.rpartition(".")
        if last in EXPERTS:
            experts = range(shape.experts)
            parts = [read(f"{stem}.experts.{e}.{EXPERTS[last]}.weight") for e in experts]
            state[own] = torch.stack(parts)
        else:
            state[own] = read(name)
    network.load_state_dict(state)
    return network.eval().requires_grad_(False)


class HeadTrainer:
    """Target, head and optimizer, with one training step."""

    def __init__(self, device: str, rate: float) -> None:
        shape = NetworkShape()
        self.device = device
        self.target = load_target(CHECKPOINT, shape).to(device)
        self.head = TrainingEagleHead(shape, HeadShape()).to(device)
        self.optimizer = Optimizer(self.head, rate)

    def step(self, rows: ConversationRows, factor: float) -> Tensor:
        """Update the head with ``rows``, at ``factor`` times the peak rate; return the loss."""
        loss = torch.zeros((), device=self.device)
        for number, (logits, wanted, weights) in enumerate(self._passes(rows)):
            losses = F.cross_entropy(logits.mT, wanted.mT, reduction="none")
            loss = loss + DECAY**number * (losses * weights).sum() / weights.sum()
        torch.autograd.backward(loss)
        self.optimizer.step(factor)
        return loss.detach()

    def _passes(self, rows: ConversationRows) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each pass's logits [B, S, V], the target's distributions, and weights [B, S]."""
        tokens, documents, weights = (part.to(self.device) for part in rows)
        kept = _kept(documents, weights)
        chosen = _chosen(kept)
        mask = _mask(documents)
        head = self.target.lm_head.weight
        with torch.autocast(self.device, dtype=torch.bfloat16):
            embedded, features, normed = target_states(self.target, tokens, mask)
            results = self.head(embedded, features, self.target.frequencies, mask, chosen, PASSES)
            for number, hidden in enumerate(results, 1):
                places = (chosen + number).clamp(max=tokens.shape[1] - 1)
                wanted = F.linear(taken(normed, places), head).float().softmax(-1)
                logits = F.linear(hidden, head).float()
                yield logits, wanted, kept[number - 1].gather(1, chosen)

    @torch.no_grad()
    def accept_length(self, rows: ConversationRows) -> float:
        """Return the mean accept length of a chain of ``PASSES`` drafts after an answer's token.

        Chains that the end of the answer cuts off count with the drafts that they have.
        """
        total = alive = torch.zeros(())
        for number, (logits, wanted, weights) in enumerate(self._passes(rows)):
            if number == 0:
                alive = weights
                total = weights.clone()
                count = weights.sum()
            alive = alive * weights * (logits.argmax(-1) == wanted.argmax(-1))
            total += alive
        return float(total.sum() / count)


def _kept(documents: Tensor, weights: Tensor) -> Tensor:
    """Return the loss weights of all passes, [passes, B, T].

    Pass n at index i predicts token i + n + 1; its weight is 0 if this token belongs to another
    conversation.
    """
    kept = []
    for ahead in range(2, PASSES + 2):
        same = documents[:, ahead:] == documents[:, :-ahead]
        kept.append(F.pad(weights[:, ahead:] * same, (0, ahead)))
    return torch.stack(kept)


def _chosen(kept: Tensor) -> Tensor:
    """Return the indices of the tokens with a loss weight in any pass, int64 [B, S].

    Rows with fewer of them than the longest are filled up with other tokens.
    """
    order = kept.amax(0).gt(0).int().sort(dim=1, descending=True, stable=True)
    return order.indices[:, : int(order.values.sum(1).max())]


def _mask(documents: Tensor) -> Tensor:
    """Return the tokens that each token attends to, bool [B, 1, T, T]."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents.unsqueeze(1) == documents.unsqueeze(2)) & causal).unsqueeze(1)


def head_config(shape: NetworkShape, head: HeadShape) -> dict[str, object]:
    """Return the content of the head's config.json."""
    target = shape.config(fp8=False)
    absent = ("first_k_dense_replace", "moe", "n_", "num_experts", "norm_topk", "scoring", "topk",
              "routed", "num_nextn")  # fmt: skip
    config = {key: value for key, value in target.items() if not key.startswith(absent)}
    return config | {
        "architectures": ["Eagle3DeepseekV3ForCausalLM"],
        "num_hidden_layers": 1,
        "q_lora_rank": head.q_rank,
        "intermediate_size": head.width,
        "draft_vocab_size": None,
        "eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS),
    }


def save(head: TrainingEagleHead, out: Path) -> None:
    """Write the head's folder: weights in bf16 under their published names, and config.json."""
    out.mkdir(parents=True, exist_ok=True)
    outer = ("fc.", "norm.")
    state = {
        name if name.startswith(outer) else f"midlayer.{name}": tensor.detach().cpu().bfloat16()
        for name, tensor in head.state_dict().items()
    }
    file = out / "model.safetensors"
    save_file(state, file, metadata={"format": "pt"})
    file.chmod(0o644)
    text = json.dumps(head_config(NetworkShape(), HeadShape()), indent=2)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")


def run(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    trainer = HeadTrainer("cuda" if torch.cuda.is_available() else "cpu", options.rate)
    check = Conversations(options.seed, held_out=True).rows(options.rows, options.length)
    steps = train(trainer, check, options)
    save(trainer.head, options.out)
    print(f"{steps} steps, accept length {trainer.accept_length(check):.3f}")


def train(trainer: HeadTrainer, check: ConversationRows, options: argparse.Namespace) -> int:
    """Train until the time is up, and return the number of steps.

    Args:
        trainer: the head and its target.
        check: held-out conversations, whose accept length is printed now and then.
        options: options of the command line.
    """
    source = Conversations(options.seed)
    started = time.monotonic()
    step = 0
    average = 0.0
    while (progress := (time.monotonic() - started) / (60 * options.minutes)) < 1:
        rows = source.rows(options.rows, options.length)
        loss = float(trainer.step(rows, learning_rate(progress, options.warm, options.hold)))
        average = loss if step == 0 else average + 0.02 * (loss - average)
        if step % 100 == 0:
            print(f"step {step} {time.monotonic() - started:.0f} s loss {average:.3f} "
                  f"accept length {trainer.accept_length(check):.3f}", flush=True)  # fmt: skip
        step += 1
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warm", type=float, default=0.02)
    parser.add_argument("--hold", type=float, default=0.3, help="share after which the rate falls")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's default")
    parser.add_argument("--seed", type=int, default=0)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
