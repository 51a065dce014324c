"""Whether a run is what it should be: any layout beside the serial run, traffic and memory beside what theory says."""
