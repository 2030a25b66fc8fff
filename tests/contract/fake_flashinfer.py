"""FlashInfer's two wrappers in plain torch on the CPU, with plans laid out in buffers as in version
0.6.11.

This code reads the values of a plan (the number of keys of a row, the start and end of a work item)
from the places where the kernel reads them, so a plan that was changed in the buffers takes effect.
Tiles of queries and pieces of keys are small, so that there are many work items.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from glowplug.kernels.mha.reference import partial_attention

#: queries x heads, keys, programs, work items of a plan
TILE, PIECE, CLUSTERS, MOST = 6, 32, 5, 512
LISTS = (
    "q_indptr",
    "kv_indptr",
    "partial_indptr",
    *("merge",) * 5,
    "q_len",
    "kv_len",
    "q_start",
    "kv_start",
    "kv_end",
    "work_indptr",
)


class MlaWrapper:
    """The latent-attention wrapper; ``given`` holds the arguments of every plan of every
    wrapper.
    """

    given: ClassVar[list[dict[str, Any]]] = []

    def __init__(
        self,
        workspace: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
    ) -> None:
        self.captured, self.indices = use_cuda_graph, kv_indices
        self.sizes = [len(x) for x in (qo_indptr, kv_indptr, kv_len_arr) if x is not None]
        self._int_workspace_buffer = torch.full((4 * MOST * len(LISTS),), 0x55, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = self._int_workspace_buffer.clone()

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        for given in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert given.dtype == torch.int32 and given.is_contiguous()
        if self.captured:
            assert self.indices is not None and self.sizes == [
                len(qo_indptr),
                len(kv_indptr),
                len(kv_len_arr),
            ]
            assert self.indices.data_ptr() == kv_indices.data_ptr(), (
                "captured kernels read the first plan's indices"
            )
        self.indices, self.heads, self.page, self.causal = kv_indices, num_heads, page_size, causal
        self.scale = sm_scale
        self.given.append(
            {
                "wrapper": self,
                "qo_indptr": qo_indptr.tolist(),
                "kv_indptr": kv_indptr.tolist(),
                "kv_indices": kv_indices.clone(),
                "kv_len_arr": kv_len_arr.tolist(),
                "page_size": page_size,
                "causal": causal,
                "kv_data_type": kv_data_type,
            }
        )
        works = self._works(qo_indptr.tolist(), kv_indptr.tolist(), kv_len_arr.tolist())
        self._plan_info = [1, CLUSTERS, *(4 * MOST * number for number in range(len(LISTS))), 0, 0]
        pinned = self._pin_memory_int_workspace_buffer.view(torch.int32)
        for number, name in enumerate(LISTS):
            if name in works:
                pinned[number * MOST :][: len(works[name])] = torch.tensor(
                    works[name], dtype=torch.int32
                )
        used = 4 * MOST * len(LISTS)
        self._int_workspace_buffer[:used].copy_(self._pin_memory_int_workspace_buffer[:used])

    def _works(
        self, queries: list[int], starts: list[int], lens: list[int]
    ) -> dict[str, list[int]]:
        """Distribute work items over clusters in turn; a row without keys has one work item,
        too.
        """
        clusters: list[list[tuple[int, ...]]] = [[] for _ in range(CLUSTERS)]
        dealt = 0
        for row, keys in enumerate(lens):
            width = queries[row + 1] - queries[row]
            for first in range(0, width * self.heads, TILE):
                reach = keys
                if self.causal and first + TILE < width * self.heads:
                    reach = max(min(keys - width + -(-(first + TILE) // self.heads), keys), 0)
                for begin in range(0, max(reach, 1), PIECE):
                    work = (
                        queries[row],
                        starts[row],
                        -1,
                        width,
                        keys,
                        first,
                        begin,
                        min(begin + PIECE, reach),
                    )
                    clusters[dealt % CLUSTERS].append(work)
                    dealt += 1
        flat = [work for cluster in clusters for work in cluster]
        ends = [sum(map(len, clusters[:number])) for number in range(CLUSTERS + 1)]
        names = (
            "q_indptr",
            "kv_indptr",
            "partial_indptr",
            "q_len",
            "kv_len",
            "q_start",
            "kv_start",
            "kv_end",
        )
        return {
            **{
                name: list(column)
                for name, column in zip(names, zip(*flat, strict=True), strict=True)
            },
            "work_indptr": ends,
        }

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor) -> Tensor:
        numbers = self._int_workspace_buffer.view(torch.int32)
        lists = {
            name: numbers[at // 4 :] for name, at in zip(LISTS, self._plan_info[2:-2], strict=True)
        }
        query = torch.cat((q_nope, q_pe), -1)
        total, weight = (
            torch.zeros(*q_nope.shape, dtype=torch.float64),
            torch.zeros(*q_nope.shape[:2], 1).double(),
        )
        for work in range(int(lists["work_indptr"][CLUSTERS])):
            self._work(
                {name: int(values[work]) for name, values in lists.items()},
                query,
                ckv,
                kpe,
                total,
                weight,
            )
        return torch.where(weight > 0, total / weight, 0.0).to(q_nope.dtype)

    def _work(
        self,
        at: dict[str, int],
        query: Tensor,
        ckv: Tensor,
        kpe: Tensor,
        total: Tensor,
        weight: Tensor,
    ) -> None:
        """Add exp(score) and exp(score) * value of one work item, query by query."""
        assert self.indices is not None
        for packed in range(at["q_start"], min(at["q_start"] + TILE, at["q_len"] * self.heads)):
            token, head = divmod(packed, self.heads)
            end = at["kv_end"]
            if self.causal:  # the kernel's two limits: of the tile, rounded down, and of the query
                end = min(
                    end,
                    at["kv_len"] - at["q_len"] + (at["q_start"] + TILE) // self.heads,
                    at["kv_len"] - at["q_len"] + token + 1,
                )
            places = (
                torch.arange(at["kv_start"], max(end, at["kv_start"])) + at["kv_indptr"] * self.page
            )
            pages, offsets = self.indices[places // self.page].long(), places % self.page
            keys = torch.cat((ckv[pages, offsets], kpe[pages, offsets]), -1).double()
            one = torch.exp(keys @ query[at["q_indptr"] + token, head].double() * self.scale)
            total[at["q_indptr"] + token, head] += one @ keys[:, : ckv.shape[-1]]
            weight[at["q_indptr"] + token, head] += one.sum()


class RaggedWrapper:
    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        head_dim_vo: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
    ) -> None:
        assert heads == kv_heads
        self.rows = (qo_indptr.tolist(), kv_indptr.tolist())
        self.causal, self.scale = causal, sm_scale

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        queries, keys = self.rows
        lses = []
        for a, b, c, d in zip(queries, queries[1:], keys, keys[1:], strict=False):
            out[a:b], lse = partial_attention(q[a:b], k[c:d], v[c:d], self.scale, self.causal)
            lses.append(lse)
        return out, torch.cat(lses) / math.log(2)


class Event:
    """A CUDA event; ``waits`` lists the events that the host has waited for, in order."""

    waits: ClassVar[list[Event]] = []

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self.waits.append(self)


def modules() -> dict[str, ModuleType]:
    """Return the stand-ins for the package's modules in ``sys.modules``."""
    package, mla, prefill = (
        ModuleType(name) for name in ("flashinfer", "flashinfer.mla", "flashinfer.prefill")
    )
    package.__dict__.update(__version__="0.0.fake", mla=mla, prefill=prefill)
    mla.__dict__["BatchMLAPagedAttentionWrapper"] = MlaWrapper
    prefill.__dict__["BatchPrefillWithRaggedKVCacheWrapper"] = RaggedWrapper
    return {made.__name__: made for made in (package, mla, prefill)}
