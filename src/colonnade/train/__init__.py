"""The training loop: the one place that knows the whole configuration and all folders."""
