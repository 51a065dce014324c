"""HTML whose texts are escaped unless they are HTML already. Pure."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from colonnade.errors import hidden, printable, without_credentials


class Html(str):
    """Markup: what is not of this class is a text, and escaped."""


def text(value: object) -> Html:
    """A text as markup shows it: no credentials, no control characters."""
    return value if isinstance(value, Html) else Html(_escaped(value))


def _escaped(value: object) -> str:
    return escape(without_credentials(printable(str(value))))


def tag(name: str, *inside: object, **attributes: object) -> Html:
    """An element. Of attributes, `_` in a name is `-`, `class_` is class, and those that are None are left out."""
    return Html(f"<{name}{_shown(attributes)}>{joined(inside)}</{name}>")


def void(name: str, **attributes: object) -> Html:
    """An element that has nothing inside and no end."""
    return Html(f"<{name}{_shown(attributes)}>")


def _shown(attributes: dict[str, object]) -> str:
    return "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )


def joined(parts: Iterable[object]) -> Html:
    return Html("".join(text(part) for part in parts))


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: Sequence[int] = ()) -> Html:
    """A table that scrolls by itself where it is wider than the page. `numbers`: columns that stand to the right."""

    def cell(name: str, column: int, value: object) -> Html:
        return tag(name, value, class_="number" if column in numbers else None)

    top = tag("tr", *(cell("th", column, value) for column, value in enumerate(head)))
    body = (tag("tr", *(cell("td", column, value) for column, value in enumerate(row))) for row in rows)
    return tag("div", tag("table", tag("thead", top), tag("tbody", *body)), class_="wide")


def data(content: dict[str, Any]) -> Html:
    """Numbers and texts for the page's own script."""
    written = json.dumps(hidden(content), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    safe = written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Html(f'<script type="application/json">{safe}</script>')
