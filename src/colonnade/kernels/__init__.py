"""What a device computes within one rank: products, attention, normalisation, dropout. Plain and tuned ways of each."""
