"""Pictures: small ones by eye, any of them by what must be in them, and those of the docs."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from colonnade.pipeline import draw, theory
from colonnade.pipeline.schedule import NAMES, Action, all_actions
from colonnade.pipeline.simulate import Durations, Simulation, simulate
from tests.pipeline.shapes import Shape, shapes

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"
SVG = "{http://www.w3.org/2000/svg}"


def simulated(name: str, num_stages: int, num_microbatches: int, virtual_stages: int = 1) -> Simulation:
    lists = all_actions(name, num_stages, num_microbatches, virtual_stages)
    return simulate(lists, num_microbatches, virtual_stages=virtual_stages)


def test_two_stages_by_eye() -> None:
    assert draw.text(simulated("1f1b", 2, 2)) == (
        "time     0     2     4     6     8\n"
        "stage 0 │F0 F1 ······B0─── ···B1─── │\n"
        "stage 1 │···F0 B0─── F1 B1─── ······│"
    )


@pytest.mark.parametrize(
    ("tick", "start", "end", "numbers"),
    [
        (2, 0, 6, [0, 2, 4]),
        (2, 0, 8, [0, 2, 4, 6]),
        (2, 4, 9, [4, 6, 8]),
        (0.1, 0, 0.3, [0, 0.1, 0.2]),
        (0.1, 0.3, 0.6, [3 * 0.1, 0.4, 0.5]),
        (5, 5, 5, []),
    ],
)
def test_numbers_of_a_ruler_end_before_its_end(tick: float, start: float, end: float, numbers: list[float]) -> None:
    assert list(draw.Scale(1.0, tick).ticks(start, end)) == numbers


def test_weight_gradients_and_chunks_have_names_of_their_own() -> None:
    assert "B0 W0" in draw.text(simulated("zero_bubble", 2, 2))
    assert "F1.1" in draw.text(simulated("interleaved", 2, 2, 2))


def test_a_wide_schedule_goes_on_below() -> None:
    whole = draw.text(simulated("1f1b", 2, 8), width=1000)
    panels = draw.text(simulated("1f1b", 2, 8), width=50).split("\n\n")
    assert len(panels) == 3
    assert all(len(line) <= 50 + 2 for panel in panels for line in panel.splitlines())
    joined = "".join(panel.splitlines()[1].split("│")[1] for panel in panels)
    assert joined == whole.splitlines()[1].split("│")[1]


def test_rows_of_many_stages_stand_below_their_ruler() -> None:
    ruler, *rows = draw.text(simulated("1f1b", 11, 11), width=1000).splitlines()
    assert {row.index("│") + 1 for row in rows} == {ruler.index("0")} and len({len(row) for row in rows}) == 1


def test_as_many_panels_as_may_be_shown_are_shown() -> None:
    drawn = draw.text(simulated("1f1b", 2, 3), width=22, panels=3)
    assert drawn.count("stage 0") == 3 and "left out" not in drawn


@pytest.mark.parametrize(("width", "count"), [(60, 1), (46, 1), (28, 2), (22, 3)])
def test_behind_panels_that_are_full_there_is_no_empty_one(width: int, count: int) -> None:
    """Of twelve units of time, in panels of twelve, six and four."""
    panels = draw.text(simulated("1f1b", 2, 3), width=width).split("\n\n")
    assert len(panels) == count
    assert all(len(line.split("│")[1]) == 36 // count for panel in panels for line in panel.splitlines()[1:])


def test_the_middle_of_a_very_wide_schedule_is_left_out_and_that_is_said() -> None:
    drawn = draw.text(simulated("1f1b", 4, 64), width=80)
    assert drawn.count("stage 0") == 4
    left_out = re.search(r"… time (\d+) to (\d+) is left out …", drawn)
    assert left_out is not None
    times = [int(each) for each in re.findall(r"^time +(\d+)", drawn, re.MULTILINE)]
    assert int(left_out[2]) == times[2] > int(left_out[1]) == 2 * times[1], "from panel to panel"
    assert "F0─ F1─ F2─" in drawn and "B63" in drawn


def test_narrow_actions_keep_their_numbers() -> None:
    """A last stage with three times the work, as a large vocabulary gives it."""
    drawn = draw.text(simulate(all_actions("1f1b", 3, 12), 12, sizes=[0.3, 0.6, 2.1]), width=2000)
    for row in (line.split("│")[1] for line in drawn.splitlines()[1:]):
        names = re.findall(r"[FB]\d*", row)
        assert len(names) == 24 and {f"{kind}{number}" for kind in "FB" for number in range(12)} == set(names)


def test_actions_too_short_for_any_name_show_nothing() -> None:
    sizes = [0.0, 0.05, 2.95]
    drawn = draw.text(simulate(all_actions("1f1b", 3, 12), 12, sizes=sizes), width=2000)
    first, second, third = (line.split("│")[1] for line in drawn.splitlines()[1:])
    assert set(first) == {"·"}
    assert not set(second) & set("0123456789"), "no number without its letter"
    assert "F11" in third


@pytest.mark.parametrize(
    ("width", "name"), [(6, "F12.1"), (5, "F12.1"), (4, "F12"), (3, "F12"), (2, "F"), (1, "F"), (0, "")]
)
def test_an_action_has_the_longest_name_that_its_columns_hold(width: int, name: str) -> None:
    action = Action("F", 12, 1)
    assert draw._fitting(action, 2, width) == name
    assert draw._fitting(action, 1, width) == name.removesuffix(".1")


@pytest.mark.slow
@given(shapes())
@settings(deadline=None, max_examples=30)
def test_every_action_is_drawn_in_both(shape: Shape) -> None:
    found = simulated(*shape)
    drawn = draw.text(found, width=10**6)
    rows = [line.split("│")[1] for line in drawn.splitlines()[1:]]
    assert len({len(row) for row in rows}) == 1, "all rows end together"
    virtual_stages = 1 + max(event.action.chunk for events in found.events for event in events)
    for row, events in zip(rows, found.events, strict=True):
        assert re.findall(r"[FBW][\d.]+", row) == [draw.label(event.action, virtual_stages) for event in events]
    picture = ElementTree.fromstring(draw.svg(found, title="a < b"))
    assert len(picture.findall(f"{SVG}g")) == sum(map(len, found.events))


def test_the_svg_names_colours_and_places_every_action() -> None:
    picture = ElementTree.fromstring(draw.svg(simulated("interleaved", 2, 2, 2), title="a < b & c"))
    boxes = picture.findall(f"{SVG}g")
    assert boxes[0].findtext(f"{SVG}title") == "forward of micro-batch 0, chunk 0, stage 0: 0 to 0.5"
    assert boxes[1].findtext(f"{SVG}title") == "forward of micro-batch 1, chunk 0, stage 0: 0.5 to 1"
    width = float(picture.attrib["width"])
    rectangles = [box.find(f"{SVG}rect") for box in boxes]
    assert all(float(r.attrib["x"]) + float(r.attrib["width"]) <= width for r in rectangles if r is not None)
    assert len({r.attrib["fill"] for r in rectangles if r is not None}) == 4, "two kinds, two chunks"
    words = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"a < b & c", "stage 0", "stage 1", "F1.1", "forward", "backward"} <= set(words)
    assert boxes[2].findtext(f"{SVG}title") == "forward of micro-batch 0, chunk 1, stage 0: 1 to 1.5"
    assert "grey: waiting, paler: later chunk" in words and "F0" not in words


def test_the_chunks_of_a_kind_go_from_its_first_colour_to_its_last() -> None:
    colours = [draw._colour(Action("B", 0, chunk), 3) for chunk in range(3)]
    assert colours[0] == draw.COLOURS["B"][0] and colours[2] == draw.COLOURS["B"][1] and len(set(colours)) == 3
    assert draw._colour(Action("F", 0, 0), 1) == draw.COLOURS["F"][0], "of one chunk, the first"


def test_an_svg_of_one_chunk_says_what_its_colours_are_and_when() -> None:
    found = simulated("zero_bubble", 2, 3)
    picture = ElementTree.fromstring(draw.svg(found, title="small"))
    texts = [(text.text, float(text.attrib["x"])) for text in picture.iter(f"{SVG}text")]
    legend = [text for text, _ in texts[-4:]]
    assert legend == ["forward", "backward", "weight gradients", "grey: waiting"]
    places = [x for _, x in texts[-4:]]
    assert all(
        after - before >= 7 * len(text) for text, before, after in zip(legend, places, places[1:], strict=False)
    ), "none is written over the next"
    fills = [rect.attrib["fill"] for rect in picture.findall(f"{SVG}rect")[-3:]]
    assert fills == [draw.COLOURS[kind][0] for kind in "FBW"]
    assert ("0", draw.MARGIN) in texts, "the ruler begins where the first action does"


def test_title_stages_ruler_and_legend_of_an_svg_stand_below_each_other() -> None:
    picture = ElementTree.fromstring(draw.svg(simulated("1f1b", 3, 4), title="small"))
    box = max(float(rect.attrib["y"]) + float(rect.attrib["height"]) for rect in picture.findall(f"{SVG}g/{SVG}rect"))
    texts = [(text.text or "", float(text.attrib["y"])) for text in picture.findall(f"{SVG}text")]
    title, *stages = [y for text, y in texts if text == "small" or text.startswith("stage")]
    (ruler,) = {y for text, y in texts if text.isdecimal()}
    (legend,) = {y for text, y in texts if text in ("forward", "backward", "grey: waiting")}
    places = [title, *stages, box, ruler - 11, ruler, legend - 11, legend, float(picture.attrib["height"])]
    assert places == sorted(places) and len(stages) == 3, "none is written over the next"


def test_boxes_of_an_svg_lie_beside_each_other_whatever_they_last() -> None:
    found = simulate(all_actions("gpipe", 1, 30), 30, durations=Durations(0.37, 0.41, 0.29))
    picture = ElementTree.fromstring(draw.svg(found, title="odd"))
    boxes = [(int(r.attrib["x"]), int(r.attrib["width"])) for r in picture.findall(f"{SVG}g/{SVG}rect")]
    assert len(boxes) == 60
    assert all(x + width == following for (x, width), (following, _) in pairwise(boxes))


def test_a_long_svg_is_narrowed_and_leaves_out_names_that_do_not_fit() -> None:
    picture = ElementTree.fromstring(draw.svg(simulated("1f1b", 2, 400), title="long"))
    assert float(picture.attrib["width"]) < draw.WIDEST + 200
    assert "F399" not in [text.text for text in picture.iter(f"{SVG}text")]


# The page


def blocks(kind: str) -> list[tuple[str, str]]:
    """The arguments and the text of each block under `<!-- kind: arguments -->`."""
    return re.findall(rf"<!-- {kind}: (.*?) -->\n```\n(.*?)\n```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(("arguments", "picture"), blocks("schedule"))
def test_the_pictures_of_the_page_are_drawn_by_this_code(arguments: str, picture: str) -> None:
    name, *numbers = arguments.split()
    assert draw.text(simulated(name, *map(int, numbers))) == picture


def test_the_page_draws_every_schedule() -> None:
    assert {arguments.split()[0] for arguments, _ in blocks("schedule")} == set(NAMES)


def test_the_table_of_the_page_is_what_the_simulator_finds() -> None:
    rows = re.findall(r"^\| `(\w+)`(?:, v = (\d))? \| ([\d.]+) \| ([\d.]+) % \| ([\d, ]+) \|$", PAGE.read_text(), re.M)
    assert {name for name, *_ in rows} == set(NAMES)
    for name, virtual, makespan, bubble, peaks in rows:
        shape = (name, 4, 16, int(virtual or 1))
        found = simulated(*shape)
        assert (f"{found.makespan:g}", f"{found.bubble:.1%}") == (makespan, f"{bubble}%")
        assert peaks == ", ".join(map(str, found.peak))
        assert found.bubble == pytest.approx(theory.bubble(*shape, Durations()))
