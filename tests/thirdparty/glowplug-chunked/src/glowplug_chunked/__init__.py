"""Latent attention in chunks over 8-bit latents: a third-party attention backend for glowplug."""
