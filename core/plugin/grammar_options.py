"""Options of structured output. Plan zone: no torch."""

from __future__ import annotations

from pydantic import Field

from glowplug.core.plugin.component import Options


class GrammarOptions(Options):
    """Options common to all libraries for structured output."""

    max_bytes: int = Field(65536, ge=64, description="a longer grammar in a request is refused")
    max_depth: int = Field(64, ge=1, description="a grammar that nests deeper is refused")
    compile_seconds: float = Field(
        2.0, gt=0, description="a grammar that takes longer to compile is refused"
    )
    compile_bytes: int = Field(
        1 << 30, ge=1 << 26, description="a grammar that takes more memory to compile is refused"
    )
    workers: int = Field(
        2,
        ge=1,
        le=32,
        description="processes that compile grammars of requests under these limits; they start "
        "with the first grammar",
    )
    cache_bytes: int = Field(
        256 << 20, ge=0, description="memory of each rank for compiled grammars that may be reused"
    )
