"""The runtime of the attention backend "chunked"."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glowplug.core.api import EnginePlan, KVLayout
from glowplug.core.protocols import AttentionBackend, Limits, MlaLayer, Worker
from glowplug.core.step.batch import Batch
from glowplug_chunked.plugin import ChunkedOptions, entries


class Chunked(AttentionBackend):
    """Absorbed latent attention, one chunk of a row's keys at a time."""

    mla_projected = None

    def __init__(self, options: ChunkedOptions, plan: EnginePlan, worker: Worker) -> None:
        self._options = options
        self._layout = plan.kv_layout(entries, options)
        self._kv: tuple[Mapping[str, Tensor], ...] = ()

    def kv_layout(self) -> KVLayout:
        return self._layout

    def reserve(self, limits: Limits) -> None:
        self._kv = limits.kv

    def plan_step(self, batch: Batch, graph: object | None) -> None:
        self._batch = batch

    def store_mla(self, latent: Tensor, k_rope: Tensor, kv_slots: Tensor, layer: MlaLayer) -> None:
        pool = self._kv[layer.index]
        pool["rope"][kv_slots] = k_rope.to(pool["rope"].dtype)
        if "latent" in pool:
            pool["latent"][kv_slots] = latent.to(pool["latent"].dtype)
            return
        scale = (latent.abs().amax(-1, keepdim=True).float() / 127).half().clamp(min=1e-7)
        pool["scale"][kv_slots] = scale
        pool["codes"][kv_slots] = (latent / scale).round().clamp(-127, 127).to(torch.int8)

    def mla(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, layer: MlaLayer
    ) -> Tensor:
        batch = self._batch
        self.store_mla(latent, k_rope, batch.kv_slots, layer)
        absorbed = torch.einsum("thn,hnc->thc", q_nope, layer.w_uk)
        query = torch.cat((absorbed, q_rope), dim=-1).float() * layer.scale
        found = query.new_zeros(*absorbed.shape)
        starts = batch.query_starts.tolist()
        for row, length in enumerate(batch.kv_lens_device.tolist()):
            begin, end = starts[row], starts[row + 1]
            if end > begin:
                found[begin:end] = self._row(query[begin:end], row, length, layer)
        value = torch.einsum("thc,hcv->thv", found.to(layer.w_uv.dtype), layer.w_uv)
        return value.flatten(1)

    def _row(self, query: Tensor, row: int, length: int, layer: MlaLayer) -> Tensor:
        """Return the weighted latents [T, H, C] of a row's queries [T, H, C + P]."""
        count = len(query)
        last_seen = torch.arange(length - count, length)[:, None, None]
        most = query.new_full((count, layer.heads, 1), float("-inf"))
        total = torch.zeros_like(most)
        mixed = query.new_zeros(count, layer.heads, layer.lora_rank)
        for begin in range(self._batch.first_key, length, self._options.keys):
            places = torch.arange(begin, min(begin + self._options.keys, length))
            keys = self._keys(row, places, layer)
            scores = torch.einsum("thc,kc->thk", query, keys)
            scores = scores.masked_fill(places > last_seen, float("-inf"))
            higher = torch.maximum(most, scores.amax(-1, keepdim=True))
            floor = higher.nan_to_num(neginf=0.0)  # rows that have seen no key yet
            weights = torch.exp(scores - floor)
            faded = torch.exp(most - floor)
            total = total * faded + weights.sum(-1, keepdim=True)
            mixed = mixed * faded + weights @ keys[:, : layer.lora_rank]
            most = higher
        return mixed / total.clamp(min=1e-30)

    def _keys(self, row: int, places: Tensor, layer: MlaLayer) -> Tensor:
        """Return the cached keys of positions of a row, float32 [K, C + P]."""
        size = self._layout.page_size
        slots = self._batch.page_table[row, places // size].long() * size + places % size
        pool = self._kv[layer.index]
        if "latent" in pool:
            latent = pool["latent"][slots].float()
        else:
            latent = pool["codes"][slots].float() * pool["scale"][slots].float()
        return torch.cat((latent, pool["rope"][slots].float()), dim=-1)
