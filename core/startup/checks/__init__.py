"""Checks of built components."""
