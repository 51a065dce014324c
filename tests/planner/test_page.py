"""A plan's page: it has every picture, its numbers are the plan's, it loads nothing, and what it is given is text."""

import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.config.schema import Config, RunConfig
from colonnade.drawing.scale import short
from colonnade.planner import page_memory, page_time
from colonnade.planner.cost import Cost
from colonnade.planner.estimate import estimate
from colonnade.planner.estimate_report import as_json, as_text
from colonnade.planner.hardware import hardware
from colonnade.planner.operators import Operator
from colonnade.planner.page import Plan, _spans, busiest, of_search, page, walks_of
from colonnade.planner.pipeline import plan_pipeline
from colonnade.planner.ranks import plan_run
from colonnade.planner.search import Confirmed, Search, search
from colonnade.planner.search_report import layout_in_words
from tests.parity.runs import Case, Way, configured
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
    return Plan(settings, pipeline, plan_run(settings, 64), walks, found)


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
    shown = of_search(found, Confirmed(best, plan().estimate, 3), 64)  # type: ignore[arg-type]
    text = page(shown)
    dots = text.split("<b>Layouts</b>")[1].split("</figure>")[0]
    assert dots.count('class="dots c0"') == len(found.front) and dots.count('class="dots c1"') == 1
    assert all(layout_in_words(each) in text for each in found.front[:5])
