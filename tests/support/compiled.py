"""Kernels built for a Hopper GPU on a machine without one; for a process in which Triton compiles
(``uninterpreted``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024  #: bytes of shared memory that one block may have
WHOLE = [["tt.divisibility", 16]]


def build(
    kernel: Any,
    kinds: Mapping[str, str],
    constants: Mapping[str, object],
    whole: tuple[str, ...] = (),
    **options: object,
) -> CompiledKernel:
    """Compile one variant, which has to fit into a block, and print the kernel's name.

    Args:
        kinds: Of arguments, as Triton writes them ("*bf16"); "i32" where not named.
        whole: Numbers that divide by 16, as pointers always do.
        options: ``num_warps`` and the like.
    """
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names
    }
    aligned = {
        (at,): WHOLE
        for at, name in enumerate(names)
        if name in whole or signature[name].startswith("*")
    }
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    made = triton.compile(
        source(kernel, signature, dict(constants), aligned), target=HOPPER, options=options
    )
    assert made.asm["cubin"] and made.metadata.shared <= SHARED, (
        kernel.__name__,
        constants,
        made.metadata.shared,
    )
    print(kernel.__name__)
    return made


def tile(rows: int, columns: int, dtype: Any = gl.bfloat16) -> str:
    """Return the kind of a descriptor whose tiles are in shared memory in the layout of Hopper's
    tensor cores.
    """
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return f"tensordesc<{dtype}[{rows}, {columns}], {layout!r}>"
