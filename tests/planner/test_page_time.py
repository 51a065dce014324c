"""Time of a plan as pictures: spans within the picture, colours with their names, dots under the roof."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.drawing.html import Html
from colonnade.pipeline.schedule import Action
from colonnade.pipeline.simulate import Event, Simulation
from colonnade.planner.cost import Cost
from colonnade.planner.hardware import hardware
from colonnade.planner.operators import Operator
from colonnade.planner.page_time import Alike, parts, pipeline, roofline
from colonnade.planner.timeline import Played

A100 = hardware("a100-80gb").having(
    products__half_area=0, products__half_depth=0, products__efficiency=1, device__kernel_seconds=0
)
LARGE = Operator("mm", 2 * 4096**3, 6 * 4096**2, "bfloat16", (1, 4096, 4096, 4096))
THIN = Operator("mm", 2 * 8192**2, 2 * 8192**2, "bfloat16", (1, 1, 8192, 8192))
SUM = Operator("add", 0, 10**9, "float32")


def events(count: int, *, begin: float = 0.0, length: float = 1.0) -> tuple[Event, ...]:
    starts = (begin + length * number for number in range(count))
    return tuple(Event(Action("F", number), start, start + length) for number, start in enumerate(starts))


def test_what_is_drawn_of_a_schedule_ends_where_the_first_stage_has_no_more_room() -> None:
    """72 actions of the first; of the second those that have begun by then, the last of which is cut."""
    simulation = Simulation((events(73), events(73, begin=0.5, length=2.0)), (1, 1))
    text = pipeline(simulation, about="it")
    spans = [tuple(map(float, each)) for each in re.findall(r'<rect x="([\d.]+)" y="0" width="([\d.]+)"', text)]
    assert len(spans) == 72 + 36 and max(at + width for at, width in spans) == pytest.approx(1000.0, abs=0.02)
    assert f"The first {72 / 146.5:.1%} of the schedule is drawn" in text


def test_of_many_stages_each_has_fewer_actions() -> None:
    """2,400 of all stages; of two thousand stages each has some."""
    text = pipeline(Simulation((events(100),) * 48, (1,) * 48), about="it")
    assert text.count('class="kF"') == 48 * 50


def spending(**spent: float) -> Html:
    found: Any = SimpleNamespace(seconds_per_step=10.0, spent={}, played={0: Played((), spent)})
    return parts(found)


def test_what_a_step_goes_to_has_a_colour_and_a_name_each() -> None:
    """After nine colours the first comes again; waiting has one of its own."""
    text = spending(**{f"axis{number}": 1.0 - number / 1000 for number in range(9)}, products=0.5)
    keys = re.findall(r'class="key (\w+)"></i>([^<]+)', text)
    assert keys[0] == ("p0", "collectives over axis0") and keys[8:10] == [
        ("p8", "collectives over axis8"), ("p0", "matrix products")
    ]  # fmt: skip
    assert keys[10] == ("rest", "waiting for other stages and data, and checkpoints")
    rects = re.findall(r'<rect .*?width="([\d.]+)".*?class="(\w+)"><title>(.*?): ', text)
    assert [each[1:] for each in rects] == keys and float(rects[0][0]) == pytest.approx(100.0)


def test_a_stage_that_spends_nothing_on_something_has_no_number_there() -> None:
    played = {0: Played((), {"tp": 2.5, "products": 7.5}), 1: Played((), {"products": 10.0})}
    found: Any = SimpleNamespace(seconds_per_step=10.0, spent={}, played=played)
    table = re.findall(r"<tbody>(.*?)</tbody>", parts(found))[0]
    assert re.findall(r"<td.*?>(.*?)</td>", table) == [
        "matrix products", "7.5 s · 75.0%", "10 s · 100%", "collectives over tp that nothing hides", "2.5 s · 25.0%", ""
    ]  # fmt: skip


def drawn(operators: list[Operator], cost: Cost, peak: float = 312e12, stage: int = 0) -> str:
    found: Any = SimpleNamespace(cost=cost, peak=peak, walks={stage: SimpleNamespace(operators=operators)})
    return roofline(found, stage)


def places(text: str, kind: str) -> list[tuple[float, float]]:
    (path,) = re.findall(rf'<path class="{kind}" d="M([^"]*?)"', text)
    x, y = zip(*(point.split() for point in path.removesuffix("h0").split("L")), strict=True)
    return list(zip(map(float, x), map(float, y), strict=True))


def dot(text: str, colour: str) -> tuple[float, float]:
    (found,) = re.findall(rf'class="dots {colour}" d="M([\d.]+) ([\d.]+)h0"', text)
    return float(found[0]), float(found[1])


@pytest.mark.parametrize("ranks", [1, 4])
def test_dots_are_on_the_roof_where_nothing_is_lost(ranks: int) -> None:
    """What has more arithmetic than memory right of the ridge, the rest left of it; of cores that slow each other
    too.
    """
    cpu = replace(A100.having(products__memory=1, device__together=0.5), cores=4)
    text = drawn([LARGE, LARGE, THIN, SUM], Cost(cpu, ranks), stage=3)
    rising, ridge, flat = places(text, "line c7")
    assert rising[1] > 900.0 and ridge[1] < 100.0, "the picture is as high as the roof"
    assert rising[0] == 0.0 and flat[0] == 1000.0 and ridge[1] == flat[1] < rising[1]
    large, thin = dot(text, "c0"), dot(text, "c1")
    assert large[0] > ridge[0] > thin[0] and large[1] == pytest.approx(ridge[1], abs=0.2)
    slope = (rising[1] - ridge[1]) / (ridge[0] - rising[0])
    assert thin[1] == pytest.approx(rising[1] - slope * thin[0], abs=0.5)
    assert "each kind of product and attention, stage 3" in text


def test_operators_are_told_with_their_share_of_all_and_their_rates() -> None:
    cost = Cost(A100.having(device__memory_bandwidth=1e12, products__memory=0.5))
    large, added, thin = 2 * cost.operator(LARGE), cost.operator(SUM), cost.operator(THIN)
    text = drawn([LARGE, SUM, THIN, LARGE], cost)
    cells = [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", text)]
    rows = {cell[0].rpartition(", ")[0]: cell[1:] for cell in cells}
    shares = [f"{each / (large + added + thin):.1%}" for each in (large, added)]
    product, total = rows["mm 1 × [4096, 4096] · [4096, 4096]"], rows["add"]
    assert (product[0], product[2:5]) == ("2", [shares[0], "arithmetic", "312TFLOP/s"])
    assert total == ["1", "2 ms", shares[1], "memory", "", "500GB/s"]
    names = re.findall(r"<title>(mm .*?)</title>", text, flags=re.DOTALL)
    of_these = [f"{times} times, {each / (large + thin):.1%} of these" for times, each in ((2, large), (1, thin))]
    assert sorted(name.split("\n")[1] for name in names) == sorted(of_these), "of products and attention"


def test_of_very_many_operators_those_that_take_most_are_told_and_drawn() -> None:
    many = [LARGE._replace(flops=LARGE.flops + number) for number in range(401)]
    text = drawn(many, Cost(A100))
    assert text.count('class="dots c0"') == 400 and text.count("<tr><td>") == 25
    assert "… and 376 more kinds of operators" in text
    assert "<svg" not in drawn([SUM], Cost(A100)), "no product, no picture"


def test_the_rate_of_operators_that_are_alike_is_that_of_all_of_them() -> None:
    found = Alike(LARGE, 3, 6.0)
    assert (found.rate, found.intensity) == (LARGE.flops / 2, LARGE.flops / LARGE.bytes)
