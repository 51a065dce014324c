"""How many logits are alive at a time. Imports no torch: what is sent for them is planned without it."""

CHUNK_LOGITS = 1 << 25
"""At most about so many logits of a rank are alive at once (128 MB in fp32)."""
CUDA_CHUNKS = 8
"""Times as many on CUDA (1 GB in fp32): products of few tokens leave most of it idle."""
