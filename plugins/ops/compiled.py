"""Ops compiled by inductor for every number of tokens, so that later steps never compile.

torch.compile makes one program for a single token and one for any larger number. Both are made at
the first call of a signature (shape, strides and dtype without the token dimension), even if that
call has more tokens than are compiled for; the self-test at start-up runs all signatures. Each
program has a code object of its own. Therefore nothing is recompiled, and neither the recompilation
limit nor dimensions that vary between layers matter.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

#: tokens of the example for the dynamic program; inductor tunes its loops for about this number
EXAMPLE_TOKENS = 64
#: inductor options; the programs are too few and small for a pool of compile processes
OPTIONS: dict[str, Any] = {"compile_threads": 1}


class Compiled:
    """An op compiled by torch.compile for calls with up to ``max_tokens`` tokens.

    Args:
        function: the op; its first ``varying`` arguments are tensors [T, ...].
        plain: called instead for more tokens, and during graph capture for argument shapes that
            have not been compiled yet.
        max_tokens: most tokens of a compiled call.
        varying: number of leading arguments with a token dimension.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        plain: Callable[..., Any],
        max_tokens: int,
        varying: int = 1,
    ) -> None:
        self._function = function
        self._plain = plain
        self._max_tokens = max_tokens
        self._varying = varying
        # signature -> program for one token, program for any larger number
        self._programs: dict[Hashable, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def __call__(self, *args: Any) -> Any:
        signature = tuple([_signature(arg) if isinstance(arg, Tensor) else arg for arg in args])
        found = self._programs.get(signature)
        if found is None:
            if args[0].is_cuda and torch.cuda.is_current_stream_capturing():
                return self._plain(*args)
            found = self._programs[signature] = (
                self._make(args, 1),
                self._make(args, EXAMPLE_TOKENS),
            )
        tokens = args[0].shape[0]
        if not 0 < tokens <= self._max_tokens:
            return self._plain(*args)
        return found[tokens > 1](*args)

    def _make(self, args: tuple[Any, ...], tokens: int) -> Callable[..., Any]:
        """Compile a program for calls with ``tokens`` tokens, run it once and return it.

        The program for more than one token accepts any larger number too.
        """
        program = torch.compile(
            _with_own_code(self._function), fullgraph=True, dynamic=False, options=OPTIONS
        )
        program(*(_example(arg, tokens) for arg in args[: self._varying]), *args[self._varying :])
        return program


def _signature(tensor: Tensor) -> Hashable:
    """Return the tensor's properties on which compiled programs depend.

    These are the shape without the token dimension, the strides and the dtype.
    """
    return tensor.shape[1:], tensor.stride(), tensor.dtype


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of ``function`` with its own code object.

    torch.compile caches its programs by code object, so programs of copies are kept apart.
    """
    assert isinstance(function, types.FunctionType), (
        "only functions can be copied, not callable objects"
    )
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _example(tensor: Tensor, tokens: int) -> Tensor:
    """Return an uninitialised tensor like ``tensor``, with ``tokens`` rows.

    With more than one token the dimension is marked dynamic, so that the program accepts any
    number.
    """
    example = torch.empty_strided(
        (tokens, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    if tokens > 1:
        torch._dynamo.mark_dynamic(example, 0)
    return example
