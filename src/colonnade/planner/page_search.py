"""A search as a picture: layouts by time and memory, and those that no other beats in both. Pure."""

from collections.abc import Sequence

from colonnade.drawing import scatter
from colonnade.drawing.html import Html, joined, table, tag
from colonnade.drawing.scale import bytes_in_words, length_of_time, scale_of
from colonnade.drawing.scatter import Curve, Dot
from colonnade.planner.estimate_report import in_words
from colonnade.planner.search import Candidate, Search, layout_in_words
from colonnade.planner.search_report import often_refused

MOST_DOTS = 1200
MOST_ROWS = 40


def drawn(found: Search, best: Candidate) -> Html:
    """All layouts that fit, the front, and why others are not there."""
    words = (
        f"{found.tried:,} layouts were put together: {len(found.fitting):,} fit into "
        f"{bytes_in_words(found.limit)}, {found.num_refused:,} cannot be, "
        f"{found.num_too_large:,} take more memory."
    )
    return joined([tag("p", words), _front(found, best), _table(found), _refused(found)])


def _front(found: Search, best: Candidate) -> Html:
    front, every = found.front, found.fitting
    shown = every[:: max(1, -(-len(every) // MOST_DOTS))]
    ends = [*front, *shown, best]
    across = scale_of([each.seconds for each in ends], from_zero=False)
    up = scale_of([each.memory for each in ends])
    dots = [*(_dot(each, "quiet") for each in shown), *(_dot(each, "c0") for each in front), _dot(best, "c1")]
    curve = Curve([(each.seconds, each.memory) for each in front], "c0")
    legend = {"no other is better in both": "c0", "the best, run on paper": "c1", "others that fit": "quiet"}
    about = "memory of a rank by time of a step, put together from what units cost"
    more = f"Of {len(every):,} layouts {len(shown):,} are drawn." if len(shown) < len(every) else ""
    picture = scatter.drawn(
        "Layouts", about, dots, [curve],
        across=("time of a step", across, length_of_time), up=(up, bytes_in_words), legend=legend,
    )  # fmt: skip
    return joined([picture, tag("p", more, class_="quiet") if more else ""])


def _dot(each: Candidate, colour: str) -> Dot:
    name = f"{layout_in_words(each)}\n{length_of_time(each.seconds)}, {bytes_in_words(each.memory)}"
    return Dot(each.seconds, each.memory, name, colour)


def _table(found: Search) -> Html:
    rows: Sequence[Sequence[object]] = [
        [length_of_time(each.seconds), bytes_in_words(each.memory), layout_in_words(each), in_words(each.bound)]
        for each in found.front[:MOST_ROWS]
    ]
    return table(["step", "memory", "layout", "most of it"], rows, numbers=(0, 1))


def _refused(found: Search) -> Html:
    if not found.refused:
        return Html()
    rows = [[f"{count:,}", reason] for reason, count in often_refused(found)]
    return tag("details", tag("summary", "layouts that cannot be"), table(["layouts", "why"], rows, numbers=(0,)))
