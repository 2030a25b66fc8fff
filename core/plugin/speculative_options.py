"""Options common to all speculative algorithms, for all checks to read. No torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from glowplug.core.facts.model_facts import ModelFacts
from glowplug.core.plugin.component import CheckContext, Options
from glowplug.core.plugin.draft_shape import DraftShape


class SpeculativeOptions(Options):
    """Options common to all speculative algorithms."""

    adaptive: bool = Field(
        True,
        description="choose the size of the drafts anew in each step, from none to the given one, "
        "by the acceptance of the running requests and the measured seconds of a step; false: "
        "always the given size, or none if an algorithm knows that no request has drafts",
    )
    cost_table: str | None = Field(
        None,
        description="file with the seconds of a step for each size of the drafts, written by "
        "glowplug tune speculative; None: measured at start-up",
    )
    simulate_accept_rates: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = Field(
        None,
        min_length=1,
        description="benchmarks only, the answers are meaningless: probability that the draft at "
        "each position is accepted if those before it are, instead of the target's choice; it "
        "needs benchmark = true",
    )

    def width(self) -> int:
        """Return the number of tokens per decoding row in a step: 1 plus the drafted tokens.

        Algorithms that draft override this method.
        """
        return 1

    def draft_shape(self) -> DraftShape:
        """Return the size of the drafts of a round; by default a chain of ``width() - 1`` drafts.

        Algorithms that draft trees override this method. If attention supports chains only, the
        plan replaces a tree by a chain of as many steps (``Sizes.draft_shape``).
        """
        return DraftShape.chain(self.width() - 1)

    def lookahead(self) -> int:
        """Return the number of positions after a step's tokens that the draft model writes to.

        The draft model writes to its KV cache, so rows need cache pages for these positions too.
        """
        return self.draft_shape().lookahead

    def draft_layers(self, draft: ModelFacts) -> int | None:
        """Return the number of the draft's layers in the target's KV pool.

        They follow the target's layers, and the weights of as many next-token layers are counted.

        Args:
            draft: facts of the draft's folder; without one, of the model.

        Returns:
            The number; None (the default) for one if the algorithm offers ``nextn_layer`` or
            ``eagle_head``, otherwise for none.
        """
        return None

    def features(self, draft: ModelFacts) -> int:
        """Return the number of chosen layers whose hidden states the draft reads.

        The states follow the final one of each token if ``draft_model`` calls ``keep_features`` of
        the target (``KeepsFeatures``). By default the number is that of an EAGLE-3 head's folder.

        Args:
            draft: facts of the draft's folder; without one, of the model.
        """
        return draft.sizes.features

    def head_rows(self) -> int:
        """Return the number of rows of the head that drafts keep a copy of."""
        return 0

    def draft_folder(self) -> str | None:
        """Return the draft model's own folder; None if it has none, or without a draft."""
        return None

    def draft_for(self, model: str) -> str | None:
        """Return the folder of the draft for the model at the path ``model``; None without one.

        Algorithms override this method if they have a draft of their own for some models.
        """
        return self.draft_folder()

    def without_effect(self, context: CheckContext) -> dict[str, str]:
        if self.width() == 1:
            return dict.fromkeys(("adaptive", "cost_table"), "nothing is drafted")
        return {} if self.adaptive else {"cost_table": "speculative.adaptive is false"}
