"""The offline engine: ``LLM(model=...)`` with ``generate``, ``chat`` and ``stream``, in the calling
process.

>>> with LLM(model="embedded", scheduler={"max_running_requests": 8}) as llm:
...     out = llm.chat([{"role": "user", "content": "What is 17 + 25?"}],
SamplingParams(temperature=0))[0]
...     out.text, out.finish_reason
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from glowplug.core.errors import EngineDead, RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.step.messages import Abort, Control, Logprobs, Reply, decode_outbound, encode
from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.front import inputs
from glowplug.entrypoints.front.delta import Delta
from glowplug.entrypoints.front.front import Front, Stream
from glowplug.entrypoints.front.inputs import Message, Prompt
from glowplug.entrypoints.front.model_text import eos_ids, open_tokenizer
from glowplug.entrypoints.front.open_engine import start_executor

#: sections of the server alone
UNUSED = dict.fromkeys(("server", "log", "metrics"), "LLM(...) serves no HTTP and sets up no log")

News = tuple[Stream, Delta]


@dataclass
class Completion:
    """One finished sequence.

    Attributes:
        text: generated text, special tokens removed unless ``skip_special_tokens=False``; ""
            without a tokenizer.
        token_ids: generated ids, the ending eos included.
        finish_reason: stop, length, abort, timeout or error (``error`` then says what).
        stop_reason: the stop string or token id that matched.
        logprobs: of ``token_ids``; prompt_logprobs: of prompt tokens 1.. (both only when asked
            for).
        choices: all ``n`` completions of the prompt, this one first.
    """

    prompt_token_ids: list[int]
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    cached_tokens: int = 0
    error: str | None = None
    choices: list[Completion] = field(default_factory=list, repr=False)

    def take(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.cached_tokens = delta.cached_tokens
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = Logprobs([], [], [])
            self.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.error = delta.error


class LLM:
    """An engine in this process (executor ``inline`` unless configured otherwise).

    ``model`` is a folder, a file a plugin can read, or "embedded"; every other keyword is a
    top-level key of the configuration (``dtype="float32"``, ``attention={"use": "torch_mla"}``,
    ``skip_tokenizer=True``). Raises PlanRefused before anything is loaded, with every reason.
    """

    def __init__(
        self, model: str = "embedded", *, plugins: Sequence[str] = (), **config: Any
    ) -> None:
        self._plugins = load_plugins(extra=tuple(plugins))
        self.plan: EnginePlan = make_plan(
            {"model": model, **config},
            source="LLM(...)",
            plugins=self._plugins,
            contributed={"executor.use": "inline"},
            unused=UNUSED,
        )
        self.tokenizer = open_tokenizer(self.plan, self._plugins)
        self._front = Front(self.plan, self.tokenizer, eos_ids(self.plan, self.tokenizer))
        self._executor = start_executor(self.plan, self._plugins)
        self._closed = False
        self._control_id = 0
        self._boxes: dict[
            Stream, list[News]
        ] = {}  # whose news goes where; all the rest is for ``poll``
        self._news: list[News] = []

    # ---- public ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Texts or token-id lists in, one Completion each, in order. RequestError (nothing is run)
        for a bad one.
        """
        batch = inputs.prompts(prompts)
        each = inputs.params_for(params, len(batch))
        return self._run([self._ids(prompt) for prompt in batch], each)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[Completion]:
        """Conversations (lists of ``{"role", "content"}``) through the chat template. ``template``:
        its keywords.
        """
        batch = inputs.conversations(conversations)
        each = inputs.params_for(params, len(batch))
        return self._run([self._chat_ids(messages, template) for messages in batch], each)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        **template: Any,
    ) -> Iterator[Delta]:
        """Deltas of one sequence as they come. Closing the iterator aborts it."""
        given: Any = prompt
        ids = (
            self._ids(inputs.prompt(given))
            if inputs.is_prompt(given)
            else self._chat_ids(inputs.messages(given), template)
        )
        stream = self._submit(ids, inputs.params_for(params, 1)[0])
        box = self._boxes[stream] = []
        try:
            while box or not stream.done:
                while box:
                    yield box.pop(0)[1]
                if not stream.done:
                    self._turn()
        finally:
            self._abandon([stream])

    def submit(self, prompt: Prompt, params: SamplingParams) -> Stream:
        """Start one sequence and return at once (``params.n`` is ignored). Its deltas come from
        ``poll``.
        """
        return self._submit(self._ids(inputs.prompt(prompt)), inputs.params_for(params, 1)[0])

    def poll(self) -> list[News]:
        """News of submitted sequences; [] when a second passes without any. One call, at most one
        engine step.
        """
        if not self._news:
            self._turn()
        news = self._news
        self._news = []
        return news

    def abort(self, streams: Sequence[Stream]) -> None:
        """Give submitted sequences up: no more of their news comes. Unknown and ended ones are
        ignored.
        """
        self._abandon(list(streams))

    def control(self, action: str, **args: Any) -> dict[str, Any]:
        """Ask the engine: "info", "flush", "check". RequestError when it refuses."""
        self._check_open()
        self._control_id += 1
        self._executor.submit(encode([Control(self._control_id, action, args)]))
        while True:
            for reply in self._turn():
                if reply.id == self._control_id:
                    if not reply.ok:
                        raise RequestError(reply.error)
                    return reply.data

    @property
    def stats(self) -> Any:
        """Latest ``messages.Stats``."""
        return self._front.stats

    def close(self) -> None:
        """End the engine and free its memory. Idempotent."""
        if not self._closed:
            self._closed = True
            self._executor.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("this LLM is closed")

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError(
                "this engine runs without a tokenizer: pass token ids", param="prompt"
            )
        return self.tokenizer.encode(prompt)

    def _chat_ids(self, messages: list[Message], template: dict[str, Any]) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                "this engine runs without a tokenizer: chat needs one", param="messages"
            )
        text = self.tokenizer.apply_chat_template(messages, **template)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _submit(self, ids: list[int], params: SamplingParams) -> Stream:
        self._check_open()
        stream, message = self._front.submit(ids, params)
        self._executor.submit(encode([message]))
        return stream

    def _run(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
        """Feeds the engine no more than its queue holds; the rest waits here."""
        for ids, one in zip(prompts, params, strict=True):
            self._front.check_request(ids, one)
        results = [Completion(ids) for ids in prompts]
        jobs = [
            (result, ids, one, k)
            for result, ids, one in zip(results, prompts, params, strict=True)
            for k in range(one.n)
        ]
        running: dict[Stream, Completion] = {}
        box: list[News] = []
        room = self.plan.sizes.max_running + self.plan.sizes.max_queued
        jobs.reverse()
        try:
            while jobs or running:
                while jobs and len(running) < room:
                    self._boxes[self._start(jobs.pop(), running)] = box
                self._turn()
                for stream, delta in box:
                    running[stream].take(delta)
                    if delta.finish_reason is not None:
                        del running[stream], self._boxes[stream]
                box.clear()
        finally:
            self._abandon(list(running))
        return results

    def _start(
        self,
        job: tuple[Completion, list[int], SamplingParams, int],
        running: dict[Stream, Completion],
    ) -> Stream:
        first, ids, params, index = job
        choice = first if index == 0 else Completion(ids, index)
        first.choices.append(choice)
        if params.seed is not None and index:
            params = params.replace(seed=params.seed + index)
        stream = self._submit(ids, params)
        running[stream] = choice
        return stream

    def _turn(self) -> list[Reply]:
        """One frame from the engine: its news goes into the boxes of those who wait for it."""
        self._check_open()
        frame = self._executor.outputs(1.0)
        if not frame:
            return []
        received = self._front.receive(decode_outbound(frame))
        for news in received.deltas:
            self._boxes.get(news[0], self._news).append(news)
        if self._front.outbox:
            self._executor.submit(encode(self._front.outbox))
            self._front.outbox = []
        return received.replies

    def _abandon(self, streams: list[Stream]) -> None:
        for stream in streams:
            self._boxes.pop(stream, None)
        message: Abort | None = self._front.abandon(streams)
        if message is not None and not self._closed:
            self._executor.submit(encode([message]))
