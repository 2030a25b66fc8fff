"""Triton's interpreter without work that it repeats or drops.

The interpreter spends most of its time on the types of small arrays: it makes block types, shapes
and tables of dtypes anew for each operation, lists the members of ``triton.language`` to replace
its functions for each call of one kernel function by another, and computes an overflow check for
each sum and product of integers that only its debug mode, which is off, would look at. Here each of
these is made once, and the check is left out. Results and errors are the interpreter's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def install() -> None:
    """Let the interpreter keep what it would make again. Call once a process."""
    from triton.language import core
    from triton.runtime import interpreter

    _keep_replaced_functions(interpreter, core)
    _keep_types(interpreter, core)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _keep_replaced_functions(interpreter: Any, core: Any) -> None:
    """List the built-in functions once, and replace them once a launch, not in nested calls."""
    found: dict[Any, list[tuple[str, Any]]] = {}
    modules: dict[Any, set[Any]] = {}
    replaced: set[Any] = set()
    patch_lang = interpreter._patch_lang

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in found:
            found[package] = [
                (name, member)
                for name, member in inspect.getmembers(package)
                if core.is_builtin(member)
            ]
        for name, member in found[package]:
            if getattr(package, name) is member:  # else it is replaced already
                interpreter._patch_attr(package, name, member, builder, scope)

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        """A scope whose end is that of a launch."""

        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def patch_once(fn: Any) -> Any:
        if fn not in modules:
            here = {one for one in fn.__globals__.values() if inspect.ismodule(one)}
            modules[fn] = here & {interpreter.tl, core}
        wanted = modules[fn]
        if wanted and wanted <= replaced:
            return Scope()
        replaced.update(wanted)
        return patch_lang(fn)

    interpreter._patch_builtin = patch_builtin
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_once


def _keep_types(interpreter: Any, core: Any) -> None:
    """Make the shape of each block type, and the NumPy dtype of each type, once."""
    block_shapes: dict[tuple[int, ...], tuple[Any, int]] = {}
    tensor_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    dtypes: dict[str, Any] = {}
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    get_dtype: Callable[[Any], Any] = interpreter._get_np_dtype
    equal = core.dtype.__eq__

    def type_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        known = block_shapes.get(sizes) if {*map(type, sizes)} == {int} else None
        if known is None:
            make_type(self, element_ty, shape)
            block_shapes[tuple(self.shape)] = self.shape, self.numel
            return
        self.element_ty = element_ty
        self.shape, self.numel = known
        self.name = f"<{sizes}, {element_ty}>"

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in tensor_shapes:
            make_tensor(self, handle, type)
            tensor_shapes[sizes] = self.shape, self.numel
            return
        self.handle = handle
        self.shape, self.numel = tensor_shapes[sizes]
        self.type = type
        self.dtype = type.scalar

    def np_dtype(kind: Any) -> Any:
        if kind.name not in dtypes:
            dtypes[kind.name] = get_dtype(kind)
        return dtypes[kind.name]

    def same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    core.block_type.__init__ = type_init
    core.tensor.__init__ = tensor_init
    core.dtype.__eq__ = same
    interpreter._get_np_dtype = np_dtype
