"""lm_eval: log-likelihoods over completions, texts over chat, on tasks of this file."""

import json
import os
from pathlib import Path

import lm_eval
from checks import MODEL, URL, run
from lm_eval.tasks import TaskManager

os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_DATASETS_CACHE"] = str(Path("cache").resolve())
TOKENIZER = os.environ["TOKENIZER"]
LINES = [
    {"question": "What is 17 + 25?", "answer": "42", "choices": ["42", "seven"], "target": 0},
    {"question": "What is 2 + 3?", "answer": "5", "choices": ["5", "yellow"], "target": 0},
]
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: target
metric_list: [{metric: acc}]
"""
GENERATE = """
task: local_generate
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: answer
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 32, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
Path("tasks").mkdir(exist_ok=True)
data = Path("tasks/lines.jsonl").resolve()
data.write_text("".join(json.dumps(line) + "\n" for line in LINES))
Path("tasks/choice.yaml").write_text(CHOICE.replace("FILE", str(data)))
Path("tasks/generate.yaml").write_text(GENERATE.replace("FILE", str(data)))


def evaluate(model, route, task, **more):
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={"model": MODEL, "base_url": URL + route, "num_concurrent": 2, **more},
        tasks=[task],
        task_manager=TaskManager(include_path="tasks", include_defaults=False),
        apply_chat_template="chat" in model,
        bootstrap_iters=0,
    )
    assert found["n-samples"][task]["effective"] == len(LINES)
    return found["results"][task]


def log_likelihoods():
    more = {"tokenizer_backend": "huggingface", "tokenizer": TOKENIZER}
    assert evaluate("local-completions", "/v1/completions", "local_choice", **more)["acc,none"] >= 0


def chat():
    found = evaluate("local-chat-completions", "/v1/chat/completions", "local_generate")
    assert found["exact_match,none"] >= 0


run(log_likelihoods, chat)
