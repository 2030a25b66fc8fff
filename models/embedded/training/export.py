"""Write a trained network as a published DeepSeek-V3 folder: config, tokenizer, weights.

    python -m glowplug.models.embedded.training.export --weights weights.safetensors \\
        --tokenizer DIR --out DIR [--bf16]

The weights are in block FP8 or bf16. FP8 covers the projections of attention, MLPs and experts;
embeddings, head, norms, routers, correction biases and the MTP layer's eh_proj keep their type, as
published. The MTP layer's copies of the embedding and the head are left out, because they equal
those of the main model, which readers use instead.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from glowplug.models.embedded.training import tokenizer
from glowplug.models.embedded.training.fp8 import quantize_blocks
from glowplug.models.embedded.training.network import Network
from glowplug.models.embedded.training.shape import NetworkShape

EXPERTS = {"experts_gate": "gate_proj", "experts_up": "up_proj", "experts_down": "down_proj"}
BF16 = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight", "eh_proj")
NEXTN = {"norm": "shared_head.norm", "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj"}


def published_name(name: str, layers: int) -> str:
    """Return the published name of a parameter of the training network (experts still stacked)."""
    head, _, rest = name.partition(".")
    if head == "lm_head":
        return name
    if head == "nextn":
        part, _, tail = rest.partition(".")
        return f"model.layers.{layers}.{tail if part == 'block' else f'{NEXTN[part]}.{tail}'}"
    return f"model.{name}"


def published(state: dict[str, Tensor], layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor under its published name, unquantized, with the experts unstacked."""
    for name, tensor in state.items():
        target = published_name(name, layers)
        stem, _, last = target.rpartition(".")
        if last in EXPERTS:
            for expert, weight in enumerate(tensor):
                yield f"{stem}.experts.{expert}.{EXPERTS[last]}.weight", weight
        else:
            yield target, tensor


def stored(tensors: Iterator[tuple[str, Tensor]], *, fp8: bool) -> dict[str, Tensor]:
    """Return the tensors in the dtypes of the checkpoint.

    Correction biases are float32. With ``fp8`` projections are block FP8, with scales as further
    tensors. All others are bf16.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name.endswith("e_score_correction_bias"):
            out[name] = tensor.float()
        elif fp8 and not any(word in name for word in BF16):
            out[name], out[f"{name}_scale_inv"] = quantize_blocks(tensor.float())
        else:
            out[name] = tensor.bfloat16()
    return {name: tensor.contiguous() for name, tensor in sorted(out.items())}


def write(weights: Path, coder_folder: Path, out: Path, *, fp8: bool) -> None:
    """Write the checkpoint folder ``out``: weights, tokenizer, config and generation config."""
    shape = NetworkShape()
    network = Network(shape)
    network.load_state_dict(load_file(weights))
    tokenizer.save(tokenizer.load(coder_folder), out, shape.context)
    tensors = stored(published(network.state_dict(), shape.layers), fp8=fp8)
    file = out / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)
    generation = {
        "bos_token_id": tokenizer.BOS_ID,
        "eos_token_id": tokenizer.EOS_ID,
        "do_sample": False,
    }
    for name, content in (("config", shape.config(fp8=fp8)), ("generation_config", generation)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--bf16",
        action="store_true",
        help="write bf16 instead of FP8, for the comparison in the model card",
    )
    options = parser.parse_args()
    write(options.weights, options.tokenizer, options.out, fp8=not options.bf16)
    print(sum(f.stat().st_size for f in options.out.iterdir()), "bytes in", options.out)


if __name__ == "__main__":
    main()
