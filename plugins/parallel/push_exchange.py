"""Exchange of tokens with the ranks of their experts through peers' memory.

A token goes only to the ranks that hold one of its experts, quantised if the experts take FP8, and
only these ranks send results back.
"""

from __future__ import annotations

from torch import Tensor

from glowplug.core.protocols import Collectives, ExpertRows, Quantized
from glowplug.core.step.batch import Batch
from glowplug.plugins.parallel.expert_exchange import AllGatherExchange, Layout


class PushExchange(AllGatherExchange):
    """Exchange through the ``ExpertRows`` of the collectives.

    Steps with more rows than these have are exchanged by all-gather, and so are all steps if
    ``expert_rows`` is None or each rank has every token.
    """

    def __init__(
        self,
        layout: Layout,
        collectives: Collectives,
        device: str,
        count_load: bool,
        expert_rows: ExpertRows | None,
    ) -> None:
        super().__init__(layout, collectives, device, count_load)
        self._expert_rows = None if self.stays else expert_rows
        self._within = layout.tp // layout.ep[1]
        #: exchange of the layer that ``combine`` ends; None: all-gather
        self._pushing: ExpertRows | None = None

    def sends_quantized(self, input_format: str, batch: Batch) -> bool:
        """Return whether the step's tokens are sent in the experts' input format."""
        rows = self._rows_for(batch)
        if rows is None:
            return super().sends_quantized(input_format, batch)
        return input_format in rows.formats

    def _rows_for(self, batch: Batch) -> ExpertRows | None:
        """Return the exchange whose buffers the step's rows fit; None: all-gather.

        The result is equal on all ranks.
        """
        found = self._expert_rows
        most = batch.num_tokens if batch.agreed is None else batch.agreed.tokens
        return found if found is not None and self._own(0, most)[0] <= found.rows else None

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = self._rows_for(batch)
        if rows is None:
            return super().dispatch(x, ids, weights, batch)
        part = self._begin(rows, ids, batch)
        found, self._arrived, weights = rows.dispatch(
            x[part], self._ids, weights[part], self._rows, self._layout.held, self._within
        )
        assert isinstance(found, Tensor), "plain tokens stay plain"
        return found, self._arrived, weights

    def dispatch_quantized(
        self, x: Quantized, ids: Tensor, weights: Tensor, batch: Batch
    ) -> tuple[Quantized, Tensor, Tensor]:
        """Send tokens in the experts' input format; see ``dispatch``."""
        rows = self._rows_for(batch)
        if rows is None:
            return super().dispatch_quantized(x, ids, weights, batch)
        assert x.scales is not None, "E4M3 values have scales"
        part = self._begin(rows, ids, batch)
        own = Quantized(x.values[part], x.scales[part])
        found, self._arrived, weights = rows.dispatch(
            own, self._ids, weights[part], self._rows, self._layout.held, self._within
        )
        assert isinstance(found, Quantized), "quantised tokens stay quantised"
        return found, self._arrived, weights

    def _begin(self, rows: ExpertRows, ids: Tensor, batch: Batch) -> slice:
        """Start the exchange of a step, and return the slice of tokens that this rank sends."""
        self._pushing = rows
        self._tokens = len(ids)
        part = self._slice(len(ids), batch)
        self._ids = self._chosen(ids, batch, part)[part]
        return part

    def combine(self, y: Tensor, partial: Tensor | None = None) -> Tensor:
        if self._pushing is None:
            return super().combine(y, partial)
        rows = self._pushing
        self._pushing = None
        alone = self._layout.group[1] == 1
        own = rows.combine(
            y,
            self._arrived,
            self._ids,
            self._layout.held,
            self._within,
            beside=partial if alone else None,
            exact=not alone,
        )
        return own[: self._tokens] if alone else self._finish(own, self._tokens, partial, y.dtype)
