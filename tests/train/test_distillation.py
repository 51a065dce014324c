"""A student and its teacher on any layout are those of one rank, the teacher beside it or from disk."""

import json
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from colonnade.config.load import load
from colonnade.errors import DataError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.serving.trained import open_trained
from colonnade.train import taught as train_taught
from colonnade.train import teacher as train_teacher
from colonnade.train.corpus import open_corpus
from colonnade.train.taught import Block, Stored, _missing
from tests.commands import forked
from tests.runs import Finished, metrics, tensors
from tests.tiny import TinyCorpus, write_config

SMALL = ("train.precision=fp64", "train.steps=4", "model.hidden_size=12", "model.num_layers=3", "model.num_heads=6")
SMALL += ("model.ffn_hidden_size=24", "train.gradient_clip=0.5", "train.evaluate_every=4", "checkpoint.every=4")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp 2, sequence parallel, stored": ("parallel.tp=2", "parallel.sequence_parallel=true", "distillation.top_k=9"),
    "pp 2, stored": ("parallel.pp=2", "train.micro_batch_size=1", "distillation.top_k=9"),
    "dp 2, ZeRO 3, stored": ("parallel.dp=2", "parallel.zero=3", "distillation.top_k=9"),
    "tp 3": ("parallel.tp=3",),
    "tp 2, sequence parallel": ("parallel.tp=2", "parallel.sequence_parallel=true"),
    "pp 2, interleaved": (
        "parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2", "train.micro_batch_size=1",
    ),
    "pp 2, dp 2, ZeRO 2": ("parallel.pp=2", "parallel.dp=2", "parallel.zero=2", "train.micro_batch_size=1"),
}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model of the same tokens, that has learned something, with dropout."""
    folder = tmp_path_factory.mktemp("teacher")
    wide = ("model.hidden_size=24", "model.num_heads=6", "optim.learning_rate=3e-2", "train.steps=8")
    wide += ("train.evaluate_every=0", "checkpoint.every=0")
    answer = forked("train", write_config(corpus, folder), *wide)
    assert answer.status == 0, answer
    return folder / "run"


def taught(corpus: TinyCorpus, folder: Path, teacher: Path, *more: str, num_ranks: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    answer = forked(
        "train", write_config(corpus, folder), *SMALL, f"distillation.teacher={teacher}", *more, num_ranks=num_ranks
    )
    assert answer.status == 0, answer
    return folder / "run"


def refused(corpus: TinyCorpus, folder: Path, teacher: Path, *more: str, num_ranks: int = 1) -> str:
    answer = forked(
        "train", write_config(corpus, folder), *SMALL, f"distillation.teacher={teacher}", *more, num_ranks=num_ranks
    )
    assert answer.status == 2 and "Traceback" not in answer.err, answer
    return answer.err


def assert_alike(run: Path, expected: Path, tolerance: float = 1e-10) -> None:
    for mine, theirs in zip(metrics(run), metrics(expected), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
    ours, whole = tensors(run), tensors(expected)
    assert ours.keys() == whole.keys()
    for name, x in whole.items():
        assert (ours[name] - x).abs().max() <= tolerance * max(1.0, float(x.abs().max())), name


@pytest.fixture(scope="module")
def serial(corpus: TinyCorpus, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Runs of one rank, without and with stored targets of nine tokens."""
    folders = (tmp_path_factory.mktemp("serial") for _ in range(2))
    more = ((), ("distillation.top_k=9",))
    return {bool(each): taught(corpus, folder, teacher, *each) for folder, each in zip(folders, more, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_the_serial_run(
    name: str, corpus: TinyCorpus, teacher: Path, serial: dict[bool, Path], tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    sizes = (int(each.split("=")[1]) for each in layout if each[:11] in ("parallel.tp", "parallel.pp", "parallel.dp"))
    run = taught(corpus, tmp_path, teacher, *layout, num_ranks=int(np.prod([*sizes])))
    assert_alike(run, serial["stored" in name])


def test_the_first_loss_is_torchs(corpus: TinyCorpus, teacher: Path, tmp_path: Path) -> None:
    """Of both kinds: labels and teacher by torch's own functions, on logits of the models as they are saved."""
    begun = ("train.steps=1", "optim.learning_rate=1e-30", "optim.min_learning_rate=0.0", "optim.weight_decay=0.0")
    still = ("model.dropout=0.0", "model.attention_dropout=0.0")
    settings = ("distillation.alpha=0.3", "distillation.temperature=3.0")
    run = taught(corpus, tmp_path, teacher, *begun, *still, *settings)
    config = load(tmp_path / "config.toml", [*SMALL, *begun])
    data = open_corpus(config)
    batch = data.load(data.training, range(4))
    cpu = torch.device("cpu")

    def logits(path: Path) -> torch.Tensor:
        model = open_trained(path, Mesh(), cpu, "fp64")
        carry = model.hidden(data_inputs(batch))
        assert carry is not None
        found: torch.Tensor = model.model.head.logits(carry[0])  # type: ignore[operator,union-attr]
        return found

    student = logits(run / "checkpoints" / "step_00000001")
    said = logits(teacher / "checkpoints" / "step_00000008")
    hard = nn.functional.cross_entropy(student.flatten(0, 1), batch.labels.flatten())
    soft = nn.functional.kl_div((student / 3).log_softmax(-1), (said / 3).softmax(-1), reduction="none").sum(-1).mean()
    assert metrics(run)[0]["loss"] == pytest.approx(float(0.7 * hard + 0.3 * 9 * soft), rel=1e-10)


def data_inputs(batch: object) -> object:
    from colonnade.tasks.gpt import LanguageModeling

    return LanguageModeling().inputs(batch, None, None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_all_tokens_stored_are_the_teacher_itself(
    corpus: TinyCorpus, teacher: Path, serial: dict[bool, Path], tmp_path: Path
) -> None:
    run = taught(corpus, tmp_path, teacher, "distillation.top_k=275")
    assert_alike(run, serial[False])
    about = json.loads((run / "teacher" / "about.json").read_text())
    assert about["top_k"] == 275 and list(about["teacher"]) == ["manifest.json"]
    rows = np.load(run / "teacher" / "targets_00000000.npy")
    assert rows.shape == (16, 16, 275) and rows["log_prob"].dtype == np.float64
    assert np.allclose(np.exp(rows["log_prob"]).sum(-1), 1.0)


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_same_and_adds_what_is_missing(
    corpus: TinyCorpus, teacher: Path, serial: dict[bool, Path], tmp_path: Path
) -> None:
    taught(corpus, tmp_path, teacher, "distillation.top_k=9", "train.steps=2", "optim.decay_steps=4")
    assert len(np.load(tmp_path / "run" / "teacher" / "targets_00000000.npy")) == 8
    shutil.copytree(tmp_path / "run" / "teacher", tmp_path / "shared")
    taught(corpus, tmp_path, teacher, "distillation.top_k=9", "optim.decay_steps=4")
    assert len(np.load(tmp_path / "run" / "teacher" / "targets_00000000.npy")) == 16
    whole = taught(corpus, tmp_path / "whole", teacher, "distillation.top_k=9", "optim.decay_steps=4")
    assert_alike(tmp_path / "run", whole, 0.0)
    message = refused(
        corpus, tmp_path / "whole", teacher, "distillation.top_k=9", "train.seed=5", "optim.decay_steps=4",
        f"distillation.store={tmp_path / 'shared'}", f"run.folder={tmp_path / 'other'}",
    )  # fmt: skip
    assert f"{tmp_path / 'shared'} has what another teacher says, or of other tokens" in message and "seed" in message


@pytest.mark.slow
def test_a_teacher_that_cannot_teach(corpus: TinyCorpus, teacher: Path, finished: Finished, tmp_path: Path) -> None:
    assert "does not exist: there is no such folder" in refused(corpus, tmp_path, tmp_path / "nobody")
    (tmp_path / "empty").mkdir()
    message = refused(corpus, tmp_path, tmp_path / "empty")
    assert f"distillation.teacher = '{tmp_path / 'empty'}' is no checkpoint, no folder of a run that has one" in message
    assert "top_k = 276 is more than the vocabulary's 275" in refused(
        corpus, tmp_path, teacher, "distillation.top_k=276"
    )
    assert "has 16 positions, and the student's samples are 24 tokens" in refused(
        corpus, tmp_path, teacher, "model.seq_length=24"
    )
    assert "tells 275 tokens apart, and the run's vocabulary has 300" in refused(
        corpus, tmp_path, teacher, "model.vocab_size=300"
    )
    deep = refused(corpus, tmp_path, teacher, "parallel.tp=4", "model.num_heads=4", num_ranks=4)
    assert "cannot be cut as the run is" in deep and "parallel.tp = 4" in deep
    changed = Path(shutil.copytree(teacher, tmp_path / "teacher"))
    taught(corpus, tmp_path / "first", changed, "train.steps=2", "optim.decay_steps=4")
    shutil.rmtree(changed)
    shutil.copytree(finished.folder, changed)
    message = refused(corpus, tmp_path / "first", changed, "optim.decay_steps=4")
    assert "Put the teacher back" in message and "teacher differs" in message


def test_a_dry_run_refuses_a_teacher_as_the_run_would(corpus: TinyCorpus, finished: Finished, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for teacher, more, said in (
        (tmp_path / "empty", [], "is no checkpoint, no folder of a run that has one"),
        (finished.folder, ["model.vocab_size=300"], "tells 275 tokens apart, and the run's vocabulary has 300"),
    ):
        config = write_config(corpus, tmp_path)
        answer = forked("train", config, f"distillation.teacher={teacher}", *more, "--dry-run")
        assert answer.status == 2 and said in answer.err, answer
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("layout", "num_ranks"), [("parallel.dp=1", 1), ("parallel.tp=2", 2)])
def test_a_dry_run_holds_a_teacher_against_what_is_stored(
    corpus: TinyCorpus, finished: Finished, tmp_path: Path, layout: str, num_ranks: int
) -> None:
    """As the first rank finds it: another may not see it yet."""

    def blind(rank: int) -> None:
        if rank > 0:
            train_taught.store_of = lambda config: tmp_path / "nowhere"

    keys = (f"distillation.teacher={finished.folder}", layout, "--dry-run")
    store = tmp_path / "run" / "teacher"
    store.mkdir(parents=True)
    (store / "about.json").write_text('{"teacher": {"manifest.json": "another\'s"}}')
    answer = forked("train", write_config(corpus, tmp_path), *keys, num_ranks=num_ranks, first=blind)
    assert answer.status == 2 and "teacher differs. Put the teacher back" in answer.err, answer


def test_a_dry_run_does_not_read_the_weights_of_a_teacher_that_nothing_is_stored_of(
    corpus: TinyCorpus, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path, ranks: object) -> dict[str, str]:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr("colonnade.train.taught.content_together", read)
    config = write_config(corpus, tmp_path)
    for top_k in (["distillation.top_k=4"], []):
        answer = forked("train", config, f"distillation.teacher={finished.folder}", *top_k, "--dry-run")
        assert answer.status == 0 and answer.out.endswith("The run would begin with step 1.\n"), answer


def test_a_model_that_has_learned_preferences_teaches_what_comes_next(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(finished.config).model.model_copy(update={"head": "preferences"})
    monkeypatch.setattr(train_teacher, "config_of", lambda *_: SimpleNamespace(model=model))
    assert train_teacher.teacher_model(finished.newest).head == "pretraining"


def test_what_a_teacher_has_said_is_read_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    """A sample of two is damaged; and what has no sums, or fewer, counts as missing."""
    block = Block(0, 2, 2)
    _save(block, tmp_path, np.arange(6, dtype="<f4").reshape(2, 3))
    damaged = bytearray(block.path(tmp_path).read_bytes())
    damaged[-5] ^= 1
    block.path(tmp_path).write_bytes(damaged)
    stored = Stored(tmp_path, size=2, stop=2, alpha=0.5, temperature=1.0)
    assert stored._row(0).tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=r"targets_00000000\.npy is damaged: what the teacher said of sample 2 is not"):
        stored._row(1)
    alone = build_mesh(Layout(), 0)
    assert _missing(tmp_path, [block], alone) == []
    np.save(block.sums(tmp_path), np.zeros(1, np.uint32))
    assert _missing(tmp_path, [block], alone) == [block]


def _save(block: Block, folder: Path, rows: np.ndarray[Any, Any]) -> None:
    np.save(block.sums(folder), np.array([zlib.crc32(row.tobytes()) for row in rows], np.uint32))
    np.save(block.path(folder), rows)


def test_behind_what_a_teacher_has_said_is_a_clear_message(tmp_path: Path) -> None:
    """A store of two full blocks."""
    for number in (0, 1):
        _save(Block(number, 4, 8), tmp_path, np.full((4, 2), number))
    stored = Stored(tmp_path, size=4, stop=8, alpha=0.5, temperature=1.0)
    assert stored._row(3).tolist() == [0, 0] and stored._row(7).tolist() == [1, 1]
    with pytest.raises(DataError, match=r"the run's first 8 samples, and sample 9 is next"):
        stored._row(8)
