"""Runtime of the ``random`` weight source: each tensor is a function of (seed, name, shape).

A rank draws the numbers of its slices only.

Scales keep hidden states and logits near one and spread routing over the experts; zero or constant
weights would route every token to the same experts and hide most mistakes. Numbers are generated on
the device that needs them and are bit-identical on every device: integers hashed from (key,
position), scaled once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from glowplug.core.facts.model_facts import ModelFacts, TensorFact
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.protocols import WeightTarget, Worker
from glowplug.kernels.formats.fp8_block import FP8_BLOCK
from glowplug.plugins.weights.cut import Cut
from glowplug.plugins.weights.random import RandomOptions

FP8_SPREAD = 96.0  #: standard deviation of FP8 codes; the maximum of 448 is 4.7 deviations
#: elements generated at a time: few enough for the CPU's cache, and to take little GPU memory
PIECE_NUMBERS = {"cpu": 1 << 17, "cuda": 1 << 26}
INT8_SPREAD = 36.0  #: standard deviation of int8 codes; the maximum of 127 is 3.5 deviations
INT4_SPREAD = 85**0.5 / 2  #: standard deviation of four random bits
SUM_DEVIATION = (2**32 / 3) ** 0.5  #: standard deviation of a sum of four 16-bit numbers


class RandomSource:
    """``WeightSource`` of random tensors in the dtypes of a published checkpoint."""

    def __init__(self, options: RandomOptions, plan: EnginePlan, worker: Worker) -> None:
        self._seed = plan.seed if options.seed is None else options.seed
        self._device = torch.device(worker.device)
        self._dtype = torch.float32
        self._tied = False
        self._layers = 1
        self._facts: ModelFacts | None = None
        self._block = (FP8_BLOCK, FP8_BLOCK)

    def open(self, facts: ModelFacts) -> None:
        dtype = getattr(torch, facts.dtype, None)
        self._dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
        self._tied = bool(facts.config.get("tie_word_embeddings"))
        self._layers = max(1, facts.num_layers)
        self._facts = facts
        self._block = facts.quant_block or self._block

    def entries(self) -> Mapping[str, TensorFact]:
        return {}

    def read(self, target: WeightTarget) -> Tensor:
        return self._on(torch.device("cpu"), target)

    def stream(self, targets: Sequence[WeightTarget]) -> Iterator[tuple[WeightTarget, Tensor]]:
        for target in targets:
            yield (
                target,
                self.read(target) if self._device.type == "cpu" else self._on(self._device, target),
            )

    def close(self) -> None:
        pass

    def _on(self, device: torch.device, target: WeightTarget) -> Tensor:
        """Return the target's slice of its tensor; numbers outside the slice are not drawn."""
        name, shape, dtype = target.name, tuple(target.shape), target.dtype
        cut = Cut.of(shape, target.index)
        if dtype == "int32":
            return self._words(name, cut, device)
        return self._scaled(name, shape, dtype, bell(self._key(name), cut, device))

    def _scaled(
        self, name: str, shape: tuple[int, ...], dtype: str | None, noise: Tensor
    ) -> Tensor:
        """Return a slice of tensor ``name`` in its dtype, made of ``noise``, in whose memory.

        Args:
            name: name of the tensor.
            shape: shape of the whole tensor.
            dtype: torch dtype name; None: the model's.
            noise: numbers of mean 0 and deviation 1, float32, in the shape of the slice.
        """
        if name.endswith(".weight_scale_inv"):
            return self._block_scales(name, shape[-1], noise)
        if name.endswith((".weight_scale", ".scales")):
            return self._narrow_scales(name, noise)
        if dtype == "int8":
            return noise.mul_(INT8_SPREAD).round_().clamp_(-127.0, 127.0).to(torch.int8)
        if dtype == "float8_e4m3fn":
            return noise.mul_(FP8_SPREAD).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
        if name.endswith("e_score_correction_bias"):
            return noise.mul_(0.05)
        if len(shape) == 1:
            vector = noise.mul_(0.1).add_(1.0) if name.endswith(".weight") else noise.mul_(0.05)
            return self._cast(vector, dtype)
        return self._cast(noise.mul_(self._deviation(name, shape[-1])), dtype)

    def _block_scales(self, name: str, blocks: int, noise: Tensor) -> Tensor:
        """Return random scales of FP8 blocks; ``blocks``: number of them along the inputs.

        NOTE: codes have the deviation FP8_SPREAD, so these scales give the weight its fan-in scale;
        they differ from block to block on purpose.
        """
        width = self._deviation(name, blocks * self._block[1])
        return noise.mul_(0.1).clamp_(-0.3, 0.3).add_(1.0).mul_(width / FP8_SPREAD)

    def _narrow_scales(self, name: str, noise: Tensor) -> Tensor:
        """Return random weight scales for int8 rows, [N, 1], or for int4 groups, [K / g, N].

        With these scales, weights have approximately the standard deviation inputs ** -0.5. NOTE:
        the number of a weight's inputs is not known here; the hidden size is close enough.
        """
        int4 = name.endswith(".scales")
        hidden = self._facts.hidden_size if self._facts is not None else 1
        width = self._deviation(name, hidden) / (INT4_SPREAD if int4 else INT8_SPREAD)
        made = noise.mul_(0.1).clamp_(-0.3, 0.3).add_(1.0).mul_(width)
        return made.to(torch.float16) if int4 else made

    def _words(self, name: str, cut: Cut, device: torch.device) -> Tensor:
        """Return random packed int4 weights: int32 words of eight 4-bit numbers each.

        If ``name`` is a tensor of AWQ's zero points ("qzeros"), all numbers of a word are 7 or
        all are 8.
        """
        words = _drawn(_low_bits, self._key(name), cut, device)
        if name.endswith(".qzeros"):
            words = words.bitwise_and_(1).add_(7).mul_(0x11111111)
        return torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).to(torch.int32)

    def _deviation(self, name: str, inputs: int) -> float:
        """Return the standard deviation of a weight: ``inputs`` ** -0.5, with two exceptions.

        Embeddings that are not tied to the head have 1. Weights whose products are added to the
        residual stream have a smaller deviation in models with more layers.
        """
        if "embed_tokens" in name and not self._tied:
            return 1.0
        if ".o_proj." in name or ".down_proj." in name:
            return float((2 * self._layers * inputs) ** -0.5)
        return float(inputs**-0.5)

    def _cast(self, value: Tensor, dtype: str | None) -> Tensor:
        return value.to(getattr(torch, dtype) if dtype else self._dtype)

    def _key(self, name: str) -> int:
        """Return the key of the random sequence for tensor ``name``, a signed 64-bit integer."""
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)


def bell(key: int, cut: Cut, device: torch.device) -> Tensor:
    """Return nearly normal random numbers, float32 [*cut.shape], of mean 0 and deviation 1.

    ``key`` and the position in the whole tensor determine each number, which is a sum of four
    uniform numbers, at most 3.46 in magnitude.
    """
    return _drawn(_sums, key, cut, device)


def _drawn(
    numbers: Callable[[int, Tensor], Tensor], key: int, cut: Cut, device: torch.device
) -> Tensor:
    """Return what ``numbers`` gives for key and positions of ``cut``, piece by piece."""
    most = PIECE_NUMBERS.get(device.type, PIECE_NUMBERS["cuda"])
    parts = [numbers(key, positions) for positions in cut.positions(most, device)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(cut.shape)


def _bits(key: int, positions: Tensor) -> Tensor:
    """Return 64 random bits for each of ``positions``, int64 [count], in their memory.

    The bits are a hash of key and position by SplitMix64 (Steele et al.). NOTE: int64 wraps and
    shifts right arithmetically on every device; the mask removes the copies of the sign bit.
    """
    bits = positions.mul_(-0x61C8864680B583EB).add_(key)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(factor)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_((1 << 33) - 1))


def _low_bits(key: int, positions: Tensor) -> Tensor:
    """Return 32 random bits for each of ``positions``, int64 [count]."""
    return _bits(key, positions).bitwise_and_(0xFFFFFFFF)


def _sums(key: int, positions: Tensor) -> Tensor:
    """Return the numbers of ``bell`` for ``positions``, int64 [count].

    Each number is the sum of the four 16-bit parts of its position's hash, shifted and scaled.
    """
    bits = _bits(key, positions)
    total = bits & 0xFFFF
    for shift in (16, 32, 48):
        total.add_((bits >> shift).bitwise_and_(0xFFFF))
    return total.sub_(2 * 0xFFFF).float().mul_(1 / SUM_DEVIATION)
