"""What was predicted of a run beside what was measured. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from colonnade.report.html import Html, table, tag
from colonnade.report.record import Record
from colonnade.report.scale import bytes_in_words, length_of_time, short

_DEEP = 6


def drawn(run: Record) -> Html:
    """Memory by kind as a bar, and every number that there is of both; nothing where there is none."""
    by_kind = _dict(_dict(run.prediction.get("memory")).get("by_kind"))
    kinds = {name: float(size) for name, size in by_kind.items() if _is_number(size) and size > 0}
    parts = [_bar(kinds)] if kinds else []
    rows = list(_rows(run))
    if rows:
        parts.append(table(["", "predicted", "measured", "measured ÷ predicted"], rows, numbers=[1, 2, 3]))
    return tag("div", *parts) if parts else Html()


def _rows(run: Record) -> Iterator[list[object]]:
    compared = dict(_leaves(run.comparison))
    for name, (predicted, measured) in compared.items():
        yield _row(name, predicted, measured)
    for name, number in _numbers(run.prediction):
        if name not in compared and "by kind" not in name and not name.endswith("rank"):
            yield _row(name, number, None)
    setup = run.setup
    if "memory › total bytes" not in compared and not run.prediction and _is_number(setup.get("memory_predicted")):
        yield _row("memory of a rank, bytes", setup["memory_predicted"], None)
    if _is_number(setup.get("memory_free")):
        yield ["memory that was free at the start", "", _words("bytes", setup["memory_free"]), ""]


def _row(name: str, predicted: float | None, measured: float | None) -> list[object]:
    ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else ""
    shown = name.removesuffix(", bytes").replace(" bytes", "")
    return [shown, _words(name, predicted), _words(name, measured), ratio]


def _words(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if "bytes" in name or "memory" in name:
        return bytes_in_words(value)
    return length_of_time(value) if "seconds" in name and "per second" not in name else short(value)


def _leaves(content: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, tuple[float | None, float | None]]]:
    if isinstance(content, dict) and {"predicted", "measured"} <= content.keys():
        numbers = [float(each) if _is_number(each) else None for each in (content["predicted"], content["measured"])]
        if any(number is not None for number in numbers):
            yield prefix, (numbers[0], numbers[1])
            return
        predicted, measured = _dict(content["predicted"]), _dict(content["measured"])
        for key in [*predicted, *(key for key in measured if key not in predicted)]:
            yield from _leaves(
                {"predicted": predicted.get(key), "measured": measured.get(key)}, _under(prefix, key), depth + 1
            )
    elif isinstance(content, dict) and depth < _DEEP:
        for key, value in content.items():
            yield from _leaves(value, _under(prefix, key), depth + 1)


def _numbers(content: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, float]]:
    if _is_number(content):
        yield prefix, float(content)
    elif isinstance(content, dict) and depth < _DEEP:
        for key, value in content.items():
            yield from _numbers(value, _under(prefix, key), depth + 1)


def _under(prefix: str, key: object) -> str:
    words = str(key).replace("_", " ")
    return f"{prefix} › {words}" if prefix else words


def _bar(kinds: Mapping[str, float]) -> Html:
    total, at, boxes = sum(kinds.values()), 0.0, []
    for number, (name, size) in enumerate(kinds.items()):
        width = 1000 * size / total
        boxes.append(
            tag("rect", tag("title", f"{name}: {bytes_in_words(size)}"), x=f"{at:.2f}", y="0", width=f"{width:.2f}",
                height="10", class_=f"p{number % 10}")
        )  # fmt: skip
        at += width
    keys = (
        tag("span", tag("i", class_=f"key p{number % 10}"), f"{name.replace('_', ' ')} {bytes_in_words(size)}")
        for number, (name, size) in enumerate(kinds.items())
    )
    head = tag(
        "figcaption",
        tag("b", "Memory of a rank, predicted"),
        f" {bytes_in_words(total)}",
        tag("span", *keys, class_="legend"),
    )
    svg = tag("svg", *boxes, viewBox="0 0 1000 10", preserveAspectRatio="none")
    return tag("figure", head, tag("div", tag("div", svg, class_="bar"), class_="row whole"), class_="gantt")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
