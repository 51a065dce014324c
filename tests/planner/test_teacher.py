"""What a teacher takes beside its student."""

from pathlib import Path

import pytest
import torch

from colonnade.architecture.parts import trained_architecture
from colonnade.config.distillation import DistillationConfig
from colonnade.config.load import load
from colonnade.pipeline.partition import chunks_of_stage
from colonnade.planner import teacher as planner_teacher
from colonnade.planner.memory import Memory
from colonnade.planner.predict import predict
from colonnade.planner.teacher import with_teacher
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
