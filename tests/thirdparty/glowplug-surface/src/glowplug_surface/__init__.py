"""A route, a mounted page, a flag and a command: a third-party plugin for glowplug."""
