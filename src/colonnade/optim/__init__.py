"""Gradients to parameters: slices in, slices out. Knows no ranks."""
