"""Sidecars of token files that a test makes or changes."""

from pathlib import Path

from colonnade.data.sidecar import Sidecar, sidecar_path


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """As the writer of a token file does at its end."""
    sidecar_path(prefix).write_bytes(sidecar.as_json())
