"""The papers' tables as commands: `python -m benchmarks.paper`."""
