"""N-gram drafts: a third-party speculative algorithm for glowplug."""
