"""NextN: chain verification against its reference, the draft's batches against their rule,
refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from glowplug.core.errors import PlanRefused
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.draft_shape import DraftShape
from glowplug.core.plugin.offers import Mode
from glowplug.core.protocols import Limits, Worker
from glowplug.core.speculation.verify import (
    accept_chain,
    accept_chain_reference,
    chain_before,
    verify,
)
from glowplug.core.step.batch import PREVIOUS_HIDDEN, Accepted, Batch, StepShape
from glowplug.core.step.graph_pieces import DraftExtend
from glowplug.core.step.to_device import kv_slots_at
from glowplug.core.testing.harness.plans import bare_plan
from glowplug.core.testing.suites.speculative import (
    HIDDEN,
    VOCAB,
    Greedy,
    SpeculativeSuite,
    likely,
    step,
)
from glowplug.plugins.speculative.nextn import NextNOptions
from glowplug.plugins.speculative.nextn_runtime import NextN
from glowplug.plugins.speculative.shared.drafting import (
    draft_positions,
    newest_tokens,
    next_draft_batch,
    uncached_tokens,
)
from tests.support.tiny import write_config

PAGE = 4


class Draft:
    """A draft model (with its family and its attention) that records its passes."""

    def __init__(self) -> None:
        self.passes: list[Batch] = []
        self.fills: list[dict[str, Tensor]] = []
        self.planned: list[Batch] = []

    def build_nextn(self, context: Any, target: Any, number: int = 0) -> Draft:
        return self

    def plan_step(self, batch: Batch, graph: object | None) -> None:
        self.planned.append(batch)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        assert self.planned[-1] is batch, "attention did not plan the pass"
        assert batch.first_key == 1 and len(input_ids) == len(positions) == batch.num_tokens == len(
            batch.kv_slots
        )
        assert batch.extra[PREVIOUS_HIDDEN].shape == (batch.num_tokens, HIDDEN)
        self.passes.append(batch)
        return torch.nn.functional.one_hot(input_ids % HIDDEN, HIDDEN).float()

    def fill(
        self, input_ids: Tensor, positions: Tensor, kv_slots: Tensor, previous: Tensor
    ) -> None:
        assert len(input_ids) == len(positions) == len(kv_slots) == len(previous)
        self.fills.append(
            {
                "input_ids": input_ids,
                "positions": positions,
                "kv_slots": kv_slots,
                "previous": previous,
            }
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.pad(hidden, (0, VOCAB - HIDDEN))


def make(limits: Limits, steps: int, **mesh: int) -> tuple[NextN, Draft]:
    chain = DraftShape.chain(steps)
    plan = bare_plan(page_size=PAGE, width=chain.tokens, draft_shape=chain)
    object.__setattr__(plan, "mesh", mesh)
    algorithm, draft = NextN(NextNOptions(steps=steps), plan, Worker(dtype=torch.float32)), Draft()
    context: Any = SimpleNamespace(attention=draft, draft_extend=DraftExtend(), collectives=None)
    assert algorithm.draft_model(context, draft, draft) is draft  # type: ignore[arg-type, comparison-overlap]
    algorithm.reserve(limits)
    return algorithm, draft


LIMITS = Limits(rows=8, context=99, num_pages=33, width=2, vocab=VOCAB, hidden=HIDDEN)


class TestOneStep(SpeculativeSuite):
    def make(self, limits: Limits) -> NextN:
        return make(limits, 1)[0]


class TestThreeSteps(SpeculativeSuite):
    def make(self, limits: Limits) -> NextN:
        return make(limits, 3)[0]


def test_acceptance_is_the_references() -> None:
    generator = torch.Generator().manual_seed(1)
    for width in range(2, 7):
        drawn = torch.randint(0, 2, (50, width), generator=generator)
        drafts = torch.randint(0, 2, (50, width - 1), generator=generator)
        counts = accept_chain(drawn, drafts)
        assert counts.dtype == torch.int32
        assert counts.tolist() == accept_chain_reference(drawn.tolist(), drafts.tolist())
        assert counts.min() == 1 and counts.max() == width


def test_the_state_before_a_position() -> None:
    assert chain_before(torch.tensor([[9, 1, 2], [8, 3, 4]])).tolist() == [
        [-1, -1],
        [1, -1],
        [1, 2],
        [-1, -1],
        [3, -1],
        [3, 4],
    ]


def test_bad_logits_count_only_where_the_row_got_to() -> None:
    """NaN after a refused draft has no effect; before or at it, it ends the row."""
    for place, bad in ((0, True), (1, True), (2, False)):
        batch = step([0, 1], 2, [3, 3], [8, 8], [True, True])
        batch.input_ids = torch.tensor([1, 5, 9, 1, 5, 9])
        logits = likely([5, 6, 7, 5, 6, 7])  # the first draft is right, the second is not
        logits[place] = float("nan")
        if place == 0:
            batch.input_ids[1] = 0  # argmax of NaN: the first one
        made = verify(logits, batch, 3, None, Greedy())
        assert made.bad.tolist() == [bad, False]


def shifted(
    algorithm: NextN,
    rows: list[int],
    queries: list[int],
    kv_lens: list[int],
    resumed: list[bool],
    decodes: int = 0,
) -> Batch:
    batch = step(rows, decodes, queries, kv_lens, [True] * len(rows))
    batch.pages = np.arange(1, 1 + 8 * len(rows), dtype=np.int32).reshape(len(rows), 8)
    batch.page_table = torch.from_numpy(batch.pages)
    owner = np.repeat(np.arange(len(rows)), batch.query_lens)
    at = batch.positions.numpy()
    batch.kv_slots = torch.from_numpy(
        batch.pages[owner, at // PAGE].astype(np.int64) * PAGE + at % PAGE
    )
    count = sum(queries[decodes:])
    batch.prompt_ids = np.arange(10, 10 + count, dtype=np.int32)
    batch.next_ids = np.array([5] * (len(rows) - decodes), np.int32)
    batch.resumed = np.array(resumed[decodes:], np.bool_)
    return batch


def test_uncached_tokens_are_paired_with_the_state_before_them() -> None:
    """Fresh, continued and resumed chunks run beside a decoding row: position p holds (hidden of p
    - 1, token p).
    """
    algorithm, _ = make(LIMITS, 1)
    batch = shifted(
        algorithm,
        [0, 1, 2, 3],
        [2, 3, 4, 2],
        [7, 3, 12, 10],
        [False, False, True, False],
        decodes=1,
    )
    batch.samples = np.array([True, True, False, True])
    tokens = torch.tensor([[20, 21], [30, 0], [0, 0], [32, 0]])
    counts = torch.tensor([2, 1, 0, 1], dtype=torch.int32)
    accepted = Accepted(tokens, counts, torch.zeros(4))
    made = uncached_tokens(batch, accepted, 1, PAGE)
    assert made.positions.tolist() == [6, 1, 2, 8, 9, 10, 11, 12, 9]
    assert made.input_ids.tolist() == [20, 11, 12, 13, 14, 15, 16, 5, 18]
    # the resumed row begins with the state of its page's last token, which is stored after the
    # step's eleven
    assert made.source.tolist() == [0, 2, 3, 11, 5, 6, 7, 8, 9]
    assert made.pages is not None and made.pages.tolist() == [batch.pages[2, 1]]
    row = torch.tensor([0, 1, 1, 2, 2, 2, 2, 2, 3])
    assert (
        made.kv_slots.tolist()
        == kv_slots_at(batch.page_table[row], made.positions[:, None], PAGE).view(-1).tolist()
    )
    newest = newest_tokens(batch, accepted, torch.tensor([1, 3]))
    assert newest.places is not None and newest.places.tolist() == [0, 1, 3]
    assert newest.tokens.tolist() == [21, 30, 32] and newest.lengths.tolist() == [7, 3, 10]
    assert newest.source.tolist() == [1, 4, 10], "the last accepted token's, or the prompt's last"


def test_every_token_but_the_newest_is_stored_once() -> None:
    """Prompts run chunk by chunk and with a cached prefix of any number of pages: slots 1 to the
    prompt's last token are stored.
    """
    rng = np.random.default_rng(0)
    for _ in range(50):
        length = int(rng.integers(2, 30))
        cached = PAGE * int(rng.integers(0, (length - 1) // PAGE + 1))
        algorithm, draft = make(LIMITS, 1)
        at, resumed = cached, cached > 0
        while at < length:
            chunk = int(rng.integers(1, length - at + 1))
            batch = shifted(algorithm, [1], [chunk], [at + chunk], [resumed])
            batch.samples = np.array([at + chunk == length])
            algorithm.accept(
                likely([3] if at + chunk == length else []),
                torch.zeros(chunk, HIDDEN),
                batch,
                Greedy(),
            )
            at, resumed = at + chunk, False
        stored = [place for fill in draft.fills for place in fill["positions"].tolist()]
        assert stored == list(range(max(1, cached), length)), (length, cached)


def test_drafts_stand_behind_what_was_accepted() -> None:
    algorithm, _ = make(LIMITS, 3)
    batch = shifted(algorithm, [4, 6], [4, 4], [14, 30], [False, False], decodes=2)
    made = next_draft_batch(
        batch, 3, draft_positions(batch, 3, torch.tensor([11, 29], dtype=torch.int32), PAGE), 4
    )
    assert made.positions.tolist() == [13, 31] and made.kv_lens_device.tolist() == [14, 32]
    assert made.kv_lens.tolist() == [13, 29] and made.mode is Mode.DRAFT_DECODE
    assert made.kv_slots.tolist() == [batch.pages[0, 3] * PAGE + 1, batch.pages[1, 7] * PAGE + 3]


def test_positions_without_a_page_go_to_scratch() -> None:
    table = torch.tensor([[3, 0], [5, 7]], dtype=torch.int32)
    assert kv_slots_at(table, torch.tensor([[3, 4], [7, 8]]), PAGE).tolist() == [[15, 0], [31, 0]]


def test_states_of_page_ends_are_kept_for_resumed_rows() -> None:
    algorithm, draft = make(LIMITS, 1)
    first = shifted(algorithm, [0], [6], [6], [False])
    hidden = torch.arange(6.0)[:, None].expand(6, HIDDEN).contiguous()
    algorithm.accept(likely([3]), hidden, first, Greedy())
    second = shifted(algorithm, [1], [3], [7], [True])
    second.pages[0, 0] = first.pages[0, 0]
    algorithm.accept(likely([3]), torch.full((3, HIDDEN), 9.0), second, Greedy())
    continued = draft.fills[-1]["previous"][:, 0].tolist()
    assert continued == [3.0, 9.0, 9.0], "the cached page's last token is number 3"


def test_passes_of_a_step() -> None:
    """A step has one pass a drafted token. Ranks skip the passes if no group has a decoding row,
    and run them, of as many tokens as the most decoding rows of a group, if any has.
    """
    for mesh, decodes, wanted in (
        ({}, 2, 0),
        ({"tp": 2, "dp": 2}, 0, 0),
        ({"tp": 2, "dp": 2}, 2, 3),
    ):
        algorithm, draft = make(LIMITS, 3, **mesh)
        chunk = step([2], 0, [5], [5], [False])
        chunk.agreed = StepShape(Mode.PREFILL, 4, 9, decodes=decodes)
        assert algorithm.draft(chunk).shape == (0, 4)
        algorithm.accept(likely([]), torch.zeros(5, HIDDEN), chunk, Greedy())
        assert len(draft.passes) == wanted and len(draft.fills) == 1
        assert [one.agreed.tokens for one in draft.passes if one.agreed is not None] == [2, 2, 2][
            :wanted
        ]
    draft.passes.clear()
    idle = step([], 0, [1], [1], [])
    for name in ("query_lens", "kv_lens", "rows"):
        setattr(idle, name, np.zeros(0, np.int32))
    idle.input_ids = idle.positions = idle.kv_slots = torch.zeros(0, dtype=torch.int64)
    idle.row_ids, idle.page_table = (
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, 1, dtype=torch.int32),
    )
    idle.kv_lens_device, idle.query_starts = (
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )
    idle.agreed = StepShape(Mode.VERIFY, 4, 16, decodes=4)
    assert algorithm.draft(idle).shape == (0, 4)
    made = algorithm.accept(torch.zeros(0, VOCAB), torch.zeros(0, HIDDEN), idle, Greedy())
    assert made.tokens.shape == (0, 4) and len(draft.passes) == 3 and len(draft.fills) == 2
    assert [one.agreed.tokens for one in draft.passes if one.agreed is not None] == [4, 4, 4]


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"topk": 0}, "speculative.topk", "1 is a chain"),
        ({"steps": 2, "topk": 4, "draft_tokens": 22}, "speculative.draft_tokens", "20 drafts"),
        ({"steps": 2, "topk": 4, "draft_tokens": 3}, "speculative.draft_tokens", "4 drafts"),
        ({"steps": 15, "topk": 5}, "speculative.topk", "a tree mask names 64"),
        ({"steps": 5, "topk": 8, "draft_tokens": 65}, "speculative.draft_tokens", "names 64"),
        ({"draft_tokens": 4}, "speculative.draft_tokens", "draft_tokens is 4"),
        ({"steps": 0}, "speculative.steps", "1 to 15"),
        ({"steps": 16}, "speculative.steps", "1 to 15"),
        ({"steps": -3}, "speculative.steps", "1 to 15"),
    ],
)
def test_knobs_that_do_not_fit_together_are_refused(
    tmp_path: Path, options: dict[str, int], field: str, said: str
) -> None:
    folder = write_config(tmp_path, "v3", num_nextn_predict_layers=1)
    refusals = refused(folder, options)
    assert [(r.field, r.by) for r in refusals] == [(field, "nextn")]
    assert said in refusals[0].reason and refusals[0].fix.startswith(field)


@pytest.mark.parametrize("name", ["v3", "v2", "llama"])
def test_a_model_without_such_a_layer_is_refused(tmp_path: Path, name: str) -> None:
    refusals = refused(write_config(tmp_path, name), {})
    assert any(r.field.startswith("speculative") for r in refusals) and all(r.fix for r in refusals)


def refused(folder: Path, options: dict[str, int]) -> tuple[Any, ...]:
    config = {
        "model": str(folder),
        "weights": {"use": "random"},
        "skip_tokenizer": True,
        "device": "cpu",
    }
    with pytest.raises(PlanRefused) as caught:
        make_plan({**config, "speculative": {"use": "nextn", **options}})
    return caught.value.refusals


class Noting:
    """Pieces of a step that record the calls."""

    def __init__(self, noted: list[tuple[str, object]]) -> None:
        self.noted = noted

    def key(self, name: str) -> object:
        return name

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        self.noted.append(("run", name))
        return work()


@pytest.mark.parametrize("on_device", [False, True])
def test_each_pass_has_run_before_the_next_is_planned(
    monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """Attention may use the same memory for the plan of every pass. If it plans on the device, all
    passes are one piece, with a key for each plan.
    """
    algorithm, draft = make(LIMITS, 3)
    noted: list[tuple[str, object]] = []
    plan_step, forward = draft.plan_step, algorithm._forward

    def planned(batch: Batch, graph: object | None) -> None:
        noted.append(("plan", graph))
        plan_step(batch, graph)

    def passed(*args: Any) -> Any:
        noted.append(("pass", len(args)))
        return forward(*args)

    monkeypatch.setattr(draft, "plan_step", planned)
    monkeypatch.setattr(algorithm, "_forward", passed)
    if on_device:
        asked: list[int] = []
        plans = lambda first_key: asked.append(first_key) or True  # noqa: E731
        monkeypatch.setattr(draft, "plans_on_device", plans, raising=False)
    batch = shifted(algorithm, [0, 1], [4, 4], [7, 11], [False, False], decodes=2)
    batch.pieces = Noting(noted)
    algorithm.draft(batch)
    names = [f"draft {number}" for number in (1, 2, 3)]
    if on_device:
        expected = [("run", "drafts")]
        expected += [step for name in names for step in (("plan", name), ("pass", 3))]
        assert asked == [1], "the draft's cache has no entry for the first position"
    else:
        expected = [("run", "draft places")]
        expected += [
            step for name in names for step in (("plan", name), ("run", name), ("pass", 3))
        ]
    assert noted == expected
