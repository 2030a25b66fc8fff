"""vLLM's serving benchmark, from its wheel."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import MODEL, URL, require, run

#: the command line without vLLM's compiled parts, which a client does not need
MAIN = """
import argparse, asyncio
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


def bench(backend, endpoint):
    out = Path(f"{backend}.json")
    command = [sys.executable, "-c", MAIN, "--backend", backend, "--endpoint", endpoint]
    command += ["--base-url", URL, "--model", MODEL, "--tokenizer", os.environ["TOKENIZER"]]
    command += ["--dataset-name", "random", "--num-prompts", "4", "--random-input-len", "16"]
    command += ["--random-output-len", "8", "--save-result", "--result-filename", str(out)]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-280:]
    found = json.loads(out.read_text())
    assert found["completed"] == 4, found


def completions_streamed():
    bench("openai", "/v1/completions")


def chat_streamed():
    bench("openai-chat", "/v1/chat/completions")


require("vllm.benchmarks.serve")
run(completions_streamed, chat_streamed)
