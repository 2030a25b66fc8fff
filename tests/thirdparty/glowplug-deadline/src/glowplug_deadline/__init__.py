"""Earliest deadline first: a third-party scheduling policy for glowplug."""
