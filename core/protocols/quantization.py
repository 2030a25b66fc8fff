"""Quantization: how linear layers and experts keep their weights and multiply."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from glowplug.core.protocols.weights import WeightTarget

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LinearShape:
    """A (possibly fused) linear layer on this rank: y = x W^T, W [sum(outputs), inputs].

    Attributes:
        name: module path of the layer, e.g. "model.layers.3.self_attn.q_b_proj".
        parts: checkpoint names of the fused parts (module paths), one for a plain layer.
        outputs: rows of each part on this rank.
        inputs: columns on this rank.
        row_starts: first row of each part in the checkpoint's tensor (tensor parallel slices), 0
            without sharding.
        col_start: first column in the checkpoint's tensor.
        full: (rows, columns) of each part in the checkpoint.
        bias: the parts carry biases.
        wide: float32 results are as welcome as those in the activation dtype.
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
    """Routed experts on this rank. Gate and up are fused: w13 [E, 2*inter, hidden], w2 [E, hidden,
    inter].

    ``prefix`` is the module path up to "experts"; checkpoint names are
    ``{prefix}.{e}.gate_proj.weight`` and so on. ``first``..``first + count`` are the experts held
    here; ``inter_start``/``inter`` the slice of their width.
    ``shared``: so many further experts of the same width follow them, which together are the shared
    expert ``shared_prefix`` (the slices of its width, in order).
    ``parts``: results may be ``Parts``.
    """

    prefix: str
    count: int
    first: int
    hidden: int
    inter: int
    inter_start: int
    inter_full: int
    total: int
    shared: int = 0
    shared_prefix: str = ""
    parts: bool = False


class Quantized(NamedTuple):
    """Activations in a linear's ``input_format``. ``scales`` is None where the format keeps values
    already scaled.
    """

    values: Tensor
    scales: Tensor | None = None


class Parts(NamedTuple):
    """[T, hidden] that is still to be added up: rows [T * K, hidden], weighted already, and their
    experts' ids [T, K], or rows of another sum, all with ids of 0.

    The rows of negative ids do not count, and hold anything. Rows are of the activation dtype or
    float32; ids may be strided in the first dimension.
    """

    rows: Tensor
    ids: Tensor


class LinearMethod(Protocol):
    """How one linear layer keeps its weight and multiplies. Holds its own tensors.

    A method may have ``apply_parts(x) -> Tensor | Parts`` too: as ``apply``, for a norm that adds
    parts up.
    """

    #: what the producer may hand over as ``Quantized``: "plain" (nothing), "fp8_group128",
    #: "int8_token", "fp8_group128_values" (E4M3 values times their scale, in the activation dtype)
    input_format: str

    def targets(self) -> Iterator[WeightTarget]: ...

    def finalize(self) -> None:
        """After loading: fuse, transpose, dequantise into the form ``apply`` uses."""
        ...

    def apply(self, x: Tensor | Quantized) -> Tensor:
        """x [T, inputs] -> [T, sum(outputs)] in the activation dtype (or ``LinearShape.wide``),
        bias added.
        """
        ...

    def dense(self) -> Tensor:
        """The weight as [sum(outputs), inputs] in the compute dtype (MLA absorption needs kv_b's).
        After finalize.
        """
        ...


class StartedExperts(Protocol):
    """A layer's experts once x is there. The gate is called next, with ``begun`` (int32), whose
    first number it sets to 1 as soon as it may read x; then ``finish``."""

    @property
    def begun(self) -> Tensor: ...

    def finish(self, ids: Tensor, weights: Tensor) -> Tensor | Parts:
        """As ``ExpertsMethod.apply`` of the same x."""
        ...


class ExpertsMethod(Protocol):
    """How the routed experts of one layer keep their weights and multiply.

    A method may have ``start(x [T, hidden], width) -> StartedExperts | None`` too, for gates that
    choose ``width`` ids a token, shared experts' among them; None: nothing is gained by beginning
    before the gate has chosen. It is called only where the gate signals (``SignallingRoute``).
    """

    input_format: str  #: as of ``LinearMethod``

    def targets(self) -> Iterator[WeightTarget]: ...

    def finalize(self) -> None: ...

    def apply(self, x: Tensor | Quantized, ids: Tensor, weights: Tensor) -> Tensor | Parts:
        """x [T, hidden], ids [T, K] (of experts held, -1: not here), weights float32 [T, K] -> [T,
        hidden].

        ids are int64, or int32 where ``Ops.route`` chose them. ``Parts`` only where
        ``ExpertsShape.parts`` allows it.
        """
        ...


class QuantizationScheme(Protocol):
    """Makes the methods of the modules it covers.

    Attributes:
        block: ranks split dimensions only at multiples of it.
        fuses_shared: its experts' methods take ``ExpertsShape.shared``.
    """

    block: int
    fuses_shared: bool

    def linear(self, shape: LinearShape) -> LinearMethod: ...

    def experts(self, shape: ExpertsShape) -> ExpertsMethod: ...

    def covers(self, module: str) -> bool:
        """Is this module quantized? If not, the model uses the unquantized scheme for it."""
        ...
