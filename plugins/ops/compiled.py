"""One op compiled by inductor for every number of tokens, so that a step never waits for a compiler
once it has run.

torch.compile makes one program for a single token and one for any other number. Both are made when
the first call of a signature (what the other dimensions are) comes, be it of more tokens than are
compiled for: the self-test of a start goes through all of them. Each is made from a code object of
its own, so that nothing is ever compiled again, and neither the limit on recompilations nor
dimensions that vary between layers play a part.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

EXAMPLE = 64  #: tokens of the program for several; inductor shapes its loops for about so many
OPTIONS: dict[str, Any] = {
    "compile_threads": 1
}  #: few and small programs, not worth processes that stay


class Compiled:
    """``function(*args)``, whose first ``varying`` arguments are tensors of tokens first, compiled
    for up to ``most`` tokens; ``plain(*args)`` for more, and while a graph is captured that was not
    run before."""

    def __init__(
        self, function: Callable[..., Any], plain: Callable[..., Any], most: int, varying: int = 1
    ) -> None:
        self._function = function
        self._plain = plain
        self._most = most
        self._varying = varying
        self._programs: dict[
            Hashable, tuple[Callable[..., Any], Callable[..., Any]]
        ] = {}  # one token, several

    def __call__(self, *args: Any) -> Any:
        signature = tuple([_signature(arg) if isinstance(arg, Tensor) else arg for arg in args])
        found = self._programs.get(signature)
        if found is None:
            if args[0].is_cuda and torch.cuda.is_current_stream_capturing():
                return self._plain(*args)
            found = self._programs[signature] = (self._make(args, 1), self._make(args, EXAMPLE))
        tokens = args[0].shape[0]
        if not 0 < tokens <= self._most:
            return self._plain(*args)
        return found[tokens > 1](*args)

    def _make(self, args: tuple[Any, ...], tokens: int) -> Callable[..., Any]:
        """Compiled, and run once: on so many tokens."""
        program = torch.compile(
            _apart(self._function), fullgraph=True, dynamic=False, options=OPTIONS
        )
        program(*(_example(arg, tokens) for arg in args[: self._varying]), *args[self._varying :])
        return program


def _signature(tensor: Tensor) -> Hashable:
    return tensor.shape[1:], tensor.stride(), tensor.dtype


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own, which is what torch.compile keeps its
    programs by.
    """
    assert isinstance(function, types.FunctionType), "a function, not a callable object"
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _example(tensor: Tensor, tokens: int) -> Tensor:
    """Like ``tensor``, of so many tokens; if several, of any number."""
    made = torch.empty_strided(
        (tokens, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    if tokens > 1:
        torch._dynamo.mark_dynamic(made, 0)
    return made
