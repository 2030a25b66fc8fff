"""Four thousand combinations in under eight seconds of CPU time, without torch; every refusal
complete.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from glowplug.core.testing.harness.fakes import TINY_LLAMA, TINY_V3, write_model
from tests.support.source_tree import ROOT

SCRIPT = """
import json, math, random, sys, time
from glowplug.core.errors import PlanRefused
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.plan.resolve import plan
from tests.support.pace import slowness, yardstick

axes = [json.loads(sys.argv[1]), ["auto", "auto", "torch_mla", "torch_mha"],
        ["auto", "auto", "bfloat16", "fp8_e4m3"],
        ["auto", "auto", "none", "block_fp8", "fp8"], ["auto", "float32", "float16"],
        ["fcfs", "priority", "longest_prefix"], ["radix", "none"], [True, False], [None, 16, 64],
        [1, 2, 2, 3, 4, 4, 8, 16], [0, 0, 0, 2, 4, 16], [0, 0, 0, 2, 4, 16],
        [None, None, {}, {}, {"steps": 3}, {"steps": 2, "draft_tokens": 2},
         {"draft_model": sys.argv[2]}],
        ["1xh200", "8xh200", "2x8xh200", "cpu"]]
rng = random.Random(7)
plugins, sheets = load_plugins(entry_points=False), {name: read_sheet(name) for name in axes[-1]}
admitted = refused = several = 0
incomplete = []
paces, started = [], time.process_time()
for number in range(4_000):
    if number % 200 == 0:
        paces.append(yardstick())
    (model, attention, kv, quantization, dtype, policy, cache, overlap, page, tp, ep, dp, drafts,
     sheet) = map(rng.choice, axes)
    config = {"model": model, "weights": {"use": "random"}, "dtype": dtype,
              "attention": {"use": attention, "kv_dtype": kv, "page_size": page},
              "quantization": {"use": quantization},
              "policy": {"use": policy}, "cache": {"use": cache}, "scheduler": {"overlap": overlap},
              "parallel": [{"use": use, "size": size} for use, size in
                           (("tensor", tp), ("ep_moe", ep),
                            ("dp_attention", dp)) if size > (use == "tensor")]}
    if drafts is not None:
        config["speculative"] = {"use": "nextn", **drafts}
    try:
        made = plan(config, plugins=plugins, hardware=sheets[sheet],
                    contributed={"executor.use": "inline"})
        several += made.ranks > 1
        admitted += 1
    except PlanRefused as error:
        refused += 1
        incomplete += [str(r) for r in error.refusals
                       if not (r.by and r.field and r.reason and r.fix and r.origin)]
        said = [(r.field, r.reason) for r in error.refusals]
        incomplete += [f"{said} says something twice"] if len(set(said)) < len(said) else []
print(json.dumps({"seconds": time.process_time() - started - sum(paces),
                  "slowness": slowness(paces),
                  "admitted": admitted, "refused": refused, "several ranks": several,
                  "incomplete": incomplete, "torch": "torch" in sys.modules,
                  "of": math.prod(len(axis) for axis in axes)}))
"""


#: process time of all of them, refusals and their fixes included; measured were 6 to 7 s
MOST_SECONDS = 8


@pytest.mark.timing
def test_four_thousand_combinations(tmp_path: Path) -> None:
    quantized = {
        **TINY_V3,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    drafting = {**TINY_V3, "num_nextn_predict_layers": 1}
    folders = [
        write_model(tmp_path / name, config)
        for name, config in (("v3", drafting), ("fp8", quantized), ("llama", TINY_LLAMA))
    ]
    draft = write_model(
        tmp_path / "draft",
        {
            **drafting,
            "architectures": ["DeepseekV3ForCausalLMNextN"],
            "num_hidden_layers": 1,
            "first_k_dense_replace": 0,
        },
    )
    found = {}
    for _ in range(2):  # a busy machine gets a second chance
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                SCRIPT,
                json.dumps([str(folder) for folder in folders]),
                str(draft),
            ],
            text=True,
            capture_output=True,
            timeout=240,
            check=False,
            env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin"},
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        if found["seconds"] < MOST_SECONDS * found["slowness"]:
            break
    print(found)
    assert found["admitted"] + found["refused"] == 4_000 <= found["of"]
    assert found["admitted"] > 120 and found["refused"] > 200 and found["several ranks"] > 60
    assert found["incomplete"] == [] and not found["torch"]
    assert found["seconds"] < MOST_SECONDS * found["slowness"], found
