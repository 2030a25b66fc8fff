"""Group-wise int4 weights, quantised at load: a third-party quantization scheme for glowplug."""
