"""A trained model to numbers: perplexity and bits per byte."""
