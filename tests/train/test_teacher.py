"""What a teacher is asked, and what comes of its answers on each stage; which layers and widths are compared."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from colonnade.errors import CheckpointError, ConfigError
from colonnade.kernels.choice import usual
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh, paper_mesh
from colonnade.model.bert_labels import LabelHead, LabelInputs
from colonnade.model.inputs import Inputs
from colonnade.train import init_from, taught, teacher
from colonnade.train.corpus import Corpus, open_corpus
from colonnade.train.init_from import Origin
from colonnade.train.teacher import Teacher, _check_cut, _check_layers
from tests.distributed import run_on_ranks
from tests.tiny import TinyCorpus, config


class Labels(LabelHead):
    """Logits that are the stream itself."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1.0


def teaching(inference: Any, matching: Any = None) -> Teacher:
    nobody: Any = None
    model: Any = SimpleNamespace(head=Labels(), residual=lambda carry: carry[0])
    listening: Any = SimpleNamespace(taken=lambda: {"blocks.0": torch.zeros(1)})
    return Teacher(nobody, model, inference, 0.25, 2.0, listening, matching, Mesh())


@pytest.mark.parametrize("is_last", [True, False])
def test_each_micro_batch_is_taught_on_the_last_stage_and_all_that_was_sent_arrives(is_last: bool) -> None:
    """Without the student's dropout; other stages have nothing to add."""
    asked: list[Any] = []

    def hidden(inputs: Inputs) -> tuple[torch.Tensor, ...] | None:
        asked.append(inputs)
        return (torch.full((2, 3), float(len(asked))),) if is_last else None

    inference = SimpleNamespace(hidden=hidden, close=lambda: asked.append("closed"))
    masks: Any = object()
    weights = torch.tensor([0.5, 0.25])
    inputs = [LabelInputs(target_weights=weights, masks=masks) for _ in range(2)]
    found: Any = teaching(inference).teach([], inputs, 1.0)
    assert [each.masks for each in asked[:-1]] == [None, None] and asked[-1] == "closed"
    if not is_last:
        assert found == inputs
        return
    for number, each in enumerate(found, 1):
        assert each.masks is masks and each.soft_labels.temperature == 2.0
        assert each.soft_labels.logits.tolist() == [[number + 1.0] * 3] * 2
        torch.testing.assert_close(each.target_weights, weights * 0.75)
        torch.testing.assert_close(each.soft_labels.weights, weights * 0.25 * 4.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_stage_reads_its_own_part_of_a_teacher(
    rank: int, corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(corpus, tmp_path, "distillation.teacher=teacher")
    read: list[set[str]] = []
    origin = SimpleNamespace(path=tmp_path, fill=lambda shards: read.append({each.name for each in shards}))
    monkeypatch.setattr(teacher, "teacher_model", lambda path: settings.model)
    monkeypatch.setattr(teacher, "origin_together", lambda path, ranks, named_by: origin)
    monkeypatch.setattr(teacher, "check_teacher", lambda *_: None)
    monkeypatch.setattr(teacher, "compared", lambda origin, *_, **__: origin)
    monkeypatch.setattr(teacher, "matching_of", lambda *_, **__: None)
    stage = paper_mesh(Layout(pp=2), rank)
    found = teacher.open_teacher(settings, stage, open_corpus(settings), torch.device("cpu"), usual())
    assert not any(each.requires_grad for each in found.model.parameters()) and not found.model.training
    assert any(name.startswith("blocks.0.") for name in read[0]) == (rank == 0)
    assert any(name.startswith(f"blocks.{settings.model.num_layers - 1}.") for name in read[0]) == (rank == 1)
    assert any(name.startswith("head.norm") for name in read[0]) == (rank == 1)


def test_a_teacher_of_other_tokens_goes_on_teaching_whom_it_has_taught(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions let it; a run that begins is refused, and one without a tokenizer asks for none."""
    settings, nobody = config(corpus, tmp_path, "distillation.teacher=it"), cast(Any, None)
    asked = list[str]()
    origin = Origin(
        Path("it"),
        "a model",
        {},
        {},
        0,
        lambda: asked.append("tokenizer") or "another",
        lambda _: None,
        nobody,
    )
    monkeypatch.setattr(teacher, "teacher_model", lambda path: settings.model)
    monkeypatch.setattr(teacher, "origin_together", lambda path, ranks, named_by: origin)
    monkeypatch.setattr(teacher, "check_teacher", lambda *_: None)

    def notes(data: Corpus, **begins: bool) -> set[str]:
        found, _ = teacher.teacher_together(settings, data, Mesh(), **begins)
        return {
            found.note,
            teacher.open_teacher(settings, Mesh(), data, torch.device("cpu"), usual(), **begins).origin.note,
        }

    without = replace(data := open_corpus(settings), tokenizer=None)
    (note,) = notes(without)
    assert note == " Whether ids mean the same tokens there and here is not known: the run has no tokenizer."
    assert not asked
    for begins in ({}, {"begins": True}):
        with pytest.raises(ConfigError, match=r"distillation\.teacher = 'it' was trained with another tokenizer than"):
            notes(data, **begins)
    (note,) = notes(data, begins=False)
    assert note.startswith(" The run goes on with it, and would not begin with it now: distillation.teacher = 'it' was")


def test_hidden_states_of_each_micro_batch_are_compared_with_its_own() -> None:
    told: list[Any] = []
    matching = SimpleNamespace(targets=lambda *given: told.append(given) or ["taught"])
    inference = SimpleNamespace(hidden=lambda inputs: None, close=lambda: None)
    inputs: list[Inputs] = [Inputs(), Inputs()]
    assert teaching(inference, matching).teach([], inputs, 0.5) == ["taught"]
    ((states, found, scale, mesh),) = told
    assert [list(each) for each in states] == [["blocks.0"]] * 2 and found == inputs
    assert scale == 0.5 and isinstance(mesh, Mesh)


@pytest.mark.parametrize(
    ("said", "width", "fits"),
    [(None, 16, True), (None, 24, False), (24, 24, True), (24, 16, False)],
)
def test_hidden_states_are_as_wide_as_was_said_or_as_the_students(said: int | None, width: int, fits: bool) -> None:
    chosen = SimpleNamespace(student_layers=[0], teacher_layers=[1], teacher_hidden_size=said)
    config: Any = SimpleNamespace(distillation=chosen, model=SimpleNamespace(hidden_size=16))
    model: Any = SimpleNamespace(num_layers=2, hidden_size=width)
    if fits:
        _check_layers("it", model, config)
        return
    with pytest.raises(ConfigError, match=rf"it has hidden states of {width} .*Set\s.*teacher_hidden_size = {width}"):
        _check_layers("it", model, config)


@pytest.mark.parametrize(
    ("layout", "teacher", "said"),
    [
        (["parallel.tp=2"], {}, ""),
        (["parallel.tp=2"], {"num_heads": 1}, "parallel.tp = 2 does not divide model.num_heads = 1"),
        (["parallel.pp=4", "model.num_layers=4"], {"num_layers": 1}, "parallel.pp = 4 stages, but 1 blocks"),
        (["parallel.pp=2", "parallel.virtual_stages=2", "parallel.schedule=interleaved", "model.num_layers=4"], {}, ""),
    ],
)
def test_a_teacher_that_cannot_be_cut_as_the_run_is_is_told(
    corpus: TinyCorpus, tmp_path: Path, layout: list[str], teacher: dict[str, int], said: str
) -> None:
    """Over tp and pp; how the student is cut beside that is not the teacher's."""
    settings = config(corpus, tmp_path, *layout)
    model = settings.model.model_copy(update={"num_layers": 2, **teacher})
    if not said:
        _check_cut("it", model, settings)
        return
    with pytest.raises(CheckpointError, match=rf"^it cannot be cut as the run is:\n  {said}"):
        _check_cut("it", model, settings)


def test_a_published_model_teaches_and_adapters_alone_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "is_published", lambda path: path.name != "neither")
    monkeypatch.setattr(teacher, "is_peft", lambda path: path.name == "adapters")
    monkeypatch.setattr(teacher, "open_published", lambda path: SimpleNamespace(model=f"model of {path.name}"))
    found: Any = teacher.teacher_model(tmp_path / "whole")
    assert found == "model of whole"
    for name in ("adapters", "neither"):
        with pytest.raises(ConfigError, match=rf"^distillation\.teacher = '{tmp_path / name}' is no checkpoint"):
            teacher.teacher_model(tmp_path / name)


@pytest.mark.parametrize(
    ("top_k", "is_stored", "asked"),
    [
        (None, False, ["teacher of who begins"]),
        (None, True, ["stored", "teacher of who goes on"]),
        (4, False, ["teacher of who begins"]),
        (4, True, ["stored"]),
    ],
)
def test_a_teacher_is_looked_at_before_a_run_where_it_will_be_read(
    top_k: int | None, is_stored: bool, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has answered already is not, and one that runs beside the student always is."""
    found: list[str] = []
    monkeypatch.setattr(taught, "_checked", lambda *_: found.append("stored"))
    monkeypatch.setattr(
        taught,
        "teacher_together",
        lambda *_, begins: found.append(f"teacher of who {'begins' if begins else 'goes on'}"),
    )
    monkeypatch.setattr(taught, "broadcast_text", lambda text, ranks: {"world": text}[ranks.name])
    chosen = SimpleNamespace(teacher="teacher", top_k=top_k, store=str(tmp_path))
    if is_stored:
        (tmp_path / taught.ABOUT).write_text("{}")
    settings: Any = SimpleNamespace(distillation=chosen)
    nobody: Any = None
    taught.check(settings, nobody, Mesh())
    assert found == asked
    chosen.teacher = None
    taught.check(settings, nobody, Mesh())
    assert found == asked


def test_all_ranks_end_where_one_cannot_read_the_teacher(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither find it nor open it. In a dry run too, which would say otherwise that the run begins."""
    settings = config(corpus, tmp_path, "distillation.teacher=teacher")
    monkeypatch.setattr(teacher, "check_teacher", lambda *_: None)
    monkeypatch.setattr(teacher, "compared", lambda origin, *_, **__: origin)

    def told(rank: int, num_ranks: int) -> list[str]:
        def away(path: Path) -> None:
            if rank:
                raise CheckpointError(f"{path} is away")

        world, data = build_mesh(Layout(dp=2), rank).world, open_corpus(settings)
        mesh: Any = SimpleNamespace(rank=rank, world=world)  # no other axis
        said: list[str] = []
        for module, part in ((init_from, {"checkpoint_at": away}), (teacher, {"teacher_model": away})):
            module.__dict__.update(part)
            for reads in (
                lambda: taught.check(settings, data, mesh),
                lambda: teacher.open_teacher(settings, mesh, data, torch.device("cpu"), usual()),
            ):
                with pytest.raises(ConfigError) as raised:
                    reads()
                said.append(str(raised.value))
            teacher.__dict__["origin_together"] = lambda path, *_: SimpleNamespace(path=path)
        return said

    assert run_on_ranks(told, 2, time_limit=20.0) == [["rank 1: teacher is away"] * 4] * 2
