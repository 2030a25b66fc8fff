"""Drafts copied from the line above: a third-party speculative algorithm for glowplug."""
