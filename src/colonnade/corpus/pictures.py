"""Bars as SVG, and the frame of a page: no scripts, no fonts, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #d8dee6 }
table { border-collapse: collapse; margin: .6rem 0 } th, td { padding: .2rem .8rem .2rem 0; text-align: left }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } tr + tr td { border-top: 1px solid #edf0f4 }
svg text { font: 13px system-ui, sans-serif; fill: #1c2733 } svg .quiet { fill: #66758a }
details { margin: .3rem 0 } summary { cursor: pointer } code { font-size: 13px; overflow-wrap: anywhere }
blockquote { margin: .4rem 0 .8rem; padding: .3rem .8rem; background: #f5f7fa; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 13px }
"""
_ROW = 24
_WIDTH = 880
_LABEL = 250
_NUMBER = 200


class Bar(NamedTuple):
    """One bar: its label, what it keeps and what it loses of the row before."""

    label: str
    value: float
    lost: float = 0
    note: str = ""


def page(title: str, blocks: Sequence[str]) -> str:
    """A page that needs nothing but itself."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join([f"<h1>{escape(title)}</h1>", *blocks])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def bars(rows: Sequence[Bar]) -> str:
    """Horizontal bars, one under the other; what is lost stands behind what is kept, in another colour."""
    largest = max((row.value + row.lost for row in rows), default=0) or 1
    room = _WIDTH - _LABEL - _NUMBER
    parts = []
    for number, row in enumerate(rows):
        y = number * _ROW
        kept, lost = room * row.value / largest, room * row.lost / largest
        parts.append(f'<text x="{_LABEL - 10}" y="{y + 16}" text-anchor="end">{escape(row.label)}</text>')
        parts.append(f'<rect x="{_LABEL}" y="{y + 3}" width="{kept:.1f}" height="{_ROW - 6}" fill="#2f6db5"/>')
        if lost:
            place = f'x="{_LABEL + kept:.1f}" y="{y + 3}" width="{lost:.1f}"'
            parts.append(f'<rect {place} height="{_ROW - 6}" fill="#e3b4a6"/>')
        note = f"{row.value:,.0f}{f' {row.note}' if row.note else ''}"
        parts.append(f'<text class="quiet" x="{_LABEL + kept + lost + 8:.1f}" y="{y + 16}">{escape(note)}</text>')
    height = max(len(rows), 1) * _ROW
    return f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" role="img">{"".join(parts)}</svg>'


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows under headings; numbers stand to the right."""
    columns = [isinstance(value, int | float) for value in rows[0]] if rows else [False] * len(head)
    kinds = [' class="n"' if number else "" for number in columns]
    top = "".join(f"<th{kind}>{escape(each)}</th>" for kind, each in zip(kinds, head, strict=True))
    lines = [
        "".join(f"<td{kind}>{escape(_shown(value))}</td>" for kind, value in zip(kinds, row, strict=True))
        for row in rows
    ]
    return f"<table><tr>{top}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def curve(points: Mapping[float, float], *, at: float, label: str) -> str:
    """A line through (x, y) in [0, 1], with a mark at one x."""
    width, height = 420, 200
    path = " ".join(
        f"{40 + x * (width - 60):.1f},{10 + (1 - y) * (height - 40):.1f}" for x, y in sorted(points.items())
    )
    x = 40 + at * (width - 60)
    axis = f'<path d="M40 10V{height - 30}H{width - 20}" fill="none" stroke="#66758a"/>'
    mark = f'<path d="M{x:.1f} 10V{height - 30}" stroke="#c8553d" stroke-dasharray="4 3"/>'
    line = f'<polyline points="{path}" fill="none" stroke="#2f6db5" stroke-width="2"/>'
    words = f'<text x="{x - 4:.1f}" y="{height - 12}" text-anchor="end">{escape(label)}</text>'
    ends = f'<text x="34" y="18" text-anchor="end">1</text><text x="34" y="{height - 28}" text-anchor="end">0</text>'
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img">{axis}{mark}{line}{words}{ends}</svg>'


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
