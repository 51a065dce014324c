"""`colonnade convert`: a published model becomes a checkpoint, and a checkpoint one that others can load."""
