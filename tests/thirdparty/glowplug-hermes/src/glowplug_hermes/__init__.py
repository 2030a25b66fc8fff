"""Tool calls in the format of Hermes: a third-party plugin for glowplug."""
