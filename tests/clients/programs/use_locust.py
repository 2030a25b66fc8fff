"""locust: users that stream chats, for a few seconds."""

import subprocess
import sys
from pathlib import Path

from checks import MODEL, URL, run

FILE = """
from locust import HttpUser, constant, task

class User(HttpUser):
    wait_time = constant(0)

    @task
    def chat(self):
        body = {"model": "%s", "messages": [{"role": "user", "content": "What is 17 + 25?"}],
                "max_tokens": 8, "stream": True}
        with self.client.post("/v1/chat/completions", json=body, stream=True,
                              catch_response=True) as answer:
            lines = [line for line in answer.iter_lines() if line]
            if lines[-1:] != [b"data: [DONE]"]:
                answer.failure("the stream was cut")

    @task
    def complete(self):
        self.client.post("/v1/completions", json={"model": "%s", "prompt": "x", "max_tokens": 4})
"""


def headless_users():
    Path("locustfile.py").write_text(FILE % (MODEL, MODEL))
    command = [sys.executable, "-m", "locust", "-f", "locustfile.py", "--headless"]
    command += ["-u", "4", "-r", "4", "-t", "5s", "-H", URL, "--only-summary"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]


run(headless_users)
