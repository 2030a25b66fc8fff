"""Protocols of quantization: storage of linear and expert weights, and their GEMMs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from glowplug.core.facts.decoder_names import MATRICES
from glowplug.core.protocols.weights import WeightTarget

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LinearShape:
    """The shape of a linear layer on this rank, fused or not.

    The layer computes y = x W^T with W [sum(outputs), inputs].

    Attributes:
        name: module path of the layer, e.g. "model.layers.3.self_attn.q_b_proj".
        parts: module paths of the fused parts in the checkpoint; one for a plain layer.
        outputs: number of rows of each part on this rank.
        inputs: number of columns on this rank.
        row_starts: first row of each part in the checkpoint's tensor (tensor-parallel slices); 0
            without sharding.
        col_start: first column in the checkpoint's tensor.
        full: (rows, columns) of each part in the checkpoint.
        bias: True: the parts have biases.
        wide: True: the result may be float32 instead of the activation dtype.
    """

    name: str
    parts: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    row_starts: tuple[int, ...]
    col_start: int
    full: tuple[tuple[int, int], ...]
    bias: bool = False
    wide: bool = False


@dataclass(frozen=True)
class ExpertsShape:
    """The shape of a layer's routed experts on this rank.

    Gate and up projections are fused: w13 [E, 2 * inter, hidden], w2 [E, hidden, inter].

    Attributes:
        prefix: module path of the experts, up to their numbers; the matrices in the checkpoint are
            ``{prefix}.{expert}.{name}.weight`` for the ``names``.
        count: number of experts held on this rank.
        first: number of the first expert held; the rank holds ``first`` to ``first + count``, the
            end excluded.
        hidden: size of the hidden states.
        inter: intermediate size of each expert on this rank.
        inter_start: start of this rank's slice of the intermediate size.
        inter_full: intermediate size of each expert in the checkpoint.
        total: number of experts in the layer.
        fused_shared: number of further experts of the same intermediate size behind the held ones
            (shared-expert fusion). Together they are the shared expert, each a slice of its
            intermediate size, in order.
        shared_prefix: module path of the shared expert.
        parts: True: results may be ``Parts``.
        held: numbers of the experts held, in order, if they are not ``first`` to ``first + count``.
            Only schemes that offer ``places_experts`` get this list.
        names: names of the gate, up and down projections in the checkpoint.
    """

    prefix: str
    count: int
    first: int
    hidden: int
    inter: int
    inter_start: int
    inter_full: int
    total: int
    fused_shared: int = 0
    shared_prefix: str = ""
    parts: bool = False
    held: tuple[int, ...] | None = None
    names: tuple[str, str, str] = MATRICES

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the experts held on this rank, in order."""
        return range(self.first, self.first + self.count) if self.held is None else self.held


class Quantized(NamedTuple):
    """Activations in a linear layer's ``input_format``.

    Attributes:
        values: quantised values.
        scales: their scales; None for formats whose values are already scaled.
    """

    values: Tensor
    scales: Tensor | None = None


class Parts(NamedTuple):
    """A [T, hidden] result whose terms have still to be summed.

    For each token, the terms are the results of its K experts. They may also belong to another sum
    than that of experts; then all ids are 0.

    Attributes:
        rows: terms with their weights applied, [T * K, hidden], in the activation dtype or float32.
            Rows of negative ids are not part of the sum and may hold anything.
        ids: the terms' expert ids, [T, K]; the first dimension may be strided.
    """

    rows: Tensor
    ids: Tensor


class PartialSum(NamedTuple):
    """A [T, hidden] term of a sum over the ranks of a mesh axis, for a norm that computes the sum.

    Attributes:
        terms: this rank's term, [T, hidden] or ``Parts`` of it.
        axis: the mesh axis.
    """

    terms: Tensor | Parts
    axis: str


class LinearMethod(Protocol):
    """The weight of one linear layer and its GEMM; the method holds its own tensors.

    A method may also have ``apply_parts(x) -> Tensor | Parts``: a variant of ``apply`` that may
    leave its terms to be summed by the following norm.

    Attributes:
        input_format: format in which the preceding operation may pass activations as ``Quantized``:
            "plain" (none), "fp8_group128", "int8_token", or "fp8_group128_values" (E4M3 values
            times their scale, in the activation dtype).
    """

    input_format: str

    def targets(self) -> Iterator[WeightTarget]:
        """Yield a target for every checkpoint tensor of the layer."""
        ...

    def finalize(self) -> None:
        """Fuse, transpose or dequantise the loaded tensors into the form that ``apply`` uses."""
        ...

    def apply(self, x: Tensor | Quantized) -> Tensor:
        """Multiply by the weight and add the bias.

        Args:
            x: activations [T, inputs], or the same as ``Quantized`` in ``input_format``.

        Returns:
            [T, sum(outputs)] in the activation dtype; with ``LinearShape.wide`` perhaps in float32.
        """
        ...

    def dense(self) -> Tensor:
        """Return the weight as [sum(outputs), inputs] in the compute dtype.

        MLA absorption needs the dense weight of the latent's up-projection. The method is called
        after ``finalize``.
        """
        ...


class StartedExperts(Protocol):
    """The experts of one layer, whose first kernel was launched before the gate.

    This kernel computes the part that needs no routing; it waits on the device until ``ready`` is
    set. The caller next runs the gate, which sets ``ready``, and then calls ``finish``.

    Attributes:
        ready: ready flag, int32; the gate sets its first element to 1 as soon as x may be read.
    """

    @property
    def ready(self) -> Tensor:
        """The ready flag, int32; the gate sets its first element to 1 as soon as x may be read."""
        ...

    def finish(self, ids: Tensor, weights: Tensor) -> Tensor | Parts:
        """Return the result of ``ExpertsMethod.apply`` for the x that was passed to ``start``.

        Args:
            ids: see ``ExpertsMethod.apply``.
            weights: see ``ExpertsMethod.apply``.
        """
        ...


class ExpertsMethod(Protocol):
    """The weights of one layer's routed experts and their GEMMs.

    A method may also have ``start(x, width) -> StartedExperts | None`` with x [T, hidden], for
    gates that choose ``width`` ids per token, including the fused shared expert's. It returns None
    if starting before the gate gains nothing. It is called only if the gate sets a ready flag
    (``RouteSettingReady``).

    Attributes:
        input_format: see ``LinearMethod.input_format``.
    """

    input_format: str

    def targets(self) -> Iterator[WeightTarget]:
        """Yield a target for every checkpoint tensor of the experts."""
        ...

    def finalize(self) -> None:
        """Convert the loaded tensors into the form that ``apply`` uses."""
        ...

    def apply(self, x: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Tensor | Parts:
        """Run the chosen experts and sum their weighted results for each token.

        Args:
            x: activations [T, hidden], or the same as ``Quantized`` in ``input_format``.
            ids: expert numbers on this rank [T, K], -1 for experts of other ranks; int64, or int32
                if ``Ops.route`` chose them.
            weights: weights of the experts, float32 [T, K].

        Returns:
            [T, hidden]; or ``Parts`` if ``ExpertsShape.parts`` is set.
        """
        ...


class QuantizationScheme(Protocol):
    """A factory for the methods of the modules that it covers.

    Attributes:
        block: ranks split dimensions only at multiples of this number.
        fused_shared: True: the scheme's expert methods support ``ExpertsShape.fused_shared``.
    """

    block: int
    fused_shared: bool

    def linear(self, shape: LinearShape) -> LinearMethod | None:
        """Return the method of a linear layer, without loaded weights.

        None hands the layer back to the unquantized scheme, for example because this rank's slice
        is not a whole number of groups.
        """
        ...

    def experts(self, shape: ExpertsShape) -> ExpertsMethod | None:
        """Return the method of a layer's routed experts; None hands them back, as in ``linear``."""
        ...

    def covers(self, module: str, rows: int, columns: int) -> bool:
        """Return whether the scheme quantizes a module; other modules use the unquantized scheme.

        Args:
            module: module path.
            rows: rows of the weight in the checkpoint, before ranks split it.
            columns: columns of that weight.
        """
        ...
