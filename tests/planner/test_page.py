"""A plan's page: it has every picture, its numbers are the plan's, it loads nothing, and what it is given is text."""

import re
from dataclasses import replace
from functools import cache
from html import unescape
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.config.distillation import DistillationConfig
from colonnade.config.load import loads
from colonnade.config.schema import Config, RunConfig
from colonnade.drawing.scale import bytes_in_words, length_of_time, percent, short
from colonnade.mesh.layout import Layout
from colonnade.pipeline.schedule import Action
from colonnade.pipeline.simulate import Event, Simulation
from colonnade.planner import page_memory, page_time
from colonnade.planner.cost import Cost
from colonnade.planner.estimate import estimate
from colonnade.planner.estimate_report import as_json, as_text
from colonnade.planner.hardware import hardware
from colonnade.planner.memory import Memory
from colonnade.planner.operators import Operator, Section
from colonnade.planner.page import Plan, _spans, busiest, of_search, page, walks_of
from colonnade.planner.pipeline import plan_pipeline
from colonnade.planner.ranks import RankKind, RankPlan, plan_run
from colonnade.planner.search import Candidate, Confirmed, Search, layout_in_words, search
from colonnade.planner.timeline import Played
from tests.parity.runs import Case, Way, configured
from tests.planner.test_estimate_report import FIGURES
from tests.report.test_page import EVIL, Reader

A100 = hardware("a100-80gb")


def config() -> Config:
    found = configured(
        Case(drop=0.0, precision="bf16", vocab_size=64, global_batch_size=4), Way(pp=2, micro_batch_size=1)
    )
    return found.model_copy(update={"run": RunConfig(folder=f"runs/{EVIL.replace('/', '')}")})


@cache
def plan(*, timed: bool = True) -> Plan:
    settings = config()
    pipeline = plan_pipeline(settings.model, settings.parallel, num_microbatches=4, vocab_size=64)
    found = estimate(settings, 64, A100, every_rank=False) if timed else None
    walks = walks_of(settings, 64) if found is None else found.walks
    return Plan(settings, settings.train.precision, pipeline, plan_run(settings, 64), walks, found)


@pytest.mark.slow
def test_every_picture_is_there_with_the_plans_numbers() -> None:
    text = page(plan())
    words = Reader(text).text
    for each in ("A step", "Pipeline", "Memory of rank 0, stage 0", "Memory by kind", "Traffic by axis", "Roofline",
                 "Bound by", "matrix products", "the configuration", "tp = 1", "always there"):  # fmt: skip
        assert each in words, each
    found = plan().estimate
    assert found is not None and f"{found.tokens_per_second:,.0f}" in words
    drawn = text.split("<b>Pipeline</b>")[1].split("</figure>")[0]
    assert len(re.findall(r'class="kF"', drawn)) == len(re.findall(r'class="kB"', drawn)) == 2 * 4
    kinds = plan().ranks.kinds
    table = text.split("Memory by kind")[1].split("<h2>")[0]
    assert table.count("<tr>") == 1 + len(kinds)


def test_without_a_machine_there_is_no_time() -> None:
    words = Reader(page(plan(timed=False))).text
    assert "With --hardware the page has them" in words and "operators and collectives of a step" in words
    assert "Roofline" not in words and "MFU" not in words


def test_what_does_not_fit_into_a_device_is_said_with_what_is_lacking() -> None:
    """On the page, in the terminal and as JSON; to the last byte."""
    timed = plan().estimate
    assert timed is not None
    full, lacking = (
        replace(timed, hardware=timed.hardware.having(device__memory=timed.memory + left)) for left in (0, -1)
    )
    words = Reader(page(replace(plan(), estimate=lacking))).text
    assert "It does not fit: 1 B more than a device has." in words and "does not fit into" in words
    assert re.search("memory   does not fit: .*, 1 B more than the ", as_text(lacking))
    assert (as_json(lacking)["fits"], as_json(lacking)["room_bytes"]) == (False, -1)
    words = Reader(page(replace(plan(), estimate=full))).text
    assert " fits into" in words and "not fit" not in words and "memory   fits: " in as_text(full)
    assert (as_json(full)["fits"], as_json(full)["room_bytes"]) == (True, 0)


def test_it_loads_nothing_and_what_it_is_given_is_text() -> None:
    text = page(plan())
    read = Reader(text)
    assert not [value for _, name, value in read.attributes if name in ("src", "href", "action", "srcset")]
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    assert "alert(1)" in read.text and len(read.scripts) == text.count("<script") == text.count("</script>")
    assert all(script.lstrip().startswith(("{", '"use strict"')) for script in read.scripts)
    assert "default-src 'none'" in text


@pytest.mark.parametrize("timed", [True, False])
def test_memory_over_time_is_that_of_the_walk(timed: bool) -> None:
    found = plan().estimate
    assert found is not None
    for stage, walk in found.walks.items():
        spans, cost = (_spans(found, stage), found.cost) if timed else (None, None)
        course = page_memory.course(walk, spans, cost)
        assert max(course.sizes) == walk.peak.bytes and list(course.places) == sorted(course.places)
        assert course.sizes[0] == min(course.sizes) and course.places[-1] <= course.end
        if timed:
            assert course.end <= found.seconds_per_step * 1.001
        else:
            assert course.end == sum(len(section.events) for section in walk.sections)


def test_the_roofline_holds_each_product_below_the_roof() -> None:
    found = plan().estimate
    assert found is not None
    cost = found.cost
    for each in page_time.alike(found.walks[0].operators, cost):
        if each.operator.flops:
            assert each.rate <= min(found.peak, each.intensity * cost.bandwidth) * (1 + 1e-9), each.name
    counted = sum(each.count for each in page_time.alike(found.walks[0].operators, cost))
    assert counted == len(list(found.walks[0].operators))


def test_operators_that_wait_for_memory_move_as_much_as_it_can_however_often_they_run() -> None:
    cost = Cost(A100)
    sums = [Operator("add", 0, 10**15, "float32")] * 96
    found: Any = SimpleNamespace(cost=cost, peak=1.0, walks={0: SimpleNamespace(operators=sums)})
    words = Reader(page_time.roofline(found, 0)).text
    assert "add, float32 96 " in words and words.endswith(f" 100% memory {short(cost.bandwidth)}B/s")


def test_a_product_is_named_with_its_sizes() -> None:
    """Of products of one kind there are many in a step: what tells them apart is their sizes."""
    cost, product = Cost(A100), Operator("_mm_", 2 * 3 * 5 * 7 * 11, 10**6, "bfloat16", (3, 5, 7, 11))
    found: Any = SimpleNamespace(cost=cost, peak=1.0, walks={0: SimpleNamespace(operators=[product])})
    assert "mm 3 × [5, 11] · [11, 7], bfloat16" in Reader(page_time.roofline(found, 0)).text


def test_operators_are_those_of_the_stage_that_works_longest() -> None:
    played = {0: SimpleNamespace(total=2.0), 3: SimpleNamespace(total=5.0), 1: SimpleNamespace(total=1.0)}
    found: Any = SimpleNamespace(played=played)
    assert busiest(found) == 3


@pytest.mark.slow
def test_a_search_shows_its_front() -> None:
    settings = config()
    found: Search = search(settings, 64, A100, 2)
    best = replace(found.fitting[0], config=settings)
    assert plan().estimate is not None
    shown = of_search(found, Confirmed(best, plan().estimate, 3), 64, "bf16")  # type: ignore[arg-type]
    text = page(shown)
    dots = text.split("<b>Layouts</b>")[1].split("</figure>")[0]
    assert dots.count('class="dots c0"') == len(found.front) and dots.count('class="dots c1"') == 1
    assert all(layout_in_words(each) in text for each in found.front[:5])


def by_hand() -> Plan:
    """500 tokens/s on two ranks; of 40,000 tokens in all, and a fifth of the time is lost to failures."""
    timed = plan().estimate
    assert timed is not None
    found = replace(
        timed,
        hardware=A100.having(device__memory=8e10, cost__device_hour=3600),
        **FIGURES,
        spent={"products": 3.0, "tp": 1.0},
        played={stage: Played((0.1, 1.0 + stage), {"products": 1.0}) for stage in timed.played},
    )
    settings = config().model_copy(update={"run": RunConfig(folder="runs/mine")})
    return replace(plan(), config=settings, ranks=replace(ranks(), parameters=1_500_000), estimate=found)


def test_a_page_says_what_of_it_has_the_teacher() -> None:
    told, found = "memory over the step is the student", by_hand().estimate
    assert found is not None and told not in page(by_hand())
    settings = config().model_copy(update={"distillation": DistillationConfig(teacher="teacher")})
    taught = replace(by_hand(), config=settings, estimate=replace(found, spent={"products": 1.5, "teacher": 0.5}))
    text = page(taught)
    assert told in text and "the teacher's forward 500 ms · 25.0% 500 ms · 25.0%" in Reader(text).text
    assert told in page(replace(taught, estimate=None))
    missing = page(replace(taught, ranks=replace(ranks(), without_teacher=True)))
    assert told not in missing and "for themselves and the teacher, which cannot be read here" in missing


def tiles(text: str) -> list[tuple[str, ...]]:
    return re.findall(r'<div class="tile"><span>(.*?)</span><b>(.*?)</b><small>(.*?)</small></div>', text)


def test_what_matters_of_a_plan_is_told_at_its_top() -> None:
    text = page(by_hand())
    found = by_hand().estimate
    assert found is not None and found.memory < 8e10
    assert tiles(text) == [
        ("a step", "2 s", "1,000 tokens"),
        ("tokens per second", "500", "of all ranks"),
        ("MFU", "80.0%", "of 312.5 TFLOP/s"),
        ("memory of a rank", bytes_in_words(found.memory), "fits into 80 GB"),
        ("the run", "1 min 20 s", "44 steps, without failures"),
        ("with failures", "1 min 40 s", "20.0% of the time is lost"),
        ("costs", "$200", "$3600 a device and hour"),
    ]
    assert '<h1>Plan of mine</h1><p class="quiet">1.5M parameters · 3 ranks (pp3 dp1 tp1) · bf16 · A100 80GB' in text
    assert "<p>Bound by matrix products: 75.0% of a step on the stage that works longest.</p>" in text


def test_every_part_of_a_page_is_there_once() -> None:
    """With the whole configuration, and operators of the stage that works longest."""
    text = page(by_hand())
    titles = ["Where a step goes", "Pipeline", "Memory", "Traffic", "Operators", "Configuration"]
    assert re.findall(r"<h2>(.*?)</h2>", text) == titles and text.count("<footer>Colonnade ") == 1
    (pre,) = re.findall(r"<pre>(.*?)</pre>", text, flags=re.DOTALL)
    assert loads(unescape(pre)) == by_hand().config
    assert "each kind of product and attention, stage 1<" in text
    untimed = page(replace(by_hand(), estimate=None))
    assert re.findall(r"<h2>(.*?)</h2>", untimed) == [titles[1], titles[2], titles[3], titles[5]]


def test_without_a_machine_a_plan_tells_what_it_knows() -> None:
    shown = replace(by_hand(), estimate=None)
    shown = replace(shown, pipeline=replace(shown.pipeline, theory=0.125))
    waits = percent(shown.pipeline.bubble)
    assert waits != "12.5%"
    assert tiles(page(shown)) == [
        ("memory of a rank", "5 kB", "at most"),
        ("stages wait", waits, "12.5% if all were equal"),
        ("a step", "4", "samples"),
    ]
    assert f"; stages wait {waits}<" in page(shown) and "bf16</p>" in page(shown)
    timed = by_hand().estimate
    assert timed is not None
    simulation = timed.simulation
    assert f"; stages wait {percent(simulation.bubble)} of {length_of_time(simulation.makespan)}<" in page(by_hand())


@pytest.mark.parametrize("several", [True, False])
def test_memory_is_drawn_of_the_five_stages_that_take_most(several: bool) -> None:
    walks: Any = {
        stage: SimpleNamespace(
            rank=10 * stage,
            memory=Memory(1, 1, 1, 0, 0),
            sections=(Section(None, [], alive=[(0, 5)]),),
            peak=SimpleNamespace(bytes=size, action=None),
        )
        for stage, size in enumerate((3, 6, 1, 5, 4, 2))
    }
    kinds = ranks().kinds if several else ranks().kinds[:1]
    text = page(replace(by_hand(), estimate=None, walks=walks, ranks=replace(ranks(), kinds=kinds)))
    names = [f"rank {10 * stage}" + f", stage {stage}" * several for stage in (1, 3, 4, 0, 5)]
    assert re.findall("<b>Memory of (.*?)</b>", text) == names


def test_the_devices_memory_is_on_every_picture_of_memory() -> None:
    found = by_hand().estimate
    assert found is not None
    small = replace(found, hardware=found.hardware.having(device__memory=4_321))
    text = page(replace(by_hand(), estimate=small))
    assert text.count("the device's memory".replace("'", "&#x27;")) == len(found.walks)
    bars = text.split("<b>Memory by kind</b>")[1].split("</figure>")[0]
    assert ">5 kB</span>" in bars, "as long as what the largest takes"
    wide = page(replace(by_hand(), estimate=replace(found, hardware=found.hardware.having(device__memory=8_000))))
    assert ">8 kB</span>" in wide.split("<b>Memory by kind</b>")[1].split("</figure>")[0]


def test_the_page_of_a_search_has_the_ranks_and_the_schedule_of_the_best() -> None:
    best = configured(
        Case(drop=0.0, precision="bf16", vocab_size=64, global_batch_size=4), Way(dp=2, micro_batch_size=1)
    )
    timed: Any = SimpleNamespace(ranks=ranks(), walks={7: None})
    candidate = Candidate(best, 1.0, 1_000, {"products": 1.0})
    found, confirmed = Search(1e9, [candidate]), Confirmed(candidate, timed, 1)
    shown = of_search(found, confirmed, 64, "bf16")
    assert (shown.config, shown.ranks, shown.walks, shown.estimate) == (best, timed.ranks, timed.walks, timed)
    assert shown.pipeline.num_microbatches == 2 and shown.search == (found, confirmed)


# --- pieces by hand ---------------------------------------------------------------------------------------------------


def ranks(**more: int) -> RankPlan:
    """Two stages of 3 and 5 kB, as all kinds of memory."""
    small, large = Memory(1_000, 0, 0, 0, activations=2_000), Memory(1_000, 0, 0, 0, activations=4_000, **more)
    sent = {("all_reduce", "tp"): (3, 2_000), ("send", "pp"): (1, 500)}
    return RankPlan(Layout(pp=3), 7, 7, (RankKind((0, 1), 2, small, {}), RankKind((2,), 1, large, sent)))


def widths(html: str) -> list[float]:
    return [float(each) for each in re.findall(r'<rect [^>]*width="([\d.]+)"', html) if float(each)]


@pytest.mark.parametrize(
    ("limit", "length"), [(None, 5_000), (8_000.0, 8_000), (4_000.0, 5_000), (19_999.0, 19_999), (20_000.0, 5_000)]
)
def test_bars_of_memory_are_as_long_as_the_device_where_a_rank_takes_a_quarter_of_it(
    limit: float | None, length: float
) -> None:
    found = widths(page_memory.by_kind(ranks(), limit))
    assert found == pytest.approx([1000 * size / length for size in (1_000, 2_000, 1_000, 4_000)], abs=0.01)


def test_a_line_of_memory_has_every_number_and_what_is_offloaded_apart() -> None:
    words = Reader(page_memory.by_kind(ranks(host=70_000), None)).text
    assert "operators in all CPU memory" in " ".join(words.split())
    assert "0–1 2 1 kB 0 B 0 B 0 B 2 kB 0 B 3 kB 0 B" in " ".join(words.split())
    assert "2 1 1 kB 0 B 0 B 0 B 4 kB 0 B 5 kB 70 kB" in " ".join(words.split())
    assert "CPU memory" not in Reader(page_memory.by_kind(ranks(), None)).text


def test_traffic_of_a_page_is_told_by_axis_and_operation_with_how_often() -> None:
    html = page_memory.traffic(ranks())
    words = " ".join(Reader(html).text.split())
    assert "2 pp send 1 500 B" in words and "2 tp all_reduce 3 2 kB" in words
    assert widths(html) == pytest.approx([200.0, 800.0])
    nothing = replace(ranks(), kinds=ranks().kinds[:1])
    assert Reader(page_memory.traffic(nothing)).text == "Ranks send nothing."


def test_memory_changes_where_operators_and_collectives_come_or_when() -> None:
    """Two sections; places are events before, or seconds, of sections as long as the schedule has them."""
    add = Operator("add", 0, 10**9, "float32")
    sections = (
        Section(None, [add, add], alive=[(0, 5), (1, 7)]),
        Section(None, [add] * 4, alive=[(0, 3), (3, 9)]),
    )
    walk: Any = SimpleNamespace(memory=Memory(100, 20, 3, 50, 60, 70, host=80), sections=sections)
    found = page_memory.course(walk, None, None)
    assert found == ([0.0, 0.0, 1.0, 2.0, 5.0], [123, 128, 130, 126, 132], 6.0)
    timed = page_memory.course(walk, [(0.0, 10.0), (20.0, 28.0)], Cost(A100))
    assert timed.places == pytest.approx([0.0, 0.0, 5.0, 20.0, 26.0], abs=0.03)
    assert (timed.sizes, timed.end) == (found.sizes, 28.0)


def simulated(stages: int, actions: int = 2) -> Simulation:
    events = tuple(Event(Action("F", number), float(number), number + 1.0) for number in range(actions))
    return Simulation((events,) * stages, (1,) * stages)


def test_a_pipeline_is_drawn_as_far_as_one_can_see_it_and_that_is_said() -> None:
    short, long = (page_time.pipeline(simulated(2, actions=count), about="it") for count in (72, 144))
    assert "goes on like this" not in short and short.count('class="kF"') == 2 * 72
    assert "The first 50.0% of the schedule is drawn" in long and long.count('class="kF"') == 2 * 72
    assert "stages are drawn" not in page_time.pipeline(simulated(64), about="it")
    many = page_time.pipeline(simulated(65), about="it", note="Mark this.")
    assert "The first 64 of 65 stages are drawn." in many and "Mark this." in many and "stage 63" in many


def test_a_step_goes_to_what_each_stage_spends_it_on_and_the_rest_is_waiting() -> None:
    """What most of it goes to first; less than a thousandth is no waiting."""
    played = {
        0: Played((), {"tp": 1.0, "products": 4.0, "memory": 0.0}), 2: Played((), {"products": 6.0, "tp": 3.995})
    }  # fmt: skip
    found: Any = SimpleNamespace(seconds_per_step=10.0, spent={}, played=played)
    words = " ".join(Reader(page_time.parts(found)).text.split())
    table = words[words.rindex("stage 0 stage 2") :]
    assert re.match(r"stage 0 stage 2 matrix products 4(\.\d+)? s · 40.0% 6(\.\d+)? s · 60.0% ", table), table
    assert re.search(r"waiting for other stages and data, and checkpoints 5(\.\d+)? s · 50.0%$", table), table


def test_what_an_operator_waits_for_is_its_start_where_that_takes_longest() -> None:
    cost = Cost(A100.having(device__kernel_seconds=1e-5))
    product = Operator("mm", 2 * 4096**3, 6 * 4096**2, "bfloat16", (1, 4096, 4096, 4096))
    assert page_time._bound(product, cost) == "arithmetic"
    assert page_time._bound(Operator("add", 0, 10**9, "float32"), cost) == "memory"
    assert page_time._bound(Operator("add", 0, 10, "float32"), cost) == "its start"


def test_operators_that_are_alike_are_one_line_and_those_that_take_most_come_first() -> None:
    cost = Cost(A100)
    small, large = Operator("add", 0, 10**6, "float32"), Operator("mul", 0, 10**8, "float32")
    found = page_time.alike([small, large, small], cost)
    assert [(each.operator, each.count) for each in found] == [(large, 1), (small, 2)]
    assert found[1].seconds == pytest.approx(2 * cost.operator(small))
    many: Any = [Operator("add", 0, 10**6 + number, "float32") for number in range(27)]
    shown: Any = SimpleNamespace(cost=cost, peak=1.0, walks={0: SimpleNamespace(operators=many)})
    assert "… and 2 more kinds of operators that take less." in Reader(page_time.roofline(shown, 0)).text
    all_: Any = SimpleNamespace(cost=cost, peak=1.0, walks={0: SimpleNamespace(operators=many[:25])})
    assert "more kinds" not in Reader(page_time.roofline(all_, 0)).text


def test_sections_of_a_stage_are_where_its_actions_are_in_the_schedule() -> None:
    """Behind what comes before the schedule; what comes behind it follows the last action."""
    events = [[Event(Action("F", 0), 1.0, 2.0), Event(Action("B", 0), 5.0, 7.0)]] * 2
    found: Any = SimpleNamespace(
        played={1: Played((0.5, 9.0, 9.0, 0.25), {})}, simulation=SimpleNamespace(events=events)
    )
    assert _spans(found, 1) == [(0.0, 0.5), (1.5, 2.5), (5.5, 7.5), (7.5, 7.75)]
    alone: Any = SimpleNamespace(played={0: Played((0.5, 1.0, 2.0), {})}, simulation=SimpleNamespace(events=events[:1]))
    assert _spans(alone, 0) == [(0.0, 0.5), (0.5, 1.5), (1.5, 3.5)]
