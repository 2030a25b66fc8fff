"""Time that a process has spent in compilers: Triton's and torch.compile's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch._guards import CompileContext

logger = logging.getLogger("glowplug.engine")

#: key of torch's own compile times that includes all the others
WHOLE_COMPILATION = "_compile.compile_inner"


class CompileTime:
    """The compile time of this process since the creation of this object.

    A Triton kernel found in Triton's cache counts with the time of its look-up. Libraries with
    compilers of their own (DeepGEMM, FlashInfer) are not included.

    ``device``: torch device of the rank; Triton is watched on CUDA only.
    """

    def __init__(self, device: str) -> None:
        watched = device.startswith("cuda") and find_spec("triton") is not None
        self._triton = _watched_triton() if watched else TritonTime()
        self._triton.serving = False
        self._before = self._total()

    def end_start(self) -> None:
        """Log each kernel that Triton compiles from now on, because requests wait for it."""
        self._triton.serving = True

    @property
    def seconds(self) -> float:
        """Seconds in compilers since the creation of this object."""
        return self._total() - self._before

    def _total(self) -> float:
        return self._triton.seconds + _torch_seconds()


class TritonTime:
    """A listener of Triton's compiler that adds up its times.

    Kernels that torch.compile makes are left out: torch's time includes them.

    Attributes:
        seconds: time so far.
        serving: requests wait for the compiler, so each kernel is logged.
    """

    def __init__(self, earlier: Callable[..., None] | None = None) -> None:
        self.seconds = 0.0
        self.serving = False
        self._earlier = earlier

    def __call__(
        self, *, times: Any, metadata: dict[str, Any], cache_hit: bool, src: Any = None, **more: Any
    ) -> None:
        if CompileContext.try_get() is None:
            took = times.total / 1e6
            self.seconds += took
            if self.serving and not cache_hit:
                logger.warning(
                    "requests waited %.2f s for the compiler: kernel %s has a variant that the "
                    "start did not compile; it is now in Triton's cache%s",
                    took,
                    metadata.get("name", "without a name"),
                    variant_of(src),
                )
        if self._earlier is not None:
            self._earlier(times=times, metadata=metadata, cache_hit=cache_hit, src=src, **more)


def variant_of(src: Any) -> str:
    """Return a kernel's constants, and its arguments that are not compiled as multiples of 16.

    ``src``: Triton's source of the kernel; "" is returned for a source that is not a function.
    """
    names = getattr(getattr(src, "fn", None), "arg_names", None)
    if names is None:
        return ""
    constants = {names[at[0]]: value for at, value in src.constants.items()}
    aligned = {names[at[0]] for at, attributes in src.attrs.items() if attributes}
    odd = [name for name in names if name not in constants and name not in aligned]
    found = [f"{name}={value}" for name, value in constants.items()]
    return f" (constants: {', '.join(found)}; not multiples of 16: {', '.join(odd) or 'none'})"


@cache
def _watched_triton() -> TritonTime:
    """Return the listener of this process, which Triton calls after each compilation."""
    compilation = import_module("triton").knobs.compilation
    listener = TritonTime(compilation.listener)
    compilation.listener = listener
    return listener


def _torch_seconds() -> float:
    """Return the seconds of all compilations by torch.compile in this process so far.

    NOTE: torch._dynamo is not imported for this, because the import takes more than a second.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    return sum(utils.compilation_time_metrics.get(WHOLE_COMPILATION, ())) if utils else 0.0
