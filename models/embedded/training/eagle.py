"""Train the embedded model's EAGLE-3 head and write its folder.

    python -m glowplug.models.embedded.training.eagle --out DIR [--minutes 45] [--threads 1]

The target is the shipped checkpoint, which stays as it is. The head learns the target's own
distribution on tasks and facts (``glowplug.models.eagle.training.trainer``). A CPU is enough; with
a GPU the same run needs fewer minutes.
"""

import argparse
import random
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from glowplug.models.eagle.training.trainer import (
    ConversationSource,
    HeadTrainer,
    add_training_options,
    save,
    train,
)
from glowplug.models.embedded.tasks import make_task
from glowplug.models.embedded.training import facts, tokenizer
from glowplug.models.embedded.training.batches import TASK_WEIGHTS
from glowplug.models.embedded.training.eagle_head import (
    FEATURE_LAYERS,
    HeadShape,
    latent_head,
    target_states,
)
from glowplug.models.embedded.training.export import EXPERTS, published_name
from glowplug.models.embedded.training.fp8 import dequantize_blocks
from glowplug.models.embedded.training.network import Network
from glowplug.models.embedded.training.shape import NetworkShape

CHECKPOINT = Path(__file__).parents[1] / "checkpoint"
TASK_SHARE = 0.8  #: share of tasks in the training text; facts are the rest


class Conversations(ConversationSource):
    """Random conversations of one question each, as tokens."""

    def __init__(self, seed: int, *, held_out: bool = False) -> None:
        super().__init__(tokenizer.PAD_ID)
        self._rng = random.Random(seed)
        self._coder: Tokenizer = tokenizer.load(CHECKPOINT)
        self._facts = facts.questions()
        self._held_out = held_out

    def conversation(self) -> tuple[list[int], list[float]]:
        if self._held_out or self._rng.random() < TASK_SHARE:
            kind = self._rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()))[0]
            task = make_task(self._rng, kind=kind, test=self._held_out)
            prompt = tokenizer.prompt_text((), task.prompt, think=task.think)
            text = f"{prompt}{task.completion}"
        else:
            asked, answer = self._rng.choice(self._facts)
            text = f"{tokenizer.prompt_text((), self._rng.choice(asked))}{answer}"
        ids: list[int] = self._coder.encode(f"{text}{tokenizer.EOS}", add_special_tokens=False).ids
        return ids, [float(own) for own in tokenizer.answer_mask(ids)]


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


class EmbeddedTarget:
    """The shipped checkpoint as the target of a head."""

    def __init__(self, device: str) -> None:
        self._network = load_target(CHECKPOINT, NetworkShape()).to(device)
        self.output_head = self._network.lm_head.weight
        self.frequencies = self._network.frequencies

    def states(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return target_states(self._network, tokens, mask)


def embedded_trainer(device: str, rate: float) -> HeadTrainer:
    """Return a trainer of a new head for the shipped checkpoint."""
    head = latent_head(NetworkShape(), HeadShape())
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return HeadTrainer(EmbeddedTarget(device), head, device, rate, dtype)


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


def run(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    trainer = embedded_trainer("cuda" if torch.cuda.is_available() else "cpu", options.rate)
    check = Conversations(options.seed, held_out=True).rows(options.rows, options.length)
    source = Conversations(options.seed)
    steps = train(trainer, lambda: source.rows(options.rows, options.length), check, options)
    save(trainer.head, head_config(NetworkShape(), HeadShape()), options.out)
    print(f"{steps} steps, accept length {trainer.accept_length(check):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_training_options(parser, minutes=45.0, rows=20, length=192)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
