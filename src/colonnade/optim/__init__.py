"""Gradients to parameters: flat slices in, flat slices out. Knows no ranks.

param_slice  what an optimizer is handed: a slice of a bucket, with its gradients and moments
adamw, lamb  the rules
schedule     the learning rate, and
loss_scale   fp16's loss scale, as pure functions
"""
