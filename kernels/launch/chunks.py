"""How many rows kernels work on at a time where the byte budget counts their memory, too. It
imports no torch.
"""

LOGPROB_ROWS = 256  #: of logits, normalised at a time by ``sampling.token_logprobs``
