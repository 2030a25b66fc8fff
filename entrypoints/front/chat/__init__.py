"""Turns of a conversation: the prompt with its tools, and the pieces of the answer."""
