"""Lines of a page's tables."""

from typing import Any


def header(*names: str) -> tuple[str, str]:
    return line(*names), "|" + "---|" * len(names)


def line(*cells: Any) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
