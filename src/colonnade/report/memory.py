"""What was predicted of a run beside what was measured. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from colonnade.drawing import bars
from colonnade.drawing.html import Html, table, tag
from colonnade.drawing.scale import bytes_in_words, length_of_time, short
from colonnade.report.record import Record

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
    colours = {name: f"p{number % 10}" for number, name in enumerate(kinds)}
    sizes = {f"{name.replace('_', ' ')} {bytes_in_words(size)}": colours[name] for name, size in kinds.items()}
    whole = tag("div", bars.stacked(kinds, colours, bytes_in_words), class_="row whole")
    return bars.figure("Memory of a rank, predicted", bytes_in_words(sum(kinds.values())), sizes, [whole])


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
