"""A run that notes when and where it ran. It imports little: each of a sweep's processes begins with its imports."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from colonnade.errors import ConfigError
from colonnade.train.side_by_side import Share


def run(config: Path, share: Share) -> int:
    """Notes when it runs and on which share; its file says how long, and how it ends."""
    told = json.loads(config.read_text())
    began = time.time()
    print(f"{config.stem} says hello", flush=True)
    if told.get("mistake"):
        raise ConfigError("train.steps = 0: use more")
    time.sleep(told["seconds"])
    note = {"began": began, "ended": time.time(), "share": share.number, "of": share.of, "group": os.getpgid(0)}
    config.with_suffix(".ran").write_text(json.dumps(note))
    return int(told.get("status", 0))
