"""Qwen2, Qwen3 and Qwen3-MoE: a third-party model family for glowplug."""
