"""The offline engine: ``LLM(model=...)`` with ``generate``, ``chat`` and ``stream``.

It runs in the calling process.

>>> with LLM(model="embedded", scheduler={"max_running_requests": 8}) as llm:
...     question = [{"role": "user", "content": "What is 17 + 25?"}]
...     out = llm.chat(question, SamplingParams(temperature=0))[0]
...     out.text, out.finish_reason
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from glowplug.core.errors import EngineDead, RequestError
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.protocols import Executor, OutputParserFactory
from glowplug.core.step.messages import Abort, Control, Reply, decode_outbound, encode
from glowplug.core.step.request import SamplingParams
from glowplug.entrypoints.front import inputs
from glowplug.entrypoints.front.chat.answers import AnswerForm, answer_form
from glowplug.entrypoints.front.chat.tools import choice_from, tools_from
from glowplug.entrypoints.front.chat.turn import Turn
from glowplug.entrypoints.front.completion import (
    Completion as Completion,
    ProgressBar,
    choices_of,
    progress_bar,
)
from glowplug.entrypoints.front.delta import Delta
from glowplug.entrypoints.front.front import CheckedRequest, Front, Stream
from glowplug.entrypoints.front.grammar_checks import GrammarChecks
from glowplug.entrypoints.front.inputs import Message, Prompt
from glowplug.entrypoints.front.model_text import eos_ids, open_tokenizer
from glowplug.entrypoints.front.named_parsers import build_parsers
from glowplug.entrypoints.front.open_engine import start_executor

#: section of the configuration that only the server uses -> why it has no effect here
UNUSED_SECTIONS = {
    **dict.fromkeys(
        ("server", "log", "metrics", "tracing"), "LLM(...) serves no HTTP and sets up no log"
    ),
    "outputs": "LLM(...) returns the whole text, the reasoning included",
}

StreamDelta = tuple[Stream, Delta]
UseTqdm = bool | Callable[..., Any] | None


class LLM:
    """An engine for generating without a server, by default in this process (executor ``inline``).

    NOTE: on a GPU all objects of the process that exist when the engine starts are left out of
    garbage collections until it is closed, because a full collection may take 0.2 s.

    Args:
        model: a folder, a file that a plugin can read, or "embedded".
        plugins: dotted modules of plugins to load besides the installed ones.
        config: top-level keys of the configuration (``dtype="float32"``,
            ``attention={"use": "torch_mla"}``, ``skip_tokenizer=True``).

    Raises:
        PlanRefused: the configuration cannot run. It has every reason, and nothing was loaded.
    """

    def __init__(
        self, model: str = "embedded", *, plugins: Sequence[str] = (), **config: Any
    ) -> None:
        self._plugins = load_plugins(extra=tuple(plugins))
        self.plan = self._make_plan({"model": model, **config})
        self.tokenizer = open_tokenizer(self.plan, self._plugins)
        self._front = Front(self.plan, self.tokenizer, eos_ids(self.plan, self.tokenizer))
        self._grammars = GrammarChecks(self.plan, self._plugins)
        self._executor = self._start()
        self._closed = False
        self._control_id = 0
        # lists that receive the deltas of some streams; those of other streams are for ``poll``
        self._boxes: dict[Stream, list[StreamDelta]] = {}
        self._unclaimed: list[StreamDelta] = []

    # ---- public ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = None,
    ) -> list[Completion]:
        """Generate completions of one prompt or several.

        Args:
            prompts: texts or lists of token ids, or a single one.
            params: sampling parameters for all prompts or one for each; None: defaults.
            use_tqdm: show a progress bar on standard error; None: only on a terminal. A function is
                called in place of ``tqdm``, with its arguments.

        Returns:
            One Completion per prompt, in order.

        Raises:
            RequestError: a prompt or its parameters cannot be served. Nothing was run.
        """
        batch = inputs.prompts(prompts)
        each = inputs.params_for(params, len(batch))
        return self._run([self._ids(prompt) for prompt in batch], each, use_tqdm)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        use_tqdm: UseTqdm = None,
        **template: Any,
    ) -> list[Completion]:
        """Render conversations with the chat template and generate completions.

        Args:
            conversations: lists of ``{"role", "content"}``, or a single one.
            params: sampling parameters for all conversations or one for each; None: defaults.
            tools: functions that the model may call, as in OpenAI's chat API.
            tool_choice: "auto", "none", "required", or the object of a function to be called.
            parallel_tool_calls: False: at most one call in an answer.
            use_tqdm: show a progress bar, as for ``generate``.
            template: keywords of the chat template.

        Returns:
            One Completion per conversation, in order. Its ``message`` has the tool calls.

        Raises:
            RequestError: a conversation or its parameters cannot be served. Nothing was run.
        """
        batch = inputs.conversations(conversations)
        each = inputs.params_for(params, len(batch))
        offered = tools_from(tools)
        choice = choice_from(tool_choice, offered, parallel_tool_calls)
        found = [
            self._chat(Turn(messages, offered, choice, template), one)
            for messages, one in zip(batch, each, strict=True)
        ]
        results = self._run([ids for ids, _ in found], [form.params for _, form in found], use_tqdm)
        for result, (_, form) in zip(results, found, strict=True):
            for one in result.choices:
                one.parse(form)
        return results

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        **template: Any,
    ) -> Iterator[Delta]:
        """Run one sequence and yield its output deltas; closing the iterator aborts it."""
        given: Any = prompt
        (one,) = inputs.params_for(params, 1)
        if inputs.is_prompt(given):
            ids = self._ids(inputs.prompt(given))
        else:
            ids, form = self._chat(Turn(inputs.messages(given), template=template), one)
            one = form.params
        stream = self._submit(self._check(ids, one))
        box = self._boxes[stream] = []
        try:
            while box or not stream.done:
                while box:
                    yield box.pop(0)[1]
                if not stream.done:
                    self._receive_frame()
        finally:
            self._abandon([stream])

    def submit(self, prompt: Prompt, params: SamplingParams) -> Stream:
        """Start one sequence and return at once; ``poll`` returns its deltas.

        ``params.n`` is ignored.
        """
        ids = self._ids(inputs.prompt(prompt))
        return self._submit(self._check(ids, inputs.params_for(params, 1)[0]))

    def poll(self) -> list[StreamDelta]:
        """Wait for new deltas of submitted sequences and return those of at most one engine step.

        The result is [] after a second without deltas.
        """
        if not self._unclaimed:
            self._receive_frame()
        deltas = self._unclaimed
        self._unclaimed = []
        return deltas

    def abort(self, streams: Sequence[Stream]) -> None:
        """Abort submitted sequences. ``poll`` returns no further deltas of these sequences.

        Unknown and ended sequences are ignored.
        """
        self._abandon(list(streams))

    def control(self, action: str, **args: Any) -> dict[str, Any]:
        """Send a control (a command besides requests) to the engine and return the reply's data.

        Args:
            action: "flush", "info", "check", "memory", "forget_load", "streams",
                "profile_start" or "profile_stop"; see ``messages.Control``.
            args: arguments of the action.

        Raises:
            RequestError: the engine refused the control.
        """
        self._check_open()
        self._control_id += 1
        self._executor.submit(encode([Control(self._control_id, action, args)]))
        while True:
            for reply in self._receive_frame():
                if reply.id == self._control_id:
                    if not reply.ok:
                        raise RequestError(reply.error)
                    return reply.data

    @cached_property
    def output_parsers(self) -> list[OutputParserFactory]:
        """The plan's output parsers, in order."""
        return build_parsers(self.plan, self._plugins)

    @property
    def stats(self) -> Any:
        """The engine's latest statistics, a ``messages.Stats``."""
        return self._front.stats

    def close(self) -> None:
        """Stop the engine and free its memory. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            self._grammars.close()
            self._executor.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _make_plan(self, config: dict[str, Any]) -> EnginePlan:
        """Return the plan of a configuration."""
        return make_plan(
            config,
            source="LLM(...)",
            plugins=self._plugins,
            contributed={"executor.use": "inline"},
            unused=UNUSED_SECTIONS,
        )

    def _start(self) -> Executor:
        """Start the plan's executor and return it."""
        return start_executor(self.plan, self._plugins)

    def _check_open(self) -> None:
        """Raise EngineDead if the engine is closed."""
        if self._closed:
            raise EngineDead("this LLM is closed")

    def _ids(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt."""
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError(
                "this engine runs without a tokenizer: pass token ids", param="prompt"
            )
        return self.tokenizer.encode(prompt)

    def _chat(self, turn: Turn, params: SamplingParams) -> tuple[list[int], AnswerForm]:
        """Return the token ids of a rendered conversation, and the form of its answers."""
        if self.tokenizer is None:
            raise RequestError(
                "this engine runs without a tokenizer: chat needs one", param="messages"
            )
        text = turn.prompt_text(self.tokenizer)
        form = answer_form(turn.output_request(text), self.output_parsers, params)
        return self.tokenizer.encode(text, add_special_tokens=False), form

    def _check(self, ids: list[int], params: SamplingParams) -> CheckedRequest:
        """Check a prompt and its parameters, with their grammar, and return the request."""
        self._grammars.check(params)
        return self._front.check(ids, params)

    def _submit(self, request: CheckedRequest) -> Stream:
        """Start one sequence."""
        return self._submit_all([request])[0]

    def _submit_all(self, requests: Sequence[CheckedRequest]) -> list[Stream]:
        """Start sequences with one message, so that the first step may have all of them."""
        self._check_open()
        made = [self._front.submit(request) for request in requests]
        self._executor.submit(encode([message for _, message in made]))
        return [stream for stream, _ in made]

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], use_tqdm: UseTqdm
    ) -> list[Completion]:
        """Run all prompts to the end and return their completions, in order.

        The engine gets no more sequences than it can run and queue; the others are kept here.
        """
        checked = [self._check(ids, one) for ids, one in zip(prompts, params, strict=True)]
        results = [Completion(ids) for ids in prompts]
        waiting = list(chain.from_iterable(map(choices_of, results, checked)))
        running: dict[Stream, Completion] = {}
        box: list[StreamDelta] = []
        try:
            with progress_bar(use_tqdm, len(waiting)) as bar:
                while waiting or running:
                    room = self.plan.sizes.max_admitted - len(running)
                    self._begin(waiting[:room], running, box)
                    del waiting[:room]
                    self._receive_frame()
                    self._take_all(box, running, bar)
        finally:
            self._abandon(list(running))
        return results

    def _begin(
        self,
        choices: Sequence[tuple[Completion, CheckedRequest]],
        running: dict[Stream, Completion],
        box: list[StreamDelta],
    ) -> None:
        """Start the sequences of ``choices``, whose deltas go to ``box``."""
        if not choices:
            return
        streams = self._submit_all([request for _, request in choices])
        for stream, (completion, _) in zip(streams, choices, strict=True):
            running[stream] = completion
            self._boxes[stream] = box

    def _take_all(
        self, box: list[StreamDelta], running: dict[Stream, Completion], bar: ProgressBar | None
    ) -> None:
        """Add the deltas in ``box`` to the completions of their sequences, and empty ``box``.

        Ended sequences are removed from ``running`` and counted by ``bar``.
        """
        for stream, delta in box:
            running[stream].take(delta)
            if delta.finish_reason is not None:
                if bar is not None:
                    bar.count(running[stream])
                del running[stream], self._boxes[stream]
        box.clear()

    def _receive_frame(self) -> list[Reply]:
        """Receive a frame from the engine, store its deltas and return its replies to controls."""
        self._check_open()
        frame = self._executor.outputs(1.0)
        if not frame:
            return []
        received = self._front.receive(decode_outbound(frame))
        for delta in received.deltas:
            self._boxes.get(delta[0], self._unclaimed).append(delta)
        if self._front.outbox:
            self._executor.submit(encode(self._front.outbox))
            self._front.outbox = []
        return received.replies

    def _abandon(self, streams: list[Stream]) -> None:
        """Remove sequences whose output is no longer wanted, and abort those that still run."""
        for stream in streams:
            self._boxes.pop(stream, None)
        message: Abort | None = self._front.abandon(streams)
        if message is not None and not self._closed:
            self._executor.submit(encode([message]))
