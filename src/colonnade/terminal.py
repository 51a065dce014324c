"""rich, which draws on terminals. Its import draws from Python's global generator: the program's that imports it goes
on as if it had not.
"""

import random

_before = random.getstate()
try:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text
finally:
    random.setstate(_before)

__all__ = [
    "BarColumn",
    "Console",
    "Group",
    "Live",
    "Panel",
    "Progress",
    "ProgressBar",
    "Table",
    "TaskID",
    "Text",
    "TextColumn",
    "TimeRemainingColumn",
]
