"""Training of an EAGLE-3 head for any target, and the head's folder.

The head learns the target's own distribution, several passes deep ("training-time test" of EAGLE-3,
arXiv 2503.01840).
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from glowplug.models.eagle.training.head import TrainingEagleHead, taken
from glowplug.models.embedded.training.optim import Optimizer
from glowplug.models.embedded.training.train import learning_rate

PASSES = 3  #: draft passes of a round in training
DECAY = 0.8  #: loss weight of a pass, relative to the pass before


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


class ConversationSource:
    """An endless source of conversations, packed in rows. ``padding``: id of padding tokens."""

    def __init__(self, padding: int) -> None:
        self._padding = padding

    def conversation(self) -> tuple[list[int], list[float]]:
        """Return the ids of a conversation, and the loss weight of predicting each."""
        raise NotImplementedError

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
            ids, own = self.conversation()
            if len(tokens) + len(ids) > length:
                rest = length - len(tokens)
                padding = [self._padding] * rest
                return tokens + padding, documents + [number] * rest, weights + [0.0] * rest
            tokens += ids
            documents += [number] * len(ids)
            weights += own
            number += 1


class HeadTarget(Protocol):
    """The target of a head, on the device of the training.

    Attributes:
        output_head: [V, D].
        frequencies: inverse rotary frequencies of the head's attention.
    """

    output_head: Tensor
    frequencies: Tensor

    def states(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return embeddings [B, T, D], features [B, T, layers * D], normed hidden states.

        Args:
            tokens: [B, T].
            mask: bool [B, 1, T, T], the tokens that each token attends to.
        """
        ...


class HeadTrainer:
    """Target, head and optimizer, with one training step.

    Args:
        target: the target.
        head: the head to train.
        device: torch device of both.
        rate: peak learning rate.
        dtype: dtype of products; bfloat16 is slow on CPUs without instructions for it.
    """

    def __init__(
        self,
        target: HeadTarget,
        head: TrainingEagleHead,
        device: str,
        rate: float,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.device = device
        self._narrow = dtype != torch.float32
        self.target = target
        self.head = head.to(device)
        self.optimizer = Optimizer(self.head, rate, dtype)

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
        target = self.target
        with self._autocast():
            embedded, features, normed = target.states(tokens, mask)
            results = self.head(embedded, features, target.frequencies, mask, chosen, PASSES)
            for number, hidden in enumerate(results, 1):
                places = (chosen + number).clamp(max=tokens.shape[1] - 1)
                wanted = F.linear(taken(normed, places), target.output_head).float().softmax(-1)
                logits = F.linear(hidden, target.output_head).float()
                yield logits, wanted, kept[number - 1].gather(1, chosen)

    def _autocast(self) -> torch.autocast:
        """Return the context of a pass, in bfloat16 if this is the trainer's dtype."""
        kind = torch.device(self.device).type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=self._narrow)

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


def train(
    trainer: HeadTrainer,
    source: Callable[[], ConversationRows],
    check: ConversationRows,
    options: argparse.Namespace,
) -> int:
    """Train until the time is up, or for ``options.steps`` steps, and return the number of steps.

    Args:
        trainer: the head and its target.
        source: function that returns the rows of the next step.
        check: held-out conversations, whose accept length is printed now and then.
        options: options of the command line (``add_training_options``).
    """
    started = time.monotonic()
    step = 0
    average = 0.0
    while True:
        passed = time.monotonic() - started
        progress = step / options.steps if options.steps else passed / (60 * options.minutes)
        if progress >= 1:
            return step
        loss = float(trainer.step(source(), learning_rate(progress, options.warm, options.hold)))
        average = loss if step == 0 else average + 0.02 * (loss - average)
        if step % options.report == 0:
            print(f"step {step} {passed:.0f} s loss {average:.3f} "
                  f"accept length {trainer.accept_length(check):.3f}", flush=True)  # fmt: skip
        step += 1


def save(head: TrainingEagleHead, config: Mapping[str, Any], out: Path) -> None:
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
    text = json.dumps(dict(config), indent=2)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")


def add_training_options(
    parser: argparse.ArgumentParser, *, minutes: float, rows: int, length: int
) -> None:
    """Add the options of every training; the arguments are defaults."""
    parser.add_argument("--out", type=Path, required=True, help="folder to write the head to")
    parser.add_argument("--minutes", type=float, default=minutes, help="duration of the training")
    parser.add_argument("--steps", type=int, default=0, help="steps in place of --minutes")
    parser.add_argument("--rows", type=int, default=rows, help="rows of a step")
    parser.add_argument("--length", type=int, default=length, help="tokens of a row")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warm", type=float, default=0.02, help="share in which the rate rises")
    parser.add_argument("--hold", type=float, default=0.3, help="share after which the rate falls")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's default")
    parser.add_argument("--report", type=int, default=100, help="steps from one report to the next")
    parser.add_argument("--seed", type=int, default=0)
