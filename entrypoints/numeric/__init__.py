"""``glowplug check --numeric``: the configured engine compared with a float32 reference.

The engine answers a few prompts, then computes the same tokens once more and returns the residual
stream after every layer. The reference computes each layer in float32 with plain torch on the CPU,
from the same checkpoint with dequantised weights, and holds the weights of one layer at a time. A
layer gets the engine's own stream as input, so that its error is its own, not that of the layers
before it.
"""
