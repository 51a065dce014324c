"""Which stage runs which part of the model for which micro-batch, when: schedules, and what executes them."""
