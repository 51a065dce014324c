"""Examples of tasks, as benchmarks publish them, to token files: a document an example, its sequences the fields."""
