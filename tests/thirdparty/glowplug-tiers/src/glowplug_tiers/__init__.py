"""Evicted pages in host memory: a third-party prefix cache for glowplug."""
