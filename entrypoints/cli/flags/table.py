"""All engine flags, and those that have no effect."""

from __future__ import annotations

from glowplug.entrypoints.cli.flags.engine_table import ENGINE_FLAGS
from glowplug.entrypoints.cli.flags.flag import Flag
from glowplug.entrypoints.cli.flags.server_table import SERVER_FLAGS

FLAGS: tuple[Flag, ...] = (*ENGINE_FLAGS, *SERVER_FLAGS)  #: in the order of ``--help``

#: switches of other engines -> the behaviour they switch on, which is always on here; they are
#: accepted, and the plan reports that they have no effect
ALWAYS_ON: dict[str, str] = {
    "--enable-chunked-prefill": (
        "prompts are always computed in chunks of at most --chunked-prefill-size tokens"
    ),
    "--enable-cache-report": "usage always counts cached tokens",
    "--enable-prompt-tokens-details": "usage always counts cached tokens",
    "--enable-request-id-headers": "answers always have the header X-Request-Id",
    "--enable-auto-tool-choice": "models with a parser of tool calls always take tools",
    "--exclude-tools-when-tool-choice-none": 'tool_choice "none" always leaves tools out',
}

#: switches of other engines -> the built-in plugin that they block, and the effect
BLOCKING: dict[str, tuple[str, str]] = {
    "--disable-custom-all-reduce": (
        "glowplug.plugins.collectives.peer_memory",
        "GPUs exchange tensors over NCCL alone, not through each other's memory",
    ),
}

#: flag -> (the other flag that makes it ineffective, why)
NO_EFFECT_WITH: dict[str, tuple[str, str]] = {
    "--cuda-graph-bs": ("--disable-cuda-graph", "graphs are off"),
    "--cuda-graph-max-bs": ("--disable-cuda-graph", "graphs are off"),
    "--piecewise-cuda-graph-tokens": (
        "--disable-piecewise-cuda-graph",
        "prefill steps run eagerly",
    ),
    "--piecewise-cuda-graph-max-tokens": (
        "--disable-piecewise-cuda-graph",
        "prefill steps run eagerly",
    ),
}
#: flag -> (the other flag that it needs to have an effect, why)
NO_EFFECT_WITHOUT: dict[str, tuple[str, str]] = {
    "--torch-compile-max-bs": ("--enable-torch-compile", "compilation is off"),
}
