"""Chunk sizes of kernels whose temporaries count towards the memory budget.

This module imports no torch.
"""

LOGPROB_ROWS = 256  #: rows of logits that ``token_logprobs`` normalises at a time
