"""Conformance suite of the ``graphs`` slot: the tokens of eager steps, with and without drafts.

    class TestMine(GraphSuite):
        graphs = {"use": "mine"}

        def config(self):
            return {"model": FOLDER, "weights": {"use": "random"}, "device": "cuda"}

The component is found as one of an installed distribution, or in the plugins that ``plugins``
returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glowplug.core.plugin.registry import PluginSet
from glowplug.core.step.messages import Abort, Submit
from glowplug.core.testing.harness.drive import Collected
from glowplug.core.testing.harness.ranks import RankSet, rank_plan, submit

ABORTED = 2  #: the request that is aborted while steps are in flight
PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"presence_penalty": 0.5},
    {"temperature": 0.8, "logprobs": 2},
)


class GraphSuite:
    """Tests that every graph runner must pass.

    Attributes:
        graphs: options of the runner under test, with its ``use``.
        speculative: options of drafts for the second run; None: no drafts.
    """

    graphs: Mapping[str, Any]
    speculative: Mapping[str, Any] | None = None

    def config(self) -> dict[str, Any]:
        """Return the configuration of a small engine without graphs."""
        raise NotImplementedError

    def plugins(self) -> PluginSet | None:
        """Return the plugins; None: the built-ins and those of installed distributions."""
        return None

    # ---- driving ---------------------------------------------------------------------------------

    def ranks(self, **sections: Any) -> RankSet:
        """Return the ranks of the configuration with these sections."""
        plugins = self.plugins()
        return RankSet(rank_plan({**self.config(), **sections}, plugins), plugins)

    def messages(self) -> list[Submit]:
        """Return requests of different lengths and parameters, more than rows of a graph."""
        found = []
        for id in range(7):
            prompt = [3 + (id * 7 + at) % 90 for at in range(1 + 5 * id)]
            found.append(submit(id, prompt, 4 + 3 * id, **PARAMETERS[id % len(PARAMETERS)]))
        return found

    def answers(self, ranks: RankSet) -> dict[int, Collected]:
        """Run all requests, of which one is aborted, and return the results of the others."""
        messages = self.messages()
        ranks.turn(messages[:4])
        for _ in range(3):
            ranks.turn()
        ranks.turn([*messages[4:], Abort([ABORTED])])
        collected = ranks.run()
        ranks.check_idle()
        return {id: one for id, one in collected.items() if id != ABORTED}

    def check_tokens(self, **sections: Any) -> None:
        """Compare the results with graphs with those of eager steps."""
        with self.ranks(graphs={"use": "eager"}, **sections) as ranks:
            eager = self.answers(ranks)
        with self.ranks(graphs=dict(self.graphs), **sections) as ranks:
            replayed = self.answers(ranks)
            again = self.answers(ranks)
        for id, one in eager.items():
            assert replayed[id].tokens == one.tokens, f"request {id} has other tokens"
            assert again[id].tokens == one.tokens, f"request {id} has other tokens when repeated"
            assert len(replayed[id].logprobs) == len(one.logprobs)

    @staticmethod
    def noted(graphs: Any) -> list[tuple[bool, int, bool]]:
        """Return a list that grows with every step.

        Its entries are (whether all rows decode, number of rows, whether the step has a graph).
        """
        found: list[tuple[bool, int, bool]] = []
        graph_for = graphs.graph_for

        def graph_of(batch: Any) -> object | None:
            graph: object | None = graph_for(batch)
            decodes = batch.num_decodes == batch.num_rows > 0
            found.append((decodes, batch.num_rows, graph is not None))
            return graph

        graphs.graph_for = graph_of
        return found

    # ---- tests -----------------------------------------------------------------------------------

    def test_tokens_are_those_of_eager_steps(self) -> None:
        self.check_tokens()

    def test_tokens_with_drafts_are_those_of_eager_steps(self) -> None:
        if self.speculative is not None:
            self.check_tokens(speculative=dict(self.speculative))

    def test_steps_of_the_stated_shapes_are_replayed(self) -> None:
        """A graph exists for decode steps of up to the largest stated number of rows."""
        with self.ranks(graphs=dict(self.graphs)) as ranks:
            runner = ranks.engines[0].runner
            graphs = runner.graphs
            shapes = graphs.shapes(ranks.plan)
            assert shapes, "the runner states no step to capture"
            assert len(set(shapes)) == len(shapes), "a shape is stated twice"
            most = max(rows for _, rows, width in shapes)
            found = self.noted(graphs)
            ranks.run([submit(1, [5, 6, 7], 6), submit(2, [9, 8], 6)])
        replayed = [graph for decodes, rows, graph in found if decodes and rows <= most]
        assert replayed and all(replayed), "a decode step was not replayed"
        assert not any(graph for decodes, _, graph in found if not decodes), "a prompt was replayed"

    def test_it_closes_twice(self) -> None:
        with self.ranks(graphs=dict(self.graphs)) as ranks:
            ranks.run([submit(1, [5, 6, 7], 3)])
            graphs = ranks.engines[0].runner.graphs
        graphs.close()
