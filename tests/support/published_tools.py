"""Published tools that are other commands here, and runs of these commands on a CPU."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from tests.support.evaluation import write_gsm8k
from tests.support.published_commands import empty_folder, pointed, run_main, server
from tests.support.source_tree import ROOT
from tests.support.waiting import LIMIT

RUNS = "runs"
ON_A_GPU = "refused: measures on a GPU"
#: requests that lm_eval has sent, by mode
LM_EVAL_REQUESTS = ROOT / "tests" / "e2e" / "lm_eval_requests.json"
#: word in a command -> the folder that it stands for
FOLDERS = {"KERNELS": ROOT / "tests" / "kernels", "SHAPES": ROOT / "models" / "shapes"}
QUESTIONS = "test.jsonl"  #: name of gsm8k's published file


@dataclass(frozen=True)
class Tool:
    """A published tool that is another command here.

    Attributes:
        source: tag of the page that publishes it.
        published: name of the tool and its options, in Markdown.
        ours: our command, in Markdown.
        runs: commands for the run on a CPU, in a folder with a file of questions; ``lm_eval MODE``
            sends the requests of a recorded run of lm_eval.
        happens: what the runs do; ON_A_GPU if they are refused.
        variables: environment variables of the runs.
        prints: text that the last run prints.
        leaves: pattern of files that the runs leave in the folder; "": any or none.
    """

    source: str
    published: str
    ours: str
    runs: tuple[str, ...]
    happens: str = RUNS
    variables: Mapping[str, str] = field(default_factory=dict)
    prints: str = ""
    leaves: str = ""


SMALL = "--random-input-len 9 --random-output-len 3 --random-range-ratio 1 --port 30000"
ONE_BATCH = "glowplug bench one-batch --model embedded --device cpu --input-len 9 --output-len 3"
COMPILED = (
    f"{ONE_BATCH.replace('embedded', 'SHAPES/tiny-llama.json')} --load-format dummy "
    "--skip-tokenizer-init --enable-torch-compile"
)
LM_EVAL = (
    "`lm_eval --model local-chat-completions --model_args model=MODEL,base_url=http://127.0.0.1:"
    "30000/v1/chat/completions,num_concurrent=128,timeout=999999,max_gen_toks=2048 --tasks gsm8k "
    "--batch_size 128 --apply_chat_template --num_fewshot 8`"
)
TOOLS = (
    Tool(
        "S4",
        "sweep of 5, 20, 80 and 160 prompts, 1000 tokens in and out, with /flush_cache before each",
        "`glowplug bench serving --num-prompts 5 20 80 160 --max-concurrency 1 4 16 32 "
        "--random-input-len 1000 --random-output-len 1000 --random-range-ratio 1 --flush-cache`",
        (f"glowplug bench serving --num-prompts 2 4 --max-concurrency 1 4 --flush-cache {SMALL}",),
    ),
    Tool(
        "S4",
        "tables of the sweep",
        "`glowplug bench table RESULTS.jsonl`",
        (f"{ONE_BATCH} --output-file RESULTS.jsonl", "glowplug bench table RESULTS.jsonl"),
    ),
    Tool(
        "S4",
        LM_EVAL,
        "the same line: lm_eval needs nothing but the server",
        ("lm_eval chat, 8 shots",),
        f"{RUNS}, by the requests of lm_eval in [a recorded run](benchmarks/lm-eval.json)",
    ),
    Tool(
        "S0",
        "a pool of threads with OpenAI's client, 760 tokens in and 460 out, concurrency 16 to 768",
        "`glowplug bench serving --backend openai-chat --num-prompts 32 1024 --max-concurrency 16 "
        "768 --random-input-len 760 --random-output-len 460`",
        (
            "glowplug bench serving --backend openai-chat --num-prompts 2 4 --max-concurrency 1 4 "
            f"{SMALL.replace('len 3', 'len 8')}",
        ),
    ),
    Tool(
        "S1",
        "bench_int8_gemm.py, benchmark_vllm_vs_sglang_fused_moe_triton.py, sgl-kernel/benchmark",
        "`glowplug bench kernels --batch-size 1 128 2048`",
        ("glowplug bench kernels --model embedded --device cpu --slots linear --auto-only",),
    ),
    Tool(
        "S1",
        "sgl-kernel/tests",
        "`python -m pytest tests/kernels`, `make gpu-test`",
        ("python -m pytest -q -p no:cacheprovider KERNELS/test_triton_mla_absorbed_fp8.py",),
        f"{RUNS}, in Triton's interpreter; here those of the products with FP8 weights",
    ),
    Tool(
        "S1",
        "test_bmm_fp8.py",
        "`python -m tests.gpu.fp8_bmm`",
        ("python -m tests.gpu.fp8_bmm",),
        ON_A_GPU,
        {"CUDA_VISIBLE_DEVICES": ""},
    ),
    Tool(
        "S1",
        "benchmark/gsm8k/bench_sglang.py --num-shots 8 --num-questions 1319 --parallel 1319",
        f"`glowplug eval gsm8k --data-path {QUESTIONS} --num-shots 8 --num-questions 1319 "
        "--parallel 1319`",
        (
            f"glowplug eval gsm8k --data-path {QUESTIONS} --num-shots 8 --num-questions 4 "
            "--parallel 1319 --max-new-tokens 8 --port 30000 --output-file answers.json",
        ),
        leaves="answers.json",
    ),
    Tool(
        "S0",
        "the question of a character composed of two others",
        "`glowplug eval golden`",
        (
            "glowplug eval golden --max-new-tokens 8 --port 30000",
            "glowplug eval golden --model embedded --device cpu --max-new-tokens 8",
        ),
    ),
    Tool(
        "S2",
        "guide to the cache of torch.compile: fill it before the start, keep it between starts",
        "`glowplug serve --enable-torch-compile --set ops.cache_dir=FOLDER`",
        (f"{COMPILED} --torch-compile-max-bs 1 --set ops.cache_dir=kept",),
        leaves="kept/**/*.so",
    ),
    Tool(
        "S1",
        "Docker image, installation from source, pip freeze",
        "`docker build -t glowplug .`, `pip install -c constraints.txt -e .`, "
        "`glowplug collect-env`",
        ("glowplug collect-env", "glowplug collect-env --json"),
        f"`collect-env` {RUNS}",
        prints='"msgspec"',
    ),
    Tool(
        "S1",
        "RAY_DEDUP_LOGS=0 before the tuning of fused_moe_triton by Ray",
        'the same before `glowplug tune fp8-moe --ray`: Ray reads it. `executor.use = "ray"` turns '
        "Ray's copies of log lines off",
        ("glowplug collect-env",),
        "`collect-env` shows it",
        variables={"RAY_DEDUP_LOGS": "0"},
        prints="RAY_DEDUP_LOGS",
    ),
)


def tool_text(tool: Tool) -> str:
    """Run a tool's commands on a CPU and return what happened.

    Raises:
        AssertionError: a command did something else than the tool states.
    """
    with (
        empty_folder() as name,
        contextlib.chdir(name),
        mock.patch.dict(os.environ, tool.variables),
    ):
        folder = Path(name)
        write_gsm8k(folder / QUESTIONS)
        output = ""
        for command in tool.runs:
            status, output = _run(command)
            assert status == (2 if tool.happens == ON_A_GPU else 0), output
        assert tool.prints in output, output
        assert not tool.leaves or any(folder.glob(tool.leaves)), sorted(folder.rglob("*"))
    if tool.happens == ON_A_GPU:
        assert "measures on a GPU" in output, output
    return tool.happens


def _run(command: str) -> tuple[int, str]:
    """Run a command; return its exit status and what it printed."""
    for name, folder in FOLDERS.items():
        command = command.replace(name, str(folder))
    program, *words = shlex.split(command)
    if program == "lm_eval":
        return _sent(" ".join(words))
    if program == "python":
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr
    return run_main(pointed(words) if "--port" in words else words)


def _sent(mode: str) -> tuple[int, str]:
    """Send the requests of a mode of the recorded run of lm_eval.

    Returns:
        0 if the server answered all of them, else 1, and the answers.
    """
    requests: list[dict[str, Any]] = json.loads(LM_EVAL_REQUESTS.read_text())["modes"][mode]
    route = f"{server().base_url}/v1/chat/completions"
    replies = [httpx.post(route, json=body, timeout=LIMIT) for body in requests]
    answered = bool(replies) and all(
        reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"]
        for reply in replies
    )
    return 0 if answered else 1, "\n".join(reply.text for reply in replies)
