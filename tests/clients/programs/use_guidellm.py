"""guidellm: a run with two streams."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import MODEL, URL, run


def concurrent_streams():
    command = [sys.executable, "-m", "guidellm", "run"]
    command += ["--backend", f"kind=openai_http,target={URL},model={MODEL}"]
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", "kind=max_requests,count=4"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={os.environ['TOKENIZER']}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=4"]
    command += ["--output", "kind=json,path=out.json", "--disable-console-interactive"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-280:]
    (found,) = json.loads(Path("out.json").read_text())["benchmarks"]
    assert len(found["requests"]["successful"]) == 4


run(concurrent_streams)
