"""What `colonnade plan` says about a pipeline: its table, its JSON, its picture, and the page that explains them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from colonnade.config.load import load
from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig
from colonnade.planner.pipeline import PipelinePlan, plan_pipeline
from colonnade.planner.pipeline_report import as_json, as_text, unit_ranges, write_picture

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"
SMALL = ModelConfig(num_layers=6, hidden_size=64, num_heads=4, seq_length=64)
BLOOM = ModelConfig(
    num_layers=70, hidden_size=14336, num_heads=112, seq_length=2048, position="alibi", embedding_norm=True
)


def small(schedule: str = "1f1b", virtual_stages: int = 1, *, vocab_size: int = 256) -> PipelinePlan:
    parallel = ParallelConfig.model_validate({"pp": 4, "schedule": schedule, "virtual_stages": virtual_stages})
    return plan_pipeline(SMALL, parallel, num_microbatches=8, vocab_size=vocab_size)


def of_page(name: str) -> str:
    """The examples of the page."""
    if name == "bloom":
        parallel = ParallelConfig(tp=4, pp=12, dp=8)
        return as_text(plan_pipeline(BLOOM, parallel, num_microbatches=256, vocab_size=250_880))
    assert name == "bloom with cuts"
    parallel = ParallelConfig(tp=4, pp=12, dp=8, cuts=(7, *[6] * 10, 5))
    return as_text(plan_pipeline(BLOOM, parallel, num_microbatches=256, vocab_size=250_880))


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (["embedding"], "embedding"),
        (["embedding", "blocks.0"], "embedding, blocks 0"),
        (["blocks.3", "blocks.4", "blocks.5", "head"], "blocks 3–5, head"),
        (["embedding", "blocks.0", "blocks.1", "head"], "embedding, blocks 0–1, head"),
    ],
)
def test_units_in_words(units: list[str], words: str) -> None:
    assert unit_ranges(units) == words


def test_the_table_has_a_line_a_stage() -> None:
    text = as_text(small())
    assert text.startswith("1f1b: 4 stages, 8 micro-batches a step\n")
    (first,) = re.findall(r"^ +0 .*$", text, flags=re.MULTILINE)
    assert first.split()[1:2] == [f"{small().stages[0].parameters:,}"]
    assert first.endswith("  embedding, blocks 0")
    assert re.search(r"^ +3 .* 1  blocks 5, head$", text, flags=re.MULTILINE)
    assert "stage 0 │" not in text


def test_one_micro_batch_is_one() -> None:
    plan = plan_pipeline(SMALL, ParallelConfig(), num_microbatches=1, vocab_size=1000)
    assert as_text(plan).startswith("1f1b: 1 stage, 1 micro-batch a step\n")


def test_virtual_stages_are_told_apart() -> None:
    text = as_text(small("interleaved", 2))
    assert text.startswith("interleaved: 4 stages × 2 virtual stages, 8 micro-batches a step\n")
    assert "embedding | blocks 3" in text
    assert "most micro-batches × chunks that live" in text


def test_the_picture_comes_when_it_is_asked_for() -> None:
    text = as_text(small(), picture=True, width=200)
    assert text.count("stage 0 │") == 1 and "F7" in text
    assert "F: forward, B: backward, W: weight gradients" in text and "F: forward" not in as_text(small())


def test_other_cuts_are_pointed_out_only_where_they_help() -> None:
    heavy_head = small(vocab_size=5000)
    assert heavy_head.bubble > heavy_head.bubble_by_work
    assert f"parallel.cuts=[{','.join(map(str, heavy_head.cuts_by_work))}]" in as_text(heavy_head)
    parallel = ParallelConfig(pp=4, cuts=tuple(heavy_head.cuts_by_work))
    mended = plan_pipeline(SMALL, parallel, num_microbatches=8, vocab_size=5000)
    assert mended.bubble == heavy_head.bubble_by_work
    assert "parallel.cuts" not in as_text(mended)


def test_the_laptop_example_has_the_cuts_that_its_plan_advises() -> None:
    """With the vocabulary that its first lines make; and it says how long stages wait with them, and without."""
    example = PAGE.parents[1] / "examples" / "laptop-3d.toml"
    text, config = example.read_text(), load(example)
    (size,) = re.findall(r"--vocab-size (\d+)", text)
    own, without = (
        plan_pipeline(
            config.model,
            parallel,
            num_microbatches=config.train.num_microbatches(parallel.dp),
            vocab_size=int(size),
        )
        for parallel in (config.parallel, config.parallel.model_copy(update={"cuts": ()}))
    )
    assert f"parallel.cuts=[{','.join(map(str, config.parallel.cuts))}]" in as_text(without)
    assert "less waiting" not in as_text(own)
    assert f"stages wait {own.bubble:.1%} of the time, not {without.bubble:.1%}" in text.replace(" %", "%")


@pytest.mark.parametrize(("less", "is_told"), [(0.011, True), (0.009, False), (-0.1, False)])
def test_cuts_are_pointed_out_where_stages_would_wait_a_hundredth_less(less: float, is_told: bool) -> None:
    plan = small()
    plan = replace(plan, bubble_by_work=plan.bubble - less)
    assert (f"evens out the work, {plan.bubble_by_work:.1%}" in as_text(plan)) is is_told


def test_json_has_the_same_numbers() -> None:
    plan = small("zero_bubble")
    found = json.loads(json.dumps(as_json(plan)))
    assert (found["schedule"], found["num_stages"], found["num_microbatches"]) == ("zero_bubble", 4, 8)
    assert found["bubble"] == plan.bubble and found["bubble_of_equal_stages"] == plan.theory
    assert [stage["peak_activations"] for stage in found["stages"]] == [4, 4, 4, 4]
    assert sum(stage["parameters_of_mean"] for stage in found["stages"]) == pytest.approx(4)
    assert (found["virtual_stages"], found["bubble_by_work"]) == (1, plan.bubble_by_work)
    assert [stage["busy"] for stage in found["stages"]] == [stage.busy for stage in plan.stages]
    assert (found["makespan"], found["cuts_by_work"]) == (plan.simulation.makespan, list(plan.cuts_by_work))
    assert found["stages"][0]["chunks"] == [["embedding", "blocks.0"]]
    for name, key in (("parameters", "parameters_of_mean"), ("work", "work_of_mean")):
        values = [getattr(stage, name) for stage in plan.stages]
        assert [stage[key] for stage in found["stages"]] == pytest.approx([4 * each / sum(values) for each in values])


def test_numbers_of_stages_that_differ_are_those_of_each() -> None:
    """With a heavy head: what JSON tells of its cuts are those that would be better, not those that it has."""
    plan = small(vocab_size=5000)
    found = as_json(plan)
    assert [stage["peak_activations"] for stage in found["stages"]] == [4, 3, 2, 1]
    assert [len(units) for stage in found["stages"] for units in stage["chunks"]] != found["cuts_by_work"]
    assert found["bubble_by_work"] < found["bubble"] and found["bubble"] > found["bubble_of_equal_stages"]
    assert found["makespan"] > max(plan.simulation.busy) == found["makespan"] * found["stages"][3]["busy"]


def test_the_picture_is_written_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "schedule.svg"
    write_picture(small(), path)
    assert "1f1b: 4 stages, 8 micro-batches a step" in path.read_text()


EXAMPLES = re.findall(r"<!-- plan: (.*?) -->\n```\n(.*?)\n```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(("name", "text"), EXAMPLES)
def test_the_examples_of_the_page_are_printed_by_this_code(name: str, text: str) -> None:
    assert of_page(name) == text


def test_the_page_has_examples() -> None:
    assert len(EXAMPLES) == 2
