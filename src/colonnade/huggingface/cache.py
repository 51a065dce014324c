"""Hugging Face's cache of what was downloaded: models--OWNER--NAME/snapshots/COMMIT/ has a model's files. No torch."""

from pathlib import Path


def not_the_snapshot(path: Path) -> str:
    """What to name in place of a model's whole part of the cache, a sentence with a space before; empty for what is
    none.
    """
    found = sorted(path.glob("snapshots/*/config.json"))
    return f" It is a part of Hugging Face's cache: its model is the folder {found[-1].parent}." if found else ""
