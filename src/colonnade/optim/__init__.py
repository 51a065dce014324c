"""Gradients to parameters: flat slices in, flat slices out. Knows no ranks.

piece        what an optimizer is handed: a stretch of a flat buffer, with its gradients and moments
adamw, lamb  the rules
schedule     the learning rate, and
loss_scale   fp16's loss scale, as pure functions
"""
