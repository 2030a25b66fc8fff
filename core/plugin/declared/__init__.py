"""Checks of the components that a plugin declares, made when it is loaded. Plan zone: no torch."""
