"""Questions to a running OpenAI server."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from glowplug.entrypoints.bench.load.http_stream import ServerTarget, call
from glowplug.entrypoints.evaluation.options import Server
from glowplug.entrypoints.evaluation.questions import Answer, Question
from glowplug.entrypoints.front import event_loop

SPARE_FILES = 64  #: open files besides the connections of questions
RETRY_SECONDS = 1.0  #: pause after which a question is put again to a server whose queue is full
QUEUE_FULL = 429  #: HTTP status of a server whose queue is full
INSPECT_SECONDS = 60.0  #: longest wait for the list of models
SHOWN_CHARACTERS = 300  #: most characters of a server's error in messages


class ServerAnswers:
    """Answers of a running OpenAI server.

    Args:
        server: the server.
        timeout: seconds after which a question counts as unanswered.

    Attributes:
        label: name of the engine in results.
        model: the model's name.

    Raises:
        ValueError: the server cannot be reached, refuses the key or serves no model.
    """

    def __init__(self, server: Server, timeout: float) -> None:
        headers = [("Authorization", f"Bearer {server.api_key}")] if server.api_key else []
        self._target = ServerTarget(server.base_url, tuple(headers), timeout)
        self.label = server.base_url
        self.model = event_loop.run(self._inspect(server.model))

    def __enter__(self) -> ServerAnswers:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    async def _inspect(self, name: str | None) -> str:
        """Check that the server answers and accepts the key, and return the model's name."""
        url = self._target.base_url
        try:
            target = replace(self._target, timeout=min(INSPECT_SECONDS, self._target.timeout))
            status, body = await call(target, "GET", "/v1/models")
        except OSError as error:
            raise ValueError(
                f"no server at {url}: {error or type(error).__name__}. Start one with "
                "`glowplug serve`, give its address with --base-url, or give an engine for this "
                "process with --model"
            ) from None
        if status in (401, 403):
            raise ValueError(
                f"{url} refused the key ({status}): {message_of(body)}. Give the right one with "
                "--api-key"
            )
        listed = _json(body).get("data") if status == 200 else None
        if name is None and not listed:
            raise ValueError(
                f"{url}/v1/models answered {status}: {message_of(body)}. Give the model's name "
                "with --model, or an OpenAI server's address with --base-url"
            )
        return name or str((listed or [{}])[0].get("id"))

    def run(
        self,
        questions: Sequence[Question],
        parallel: int,
        answers: MutableMapping[int, Answer],
        finished: Callable[[], None],
    ) -> None:
        """Put all questions to the server.

        A question that fails gets an answer with the error.

        Args:
            questions: the questions.
            parallel: most questions in flight.
            answers: gets the answer of each question by its index, as soon as it is there.
            finished: called after each answer.

        Raises:
            KeyboardInterrupt: the run was interrupted; ``answers`` has those that had arrived.
        """
        allow_open_files(parallel + SPARE_FILES)
        event_loop.run(self._run(questions, parallel, answers, finished))

    async def _run(
        self,
        questions: Sequence[Question],
        parallel: int,
        answers: MutableMapping[int, Answer],
        finished: Callable[[], None],
    ) -> None:
        gate = asyncio.Semaphore(parallel)

        async def one(index: int, question: Question) -> None:
            async with gate:
                answers[index] = await self._answer(question)
            finished()

        async with asyncio.TaskGroup() as group:
            for index, question in enumerate(questions):
                group.create_task(one(index, question))

    async def _answer(self, question: Question) -> Answer:
        path, payload = body_of(question, self.model)
        started = time.perf_counter()
        try:
            status, body = await self._unless_full(path, payload)
            found = _json(body)
            text = _text(found) if status == 200 else None
        except (OSError, ValueError) as error:
            return _failed(started, f"{type(error).__name__}: {error}")
        if text is None:
            return _failed(started, f"HTTP {status}: {message_of(body)}")
        usage = found.get("usage") or {}
        return Answer(text, usage.get("completion_tokens", 0), time.perf_counter() - started)

    async def _unless_full(self, path: str, payload: dict[str, Any]) -> tuple[int, bytes]:
        """Send a request, again while the server's queue is full; return status and body."""
        deadline = time.monotonic() + self._target.timeout
        while True:
            status, body = await call(self._target, "POST", path, payload)
            if status != QUEUE_FULL or time.monotonic() > deadline:
                return status, body
            await asyncio.sleep(RETRY_SECONDS)


def body_of(question: Question, model: str) -> tuple[str, dict[str, Any]]:
    """Return the route and the request body of a question."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": question.max_tokens,
        "temperature": 0,
    }
    if question.stop:
        body["stop"] = list(question.stop)
    if not question.chat:
        return "/v1/completions", {**body, "prompt": question.prompt}
    if question.template:
        body["chat_template_kwargs"] = dict(question.template)
    messages = [{"role": "user", "content": question.prompt}]
    return "/v1/chat/completions", {**body, "messages": messages}


def _text(found: dict[str, Any]) -> str | None:
    """Return the text of a completion or chat completion; None if it is neither.

    Reasoning that the server has separated is put in front again, as the model wrote it.
    """
    choices = found.get("choices")
    if not isinstance(choices, list) or not choices:
        return None
    choice = choices[0]
    if "message" not in choice:
        return str(choice.get("text") or "")
    message = choice["message"]
    content = message.get("content") or ""
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not reasoning:
        return str(content)
    return f"{reasoning}</think>{content}" if content else str(reasoning)


def _failed(started: float, error: str) -> Answer:
    return Answer(seconds=time.perf_counter() - started, error=error)


def _json(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; {} if it is none."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def message_of(body: bytes) -> str:
    """Return the error message of a server's answer, or the beginning of the answer."""
    error = _json(body).get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or body.decode(errors="replace"))[:SHOWN_CHARACTERS]


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to ``count``, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
