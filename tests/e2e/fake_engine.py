"""An executor without a model, behind the real client: it answers with the text that the prompt
gives, a byte a token.

The words after ``say:`` in a prompt are the answer; without them it is TEXT. ``fail:nan`` in a
prompt fails the sequence after two tokens, ``hang:`` never gives a token. Everything above the
executor is the real code.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from glowplug.core.errors import EngineDead
from glowplug.core.facts.model_facts import Facts, HardwareFacts, ModelFacts, SoftwareFacts
from glowplug.core.plan.plan import EnginePlan, Sizes
from glowplug.core.step.messages import (
    Abort,
    Admitted,
    Control,
    Failed,
    Finished,
    Inbound,
    Logprobs,
    Reply,
    Stats,
    StepOutput,
    Submit,
    decode_inbound,
    encode,
)
from glowplug.core.step.request import Admission
from glowplug.core.text.detokenize import byte_alphabet
from glowplug.core.text.tokenizer import Tokenizer

TEXT = "Grüße aus 東京 🗼: the family 👩‍👩‍👧 says hello, and one plus one is two."
BOS, EOS, USER, ASSISTANT, SYSTEM = 256, 257, 258, 259, 260
VOCAB = 264
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>{% endif %}{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer: ids 0 to 255 are the bytes themselves, followed by a few
    special tokens.
    """
    vocabulary = dict(byte_alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"])
    return Tokenizer(
        backend, chat_template=TEMPLATE, special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"}
    )


def make_plan(*, context: int = 4096, **config: object) -> EnginePlan:
    model = ModelFacts(
        path="/models/fake",
        architecture="Fake",
        format="none",
        kind="mla",
        config={},
        dtype="float32",
        vocab_size=VOCAB,
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_positions=context,
    )
    sizes = Sizes(
        context_length=context,
        max_running=256,
        max_queued=1024,
        max_step_tokens=512,
        chunk_size=512,
        page_size=16,
        num_pages=4097,
        kv_bytes=1 << 20,
    )
    return EnginePlan(
        model="/models/fake",
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
        seed=0,
        overlap=True,
        choices=(),
        decisions=(),
        budget=(),
        sizes=sizes,
        mesh={},
        facts=Facts(model, HardwareFacts(), SoftwareFacts()),
        config=dict(config),
        plugins=(),
        plugin_fingerprint="0123456789abcdef",
        fingerprint="fedcba9876543210",
    )


@dataclass
class Running:
    submit: Submit
    tokens: list[int]
    fail_at: int = -1
    hang: bool = False
    at: int = 0
    deadline: float = 0.0
    queued_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0


class FakeExecutor:
    """An executor that produces the requested text.

    Attributes:
        step_seconds: Pause between steps.
        rows: Number of sequences that run at once.
        queue_limit: Number of sequences that may wait.
        loaded: Set once the model may be ready.
        held: While it returns True, sequences run and get no token.
        profiled: Labels of the profiles started.
        silent: Stops all frames, heartbeats included.
        loads: Load of the experts of each rank, by layer.
    """

    def __init__(
        self,
        *,
        step_seconds: float = 0.0,
        rows: int = 256,
        queue_limit: int = 1024,
        loaded: threading.Event | None = None,
        held: Callable[[], bool] = lambda: False,
    ) -> None:
        self.step_seconds = step_seconds
        self.rows, self.queue_limit = rows, queue_limit
        self._loaded = loaded
        self._held = held
        self.loads: list[dict[str, list[int]]] = []
        self.frames: queue.Queue[bytes] = queue.Queue()
        self.inbox: queue.Queue[bytes | None] = queue.Queue()
        self.running: dict[int, Running] = {}
        self.waiting: dict[int, Running] = {}
        self.stats = Stats(pages_total=4096, pages_free=4096, page_size=16)
        self.silent = False
        self.profiled: list[str] = []
        self.admissions: list[Admission] = []
        self.params: list[object] = []
        self.dead: EngineDead | None = None
        self._stop = threading.Event()

    # ---- the executor's protocol -----------------------------------------------------------------

    def start(self, plan: EnginePlan) -> None:
        if self._loaded is not None:
            self._loaded.wait()
        threading.Thread(target=self._loop, daemon=True).start()

    def submit(self, data: bytes) -> None:
        self.inbox.put(data)

    def outputs(self, timeout: float | None) -> bytes | None:
        if self.dead is not None:
            raise self.dead
        try:
            return self.frames.get(timeout=timeout)
        except queue.Empty:
            return None

    def stop(self) -> None:
        self._stop.set()
        self.inbox.put(None)

    def die(self) -> None:
        """End as if a rank had been killed."""
        self.dead = EngineDead(
            "rank 0 (step): killed by signal 9 in /usr/lib/secret.so at 0x7fdeadbeef00"
        )
        self.frames.put(encode([Failed(0, "step", "killed")]))

    # ---- the engine ------------------------------------------------------------------------------

    def _loop(self) -> None:
        beat = 0.0
        while not self._stop.is_set():
            if self.silent:
                time.sleep(0.01)
                continue
            idle = not self.running and not self.waiting
            self._receive(block=idle)
            output = self._step()
            now = time.monotonic()
            if output.ids or output.finished or output.admitted or now - beat > 0.2:
                beat = now
                output.stats = self._load()
                self.frames.put(encode([output]))
            if self.step_seconds and not idle:
                time.sleep(self.step_seconds)

    def _receive(self, block: bool) -> None:
        try:
            data = (
                self.inbox.get(timeout=0.2 if block else 0.0) if block else self.inbox.get_nowait()
            )
            while data is not None:
                for message in decode_inbound(data):
                    self._take(message)
                data = self.inbox.get_nowait()
        except queue.Empty:
            pass

    def _take(self, message: Inbound) -> None:
        if isinstance(message, Submit):
            self._add(message)
        elif isinstance(message, Abort):
            ends = [
                self._end(id, Finished(id, message.reason))
                for id in message.ids
                if id in self.running or id in self.waiting
            ]
            if ends:
                self.stats.aborted += len(ends)
                self.frames.put(encode([StepOutput(finished=ends, stats=self._load())]))
        elif isinstance(message, Control):
            self.frames.put(encode([self._control(message)]))

    def _control(self, message: Control) -> Reply:
        if message.action == "flush" and self.running:
            return Reply(
                message.id,
                False,
                error="requests are running; the cache can be flushed only when idle",
            )
        if message.action == "profile_start":
            self.profiled.append(message.args["label"])
        if message.action == "forget_load":
            self.loads = [
                {layer: [0] * len(counts) for layer, counts in rank.items()} for rank in self.loads
            ]
        return Reply(message.id, True, self._info() if message.action == "info" else {})

    def _info(self) -> dict[str, Any]:
        """Return the reply to "info": with loads, those of several ranks."""
        own: dict[str, Any] = {"kv_bytes": 1 << 20}
        if not self.loads:
            return own
        return {**own, "ranks": [{**own, "expert_load": load} for load in self.loads]}

    def _add(self, submit: Submit) -> None:
        if len(self.waiting) >= self.queue_limit:
            refused = Finished(
                submit.id, "error", error="the queue is full", error_code="queue_full"
            )
            self.frames.put(encode([StepOutput(finished=[refused])]))
            return
        self.admissions.append(submit.admission)
        self.params.append(submit.params)
        prompt = bytes(token for token in submit.prompt_ids.tolist() if token < 256).decode(
            "utf-8", "replace"
        )
        text = prompt.rpartition("say:")[2] if "say:" in prompt else TEXT
        tokens = (
            [*text.encode(), EOS] if not submit.params.ignore_eos else list(text.encode()) * 4096
        )
        now = time.monotonic()
        self.waiting[submit.id] = Running(
            submit,
            tokens,
            fail_at=2 if "fail:nan" in prompt else -1,
            hang="hang:" in prompt,
            deadline=now + submit.timeout if submit.timeout else 0.0,
        )

    def _step(self) -> StepOutput:
        output = StepOutput()
        while self.waiting and len(self.running) < self.rows:
            id, sequence = next(iter(self.waiting.items()))
            self.running[id] = self.waiting.pop(id)
            cached = (
                len(sequence.submit.prompt_ids) // 16 * 16 if sequence.submit.salt == "warm" else 0
            )
            sequence.admitted_at = time.monotonic()
            output.admitted.append(Admitted(id, sequence.admitted_at - sequence.queued_at, cached))
            self.stats.prefix_queries += 1
            self.stats.prefix_hits += cached > 0
            self.stats.prefix_query_tokens += len(sequence.submit.prompt_ids)
            self.stats.prefix_hit_tokens += cached
        for id, sequence in list(self.running.items()):
            self._advance(id, sequence, output)
        self.stats.steps += 1
        return output

    def _advance(self, id: int, sequence: Running, output: StepOutput) -> None:
        params = sequence.submit.params
        if sequence.deadline and time.monotonic() > sequence.deadline:
            output.finished.append(self._end(id, Finished(id, "timeout")))
            return
        if sequence.hang or self._held():
            return
        if sequence.at == sequence.fail_at:
            error = "NaN in the logits, see /var/log/engine.log at 0x7f12345678"
            output.finished.append(
                self._end(id, Finished(id, "error", error=error, error_code="nan_logits"))
            )
            return
        token = sequence.tokens[sequence.at]
        if sequence.at == 0 and params.prompt_logprobs is not None:
            output.prompt_logprobs.append(
                (id, scores(sequence.submit.prompt_ids[1:].tolist(), params.prompt_logprobs))
            )
        if sequence.at == 0:
            output.prefilled.append((id, time.monotonic() - sequence.admitted_at))
        sequence.at += 1
        output.ids.append(id)
        output.tokens.append(token)
        if params.logprobs is not None:
            output.logprobs.append((id, scores([token], params.logprobs)))
        self.stats.output_tokens += 1
        if token in sequence.submit.stop_ids:
            output.finished.append(self._end(id, Finished(id, "stop", stop_id=token)))
        elif sequence.at == params.max_tokens:
            output.finished.append(self._end(id, Finished(id, "length")))

    def _end(self, id: int, finished: Finished) -> Finished:
        self.running.pop(id, None)
        self.waiting.pop(id, None)
        self.stats.finished += 1
        return finished

    def _load(self) -> Stats:
        used = sum(len(one.submit.prompt_ids) // 16 + 1 for one in self.running.values())
        self.stats.running, self.stats.waiting = len(self.running), len(self.waiting)
        self.stats.pages_free = self.stats.pages_total - used
        return self.stats


def scores(tokens: list[int], top: int) -> Logprobs:
    """Return invented log-probabilities: each token is its own best, then the ids after it."""
    return Logprobs(
        token=[-0.25 - token % 7 for token in tokens],
        top_ids=[[(token + k) % VOCAB for k in range(top)] for token in tokens],
        top=[[-0.25 - token % 7 - k for k in range(top)] for token in tokens],
    )
