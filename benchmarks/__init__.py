"""Benchmarks: one script a question, dated results a machine. Started with `python -m benchmarks.…`."""
