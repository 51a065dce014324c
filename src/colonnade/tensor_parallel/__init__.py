"""Layers that are cut over the ranks of one axis.

Each is handed its `Axis`; an axis of size 1 gives the serial layer.
"""
