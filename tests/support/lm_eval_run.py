"""lm_eval against a server, and the same log-probabilities directly from the engine.

``python -m tests.support.lm_eval_run --output docs/benchmarks/lm-eval.json`` records a run; lm_eval
must be installed (``pip install lm_eval[api]``).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glowplug import LLM, SamplingParams
from glowplug.core.facts.model_folder import embedded_path
from glowplug.entrypoints.bench.load.local_server import MODEL, LocalServer
from glowplug.entrypoints.bench.others.report import write_json
from glowplug.models.embedded.tasks import Task, held_out_tasks

CONFIG = {"model": "embedded", "device": "cpu", "dtype": "float32", "memory": {"kv_tokens": 8192}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)

CHOICE = """
task: glowplug_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: target
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""
GENERATE = """
task: glowplug_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
fewshot_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 32, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
ROLLING = """
task: glowplug_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}]
"""

#: most difference of a log-probability from the engine's own
TOLERANCE = 1e-3
RECORDED = Path(__file__).resolve().parents[1] / "e2e" / "lm_eval_requests.json"


@dataclass(frozen=True)
class Mode:
    """A way in which lm_eval sends requests.

    Attributes:
        model: lm_eval's name of the client.
        route: the server's route.
        tasks: names of the tasks.
        args: further arguments of the client.
        batch_size: prompts of a request.
        chat: the chat template is applied.
        shots: worked examples in front of each question.
    """

    model: str
    route: str
    tasks: tuple[str, ...]
    args: dict[str, Any]
    batch_size: int = 1
    chat: bool = False
    shots: int = 0


LOCAL = {"tokenizer_backend": "huggingface", "tokenizer": str(embedded_path())}
MODES = {
    "completions, token ids in batches": Mode(
        "local-completions",
        "/v1/completions",
        ("glowplug_choice", "glowplug_rolling", "glowplug_generate"),
        {**LOCAL, "num_concurrent": 4},
        batch_size=3,
    ),
    "completions, texts": Mode(
        "local-completions",
        "/v1/completions",
        ("glowplug_choice", "glowplug_generate"),
        {**LOCAL, "num_concurrent": 1, "tokenized_requests": False},
    ),
    "chat": Mode(
        "local-chat-completions",
        "/v1/chat/completions",
        ("glowplug_generate",),
        {"num_concurrent": 4},
        chat=True,
    ),
    "chat, 8 shots": Mode(
        "local-chat-completions",
        "/v1/chat/completions",
        ("glowplug_generate",),
        {"num_concurrent": 128, "timeout": 999999, "max_gen_toks": 2048},
        batch_size=128,
        chat=True,
        shots=8,
    ),
}


def asked() -> list[Task]:
    """Return the tasks that are asked: short ones in plain form."""
    return [task for task in held_out_tasks(40) if not task.think and task.kind != "copy"][:12]


def write_tasks(folder: Path) -> None:
    """Write lm_eval's tasks and their data to ``folder``."""
    tasks = asked()
    lines = []
    for number, task in enumerate(tasks):
        others = [other.answer for other in tasks if other.answer != task.answer]
        choices = [task.answer, others[number % len(others)], "not known"]
        lines.append(
            {"question": task.prompt, "answer": task.answer, "choices": choices, "target": 0}
        )
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in (("choice", CHOICE), ("generate", GENERATE), ("rolling", ROLLING)):
        (folder / f"{name}.yaml").write_text(text.format(file=file))


@contextmanager
def offline(cache: Path) -> Iterator[None]:
    """Keep lm_eval's libraries from the network, with their caches in ``cache``."""
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(cache),
        "HF_HOME": str(cache),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def evaluate(mode: Mode, base_url: str, folder: Path) -> dict[str, Any]:
    """Run lm_eval in one mode; return its results, its samples and the requests that it sent."""
    import lm_eval
    from lm_eval.models import openai_completions
    from lm_eval.tasks import TaskManager

    client = {
        "local-completions": openai_completions.LocalCompletionsAPI,
        "local-chat-completions": openai_completions.LocalChatCompletion,
    }[mode.model]
    sent: list[dict[str, Any]] = []
    plain = client._create_payload

    def recorded(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        payload: dict[str, Any] = plain(self, *args, **kwargs)
        sent.append(json.loads(json.dumps(payload)))
        return payload

    client._create_payload = recorded
    try:
        found = lm_eval.simple_evaluate(
            model=mode.model,
            model_args={"model": MODEL, "base_url": base_url + mode.route, **mode.args},
            tasks=list(mode.tasks),
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            batch_size=mode.batch_size,
            num_fewshot=mode.shots,
            apply_chat_template=mode.chat,
            bootstrap_iters=0,
        )
    finally:
        client._create_payload = plain
    return {"results": found["results"], "samples": found["samples"], "sent": sent}


class Direct:
    """Results of the engine itself, without a server.

    Args:
        llm: the engine, with the configuration of the server.
    """

    def __init__(self, llm: LLM) -> None:
        assert llm.tokenizer is not None
        self._llm = llm
        self._tokenizer = llm.tokenizer

    def ids(self, text: str, begins: bool = False) -> list[int]:
        """Return the token ids of a text, behind the model's first token if ``begins``."""
        return self._tokenizer.encode(text, add_special_tokens=begins)

    def scores(self, prompt: list[int] | str) -> list[float]:
        """Return the log-probabilities of a prompt's tokens from the second one on."""
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        found = self._llm.generate([prompt], params)[0].prompt_logprobs
        return [] if found is None else list(found.token)

    def loglikelihood(self, context: str, continuation: str, texts: bool) -> float:
        """Return the log-likelihood of ``continuation`` as lm_eval counts it.

        Args:
            context: the text before it.
            continuation: the text.
            texts: the server gets texts, in front of which it puts the model's first token. lm_eval
                does not count this token, so its sum begins with the context's last token.
        """
        whole = self.ids(context + continuation, begins=texts)
        return sum(self.scores(whole)[len(self.ids(context)) - 1 :])

    def rolling(self, text: str) -> float:
        """Return the log-likelihood of a whole text behind the model's first token."""
        first = self.ids("", begins=True)
        return sum(self.scores(first + self.ids(text)))

    def completion(self, prompt: str | list[int], most: int, stop: list[str]) -> str:
        """Return the greedy continuation of a prompt."""
        params = SamplingParams(temperature=0.0, max_tokens=most, stop=stop)
        return self._llm.generate([prompt], params)[0].text

    def chat(self, messages: list[dict[str, Any]], most: int, stop: list[str]) -> tuple[str, Any]:
        """Return the greedy answer to a conversation and the log-probabilities of its tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=most, stop=stop, logprobs=1)
        found = self._llm.chat([messages], params)[0]
        return found.text, found.logprobs


def compared(mode: Mode, found: dict[str, Any], direct: Direct) -> dict[str, Any]:
    """Compare what lm_eval computed with the engine's own results.

    Returns:
        The number of log-likelihoods and their largest difference, the number of generated texts
        and of those that differ, and lm_eval's own results.
    """
    errors = []
    generated = different = 0
    texts = mode.args.get("tokenized_requests") is False
    for name, samples in found["samples"].items():
        for sample in samples:
            for arguments, answers in zip(sample["arguments"], sample["resps"], strict=True):
                if name == "glowplug_choice":
                    errors.append(abs(answers[0][0] - direct.loglikelihood(*arguments, texts)))
                elif name == "glowplug_rolling":
                    errors.append(abs(answers[0] - direct.rolling(arguments[0])))
                else:
                    generated += 1
                    different += answers[0] != generated_directly(mode, arguments[0], direct)
    return {
        "loglikelihoods": len(errors),
        "largest_difference": max(errors, default=0.0),
        "generated": generated,
        "different_texts": different,
        "requests": len(found["sent"]),
        "results": {
            task: {key: value for key, value in line.items() if isinstance(value, int | float)}
            for task, line in found["results"].items()
        },
    }


def generated_directly(mode: Mode, prompt: Any, direct: Direct) -> str:
    """Return the engine's own answer to a prompt of the task ``glowplug_generate``."""
    if mode.chat:
        messages = json.loads(prompt if isinstance(prompt, str) else prompt[0])
        return direct.chat(messages, 32, ["\n\n"])[0]
    begins = mode.args.get("tokenized_requests") is False
    return direct.completion(direct.ids(prompt, begins), 32, ["\n\n"])


def record() -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Run every mode; return the comparison of each, and a few of the requests of each."""
    import lm_eval

    lines: dict[str, Any] = {}
    sent: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name, LocalServer(CONFIG, threads=1) as server:
        folder = Path(name)
        write_tasks(folder)
        with offline(folder / "cache"), LLM(**CONFIG) as llm:
            direct = Direct(llm)
            for title, mode in MODES.items():
                found = evaluate(mode, server.base_url, folder)
                lines[title] = compared(mode, found, direct)
                sent[title] = distinct(found["sent"])
    return {"lm_eval": lm_eval.__version__, "model": "embedded", "modes": lines}, sent


def distinct(sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first two requests of each set of keys and number of prompts."""
    found: dict[str, list[dict[str, Any]]] = {}
    for body in sent:
        prompt = body.get("prompt")
        size = len(prompt) if isinstance(prompt, list) else 0
        found.setdefault(f"{sorted(body)} {size}", []).append(body)
    return [body for bodies in found.values() for body in bodies[:2]]


def main() -> None:
    """Record a run, and the requests for the test without lm_eval."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="file of the comparison")
    options = parser.parse_args()
    lines, sent = record()
    write_json(options.output, {**lines, "command": "python -m tests.support.lm_eval_run"})
    write_json(RECORDED, {"lm_eval": lines["lm_eval"], "modes": sent})
    print(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
