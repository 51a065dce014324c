"""One script a peer; `reference.py` holds the task that all of them, and Colonnade, are given."""
