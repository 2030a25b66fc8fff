"""Options of ``bench serving`` under vLLM's and SGLang's names: what reaches the server and the
record.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.facts.model_folder import embedded_path
from glowplug.core.text.tokenizer import Tokenizer
from glowplug.entrypoints import bench
from glowplug.entrypoints.bench import serving
from glowplug.entrypoints.bench.load import http_stream, shared_prefix
from glowplug.entrypoints.bench.load.shared_prefix import PrefixGroups
from glowplug.entrypoints.cli.main import main
from tests.support.bench_server import FakeServer
from tests.support.source_tree import ROOT

PAGE = ROOT / "docs" / "benchmarks" / "README.md"
EMBEDDED = embedded_path()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args(list(words))


def measured(server: FakeServer, *words: str) -> list[dict[str, Any]]:
    """Measure the server with these options; return the bodies of the requests without warm-ups."""
    small = ["--num-warmups", "0", "--disable-tqdm"]
    lengths = [] if "--num-prompts" in words else ["--num-prompts", "1"]
    sizes = ["--input-len", "4", "--output-len", "2", "--random-range-ratio", "1"]
    given = ["serving", "--port", str(server.port), *small, *lengths, *sizes, *words]
    assert bench.run(parsed(*given)) == 0
    return [body for _, body in server.asked if "stream" in body]


SAMPLING = "--top-p 0.9 --top-k 20 --min-p 0.1 --temperature 0.7 --frequency-penalty 0.1"
PENALTIES = "--presence-penalty 0.2 --repetition-penalty 1.1"
SENT = {
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "temperature": 0.7,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.1,
}


@pytest.mark.parametrize("backend", ["vllm", "openai-chat", "sglang"])
def test_sampling_parameters_are_sent(server: FakeServer, backend: str) -> None:
    words = [*SAMPLING.split(), *PENALTIES.split(), "--extra-body", '{"min_tokens": 1}']
    (body,) = measured(server, "--backend", backend, *words)
    found = body["sampling_params"] if backend == "sglang" else body
    assert {key: found[key] for key in SENT} == SENT and body["min_tokens"] == 1


def test_parameters_that_are_not_given_are_not_sent(server: FakeServer) -> None:
    (body,) = measured(server)
    assert body.keys() & SENT.keys() == {"temperature"} and "logprobs" not in body


@pytest.mark.parametrize(
    ("backend", "words", "sent"),
    [
        ("openai", "--logprobs 3", {"logprobs": 3}),
        ("openai-chat", "--logprobs 3", {"logprobs": True, "top_logprobs": 3}),
        ("sglang", "--return-logprob", {"return_logprob": True, "top_logprobs_num": 0}),
    ],
)
def test_log_probabilities_are_requested(
    server: FakeServer, backend: str, words: str, sent: dict[str, Any]
) -> None:
    (body,) = measured(server, "--backend", backend, *words.split())
    assert body | sent == body


def test_the_server_is_addressed_as_the_options_say(server: FakeServer) -> None:
    names = ["--model", "/models/x", "--served-model-name", "short"]
    heads = ["--header", "X-One=1", "X-Two=2", "--header", "X-Three=3"]
    ids = ["--request-id-prefix", "run-", "--num-prompts", "2"]
    bodies = measured(server, "--endpoint", "/proxy/v1/completions", *names, *heads, *ids)
    assert {body["model"] for body in bodies} == {"short"}
    assert [path for path, body in server.asked if "stream" in body] == [
        "/proxy/v1/completions"
    ] * 2
    sent = [head for head in server.heads if "/proxy/" in head]
    for head in sent:
        assert all(f"{line}\r\n" in head for line in ("X-One: 1", "X-Two: 2", "X-Three: 3"))
    assert {re.findall(r"X-Request-Id: (\S+)", head)[0] for head in sent} == {"run-0", "run-1"}


def test_certificates_are_checked_unless_insecure() -> None:
    for words, mode in (([], ssl.CERT_REQUIRED), (["--insecure"], ssl.CERT_NONE)):
        target = serving._target(parsed("serving", *words))
        assert http_stream._tls(target.verify).verify_mode == mode


def test_results_are_appended_with_metadata(server: FakeServer, tmp_path: Path) -> None:
    words = ["--result-dir", str(tmp_path), "--result-filename", "all.json", "--append-result"]
    for number in ("1", "2"):
        measured(server, *words, "--metadata", f"run={number}", "tp=8")
    lines = [json.loads(line) for line in (tmp_path / "all.json").read_text().splitlines()]
    assert [(line["run"], line["tp"]) for line in lines] == [("1", "8"), ("2", "8")]
    assert lines[0]["temperature"] == 0.0 and lines[0]["sampling_params"] == {}


def test_metadata_replaces_no_figure(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serving", "--port", str(server.port), "--metadata", "duration=0"]
    assert bench.run(parsed(*words)) == 2
    assert "--metadata duration is a key of the record itself" in capsys.readouterr().err
    assert not any("stream" in body for _, body in server.asked)


# ---- prompts -------------------------------------------------------------------------------------


def test_random_prompts_begin_with_one_prefix(server: FakeServer) -> None:
    bodies = measured(server, "--random-prefix-len", "6", "--num-prompts", "3")
    prompts = [body["prompt"] for body in bodies]
    assert {len(prompt) for prompt in prompts} == {10}
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({tuple(prompt[6:]) for prompt in prompts}) == 3


def test_groups_share_prefixes_and_are_mixed() -> None:
    sizes = PrefixGroups(3, 4, prefix_len=5, suffix_len=2, output_len=9)
    found = shared_prefix.prompts(random.Random(1), 12, sizes, 1000)
    prefixes = [tuple((one.ids or [])[:5]) for one in found]
    assert sorted(map(prefixes.count, set(prefixes))) == [4, 4, 4]
    assert prefixes != sorted(prefixes, key=prefixes.index)
    assert {(one.input_len, one.output_len) for one in found} == {(7, 9)}
    assert len({tuple(one.ids or []) for one in found}) == 12
    with pytest.raises(ValueError, match="3 groups of 4 prompts are 12"):
        shared_prefix.prompts(random.Random(1), 13, sizes, 1000)


GSP = "--gsp-num-groups 2 --gsp-prompts-per-group 3 --gsp-system-prompt-len 4 --gsp-question-len 2"
REPEATED = (
    "--prefix-repetition-num-prefixes 2 --prefix-repetition-prefix-len 4 "
    "--prefix-repetition-suffix-len 2 --prefix-repetition-output-len 3 --num-prompts 5"
)


@pytest.mark.parametrize(
    ("name", "words", "count"),
    [
        ("generated-shared-prefix", f"{GSP} --gsp-output-len 3", 6),
        ("generated-shared-prefix", f"{GSP} --gsp-output-len 3 --num-prompts 4", 4),
        ("prefix_repetition", REPEATED, 5),
    ],
)
def test_datasets_of_shared_prefixes(
    server: FakeServer, name: str, words: str, count: int, tmp_path: Path
) -> None:
    lines = tmp_path / "x.jsonl"
    given = ["serving", "--port", str(server.port), "--num-warmups", "0", "--dataset-name", name]
    assert bench.run(parsed(*given, *words.split(), "--output-file", str(lines))) == 0
    bodies = [body for _, body in server.asked if "stream" in body]
    assert len(bodies) == count and {len(body["prompt"]) for body in bodies} == {6}
    assert len({tuple(body["prompt"][:4]) for body in bodies}) == 2
    assert {body["max_tokens"] for body in bodies} == {3}
    record = json.loads(lines.read_text())
    assert record["num_prompts"] == count and record["shared_prefix"]["prefix_len"] == 4


def custom(folder: Path) -> list[str]:
    """Write a file with a prompt; return the options to send it."""
    (folder / "prompts.jsonl").write_text('{"prompt": "Sort: 9 4 7"}\n')
    return ["--dataset-name", "custom", "--dataset-path", str(folder / "prompts.jsonl")]


def test_texts_of_a_file_get_a_suffix_and_the_chat_template(
    server: FakeServer, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_folder(EMBEDDED)
    first = tokenizer.settings()["bos_token"] or ""
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Sort: 9 4 7 now"}])
    template = ["--prompt-suffix", " now", "--apply-chat-template", "--tokenizer", str(EMBEDDED)]
    (plain,) = measured(server, *custom(tmp_path), "--prompt-suffix", " now")
    assert plain["prompt"] == "Sort: 9 4 7 now"
    *_, body = measured(server, *custom(tmp_path), *template, "--custom-output-len", "5")
    assert body["prompt"] == rendered.removeprefix(first) and body["max_tokens"] == 5
    *_, body = measured(server, *custom(tmp_path), *template, "--tokenize-prompt")
    assert body["prompt"] == tokenizer.encode(rendered, add_special_tokens=False)
    thinking = ["--chat-template-kwargs", '{"thinking": true}']
    *_, body = measured(server, *custom(tmp_path), *template, *thinking)
    assert body["prompt"] == tokenizer.apply_chat_template(
        [{"role": "user", "content": "Sort: 9 4 7 now"}], thinking=True
    ).removeprefix(first)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--apply-chat-template", "--apply-chat-template is for prompts of a file"),
        ("--dataset-name custom --tokenize-prompt", "--tokenize-prompt needs --tokenizer"),
        ("--chat-template-kwargs {}", "needs --apply-chat-template"),
        (
            "--dataset-name custom --backend openai-chat --tokenizer x --apply-chat-template",
            "the server applies its chat template",
        ),
        ("--dataset-name sharegpt", "--dataset-name sharegpt needs --dataset-path"),
        ("--dataset-name generated-shared-prefix --num-prompts 2000", "groups of 16 prompts"),
        ("--dataset-name generated-shared-prefix --gsp-question-len 0", "must be at least 1"),
        ("--gsp-question-len 128", "choose --dataset-name generated-shared-prefix"),
        ("--sharegpt-output-len 8", "--sharegpt-output-len has no effect with --dataset-name rand"),
        ("--dataset-name prefix_repetition --gsp-num-groups 2", "--gsp-num-groups has no effect"),
        ("--dataset-name prefix_repetition --random-prefix-len 2", "random or random-ids"),
        ("--dataset-path file.json", "choose --dataset-name custom or sharegpt"),
        ("--dataset-name custom --no-oversample", "choose --dataset-name sharegpt"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    server: FakeServer, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run(parsed("serving", "--port", str(server.port), *words.split())) == 2
    assert said in capsys.readouterr().err


def listed(heading: str) -> list[str]:
    """Return the options in the first column of the page's table below a heading."""
    text = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`--.*?) \|", text, re.MULTILINE)
    return [option for cell in cells for option in re.findall(r"`(--[a-z0-9-]+)`", cell)]


def test_the_options_that_are_not_taken_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    left_out = listed("Options that bench serving does not take")
    assert len(left_out) > 20
    for option in left_out:
        with pytest.raises(SystemExit) as caught:
            main(["bench", "serving", option])
        assert caught.value.code == 2, option
        said = capsys.readouterr().err
        assert f"unknown flag {option}" in said or f"{option} is a flag of" in said, said
