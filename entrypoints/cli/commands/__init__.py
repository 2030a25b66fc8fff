"""Sub-commands of ``glowplug`` that are one module each."""
