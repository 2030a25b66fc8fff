"""``glowplug eval``: readers, grading, failures, interruptions, comparisons and the model card."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from glowplug.core.errors import EngineDead
from glowplug.core.facts.model_folder import embedded_path
from glowplug.entrypoints.bench.load.local_server import LocalServer
from glowplug.entrypoints.cli.main import main
from glowplug.entrypoints.evaluation import TASKS, golden, gsm8k, tasks
from glowplug.entrypoints.evaluation.questions import Question
from glowplug.entrypoints.evaluation.statistics import mcnemar, wilson
from glowplug.models.embedded.tasks import Task, held_out_tasks, is_correct
from tests.support.evaluation import Reply, chat, completion, scripted, write_gsm8k, write_mmlu
from tests.support.waiting import LIMIT

LAST = re.compile(r"Question: (\w+) has (\d+) boxes with (\d+) pens each[^\n]*\nAnswer:$")


def solved(body: dict[str, Any]) -> str:
    """Return the right answer to the last question of a gsm8k prompt."""
    found = LAST.search(body["prompt"])
    assert found is not None, body["prompt"]
    total = int(found[2]) * int(found[3])
    return f" That is {found[2]} * {found[3]} = {total:,} pens.\n#### {total:,}\n\n"


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run ``glowplug eval`` and return the exit code and the result that it wrote."""
    file = tmp_path / "result.json"
    code = main(["eval", *words, "--output-file", str(file)])
    return code, json.loads(file.read_text())


# ---- gsm8k -------------------------------------------------------------------------------------


def test_gsm8k_reads_twenty_questions_with_examples(tmp_path: Path) -> None:
    data = tmp_path / "test.jsonl"
    answers = write_gsm8k(data, 20)
    with scripted(lambda body: completion(solved(body), 5)) as server:
        words = ["gsm8k", "--data-path", str(data), "--base-url", server.url]
        code, found = run(tmp_path, *words, "--num-shots", "3", "--parallel", "4")
    assert code == 0 and found["accuracy"] == 1.0 and found["invalid"] == 0
    assert found["answered"] == found["num_questions"] == 20
    assert [one["expected"] for one in found["questions"]] == [str(total) for total in answers]
    assert found["output_tokens"] == 100 and found["model"] == "served"
    assert found["interval"] == pytest.approx([0.8389, 1.0], abs=1e-4)
    assert found["shots_among_questions"] and found["num_shots"] == 3
    assert 1 < server.most <= 4, "no more than --parallel in flight"
    body = next(one for one in server.bodies if "Emil has 7 boxes" in one["prompt"][-80:])
    assert body["prompt"].count("Question: ") == 4 and body["temperature"] == 0
    assert body["prompt"].startswith("Question: Ada has 3 boxes with 400 pens each.")
    assert (
        "\nAnswer: Ada has 3 * 400 = <<3*400=1200>>1,200 pens.\n#### 1,200\n\nQ" in body["prompt"]
    )
    assert body["max_tokens"] == 512 and "Question" in body["stop"]


def test_gsm8k_takes_sglangs_spellings(tmp_path: Path) -> None:
    data = tmp_path / "test.jsonl"
    write_gsm8k(data, 20)
    with scripted(lambda body: completion(solved(body))) as server:
        host, _, port = server.url.rpartition(":")
        words = ["--data-path", str(data), "--host", host, "--port", port, "--num-questions", "7"]
        code, found = run(tmp_path, "gsm8k", *words, "--max-new-tokens", "64")
    assert code == 0 and found["answered"] == 7 and server.bodies[0]["max_tokens"] == 64


def test_gsm8k_takes_examples_from_another_file(tmp_path: Path) -> None:
    data, shots = tmp_path / "test.jsonl", tmp_path / "train.jsonl"
    write_gsm8k(data, 20)
    shots.write_text('{"question": "One and one?", "answer": "#### 2"}\n')
    words = ["--data-path", str(data), "--shots-path", str(shots), "--num-shots", "1"]
    with scripted(lambda body: completion(solved(body))) as server:
        code, found = run(tmp_path, "gsm8k", *words, "--base-url", f"{server.url}/v1")
    assert code == 0 and not found["shots_among_questions"]
    assert server.bodies[0]["prompt"].startswith("Question: One and one?\nAnswer: #### 2\n\n")


@pytest.mark.parametrize(
    ("text", "value", "correct"),
    [
        (" 3 * 400 = 1,200", "1200", True),
        ("So $1200.00.", "1200.00", True),
        ("the answer is 1200. Thanks", "1200", True),
        ("7-1200", "1200", True),
        ("x = -1200", "-1200", False),
        ("1200 or 1300", "1300", False),
        ("no idea", None, False),
        ("<think>1300</think>1200", "1200", True),
    ],
)
def test_the_last_number_counts(text: str, value: str | None, correct: bool) -> None:
    grade = gsm8k.grade(Question("0", "", "1200"), text)
    assert (grade.value, grade.correct) == (value, correct)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", ":2: not JSON"),
        ("[1]", ":2: not a JSON object but a list"),
        ('{"question": "x"}', ':2: "answer" is missing'),
        ('{"question": 3, "answer": "#### 1"}', ':2: "question" is a number'),
        ('{"question": "", "answer": "#### 1"}', ':2: "question" is an empty text'),
        ('{"question": "x", "answer": "four"}', ":2: the answer does not end with '#### NUMBER'"),
    ],
)
def test_a_malformed_line_is_named(
    line: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "test.jsonl"
    data.write_text('{"question": "x", "answer": "#### 4"}\n' + line + "\n")
    words = ["--data-path", str(data), "--num-shots", "0", "--model", "embedded"]
    assert main(["eval", "gsm8k", *words]) == 2
    assert f"{data}{reason}" in capsys.readouterr().err


def test_a_missing_file_and_too_few_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "gsm8k", "--model", "embedded", "--data-path", str(tmp_path / "none")]
    assert main(words) == 2
    assert "none cannot be read: No such file" in capsys.readouterr().err
    write_gsm8k(tmp_path / "few.jsonl", 3)
    assert main([*words[:-1], str(tmp_path / "few.jsonl")]) == 2
    assert "few.jsonl has 3 lines, --num-shots is 5" in capsys.readouterr().err


# ---- mmlu --------------------------------------------------------------------------------------


def test_mmlu_reads_the_published_folder(tmp_path: Path) -> None:
    write_mmlu(tmp_path / "data")

    def answer(body: dict[str, Any]) -> Reply:
        return completion(" B" if "order of 2" in body["prompt"].split("\n\n")[-1] else " C")

    with scripted(answer) as server:
        words = ["--data-path", str(tmp_path / "data"), "--ntrain", "1", "--base-url", server.url]
        code, found = run(tmp_path, "mmlu", *words)
    assert code == 0 and found["answered"] == 4 and found["correct"] == 3
    assert found["groups"]["abstract_algebra"]["accuracy"] == 1.0
    assert found["groups"]["virology"]["accuracy"] == 0.5
    assert found["questions"][3]["name"] == "virology/1"
    prompts = [body["prompt"] for body in server.bodies]
    assert (
        "The following are multiple choice questions (with answers) about virology.\n\n"
        "Which is a virus?\nA. ant\nB. bee\nC. flu\nD. oak\nAnswer: C\n\n"
        "And which is a tree?\nA. ant\nB. bee\nC. flu\nD. oak\nAnswer:"
    ) in prompts
    assert {body["max_tokens"] for body in server.bodies} == {1}


def test_mmlu_names_bad_rows_and_unknown_subjects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    write_mmlu(folder)
    words = ["eval", "mmlu", "--data-path", str(folder), "--ntrain", "1", "--model", "embedded"]
    assert main([*words, "--subjects", "virologie"]) == 2
    assert "no subject 'virologie'; it has: abstract_algebra, virology" in capsys.readouterr().err
    (folder / "test" / "virology_test.csv").write_text("q,1,2,3,4,A\nq,1,2,3,4,E\n")
    assert main(words) == 2
    assert "virology_test.csv:2: the answer is 'E'" in capsys.readouterr().err
    (folder / "test" / "virology_test.csv").write_text("q,1,2,3,A\n")
    assert main(words) == 2
    assert "virology_test.csv:1: 5 columns" in capsys.readouterr().err
    assert main(["eval", "mmlu", "--data-path", str(tmp_path), "--model", "embedded"]) == 2
    assert "no files named SUBJECT_test.csv" in capsys.readouterr().err


# ---- servers and failures ----------------------------------------------------------------------


def test_failed_requests_are_invalid_and_lose_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "test.jsonl"
    write_gsm8k(data, 20)

    def answer(body: dict[str, Any]) -> Reply | None:
        name = str(LAST.search(body["prompt"])[1])  # type: ignore[index]
        if name == "Ada":
            return 500, {"error": {"message": "out of luck"}}
        if name == "Ben":
            return None
        return completion("no number" if name == "Cleo" else solved(body))

    with scripted(answer) as server:
        words = ["--data-path", str(data), "--num-shots", "0", "--base-url", server.url]
        code, found = run(tmp_path, "gsm8k", *words)
    assert code == 1, "some requests failed"
    assert found["answered"] == 20 and found["correct"] == 8 and found["accuracy"] == 0.4
    assert found["invalid"] == 12 and found["invalid_rate"] == 0.6 and found["failed"] == 8
    reasons = found["reasons"]
    assert reasons["HTTP 500: out of luck"] == 4 and reasons["no value in the answer"] == 4
    assert sum(count for reason, count in reasons.items() if "closed the connection" in reason) == 4
    assert "Invalid: 4 x HTTP 500: out of luck" in capsys.readouterr().out


def test_a_question_waits_while_the_servers_queue_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glowplug.entrypoints.evaluation.server.RETRY_SECONDS", 0.01)
    data = tmp_path / "test.jsonl"
    write_gsm8k(data, 20)
    seen: set[str] = set()

    def answer(body: dict[str, Any]) -> Reply:
        if body["prompt"] not in seen:
            seen.add(body["prompt"])
            return 429, {"error": {"message": "the queue is full"}}
        return completion(solved(body))

    with scripted(answer) as server:
        words = ["--data-path", str(data), "--base-url", server.url]
        code, found = run(tmp_path, "gsm8k", *words)
    assert code == 0 and found["accuracy"] == 1.0 and len(server.bodies) == 40


def test_an_engine_that_dies_leaves_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glowplug.entrypoints.front.llm import LLM

    polled = LLM.poll

    def poll(self: LLM) -> Any:
        if len(calls) > 40:
            raise EngineDead("rank 0 ended")
        calls.append(1)
        return polled(self)

    calls: list[int] = []
    monkeypatch.setattr(LLM, "poll", poll)
    words = ["tasks", "--model", "embedded", "--device", "cpu", "--num-questions", "60"]
    code, found = run(tmp_path, *words, "--parallel", "4")
    assert code == 1 and found["answered"] == 60 and 0 < found["correct"] < 60
    assert found["reasons"]["EngineDead: rank 0 ended"] == found["failed"] > 0


def test_a_server_that_is_down_or_refuses_the_key_ends_the_run_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "test.jsonl"
    write_gsm8k(data, 20)
    words = ["eval", "gsm8k", "--data-path", str(data)]
    assert main([*words, "--base-url", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert "no server at http://127.0.0.1:9" in said and "--base-url" in said
    with scripted(lambda body: completion(solved(body)), key="secret") as server:
        assert main([*words, "--base-url", server.url, "--api-key", "wrong"]) == 2
        said = capsys.readouterr().err
        assert "refused the key (401): the key is wrong" in said and "--api-key" in said
        assert server.bodies == []
        assert main([*words, "--base-url", server.url, "--api-key", "secret"]) == 0


def test_an_engine_option_beside_a_server_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "golden", "--base-url", "http://127.0.0.1:9"]
    assert main([*words, "--dtype", "float32"]) == 2
    assert "--dtype is an option of the engine" in capsys.readouterr().err
    assert main([*words, "--set", "seed=1"]) == 2
    assert "--set is an option of the engine" in capsys.readouterr().err


@pytest.mark.slow  # another test's event loop may take the signal in a process of several tests
def test_an_interrupted_run_keeps_its_answers(tmp_path: Path) -> None:
    data = tmp_path / "test.jsonl"
    write_gsm8k(data, 20)
    released = threading.Event()

    def answer(body: dict[str, Any]) -> Reply:
        if len(server.bodies) > 6:
            os.kill(os.getpid(), signal.SIGINT)
            released.wait(LIMIT)
        return completion(solved(body))

    with scripted(answer) as server:
        words = ["--data-path", str(data), "--base-url", server.url, "--parallel", "1"]
        code, found = run(tmp_path, "gsm8k", *words)
        released.set()
    assert code == 130 and found["interrupted"] and found["num_questions"] == 20
    assert found["answered"] == 6 and found["accuracy"] == 1.0


def test_an_interrupted_engine_keeps_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glowplug.entrypoints.front.llm import LLM

    polled = LLM.poll

    def poll(self: LLM) -> Any:
        if len(calls) > 40:
            raise KeyboardInterrupt
        calls.append(1)
        return polled(self)

    calls: list[int] = []
    monkeypatch.setattr(LLM, "poll", poll)
    words = ["tasks", "--model", "embedded", "--device", "cpu", "--parallel", "4"]
    code, found = run(tmp_path, *words)
    assert code == 130 and found["interrupted"] and 0 < found["answered"] < 500


def test_reasoning_that_a_server_separates_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(
        '{"question": "a", "answer": "4", "kind": "k", "think": true}\n'
        '{"question": "b", "answer": "4", "kind": "k", "think": true}\n'
        '{"question": "c", "answer": "4", "kind": "k"}\n'
    )
    replies = {"a": chat("4", "I count 3."), "b": chat("", "I count 4"), "c": chat("4")}
    with scripted(lambda body: replies[body["messages"][0]["content"]]) as server:
        words = ["tasks", "--data-path", str(file), "--base-url", server.url]
        code, found = run(tmp_path, *words, "--parallel", "1")
    assert code == 0
    assert [one["correct"] for one in found["questions"]] == [True, False, True]
    assert found["invalid"] == 1, "an answer that never ends its reasoning is invalid"
    assert found["groups"]["think form"]["accuracy"] == 0.5
    kwargs = [body.get("chat_template_kwargs") for body in server.bodies]
    assert kwargs == [{"thinking": True}, {"thinking": True}, None]


# ---- golden prompts ----------------------------------------------------------------------------


def test_golden_prompts_and_their_rules(tmp_path: Path) -> None:
    file = tmp_path / "golden.json"
    entries = [
        {"prompt": "character", "expect": ["杚"]},
        {"prompt": "exact", "expect": ["4", "four"], "match": "exact"},
        {"prompt": "inexact", "expect": ["4"], "match": "exact"},
        {"prompt": "pattern", "expect": ["^9\\.9$"], "match": "regex"},
    ]
    file.write_text(json.dumps(entries))
    replies = {"character": "It is 杚.", "exact": "four", "inexact": "4.", "pattern": "9.9"}
    with scripted(lambda body: chat(replies[body["messages"][0]["content"]])) as server:
        words = ["golden", "--data-path", str(file), "--base-url", server.url]
        code, found = run(tmp_path, *words)
        assert code == 0
        assert [one["correct"] for one in found["questions"]] == [True, True, False, True]
        assert run(tmp_path, *words, "--min-accuracy", "0.7")[0] == 0
        assert run(tmp_path, *words, "--min-accuracy", "0.8")[0] == 1


def test_the_shipped_golden_prompts_contain_the_published_one() -> None:
    args = argparse.Namespace(data_path=golden.DEFAULT, thinking=True, max_new_tokens=9)
    found = golden.questions(args)
    assert any("木" in one.prompt and "乞" in one.prompt and "杚" in one.expected for one in found)
    for one in found:
        assert golden.grade(one, one.prompt).correct == (one.name == "verbatim copy"), one.name


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "must be a JSON list"),
        ('[{"prompt": "x"}]', 'entry 0: "expect" must be a list of texts'),
        ('[{"prompt": "x", "expect": ["("], "match": "regex"}]', "is no regular expression"),
        ('[{"prompt": "x", "expect": ["a"], "match": "near"}]', "\"match\" is 'near'"),
        ('[{"expect": ["a"]}]', 'entry 0: "prompt" is missing'),
        ("[", "not JSON"),
    ],
)
def test_a_malformed_golden_file_is_named(
    text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "golden.json"
    file.write_text(text)
    assert main(["eval", "golden", "--data-path", str(file), "--model", "embedded"]) == 2
    said = capsys.readouterr().err
    assert str(file) in said and reason in said


# ---- comparisons -------------------------------------------------------------------------------


def test_two_servers_are_compared_on_the_same_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "test.jsonl"
    write_gsm8k(data, 20)

    def worse(body: dict[str, Any]) -> Reply:
        wrong = LAST.search(body["prompt"])[1] in ("Ada", "Emil")  # type: ignore[index]
        return completion("1" if wrong else solved(body))

    with scripted(lambda body: completion(solved(body))) as one, scripted(worse, "k2") as two:
        words = ["--data-path", str(data), "--num-shots", "0", "--base-url", one.url]
        words += ["--compare", two.url, "--compare-api-key", "k2"]
        code, found = run(tmp_path, "gsm8k", *words)
    assert code == 0 and found["first"]["correct"] == 20 and found["second"]["correct"] == 12
    said = found["comparison"]
    assert (said["both"], said["first_only"], said["second_only"], said["neither"]) == (12, 8, 0, 0)
    assert said["p_value"] == pytest.approx(2 / 2**8) and said["difference"] == -0.4
    assert [one["name"] for one in said["disagreements"]][:3] == ["0", "4", "5"]
    printed = capsys.readouterr().out
    assert "only the first 8" in printed and "-40.00 points, p = 0.0078" in printed


def test_two_configurations_and_an_earlier_result_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tasks", "--model", "embedded", "--device", "cpu", "--num-questions", "20"]
    changed = ["--set", "quantization.use=block_fp8"]
    code, found = run(
        tmp_path, *words, *changed, "--compare-set", "quantization.activations=dynamic"
    )
    assert code == 0 and found["comparison"]["compared"] == 20
    assert found["first"]["engine"] != found["second"]["engine"], "two plans"
    earlier = tmp_path / "earlier.json"
    (tmp_path / "result.json").rename(earlier)
    code, again = run(tmp_path, *words, *changed, "--compare", str(earlier))
    assert code == 0 and again["comparison"]["p_value"] == 1.0
    assert again["comparison"]["same_text"] == 20, "greedy answers of the same engine"
    config = tmp_path / "other.toml"
    config.write_text('model = "embedded"\ndevice = "cpu"\nseed = 3\n')
    code, third = run(tmp_path, *words, "--compare", str(config))
    assert code == 0 and third["second"]["answered"] == 20
    capsys.readouterr()
    assert main(["eval", *words[:-1], "15", "--compare", str(earlier)]) == 2
    assert "has answers to other questions" in capsys.readouterr().err
    assert main(["eval", *words, "--compare", str(tmp_path / "none")]) == 2
    assert "neither a URL nor a file" in capsys.readouterr().err


def test_a_server_and_an_engine_here_answer_alike(tmp_path: Path) -> None:
    """Chats, think form and completions over HTTP equal those of an engine in this process."""
    config = {"model": "embedded", "device": "cpu", "memory": {"kv_tokens": 8192}}
    engine = ["--model", "embedded", "--device", "cpu", "--set", "memory.kv_tokens=8192"]
    data = tmp_path / "test.jsonl"
    write_gsm8k(data, 20)
    with LocalServer(config, threads=1) as server:
        compare = ["--compare", server.base_url, "--parallel", "8"]
        code, found = run(tmp_path, "tasks", *engine, *compare, "--num-questions", "40")
        shots = ["--num-shots", "1", "--max-new-tokens", "16"]
        other, sums = run(tmp_path, "gsm8k", "--data-path", str(data), *shots, *engine, *compare)
    assert code == other == 0
    assert found["first"]["groups"]["think form"]["correct"] > 0
    assert found["comparison"]["p_value"] == 1.0
    assert found["comparison"]["same_text"] >= 39, "batches differ, so ties may too"
    assert sums["second"]["answered"] == 20 and sums["comparison"]["same_text"] >= 18


def test_intervals_and_the_exact_test_against_known_values() -> None:
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert mcnemar(0, 0) == 1.0 and mcnemar(3, 3) == 1.0
    assert mcnemar(10, 3) == pytest.approx(0.0923, abs=1e-4) == mcnemar(3, 10)
    assert 0 < mcnemar(1300, 1500) < 0.001, "thousands of disagreements do not overflow"


# ---- the embedded model ------------------------------------------------------------------------


def test_the_shipped_tasks_are_the_held_out_ones() -> None:
    lines = [json.loads(line) for line in tasks.held_out_path().read_text().splitlines()]
    wanted = [
        {"question": one.prompt, "answer": one.answer, "kind": one.kind}
        | ({"think": True} if one.think else {})
        for one in held_out_tasks(500)
    ]
    assert lines == wanted


@pytest.mark.parametrize("text", ["3", " 3\n", "3.", "13", "", "a</think>\n\n3", "x 3"])
@pytest.mark.parametrize("think", [False, True])
def test_tasks_are_graded_as_the_model_card_grades_them(text: str, think: bool) -> None:
    task = Task("add", "1,2", "What is 1 + 2?", "3", "Ones: 1 + 2 = 3.", think)
    question = Question("0", task.prompt, "3", rule=tasks.CLOSED if think else "")
    assert TASKS["tasks"].grade(question, text).correct == is_correct(task, text)


def test_the_embedded_model_has_the_scores_of_its_card(tmp_path: Path) -> None:
    """Each score of the card, with rounded activations; another CPU may round one answer away."""
    scheme = ["--set", "quantization.use=block_fp8", "--set", "quantization.activations=dynamic"]
    code, found = run(tmp_path, "tasks", "--model", "embedded", "--device", "cpu", *scheme)
    assert code == 0 and found["answered"] == 500 and found["failed"] == 0
    columns, scores = card()
    lines = {"all": found, **found["groups"]}
    assert set(columns) == lines.keys() and len(columns) == 9
    for kind, score in zip(columns, scores, strict=True):
        line = lines[kind]
        assert abs(100 * line["accuracy"] - score) <= 100 / line["answered"] + 0.05, kind
    assert found["output_throughput"] > 0 and found["output_tokens"] > 3000


def card() -> tuple[list[str], list[float]]:
    """Return the kinds and the scores of the engine in the card's table."""
    text = (embedded_path().parent / "README.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(("| | all |", "| FP8 checkpoint through the engine, CPU |"))
    ]
    return rows[0][1:], [float(cell) for cell in rows[1][1:]]
