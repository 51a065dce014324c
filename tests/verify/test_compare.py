"""Number against number: what differs first, by how much, where; what is missing; what rounding allows."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.mesh.layout import Layout
from colonnade.verify.compare import (
    Far,
    LocalShard,
    Number,
    Verdict,
    compare,
    distance,
    exact,
    failed,
    judge,
    near,
    of_serial_run,
)
from colonnade.verify.layouts import LeftOut
from colonnade.verify.table import Report, as_json, as_text

TP2 = Layout(tp=2)


def number(name: str, what: str = "gradient", step: int = 1) -> Number:
    return Number(what, name, step)


def shard(
    name: str, values: Sequence[object], *, at: tuple[int, ...] = (0,), shape: tuple[int, ...] = (2,)
) -> LocalShard:
    return LocalShard(number(name), shape, at, torch.tensor(values, dtype=torch.float64))


def judged(serial: dict[str, list[float]], *ranks: list[LocalShard]) -> Verdict:
    wholes = {number(name): torch.tensor(x, dtype=torch.float64) for name, x in serial.items()}
    return judge("tp=2", TP2, compare(wholes, ranks), exact)


def test_the_first_difference_is_the_first_of_the_run_on_any_rank() -> None:
    told = judged(
        {"a": [1.0, 2.0], "b": [3.0, 4.0]},
        [shard("a", [1.0, 2.0]), shard("b", [3.0, 4.4])],
        [shard("a", [1.0, 2.02]), shard("b", [3.0, 4.0])],
    )
    assert not told.ok
    assert told.first_difference == "gradient of a in step 1 by 1.0e-02 at [1] on rank 1 [pp0 dp0 tp1]"
    assert told.furthest == "gradient of b in step 1 by 1.0e-01 at [1] on rank 0 [pp0 dp0 tp0]"
    assert told.max_relative_difference == pytest.approx(0.1)


def test_rounding_is_no_difference() -> None:
    assert judged({"a": [1.0, 2.0]}, [shard("a", [1.0 + 1e-11, 2.0])]).ok
    assert not judged({"a": [1.0, 2.0]}, [shard("a", [1.0 + 1e-9, 2.0])]).ok


def test_boxes_are_held_against_their_part_of_the_whole() -> None:
    told = judged({"a": [1.0, 2.0]}, [shard("a", [1.0])], [shard("a", [2.0], at=(1,))])
    assert told.ok and told.max_relative_difference == 0.0 and told.furthest is None


def test_a_box_of_tiny_elements_is_held_against_the_largest_of_the_whole() -> None:
    """They are rounding alone, or nothing."""
    for tiny in (0.0, 1e-20):
        told = judged({"a": [1.0, tiny]}, [shard("a", [1.0])], [shard("a", [1e-15], at=(1,))])
        assert told.ok and told.max_relative_difference == pytest.approx(1e-15, rel=1e-4, abs=0)


def test_an_element_that_no_rank_has_is_a_difference() -> None:
    told = judged({"a": [1.0, 2.0], "b": [0.0, 0.0]}, [shard("a", [1.0, 2.0]), shard("b", [0.0], at=(1,))])
    assert told.first_difference == "gradient of b in step 1: 1 of its elements are on no rank" and not told.ok
    nothing = judged({"a": [1.0, 2.0]}, [], [])
    assert nothing.first_difference == "gradient of a in step 1: 2 of its elements are on no rank"


def test_a_number_that_the_serial_run_does_not_have() -> None:
    told = judged({"a": [1.0, 2.0]}, [shard("a", [1.0, 2.0]), shard("z", [1.0, 2.0])])
    assert told.first_difference == "gradient of z in step 1, which the serial run does not have"
    other = judged({"a": [1.0, 2.0]}, [shard("a", [1.0, 2.0]), shard("a", [1.0, 2.0], shape=(3,))])
    assert not other.ok, "of another shape"


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_no_number_is_infinitely_far(wrong: float) -> None:
    told = judged({"a": [1.0, 2.0]}, [shard("a", [1.0, wrong])])
    assert told.max_relative_difference is None and not told.ok
    assert told.first_difference == "gradient of a in step 1 by inf at [1] on rank 0 [pp0 dp0 tp0]"


def test_a_serial_run_that_is_infinite_somewhere_is_far_from_everything() -> None:
    told = judged({"a": [1.0, math.inf]}, [shard("a", [1.5])], [shard("a", [math.inf], at=(1,))])
    assert not told.ok and told.first_difference is not None
    assert told.first_difference.startswith("gradient of a in step 1 by inf at [0]")


def test_what_should_be_zero() -> None:
    assert judged({"a": [0.0, 0.0]}, [shard("a", [0.0, 0.0])]).ok
    assert not judged({"a": [0.0, 0.0]}, [shard("a", [0.0, 1e-300])]).ok


@pytest.mark.parametrize(
    ("what", "step", "floor"),
    [
        ("weight", 0, 0.0),
        ("gradient", 1, 2e-3),
        ("gradient", 2, 5e-3),
        ("optimizer exp_avg", 2, 5e-3),
        ("optimizer exp_avg_sq", 2, 1e-10 * 5e-3**2),
        ("weight", 2, 30.0 * 7e-3),
        ("parameter", 2, 30.0 * 7e-3),
        ("loss", 2, 0.0),
        ("gradient norm", 2, 0.0),
    ],
)
def test_what_is_next_to_nothing_is_held_against_the_largest_gradient(what: str, step: int, floor: float) -> None:
    """Of 2 in step 1 and of 5 in step 2; a weight moves by 30 times a gradient at most."""
    largest = {number("a", step=1): torch.tensor([0.5, -2.0]), number("a", step=2): torch.tensor([5.0, 0.0])}
    about, nothing = number("b", what, step), torch.tensor([1e-17, 0.0], dtype=torch.float64)
    off = LocalShard(about, (2,), (0,), nothing + torch.tensor([0.0, 1e-16], dtype=torch.float64))
    far = compare({**largest, about: nothing}, [[off]], 30.0).furthest[about]
    assert far.distance == pytest.approx(1e-16 / max(floor, 1e-17), rel=1e-6)


def test_a_gradient_is_not_hidden_behind_the_largest() -> None:
    """Where it is a billionth of it, and wrong by a thousandth."""
    told = judged({"a": [1.0, 0.0], "b": [1e-9, 0.0]}, [shard("a", [1.0, 0.0]), shard("b", [1.001e-9, 0.0])])
    assert not told.ok and told.first_difference is not None and told.first_difference.startswith("gradient of b ")


def test_scalars_and_empty_boxes() -> None:
    loss = LocalShard(Number("loss", "", 1), (), (), torch.tensor(2.0))
    assert distance(loss, torch.tensor(4.0), 3) == Far(0.5, 3, ())
    assert distance(shard("a", [], at=(2,)), torch.ones(2), 0).distance == 0.0


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_the_furthest_element_is_named_in_the_whole(shape: list[int], data: st.DataObject) -> None:
    serial = torch.arange(1.0, 1.0 + math.prod(shape), dtype=torch.float64).view(shape)
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = serial[tuple(slice(at, n) for at, n in zip(offsets, shape, strict=True))].clone()
    inside = tuple(data.draw(st.integers(0, n - 1)) for n in box.shape)
    box[inside] += 7.0
    far = distance(LocalShard(number("a"), tuple(shape), offsets, box), serial, 0)
    assert far.element == tuple(at + i for at, i in zip(offsets, inside, strict=True))
    assert far.distance == pytest.approx(7.0 / math.prod(shape))


def test_numbers_in_words() -> None:
    assert [str(each) for each in (number("w"), number("w", "weight", 0), number("w", "weight", 3))] == [
        "gradient of w in step 1",
        "weight w before step 1",
        "weight w after step 3",
    ]
    assert str(number("w", "parameter", 2)) == "parameter w after step 2"
    assert str(number("w", "optimizer exp_avg", 2)) == "optimizer exp_avg of w after step 2"
    assert str(number("", "loss", 2)) == "loss of step 2"


def test_whole_is_what_a_serial_run_has() -> None:
    assert list(of_serial_run([shard("b", [1.0, 2.0]), shard("a", [3.0, 4.0])])) == [number("b"), number("a")]
    with pytest.raises(AssertionError, match="has all of every tensor"):
        of_serial_run([shard("a", [1.0])])


# --- formats of fewer bits --------------------------------------------------------------------------------------------


def rounded_bounds(**own: float) -> dict[str, float]:
    """Bounds in bf16 of tensors of ones, of which the serial run is so far off, in whatever step."""
    numbers = [
        number(name, what, step) for name in own for what, step in (("gradient", 1), ("weight", 0), ("weight", 2))
    ]
    parts = [LocalShard(each, (2,), (0,), torch.tensor([1.0, 1.0 + own[each.name]])) for each in numbers]
    bound = near(compare({each: torch.ones(2) for each in numbers}, [parts]), "bf16")
    return {f"{each.what} {each.name}{each.step}": bound(each) for each in numbers}


def test_a_layout_may_round_as_much_as_the_serial_run_does() -> None:
    """Up to the first update each tensor for itself; then the furthest of its kind counts."""
    rounding = 16 * 2.0**-9
    assert rounded_bounds(a=0.0, b=0.5) == {
        "gradient a1": rounding,
        "weight a0": rounding,
        "weight a2": 16 * 0.5 + rounding,
        "gradient b1": 4 * 0.5 + rounding,
        "weight b0": 4 * 0.5 + rounding,
        "weight b2": 16 * 0.5 + rounding,
    }


@pytest.mark.parametrize("what", ["loss", "gradient", "gradient norm"])
def test_what_comes_before_the_first_update_is_bounded_for_itself(what: str) -> None:
    first, second = (Number(what, "", step) for step in (1, 2))
    parts = [LocalShard(each, (), (), torch.tensor(1.0 + 0.5 * (each == second))) for each in (first, second)]
    bound = near(compare({each: torch.tensor(1.0) for each in (first, second)}, [parts]), "bf16")
    assert (bound(first), bound(second)) == (16 * 2.0**-9, 16 * 0.5 + 16 * 2.0**-9)


@pytest.mark.parametrize(("precision", "power"), [("fp32", -24), ("bf16", -9), ("fp16", -12)])
def test_a_number_that_the_serial_run_has_exactly_may_be_sixteen_roundings_off(precision: str, power: int) -> None:
    """As the page on `verify` says for each format."""
    weight = Number("weight", "w", 1)
    own = compare({weight: torch.ones(2)}, [[LocalShard(weight, (2,), (0,), torch.ones(2))]])
    assert near(own, precision)(weight) == 16 * 2.0**power


def test_the_furthest_of_a_kind_counts_wherever_it_stands() -> None:
    assert rounded_bounds(a=0.5, b=0.0)["weight b2"] == rounded_bounds(a=0.0, b=0.5)["weight a2"]


def bounded(*bounds: float) -> Verdict:
    """Of numbers that are 0.5 and 0.25 off, each with a bound of its own."""
    serial, names = {number(name): torch.ones(2) for name in "ab"}, dict(zip("ab", bounds, strict=True))
    shards = [shard("a", [1.0, 1.5]), shard("b", [0.75, 1.0])]
    return judge("tp=2", TP2, compare(serial, [shards]), lambda each: names[each.name])


@pytest.mark.parametrize(
    ("bounds", "ratio", "nearest"),
    [
        ((1.0, 0.125), 2.0, "b"),
        ((1.0, 0.3125), 0.8, "b"),
        ((0.25, 1.0), 2.0, "a"),
        ((math.inf, 0.5), 0.5, "b"),
        ((1.0, 0.0), None, "b"),
    ],
)
def test_the_number_that_is_nearest_to_its_bound(bounds: Sequence[float], ratio: float | None, nearest: str) -> None:
    """It need not be the one of the largest difference, and the verdict can be read from it."""
    told = bounded(*bounds)
    assert told.max_relative_difference == 0.5 and told.furthest is not None
    assert told.max_ratio_to_bound == (None if ratio is None else pytest.approx(ratio))
    assert told.nearest_to_bound is not None
    assert told.nearest_to_bound.startswith(f"gradient of {nearest} in step 1 by ")
    assert told.ok == (ratio is not None and ratio <= 1.0)


def test_whether_a_step_overflows_has_no_rounding() -> None:
    overflow = Number("overflow", "", 1)
    own = compare({overflow: torch.tensor(0.0)}, [[LocalShard(overflow, (), (), torch.tensor(0.0))]])
    assert near(own, "fp16")(overflow) == 0.0


# --- what is told -----------------------------------------------------------------------------------------------------

REPORT = Report(
    steps=1,
    precision="fp64",
    tolerance="up to 1e-10",
    shrunk={"num_layers": [24, 2]},
    layouts=[
        Verdict("tp=2", 2, 1.5e-15, "loss of step 1 by 1.5e-15", None, True, 1.5e-5, "weight w by 1.5e-15"),
        Verdict("pp=2", 2, 0.25, "…", "loss of step 1 by 2.5e-01", False, 2.5e9, "…"),
        failed("dp=2,zero=1", Layout(dp=2), 1),
    ],
    left_out=[LeftOut("tp=3", "3 does not divide 2.")],
    init_from_not_read=None,
)


def test_the_table() -> None:
    assert as_text(REPORT).splitlines() == [
        "shrunk: num_layers 24 → 2",
        "1 step in fp64; equal is up to 1e-10",
        "",
        "  layout       ranks  largest difference",
        "  tp=2             2  1.5e-15  equal",
        "  pp=2             2  2.5e-01  DIFFERS, first in the loss of step 1 by 2.5e-01",
        "  dp=2,zero=1      2     none  DIFFERS: its ranks failed with exit status 1 before there was anything to "
        "compare",
        "  tp=3         left out: 3 does not divide 2.",
        "",
        "1 of 3 layouts equal to the serial run.",
    ]


def test_the_table_of_a_format_of_fewer_bits_tells_what_the_verdict_goes_by() -> None:
    """The largest difference is that of a number that may differ by more than others."""
    equal, differs, _ = REPORT.layouts
    layouts = [
        replace(equal, max_relative_difference=1.6, max_ratio_to_bound=0.994),
        replace(differs, max_ratio_to_bound=1.0001),
        replace(differs, max_ratio_to_bound=25_000.0),
        failed("dp=2", Layout(dp=2), 1),
    ]
    assert as_text(replace(REPORT, precision="bf16", layouts=layouts)).splitlines()[3:8] == [
        "  layout  ranks  largest difference  difference / bound",
        "  tp=2        2  1.6e+00             1.00                equal",
        "  pp=2        2  2.5e-01             1.01                DIFFERS, first in the loss of step 1 by 2.5e-01",
        "  pp=2        2  2.5e-01             2.5e+04             DIFFERS, first in the loss of step 1 by 2.5e-01",
        "  dp=2        2     none             none                DIFFERS: its ranks failed with exit status 1 before "
        "there was anything to compare",
    ]


def test_one_layout_and_several_steps_are_told_in_words() -> None:
    lines = as_text(replace(REPORT, steps=2, layouts=REPORT.layouts[:1])).splitlines()
    assert lines[1].startswith("2 steps in fp64") and lines[-1] == "1 of 1 layout equal to the serial run."


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (Number("loss", "", 1), "loss of step 1"),
        (Number("gradient", "w", 2), "gradient of w in step 2"),
        (Number("weight", "w", 0), "weight w before step 1"),
        (Number("weight", "w", 1), "weight w after step 1"),
        (Number("optimizer exp_avg", "w", 1), "optimizer exp_avg of w after step 1"),
        (Number("parameter", "w", 3), "parameter w after step 3"),
    ],
)
def test_a_number_is_told_with_its_time(number: Number, words: str) -> None:
    assert str(number) == words


def test_weights_that_are_not_those_of_the_run_are_told() -> None:
    report = replace(REPORT, init_from_not_read="Llama-3-8B")
    assert as_text(report).splitlines()[1] == "weights are drawn: train.init_from = 'Llama-3-8B' is not read"
    assert as_json(report)["init_from_not_read"] == "Llama-3-8B"
    assert as_json(REPORT)["init_from_not_read"] is None


def test_the_object() -> None:
    told = as_json(REPORT)
    assert told["layouts"][0] == {
        "layout": "tp=2",
        "num_ranks": 2,
        "max_relative_difference": 1.5e-15,
        "furthest": "loss of step 1 by 1.5e-15",
        "first_difference": None,
        "ok": True,
        "max_ratio_to_bound": 1.5e-5,
        "nearest_to_bound": "weight w by 1.5e-15",
    }
    assert told["layouts"][2]["max_relative_difference"] is None and told["layouts"][2]["ok"] is False
    assert told["left_out"] == [{"layout": "tp=3", "reason": "3 does not divide 2."}]
    assert (told["shrunk"], told["precision"], told["steps"]) == ({"num_layers": [24, 2]}, "fp64", 1)
    assert not REPORT.ok
