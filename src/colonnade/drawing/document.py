"""A whole HTML file that fetches nothing: its head, style, script and foot. Pure but for the clock."""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from colonnade import __version__
from colonnade.drawing.html import Html, tag

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What a browser is forbidden: to load anything."""


def document(title: str, body: Html, *, refresh: int = 0) -> str:
    """The file. `refresh`: seconds after which a browser reads it again; 0: never."""
    here = Path(__file__).parent
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{again}'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">{tag("title", title + " · Colonnade")}'
        f"<style>{style}</style></head>\n<body>{body}<script>{script}</script></body></html>\n"
    )


def foot() -> Html:
    """Who made the page, and when."""
    return tag("footer", f"Colonnade {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")


def tile(name: str, value: str, about: str) -> Html:
    """A number that matters."""
    return tag("div", tag("span", name), tag("b", value), tag("small", about), class_="tile")


def notes(lines: Iterable[object]) -> list[Html]:
    """Sentences that stand out; each once."""
    found = dict.fromkeys(lines)
    return [tag("aside", *(tag("p", line) for line in found))] if found else []
