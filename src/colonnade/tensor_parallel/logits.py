"""How many logits are alive at a time. Imports no torch: what is sent for them is planned without it."""

CHUNK_LOGITS = 1 << 24
"""At most about so many logits of a rank are alive at once (64 MB in fp32)."""
