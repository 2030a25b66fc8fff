"""transformers' ``generate`` as the other side of a comparison.

No other module imports transformers.
"""

from __future__ import annotations

import time
import warnings
from typing import Any


class TransformersSide:
    """A checkpoint in float32 under ``AutoModelForCausalLM``, with its KV cache.

    It generates greedily, one prompt at a time. An FP8 checkpoint needs accelerate and is
    dequantized while it loads, so all multiplications are float32.
    """

    def __init__(self, folder: str) -> None:
        import torch
        import transformers

        logging: Any = transformers.logging
        logging.set_verbosity_error()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32
            )
        # NOTE: without float() the unquantized weights of an FP8 checkpoint would stay bfloat16.
        self.model = model.float().eval()
        self.version = transformers.__version__

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """Return exactly ``count`` greedy tokens after ``prompt``, and the seconds for them."""
        import torch

        ids = torch.tensor([prompt])
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started
        return out[0, len(prompt) :].tolist(), seconds
