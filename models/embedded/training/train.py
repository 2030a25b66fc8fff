"""Train the embedded model on one GPU (or, with tiny settings, on a CPU).

    python -m glowplug.models.embedded.training.train --data DIR --out DIR [--minutes 9] \\
        [--resume FILE]

The learning rate warms up, stays constant, and falls linearly over the second half of the given
time. Expert loads are balanced by the correction bias alone (the auxiliary-loss-free rule of
DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2). From `--fp8-from` on, projections
compute in block FP8, the format in which the checkpoint is served, with straight-through gradients.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from glowplug.models.embedded import score as evaluate
from glowplug.models.embedded.training import batches
from glowplug.models.embedded.training.network import Network
from glowplug.models.embedded.training.optim import Optimizer
from glowplug.models.embedded.training.shape import NetworkShape

WEIGHTS = "weights.safetensors"
NEXTN_WEIGHT = 0.3
BIAS_SPEED = 1e-3


@dataclass(slots=True)
class StepClock:
    """Progress of the training: a share of ``steps``, or of ``seconds`` if ``steps`` is 0."""

    steps: int
    seconds: float
    started: float
    step: int = 0

    @property
    def progress(self) -> float:
        return (
            self.step / self.steps
            if self.steps
            else (time.monotonic() - self.started) / self.seconds
        )


def learning_rate(progress: float, warm: float, hold: float) -> float:
    """Return the factor on the peak learning rate at ``progress`` (0 to 1).

    It rises linearly from 0 to 1 until ``warm``, and falls linearly to 0 from ``hold`` on.
    """
    return min(
        progress / warm if warm else 1.0, 1.0, max(0.0, (1 - progress) / max(1 - hold, 1e-9))
    )


def weighted_loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the mean cross-entropy of `hidden @ head` under per-target weights."""
    logits = F.linear(hidden, head).float().flatten(0, -2)
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


class Trainer:
    """Model and optimizer, with one training step."""

    def __init__(self, shape: NetworkShape, device: str, rate: float, compiled: bool) -> None:
        self.device = device
        self.model = Network(shape).to(device)
        self.optimizer = Optimizer(self.model, rate)
        self.loss = torch.compile(weighted_loss) if compiled else weighted_loss
        if compiled:
            for block in (*self.model.layers, self.model.nextn.block):
                block.compile(dynamic=False)

    def tensors(self, batch: batches.TrainingBatch) -> tuple[Tensor, Tensor, Tensor]:
        parts = (torch.from_numpy(part) for part in (batch.ids, batch.documents, batch.weights))
        if self.device != "cpu":
            parts = (part.pin_memory().to(self.device, non_blocking=True) for part in parts)
        ids, documents, weights = parts
        return ids.long(), documents, weights.float()

    def step(self, batch: batches.TrainingBatch, rate: float, balance: float) -> Tensor:
        """Update the model with one batch and return (loss, MTP loss) on the device.

        Args:
            batch: the batch.
            rate: factor on the peak learning rate.
            balance: step of the correction biases that balance the experts' loads.
        """
        ids, documents, weights = self.tensors(batch)
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            hidden, ahead = self.model(ids, documents)
            head = self.model.lm_head.weight
            main = self.loss(hidden[:, :-1], head, ids[:, 1:], weights[:, 1:])
            same = documents[:, 2:] == documents[:, :-2]
            nextn = self.loss(ahead[:, :-2], head, ids[:, 2:], weights[:, 2:] * same)
        torch.autograd.backward(main + NEXTN_WEIGHT * nextn)
        self.optimizer.step(rate)
        self._balance(balance)
        return torch.stack((main.detach(), nextn.detach()))

    @torch.no_grad()
    def _balance(self, speed: float) -> None:
        for router in self.model.routers():
            step = torch.sign(router.load.mean() - router.load)
            # Without the mean: a common offset would not change the choice.
            router.e_score_correction_bias += speed * (step - step.mean())

    def imbalance(self) -> float:
        """Return how unevenly experts are loaded, in the least balanced layer.

        This is the load of the layer's busiest expert, divided by the mean load of its experts.
        """
        return max(float(r.load.max() / r.load.mean().clamp_min(1)) for r in self.model.routers())


def save(model: Network, file: Path) -> None:
    """Write the weights as bf16 (correction biases as float32)."""
    state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
    save_file({k: v if "bias" in k else v.bfloat16() for k, v in state.items()}, file)


def report(trainer: Trainer, folder: Path, *, fp8: bool, count: int) -> None:
    """Print the model's exact-match scores on ``count`` held-out tasks, in FP8 or bf16."""
    trainer.model.quantize(fp8)
    scores = evaluate.task_scores(trainer.model, folder, count)
    print(
        "  fp8 " if fp8 else "  bf16",
        {name: round(value, 1) for name, value in scores.items()},
        flush=True,
    )


def run(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = Trainer(
        NetworkShape(), device, options.rate, compiled=device == "cuda" and not options.eager
    )
    if options.resume:
        trainer.model.load_state_dict(load_file(options.resume, device=device))
    mix = batches.TaskMix(options.tasks, options.pairs, options.prose, options.recall)
    source = batches.stream(options.data, mix=mix, rows=options.rows, length=options.length,
                            seed=options.seed, workers=options.workers)  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    train_loop(trainer, source, options)
    save(trainer.model, options.out / WEIGHTS)
    for fp8 in (False, True):
        report(trainer, options.data, fp8=fp8, count=options.final_tasks)
    scores = evaluate.agreement(trainer.model, options.data, min(options.final_tasks, 400))
    print("mtp agreement", {name: round(value, 1) for name, value in scores.items()})
    for question in evaluate.SAMPLES:
        print(f"  {question!r}: {evaluate.answer(trainer.model, options.data, question)!r}")


def train_loop(
    trainer: Trainer, source: Iterator[batches.TrainingBatch], options: argparse.Namespace
) -> None:
    trainer.step(next(source), 0.0, 0.0)  # compile before the clock starts
    clock = StepClock(options.steps, options.minutes * 60, time.monotonic())
    averages = torch.zeros(2)
    fp8 = False
    log = []
    next_report = options.report_every
    while clock.progress < 1:
        if not fp8 and clock.progress >= options.fp8_from:
            fp8 = True
            trainer.model.quantize(True)
        progress = clock.progress
        speed = BIAS_SPEED if progress < 0.9 else 0.0
        losses = trainer.step(
            next(source), learning_rate(progress, options.warm, options.hold), speed
        )
        averages = (
            losses if clock.step == 0 else torch.lerp(averages.to(losses.device), losses, 0.02)
        )
        clock.step += 1
        if clock.step % 100 == 0:
            main, nextn = averages.tolist()
            elapsed = time.monotonic() - clock.started
            log.append(
                {"step": clock.step, "seconds": round(elapsed), "loss": main, "mtp_loss": nextn}
            )
            rate = clock.step * options.rows * options.length / elapsed / 1e6
            if clock.step % 500 == 0:
                print(f"step {clock.step} {elapsed:.0f}s loss {main:.3f} mtp {nextn:.3f} "
                      f"{rate:.2f}M ids/s imbalance {trainer.imbalance():.2f}",
                      flush=True)  # fmt: skip
            if elapsed > next_report:
                next_report += options.report_every
                report(trainer, options.data, fp8=fp8, count=210)
                trainer.model.train()
    (options.out / "log.json").write_text(json.dumps(log))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--resume", type=Path, help="weights.safetensors of an earlier run to continue"
    )
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument(
        "--steps", type=int, default=0, help="number of steps to train, instead of --minutes"
    )
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--warm", type=float, default=0.02)
    parser.add_argument(
        "--hold",
        type=float,
        default=0.5,
        help="share of the run after which the learning rate falls",
    )
    parser.add_argument("--fp8-from", type=float, default=0.85)
    parser.add_argument("--tasks", type=float, default=0.6)
    parser.add_argument("--pairs", type=float, default=0.26)
    parser.add_argument("--prose", type=float, default=0.1)
    parser.add_argument("--recall", type=float, default=0.04)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--report-every", type=float, default=60.0, help="seconds between two scores"
    )
    parser.add_argument("--final-tasks", type=int, default=500)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
