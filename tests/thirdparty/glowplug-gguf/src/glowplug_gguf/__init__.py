"""GGUF models for glowplug: a weight source, model facts and a tokenizer, added through hooks
alone.
"""
