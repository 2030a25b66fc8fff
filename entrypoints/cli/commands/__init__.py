"""Sub-commands of ``glowplug`` that need no other module of their own."""
