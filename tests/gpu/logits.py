"""Logits of every way to compute a model, compared with the float32 reference: plain torch, eager,
dequantised weights.

A model is cut to its first dense and its first mixture layer, at the published sizes, with seeded
weights of proper scale. Prompts of 1 to 700 tokens run together; then decode steps follow with
given (not drawn) tokens, so that all ways read the same tokens. Logits of all positions are
compared, and those of decode steps, which read the cache, once more separately. For the embedded
model whole chats are read, the end of each in decode steps.

A block FP8 checkpoint requires activations rounded to E4M3, a token and 128 channels at a time,
before every GEMM. Its ways are also compared with a second reference, which rounds them so in
float32 and is the model as its checkpoint defines it. Positions at which gates chose other experts
than the reference's are listed separately (``tests.support.gate_choices``), and two ways follow a
reference's choice of experts.

``python -m tests.gpu.logits --model v2lite v3 --output docs/benchmarks/logits-h200.json``; a model
is a shape that ships, a folder, or "embedded" (which is not cut).
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glowplug import LLM, PlanRefused, SamplingParams
from glowplug.core.plugin.registry import load_plugins
from glowplug.entrypoints.checkpoints.cut_model import model_config, write_cut
from tests.plugins.teacher_runtime import SCRIPTS, SEEN, score_prompts
from tests.support.gate_choices import Choices, Watch, flips

LENGTHS = (1, 2, 33, 63, 64, 65, 130, 333, 700)
CHATS = 64
STEPS = 8  #: decode steps after each prompt
TEACHER = ("tests.plugins.teacher",)
BACKENDS = ("triton_mla", "flashinfer_mla", "fa3_mla", "flashmla", "hopper_mla")
EAGER = {"use": "eager"}
FOLLOWS = "auto, eager, experts of the "  #: followed by the reference's name
DYNAMIC = {"use": "plain_torch", "activations": "dynamic"}
COSINE = 0.999  #: least median of every way, except those with a coarser cache

Key = tuple[int, int]


@dataclass(frozen=True)
class Distance:
    """The distance of one way's logits from the reference's, over all positions.

    Attributes:
        kl: Of the reference's distribution from the way's, mean, in nats.
        top1: Share of positions with the same best token.
        shift: Median change of the log-probability of the reference's best token.
    """

    positions: int
    cosine_min: float
    cosine_median: float
    max_error: float
    kl: float
    top1: float
    shift: float


@torch.inference_mode()
def distance(want: dict[Key, Tensor], got: dict[Key, Tensor]) -> Distance:
    """Return the distance of float32 logits [vocabulary] by position."""
    assert want.keys() == got.keys(), f"{len(want)} positions against {len(got)}"
    columns = [_position(want[key].double(), got[key].double()) for key in sorted(want)]
    cosine, error, kl, same, shift = torch.stack(columns).cpu().numpy().T
    return Distance(
        len(columns),
        float(cosine.min()),
        float(np.median(cosine)),
        float(error.max()),
        float(kl.mean()),
        float(same.mean()),
        float(np.median(shift)),
    )


def _position(want: Tensor, got: Tensor) -> Tensor:
    cosine = torch.nn.functional.cosine_similarity(want, got, dim=0)
    before, after = want.log_softmax(0), got.log_softmax(0)
    best = want.argmax()
    kl = (before.exp() * (before - after)).sum()
    same = (got.argmax() == best).double()
    return torch.stack(
        [cosine, (want - got).abs().max(), kl, same, (before[best] - after[best]).abs()]
    )


# ---- ways ----------------------------------------------------------------------------------------


def reference(fp8: bool, **changes: Any) -> dict[str, Any]:
    """Return a configuration with everything in plain torch and float32, without absorption."""
    return {
        "dtype": "float32",
        "attention": {"use": "torch_mla", "absorb": False},
        "ops": {"use": "torch"},
        "quantization": {"use": "plain_torch"},
        "graphs": EAGER,
        **changes,
    }


def ways(fp8: bool, device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and configurations; the first are not an engine's but show the error of a number
    format alone.
    """
    if fp8:
        yield (
            "format: FP8 products, bfloat16",
            reference(fp8, dtype="bfloat16", quantization=DYNAMIC),
        )
    else:
        yield "format: bfloat16", reference(fp8, dtype="bfloat16")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        yield (
            f"format: cache of {name}",
            reference(fp8, attention={"use": "rounded_mla", "to": name}),
        )
    if device == "cpu":
        return
    yield "auto, eager", {"graphs": EAGER}
    if fp8:
        yield FOLLOWS + "reference", {"graphs": EAGER}
        yield FOLLOWS + "rounded reference", {"graphs": EAGER}
    yield "auto, graphs", {}
    for backend in BACKENDS:
        yield backend, {"attention": {"use": backend}}
    yield "torch_mla", {"attention": {"use": "torch_mla"}, "graphs": EAGER}
    for backend in ("triton_mla", "flashmla", "hopper_mla"):
        yield f"{backend}, FP8 cache", {"attention": {"use": backend, "kv_dtype": "fp8_e4m3"}}
    yield "triton_mla, FP8 absorbed", {"attention": {"use": "triton_mla", "absorbed": "fp8"}}


# ---- running -------------------------------------------------------------------------------------


def sequences(llm: LLM) -> list[list[int]]:
    """Return whole token sequences; decode steps read the last ``STEPS`` of each."""
    if llm.tokenizer is None:
        rng, vocab = np.random.default_rng(7), llm.plan.facts.model.vocab_size
        return [rng.integers(2, vocab, length + STEPS + 1).tolist() for length in LENGTHS]
    from glowplug.models.embedded.tasks import held_out_tasks

    found = []
    for task in held_out_tasks(CHATS):
        asked = llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": task.prompt}], thinking=task.think
        )
        found.append(llm.tokenizer.encode(asked + task.completion, add_special_tokens=False))
    return [script for script in found if len(script) > 2 * STEPS]


def base(folder: str, device: str, weights: str) -> dict[str, Any]:
    return {
        "model": folder,
        "device": device,
        "skip_tokenizer": folder != "embedded",
        "weights": {"use": weights},
        "context_length": 1024,
        "memory": {"kv_tokens": 8192},
        "sampling": {"use": "teacher"},
        "cache": {"use": "none"},
        "scheduler": {"max_running_requests": 16, "chunk_size": 2048},
    }


@dataclass(frozen=True)
class Run:
    """One run of a way.

    Attributes:
        logits: By position.
        decoded: Logits of decode steps.
        plan: The plan's choices.
        choices: The gates' choices, without positions computed in a replay.
    """

    logits: dict[Key, Tensor]
    decoded: frozenset[Key]
    plan: str
    choices: Choices

    def only(self, keys: Iterable[Key]) -> dict[Key, Tensor]:
        return {key: self.logits[key] for key in keys}

    @property
    def watched(self) -> bool:
        """True if the gates' choices of every position are recorded."""
        return bool(self.choices) and all(
            len(one.keys) == len(self.logits) for one in self.choices.values()
        )


def run(config: dict[str, Any], forced: Choices | None = None) -> Run:
    with LLM(plugins=TEACHER, **config) as llm:
        chosen = {choice.slot: choice.name for choice in llm.plan.choices}
        runner = llm._executor._engine.runner  # type: ignore[attr-defined]
        score_prompts(runner)
        watch = Watch(runner, forced)
        scripts = sequences(llm)
        SCRIPTS[:] = scripts
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=STEPS + 1,
                ignore_eos=True,
                prompt_logprobs=0,
                seed=number,
            )
            for number in range(len(scripts))
        ]
        try:
            done = llm.generate([script[: -STEPS - 1] for script in scripts], params)
        finally:
            SCRIPTS.clear()
            found, decoded = dict(SEEN), _decoded(scripts)
            SEEN.clear()
    for completion, script in zip(done, scripts, strict=True):
        assert completion.token_ids == script[-STEPS - 1 :], (
            f"a request ended early: {completion.error}"
        )
    choices = watch.choices
    del llm, runner, watch
    gc.collect()
    if config["device"] != "cpu":
        torch.cuda.empty_cache()
    plan = " ".join(chosen[slot] for slot in ("attention", "quantization", "ops", "graphs"))
    return Run(found, decoded, plan, choices)


def _decoded(scripts: list[list[int]]) -> frozenset[Key]:
    return frozenset(
        (number, len(script) - back)
        for number, script in enumerate(scripts)
        for back in range(1, STEPS + 1)
    )


def compare(
    name: str, folder: str, options: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (way, its line of the table), one after another."""
    weights = (
        "safetensors"
        if name == "embedded" or list(Path(folder).glob("*.safetensors"))
        else "random"
    )
    common = base(folder, options.device, weights)
    fp8 = load_plugins(TEACHER).read_model(folder).facts.quant_method == "fp8"
    started = time.monotonic()
    want, rounded = run(common | reference(fp8)), None
    spread = float(torch.stack([line.std() for line in want.logits.values()]).median())
    yield (
        "reference",
        {"deviation_of_logits": spread, "seconds": round(time.monotonic() - started, 1)},
    )
    if fp8:
        started = time.monotonic()
        rounded = run(common | reference(fp8, quantization=DYNAMIC))
        line = compared(want, rounded) | {"plan": rounded.plan}
        yield "format: FP8 products", line | {"seconds": round(time.monotonic() - started, 1)}
    for way, changes in ways(fp8, options.device):
        if not re.search(options.only, way):
            continue
        started = time.monotonic()
        try:
            followed = {FOLLOWS + "reference": want, FOLLOWS + "rounded reference": rounded}.get(
                way
            )
            got = run(common | changes, None if followed is None else followed.choices)
            line = compared(want, got) | {"plan": got.plan}
            if rounded is not None:
                line["rounded"] = compared(rounded, got)
        except PlanRefused as refused:
            line = {"refused": refused.refusals[0].reason}
        except Exception as error:
            line = {"failed": f"{type(error).__name__}: {error}"[:300]}
        yield way, line | {"seconds": round(time.monotonic() - started, 1)}


def compared(want: Run, got: Run) -> dict[str, Any]:
    """Return distances over all positions, over decode steps, and over positions with the
    reference's experts.
    """
    line = asdict(distance(want.logits, got.logits)) | {
        "decode": asdict(distance(want.only(want.decoded), got.only(got.decoded)))
    }
    if want.watched and got.watched:
        said, flipped = flips(want.choices, got.choices)
        kept = want.logits.keys() - flipped
        line |= {
            "gates": asdict(said),
            "same_experts": asdict(distance(want.only(kept), got.only(kept))),
        }
    return line


def shown(way: str, line: dict[str, Any]) -> str:
    if "cosine_min" not in line:
        return f"{way:28} {json.dumps(line)}"
    said = (
        f"{way:28} {_columns(line)}; decode {_columns(line['decode'])}; "
        f"{line['seconds']} s ({line['plan']})"
    )
    for name, part in (
        ("to the reference", line),
        ("to the rounded reference", line.get("rounded", {})),
    ):
        if part is not line and part:
            said += f"\n    {name}: {_columns(part)}; decode {_columns(part['decode'])}"
        if "gates" in part:
            gates = json.dumps(part["gates"])
            said += f"\n    {name}, same experts: {_columns(part['same_experts'])}; {gates}"
    return said


def _columns(line: dict[str, Any]) -> str:
    return (
        f"cos {line['cosine_min']:.6f} min {line['cosine_median']:.6f} median, max "
        f"{line['max_error']:.3f} KL {line['kl']:.1e} top-1 {line['top1']:.3f} shift "
        f"{line['shift']:.4f}"
    )


def bad(way: str, line: dict[str, Any]) -> bool:
    if "FP8 cache" in way or way.startswith("format") or "refused" in line:
        return False
    return "failed" in line or line.get("cosine_median", 1.0) < COSINE


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["v2lite", "v3"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="ways whose names match this")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    from glowplug.entrypoints.bench.others.conditions import conditions

    plugins = load_plugins()
    found: dict[str, dict[str, Any]] = {}
    for name in options.model:
        print(f"-- {name}", flush=True)
        found[name] = {}
        with tempfile.TemporaryDirectory() as folder:
            if name != "embedded":
                write_cut(model_config(name, plugins), Path(folder))
            for way, line in compare(name, name if name == "embedded" else folder, options):
                found[name][way] = line
                print(shown(way, line), flush=True)
                if options.output:
                    said = conditions(options.device) | {
                        "command": "python -m tests.gpu.logits " + " ".join(sys.argv[1:])
                    }
                    options.output.write_text(json.dumps(said | {"models": found}, indent=1) + "\n")
    return int(any(bad(way, line) for lines in found.values() for way, line in lines.items()))


if __name__ == "__main__":
    sys.exit(main())
