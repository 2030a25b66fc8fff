"""SGLang's serving benchmark, from its wheel, on each of its backends for such servers."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import MODEL, URL, require, run


def bench(backend):
    out = Path(f"{backend}.jsonl")
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", backend]
    command += ["--base-url", URL, "--model", MODEL, "--tokenizer", os.environ["TOKENIZER"]]
    command += ["--dataset-name", "random-ids", "--num-prompts", "4", "--random-input-len", "16"]
    command += ["--random-output-len", "8", "--output-file", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-280:]
    found = json.loads(out.read_text().splitlines()[-1])
    assert found["completed"] == 4, found


def sglang_streamed():
    bench("sglang")


def sglang_oai_streamed():
    bench("sglang-oai")


def sglang_oai_chat_streamed():
    bench("sglang-oai-chat")


require("sglang.benchmark.serving")
run(sglang_streamed, sglang_oai_streamed, sglang_oai_chat_streamed)
