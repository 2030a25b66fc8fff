"""Parsers of tool calls: a streaming core, and one module for each format."""
