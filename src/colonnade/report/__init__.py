"""A run's folder as a page, in the terminal, and a sweep's as a table. Reads files alone; imports no torch."""
