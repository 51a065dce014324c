"""The transformer: units (embedding, blocks, head) that the training step strings together.

No communication of its own.
"""
