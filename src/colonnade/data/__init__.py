"""Text to tokens on disk, and a step of a run to the samples that it trains on.

    text ── tokenize ──▶ prefix.bin, prefix.idx, prefix.json ── gpt_dataset ──▶ samples ── loader ──▶ Batch

Which samples belong to which step is arithmetic alone (`sampler`): nothing is indexed, saved or sent.
"""
