"""What a teacher takes beside its student."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from colonnade.architecture import parts
from colonnade.architecture.parts import trained_architecture
from colonnade.config.distillation import DistillationConfig
from colonnade.config.load import load
from colonnade.pipeline.partition import chunks_of_stage
from colonnade.planner import teacher as planner_teacher
from colonnade.planner.compose import Composer
from colonnade.planner.cost import Cost
from colonnade.planner.hardware import hardware
from colonnade.planner.memory import Memory
from colonnade.planner.predict import predict
from colonnade.planner.ranks import plan_run
from colonnade.planner.teacher import with_model, with_teacher
from tests.parity.runs import Case, Way, configured
from tests.runs import Finished
from tests.tiny import TinyCorpus, write_config

CPU = torch.device("cpu")


@pytest.mark.slow
def test_a_teacher_beside_the_student_takes_its_weights_and_what_it_says(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    file = write_config(corpus, tmp_path)
    taught = load(file, [f"distillation.teacher={finished.folder}"])
    stored = load(file, [f"distillation.teacher={finished.folder}", "distillation.top_k=9"])
    alone = predict(load(file), 275, stage=0, device=CPU)
    beside, asked = (predict(config, 275, stage=0, device=CPU) for config in (taught, stored))
    assert beside.parameters == 2 * alone.parameters, "the teacher is as large as the student"
    assert beside.activations - alone.activations == 4 * 16 * 16 * 4, "a step's samples, h numbers of fp32 a token"
    assert asked.parameters == alone.parameters
    assert asked.activations - alone.activations == 4 * 16 * 9 * (8 + 4)
    assert beside.operators - alone.operators == 3 * 2 * 16 * 275 * 4


@pytest.mark.slow
def test_a_pipelines_first_stage_has_a_part_of_the_weights_alone(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    file = write_config(corpus, tmp_path)
    config = load(file, [f"distillation.teacher={finished.folder}", "parallel.pp=2"])
    alone = [predict(load(file, ["parallel.pp=2"]), 275, stage=stage, device=CPU) for stage in (0, 1)]
    beside = [predict(config, 275, stage=stage, device=CPU) for stage in (0, 1)]
    assert beside[0].parameters > alone[0].parameters and beside[0].activations == alone[0].activations
    assert beside[1].parameters > alone[1].parameters and beside[1].activations > alone[1].activations


@pytest.mark.parametrize(("fp32_residual", "width"), [(False, 2), (True, 4)])
def test_hidden_states_are_of_every_sequence_of_a_sample_and_as_wide_as_the_teachers_stream(
    monkeypatch: pytest.MonkeyPatch, fp32_residual: bool, width: int
) -> None:
    config = configured(Case(block="choice", precision="bf16"), Way(micro_batch_size=2))
    teacher = config.model.model_copy(update={"hidden_size": 24, "fp32_residual": fp32_residual})
    monkeypatch.setattr(planner_teacher, "teacher_model", lambda path: teacher)

    def activations(*layers: int) -> int:
        chosen = DistillationConfig(teacher="teacher", student_layers=layers, teacher_layers=layers)
        taught = config.model_copy(update={"distillation": chosen})
        return with_teacher(Memory(0, 0, 0, 0, 0), taught, 37, stage=0, device="cpu").activations

    texts = config.train.global_batch_size * config.model.sequences
    assert config.model.sequences == 3
    assert activations(0, 1) - activations() == 2 * texts * config.model.seq_length * 24 * width


def test_hidden_states_are_those_of_every_chunk_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(precision="bf16", num_layers=10)
    config = configured(case, Way(pp=2, micro_batch_size=2, schedule="interleaved", virtual_stages=2))
    held = [
        {unit.layer for unit in units if unit.layer is not None}
        for units in chunks_of_stage(trained_architecture(config, 37), config.parallel, 0)
    ]
    assert len(held) == 2 and all(held), "both chunks have blocks"
    monkeypatch.setattr(planner_teacher, "teacher_model", lambda path: config.model)

    def activations(*layers: int) -> int:
        chosen = DistillationConfig(teacher="teacher", student_layers=layers, teacher_layers=layers)
        taught = config.model_copy(update={"distillation": chosen})
        return with_teacher(Memory(0, 0, 0, 0, 0), taught, 37, stage=0, device="cpu").activations

    of_one = config.train.global_batch_size * config.model.seq_length * config.model.hidden_size * 2
    first, second = (min(layers) for layers in held)
    assert activations(first) - activations() == activations(second) - activations() == of_one
    assert activations(first, second) - activations() == 2 * of_one


def added(
    monkeypatch: pytest.MonkeyPatch,
    way: Way,
    case: Case,
    *,
    stage: int = 0,
    top_k: int | None = None,
    gpu: bool = False,
) -> Memory:
    """What a teacher that is twice as wide as its student adds on a rank of this stage."""
    config = configured(case, way)
    teacher = config.model.model_copy(update={"hidden_size": 2 * config.model.hidden_size})
    monkeypatch.setattr(planner_teacher, "teacher_model", lambda path: teacher)
    chosen = DistillationConfig(teacher="teacher", top_k=top_k)
    taught = config.model_copy(update={"distillation": chosen})
    return with_teacher(Memory(1, 2, 3, 4, 5, 6), taught, 37, stage=stage, device="cuda" if gpu else "cpu")


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (1, 2)])
def test_of_a_pipeline_the_last_stage_has_what_the_teacher_says(
    monkeypatch: pytest.MonkeyPatch, tp: int, dp: int
) -> None:
    """Of every micro-batch of this rank what the teacher's output layer reads; three matrices of logits of one."""
    case, way = Case(precision="bf16"), Way(pp=2, tp=tp, dp=dp, micro_batch_size=2)
    length, tokens = configured(case, way).model.seq_length, 8 // dp * configured(case, way).model.seq_length
    first, last = (added(monkeypatch, way, case, stage=stage) for stage in (0, 1))
    assert (first.activations, first.operators) == (5, 6)
    assert last.activations - 5 == tokens * 2 * configured(case, way).model.hidden_size * 2
    assert last.operators - 6 == 3 * 2 * length * -(-37 // tp) * 4
    assert (last.gradients, last.optimizer, last.buffers) == (2, 3, 4), "it is not trained"


def test_each_rank_has_its_shards_of_its_stage_of_a_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the numbers of the run, without gradients; one whose answers are stored has no weights."""
    case = Case(precision="bf16")
    whole = added(monkeypatch, Way(micro_batch_size=2), case).parameters - 1
    stages = [added(monkeypatch, Way(pp=2, micro_batch_size=2), case, stage=stage).parameters - 1 for stage in (0, 1)]
    assert max(stages) < whole <= sum(stages)
    assert whole / 2 < added(monkeypatch, Way(tp=2, micro_batch_size=2), case).parameters - 1 < 0.6 * whole
    wide = added(monkeypatch, Way(micro_batch_size=2), replace(case, precision="fp32")).parameters - 1
    assert wide == 2 * whole
    assert added(monkeypatch, Way(micro_batch_size=2), case, top_k=9).parameters == 1


@pytest.mark.parametrize(("precision", "width"), [("bf16", 4), ("fp64", 8)])
def test_answers_that_are_stored_are_tokens_and_their_chances(
    monkeypatch: pytest.MonkeyPatch, precision: str, width: int
) -> None:
    case, way = Case(precision=precision), Way(micro_batch_size=2)
    found = added(monkeypatch, way, case, top_k=9)
    assert found.activations - 5 == 8 * configured(case, way).model.seq_length * 9 * (8 + width)


def test_of_labels_a_teacher_says_one_number_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no logits of a vocabulary are computed."""
    case, way = Case(block="labels", precision="bf16"), Way(micro_batch_size=2)
    labels = configured(case, way).model.num_labels
    assert labels is not None and labels > 1
    found = added(monkeypatch, way, case)
    assert (found.activations - 5, found.operators) == (8 * labels * 4, 6)


def test_logits_are_computed_in_chunks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger ones on a GPU."""
    case, way = Case(precision="bf16"), Way(micro_batch_size=2)
    monkeypatch.setattr(planner_teacher, "CHUNK_LOGITS", 50)
    monkeypatch.setattr(planner_teacher, "CUDA_CHUNKS", 3)
    assert [added(monkeypatch, way, case, gpu=gpu).operators - 6 for gpu in (False, True)] == [3 * 50 * 4, 3 * 150 * 4]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_is_predicted_with_its_own_part_of_a_teacher(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    config = configured(Case(precision="bf16", num_layers=5), Way(pp=2, micro_batch_size=2))
    monkeypatch.setattr(planner_teacher, "teacher_model", lambda path: config.model)
    taught = config.model_copy(update={"distillation": DistillationConfig(teacher="teacher")})
    alone, beside = (predict(each, 37, stage=stage, device=CPU) for each in (config, taught))
    assert beside == with_teacher(alone, taught, 37, stage=stage, device="cpu")
    assert (beside.activations > alone.activations) == (stage == 1), "the last stage has what the teacher says"


def test_a_teacher_is_cut_once_for_all_stages_and_layouts_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search asks for each stage of each layout."""
    cut, real = list[int](), planner_teacher.chunks
    monkeypatch.setattr(planner_teacher, "chunks", lambda stated, way: cut.append(way.pp) or real(stated, way))
    config = configured(Case(precision="bf16", num_layers=6, vocab_size=41), Way(pp=2, micro_batch_size=1))
    taught = config.model_copy(update={"distillation": DistillationConfig(teacher="teacher")})
    none, found = Memory(0, 0, 0, 0, 0, 0), []
    for tp, pp, zero in ((1, 2, 0), (1, 4, 0), (1, 2, 1), (2, 2, 0)):
        keys = {"tp": tp, "pp": pp, "zero": zero}
        each = taught.model_copy(update={"parallel": config.parallel.model_copy(update=keys)})
        found.append(
            [with_model(none, each, config.model, 41, units=(), stage=at, device="cpu").parameters for at in range(pp)]
        )
    assert cut == [2, 4, 2] and found[0] == found[2] and sum(found[3]) < sum(found[0]) <= sum(found[1])
    model = trained_architecture(config, 41)
    held = [dict.fromkeys(b for unit in units for b in unit.buckets) for units in real(model, config.parallel)]
    assert found[0] == [2 * sum(w.size for b in each for w in model.buckets[b]) for each in held]


def test_a_student_is_stated_once_for_all_stages_that_are_compared_with_its_teacher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a plan, and in a search, which asks for each stage of each layout."""
    stated, real = list[object](), parts.with_parts
    monkeypatch.setattr(parts, "with_parts", lambda *given: stated.append(given) or real(*given))
    config = configured(Case(precision="bf16", num_layers=6), Way(pp=4, micro_batch_size=1))
    monkeypatch.setattr(planner_teacher, "teacher_model", lambda path: config.model)
    chosen = DistillationConfig(teacher="teacher", student_layers=(0, 3, 4), teacher_layers=(0, 3, 4))
    taught = config.model_copy(update={"distillation": chosen})
    plan_run(taught, 37)
    assert len(stated) == 1
    composer, none = Composer(taught, 37, Cost(hardware("a100-80gb"), 4)), Memory(0, 0, 0, 0, 0)
    cut = taught.model_copy(update={"parallel": taught.parallel.model_copy(update={"cuts": (5, 1, 1, 1)})})
    composed = [[composer._teacher_memory(stage, each) for stage in range(4)] for each in (taught, cut)]
    assert len(stated) == 2
    for each, of_stages in zip((taught, cut), composed, strict=True):
        assert of_stages == [with_teacher(none, each, 37, stage=stage, device="cuda").total for stage in range(4)]
    assert composed[0] != composed[1]


def test_without_a_teacher_nothing_is_added_and_one_that_cannot_be_read_has_no_weights(tmp_path: Path) -> None:
    """The run itself says why; its answers are taken to be none then."""
    config = configured(Case(precision="bf16"), Way(micro_batch_size=2))
    memory = Memory(1, 2, 3, 4, 5, 6, host=7)
    assert with_teacher(memory, config, 37, stage=0, device="cpu") == memory
    chosen = DistillationConfig(teacher=str(tmp_path / "none"), student_layers=(0, 1), teacher_layers=(0, 1))
    lost = config.model_copy(update={"distillation": chosen})
    found = with_teacher(memory, lost, 37, stage=0, device="cpu")
    assert found == replace(memory, operators=found.operators)
