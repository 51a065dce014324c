"""Colonnade: trains large transformers by model parallelism, the same run on any layout."""

__version__ = "0.1.0"
