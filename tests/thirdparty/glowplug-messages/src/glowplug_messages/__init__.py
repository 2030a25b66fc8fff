"""A chat route with a stream of events, and a command that uses it: a plugin for glowplug."""
