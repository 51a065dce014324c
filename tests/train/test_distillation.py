"""A student and its teacher on any layout are those of one rank, the teacher beside it or from disk."""

import errno
import json
import mmap
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from colonnade.config.load import load
from colonnade.errors import ConfigError, DataError, DiskError, LockError
from colonnade.lock import locked
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.model.bert_labels import LabelInputs
from colonnade.model.inputs import Inputs
from colonnade.serving.trained import open_trained
from colonnade.train import taught as train_taught
from colonnade.train import teacher as train_teacher
from colonnade.train.corpus import open_corpus
from colonnade.train.taught import Block, Stored, _missing
from colonnade.train.teacher import check_teacher, check_tokenizer, with_soft_labels, with_soft_targets
from tests import tiny
from tests.commands import forked
from tests.distributed import run_on_ranks
from tests.emulated import Copies
from tests.runs import Finished, metrics, tensors
from tests.tiny import TinyCorpus, write_config
from tests.told import Told

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
def test_a_run_that_goes_on_knows_its_teacher_by_its_weights(
    corpus: TinyCorpus, teacher: Path, finished: Finished, tmp_path: Path
) -> None:
    """However they are named."""
    taught(corpus, tmp_path, teacher, "train.steps=2", "optim.decay_steps=4")
    message = refused(corpus, tmp_path, finished.folder, "optim.decay_steps=4")
    assert "Put the teacher back" in message and "teacher differs" in message
    run = taught(corpus, tmp_path, teacher / "checkpoints" / "step_00000008", "optim.decay_steps=4")
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_teacher_that_cannot_teach(corpus: TinyCorpus, teacher: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["targets_00000000.npy", "sums_00000000.npy"])
def test_a_file_without_content_counts_as_missing(tmp_path: Path, name: str) -> None:
    """As a machine that has lost its power may leave it: numpy has an error of its own for it."""
    block = Block(0, 2, 2)
    _save(block, tmp_path, np.arange(6, dtype="<f4").reshape(2, 3))
    (tmp_path / name).write_bytes(b"")
    assert _missing(tmp_path, [block], build_mesh(Layout(), 0)) == [block]


def _save(block: Block, folder: Path, rows: np.ndarray[Any, Any]) -> None:
    np.save(block.sums(folder), np.array([zlib.crc32(row.tobytes()) for row in rows], np.uint32))
    np.save(block.path(folder), rows)


def test_what_is_stored_is_known_by_all_that_it_depends_on(
    corpus: TinyCorpus, finished: Finished, tmp_path: Path
) -> None:
    """And not by how the data are read."""
    other = tiny.make(tmp_path / "other", num_documents=30)

    def about(*keys: str) -> dict[str, Any]:
        settings = tiny.config(corpus, tmp_path, f"distillation.teacher={finished.folder}", *keys)
        return train_taught._about(settings, open_corpus(settings), Mesh())

    def changed(*keys: str) -> set[str]:
        found = about("distillation.top_k=4", *keys)
        assert found.keys() == before.keys()
        return {name for name, value in found.items() if value != before[name]}

    before = about("distillation.top_k=4")
    for key, names in (
        ("distillation.top_k=5", {"top_k"}),
        ("distillation.temperature=3.0", {"temperature"}),
        ("train.seed=5", {"seed"}),
        ("train.precision=fp64", {"precision"}),
        ("model.seq_length=8", {"seq_length"}),
        ("data.no_loss_on=[3]", {"read"}),
        ("data.revision=1", {"read"}),
        (f"data.cache={tmp_path / 'cache'}", set()),
    ):
        assert changed(key) == names, key
    assert "data" in changed(f"data.train={other.prefix}", f"data.tokenizer={other.tokenizer}")
    beside = about()
    assert beside == {"teacher": before["teacher"]} and list(beside["teacher"]) == ["manifest.json"]


def test_what_another_has_said_is_told_with_what_differs(tmp_path: Path) -> None:
    """Also what only one of both depends on, but for files that nobody reads, which earlier versions recorded too."""
    now: dict[str, Any] = {"teacher": {"model.safetensors": "a"}, "seed": 1}
    train_taught._check(tmp_path, now)
    for before, said in (
        ({**now, "teacher": {"model.safetensors": "b"}}, "asks for: teacher differs. Put"),
        ({"teacher": now["teacher"]}, "asks for: seed differs. Put"),
        ({**now, "top_k": 4, "temperature": 1.0}, "asks for: temperature, top_k differ. Put"),
    ):
        (tmp_path / "about.json").unlink(missing_ok=True)
        train_taught._write_down(tmp_path, before)
        with pytest.raises(DataError, match=said):
            train_taught._check(tmp_path, now)
    for before in (now, {**now, "teacher": {**now["teacher"], "tokens.bin": "c"}}):
        (tmp_path / "about.json").unlink()
        train_taught._write_down(tmp_path, before)
        train_taught._check(tmp_path, now)


def test_a_store_of_an_earlier_version_is_of_the_samples_that_it_made(tmp_path: Path) -> None:
    """It does not say data.revision: a run that goes on has that of then, and one that begins reads others."""
    before = {"teacher": {"manifest.json": "a"}, "top_k": 4, "read": {"packing": "best_fit"}}
    train_taught._write_down(tmp_path, before)
    train_taught._check(tmp_path, {**before, "read": {"packing": "best_fit", "revision": "1"}})
    with pytest.raises(DataError, match=r"asks for: read differs"):
        train_taught._check(tmp_path, {**before, "read": {"packing": "best_fit", "revision": "2"}})


def test_a_store_that_says_how_samples_were_made_goes_by_that(tmp_path: Path) -> None:
    about = {"teacher": {"manifest.json": "a"}, "top_k": 4, "read": {"packing": "best_fit", "revision": "2"}}
    train_taught._write_down(tmp_path, about)
    train_taught._check(tmp_path, about)


@pytest.mark.parametrize("content", ["{", "[1]", "3", "{}", '{"teacher": 3}', '{"teacher": {}, "read": 3}'])
def test_of_a_store_that_does_not_say_whose_it_is_nothing_is_used(tmp_path: Path, content: str) -> None:
    (tmp_path / "about.json").write_text(content)
    with pytest.raises(
        DataError, match=rf"about\.json cannot be read .*\. Remove {tmp_path} to have the teacher asked"
    ):
        train_taught._check(tmp_path, {"teacher": {}})


@pytest.mark.parametrize(
    ("step", "samples", "stops"),
    [(0, 0, [3, 6, 9, 12, 15, 18, 21, 24]), (2, 10, [3, 6, 9, 12, 15, 18, 21, 24, 26]), (9, 5, [3, 5]), (9, 0, [0])],
)
def test_what_is_asked_are_all_samples_to_the_runs_end(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, samples: int, stops: list[int]
) -> None:
    """Six steps of four; behind a rollback some were passed over. Blocks of three samples."""
    monkeypatch.setattr(train_taught, "BLOCK", 3 * 16 * 4)
    settings = tiny.config(corpus, tmp_path, "distillation.teacher=t", "distillation.top_k=4")
    state: Any = SimpleNamespace(step=step, samples=samples)
    blocks = train_taught._blocks(settings, open_corpus(settings), state)
    assert [(block.number, block.size, block.stop) for block in blocks] == [(n, 3, m) for n, m in enumerate(stops)]


def test_what_is_missing_is_what_the_first_rank_does_not_find(tmp_path: Path) -> None:
    blocks = [Block(0, 2, 2), Block(1, 2, 3)]
    for block in blocks:
        _save(block, tmp_path, np.zeros((2, 3), "<f4"))  # of the second one more than is needed

    def missing(rank: int, num_ranks: int) -> list[Block]:
        mesh: Any = SimpleNamespace(rank=rank, world=build_mesh(Layout(tp=2), rank).world)  # no other axis
        if rank:
            train_taught.__dict__["_files"] = lambda *_: pytest.fail("all of what is stored is read by each rank")
        return _missing(tmp_path if rank == 0 else tmp_path / "nowhere", blocks, mesh)

    assert run_on_ranks(missing, 2) == [[], []]


def test_each_rank_asks_about_its_samples_of_a_block_and_comes_along_with_the_others(
    corpus: TinyCorpus, tmp_path: Path
) -> None:
    """Of samples 8 to 12 two micro-batches of two for the first rank, and one of one for the second."""
    settings = tiny.config(corpus, tmp_path)
    opened, found = open_corpus(settings), []
    for rank in (0, 1):
        mesh: Any = SimpleNamespace(data=SimpleNamespace(rank=rank, size=2))
        asked = train_taught._asked(Block(1, 8, 13), settings, opened, mesh)
        found.append([(places, batch.samples.tolist()) for places, batch in asked])
    told = sorted((place, 8 + place) for places in found for each, _ in places for place in each or ())
    assert told == [(place, 8 + place) for place in range(5)]
    for each in (each for places in found for each in places if each[0] is not None):
        assert each[1] == [8 + place for place in each[0] or ()]
    assert len(found[0]) == len(found[1]), "what communicates is called as often"


@pytest.mark.parametrize(("precision", "kind"), [("fp64", "<f8"), ("fp32", "<f4"), ("bf16", "<f4")])
def test_what_a_teacher_says_is_written_in_the_runs_precision(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, kind: str
) -> None:
    settings = tiny.config(corpus, tmp_path, f"train.precision={precision}")
    table = torch.tensor([[[[7.0, -0.1], [3.0, -2.0]]], [[[5.0, -0.3], [274.0, -1.5]]]], dtype=torch.float64)
    monkeypatch.setattr(train_taught, "_computed", lambda *_: table)
    nobody: Any = None
    train_taught._compute(nobody, [Block(0, 2, 2)], tmp_path, config=settings, corpus=nobody, mesh=Mesh())
    stored = Stored(tmp_path, size=2, stop=2, alpha=0.5, temperature=1.0)
    assert stored._row(0)["log_prob"].dtype == kind and stored._row(1)["id"].tolist() == [[5, 274]]
    assert stored._row(1)["log_prob"].tolist() == [[float(np.dtype(kind).type(n)) for n in (-0.3, -1.5)]]
    assert _missing(tmp_path, [Block(0, 2, 2)], Mesh()) == []


@pytest.mark.parametrize(
    ("number", "asks"), [(errno.ESTALE, False), (errno.ENOENT, True), (errno.EACCES, True)], ids=["away", "not", "no"]
)
def test_what_a_disk_does_not_give_for_a_while_is_not_asked_again(
    number: int, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks alike, of which the first reads. A teacher takes long over a block."""
    block = Block(0, 2, 2)

    def away(path: Path, **more: Any) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    def found(rank: int, num_ranks: int) -> list[Block] | str:
        try:
            return _missing(tmp_path, [block], build_mesh(Layout(dp=2), rank))
        except DiskError as error:
            return str(error)

    monkeypatch.setattr(np, "load", away)
    told = run_on_ranks(found, 2)
    if asks:
        assert told == [[block]] * 2
    else:
        assert told[0] == told[1] and "Start the same command again when its disk answers." in told[0]


@pytest.mark.parametrize("name", ["targets_00000000.npy", "sums_00000000.npy"])
@pytest.mark.parametrize("opens", [False, True], ids=["away", "maps no files"])
def test_what_of_a_teacher_cannot_be_read_is_named(
    opens: bool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both say the same. A file system that maps no files says it for ever: nobody has to start the run again."""
    block, maps, is_away = Block(0, 2, 2), mmap.mmap, os.strerror(errno.ENODEV)

    def no_file(file: int, *words: Any, **more: Any) -> Any:
        if os.path.samestat(os.fstat(file), (tmp_path / name).stat()):
            raise OSError(errno.ENODEV, is_away)
        return maps(file, *words, **more)

    def away(honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *words: Any, **more: Any) -> Any:
            if path.name == name:
                raise OSError(errno.ENODEV, is_away)
            return honest(path, *words, **more)

        return call

    for file in (block.path(tmp_path), block.sums(tmp_path)):
        np.save(file, np.zeros(2))
    if opens:
        monkeypatch.setattr(mmap, "mmap", no_file)
    else:
        monkeypatch.setattr(np, "load", away(np.load))
        monkeypatch.setattr(Path, "open", away(Path.open))
    said = {
        True: f"{tmp_path / name} lies on a file system that maps no files into memory, as they are read here. Copy "
        f"{tmp_path} to another, and set distillation.store to it there.",
        False: f"{tmp_path / name} cannot be read ([Errno {errno.ENODEV}] {is_away}). Start the same command again "
        "when its disk answers.",
    }
    stored = Stored(tmp_path, size=2, stop=2, alpha=0.5, temperature=1.0)
    for read in (lambda: _missing(tmp_path, [block], Mesh()), lambda: stored._row(0)):
        with pytest.raises(DataError if opens else DiskError) as told:
            read()
        assert str(told.value) == said[opens]


def test_what_is_stored_stays_whoever_else_asks(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run, with other last bits, adds what is missing; and between its two files the first run reads on."""
    settings, nobody = tiny.config(corpus, tmp_path, "train.precision=fp64"), cast(Any, None)
    asked: list[range] = []

    def store(bits: float, stop: int) -> None:
        def computed(_: object, block: Block, *__: object) -> torch.Tensor:
            asked.append(block.asked)
            return torch.stack([torch.full((1, 1, 2), place + bits, dtype=torch.float64) for place in block.asked])

        monkeypatch.setattr(train_taught, "_computed", computed)
        missing = _missing(tmp_path, [Block(0, 6, stop)], Mesh())
        train_taught._compute(nobody, missing, tmp_path, config=settings, corpus=nobody, mesh=Mesh())

    def said(stop: int) -> list[float]:
        stored = Stored(tmp_path, size=6, stop=stop, alpha=0.5, temperature=1.0)
        return [float(stored._row(place)["log_prob"].item()) for place in range(stop)]

    store(0.25, 2)
    written = train_taught.written

    @contextmanager
    def read_meanwhile(path: Path) -> Iterator[Any]:
        assert said(2) == [0.25, 1.25]
        with written(path) as stream:
            yield stream
        assert said(2) == [0.25, 1.25]

    monkeypatch.setattr(train_taught, "written", read_meanwhile)
    store(0.5, 5)
    store(0.75, 4)
    assert said(5) == [0.25, 1.25, 2.5, 3.5, 4.5] and asked == [range(2), range(2, 5)]
    monkeypatch.setattr(train_taught, "_missing", lambda _, blocks, __: blocks)  # as two runs that begin together
    store(0.75, 6)
    assert said(6) == [0.25, 1.25, 2.5, 3.5, 4.5, 5.75]


def test_who_stores_waits_for_another_that_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for no run whose folder it is."""
    with ExitStack() as other, locked(tmp_path, "colonnade train"):
        other.enter_context(train_taught._in_turn(tmp_path))
        monkeypatch.setattr(train_taught.time, "sleep", lambda _: other.close())
        with (
            train_taught._in_turn(tmp_path),
            pytest.raises(LockError),
            locked(tmp_path, "a third", name="targets.lock"),
        ):
            pass


def test_of_two_runs_that_begin_together_the_second_does_not_add_another_teachers_answers(
    corpus: TinyCorpus, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's answers come while the second one reads its teacher."""
    theirs = '{"teacher": {"manifest.json": "another\'s"}}'

    def opened(*_: object, **__: object) -> object:
        (tmp_path / "about.json").write_text(theirs)
        return SimpleNamespace(origin=SimpleNamespace(path="teacher", what="a checkpoint"))

    monkeypatch.setattr(train_taught, "open_teacher", opened)
    keys = (f"distillation.teacher={finished.folder}", f"distillation.store={tmp_path}", "distillation.top_k=4")
    settings = tiny.config(corpus, tmp_path, *keys)
    model: Any = nn.Linear(1, 1)
    model.parallel = SimpleNamespace(products=None)
    state: Any = SimpleNamespace(model=model, step=0, samples=0, teacher=None)
    with pytest.raises(DataError, match="has what another teacher says, or of other tokens"):
        train_taught.attach(state, settings, open_corpus(settings), Mesh(), cast(Any, Told()))
    assert (tmp_path / "about.json").read_text() == theirs and state.teacher is None
    assert not list(tmp_path.glob("*.npy"))


@pytest.mark.parametrize("is_stored", [True, False])
def test_of_a_teacher_whose_ids_are_not_compared_with_the_runs_that_is_said(
    is_stored: bool, corpus: TinyCorpus, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_teacher = SimpleNamespace(path="it", what="a model", note=" Unknown.")
    began: list[bool] = []
    monkeypatch.setattr(
        train_taught,
        "open_teacher",
        lambda *_, begins: began.append(begins) or SimpleNamespace(origin=of_teacher),
    )
    monkeypatch.setattr(train_taught, "_compute", lambda *_, **__: None)
    keys = [f"distillation.teacher={finished.folder}", f"run.folder={tmp_path}"]
    keys += ["distillation.top_k=4", f"distillation.store={tmp_path}"] if is_stored else []
    settings, told = tiny.config(corpus, tmp_path, *keys), Told()
    model: Any = nn.Linear(1, 1)
    model.parallel = SimpleNamespace(products=None)
    state: Any = SimpleNamespace(model=model, step=0, samples=0, teacher=None)
    for _ in range(2):
        train_taught.attach(state, settings, open_corpus(settings), Mesh(), cast(Any, told))
    assert began == [True, False], "the second time it goes on"
    for line in told.said:
        assert line.startswith("Asking it" if is_stored else "Taught by it") and line.endswith(". Unknown.")


class OnGPU(torch.Tensor):
    """One that says that it lies on a GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


def test_a_micro_batch_is_taught_what_was_said_of_its_samples(tmp_path: Path) -> None:
    """Sequences of one token, of which two are stored."""
    rows = np.empty((3, 1, 2), dtype=[("id", "<u4"), ("log_prob", "<f4")])
    rows["id"] = np.arange(6).reshape(3, 1, 2)
    rows["log_prob"] = -rows["id"].astype("<f4")
    _save(Block(0, 3, 3), tmp_path, rows)
    stored = Stored(tmp_path, size=3, stop=3, alpha=0.25, temperature=2.0)
    batch: Any = SimpleNamespace(samples=torch.tensor([2, 0]))
    with Copies() as copies:
        (taught,) = stored.teach([batch], [Inputs(loss_weights=torch.full((1, 2), 0.5).as_subclass(OnGPU))], 1.0)
    assert copies.uploads == [(True, True)] * 2, "from pinned memory, and not waited for, as batches are"
    assert taught.soft is not None and taught.soft.ids is not None and taught.soft.log_probs is not None
    assert taught.soft.ids.tolist() == [[[4, 5], [0, 1]]] and taught.soft.log_probs.tolist() == [[[-4, -5], [0, -1]]]
    assert taught.soft.temperature == 2.0 and taught.soft.weights.tolist() == [[0.5 * 0.25 * 4] * 2]
    assert taught.loss_weights is not None and taught.loss_weights.tolist() == [[0.5 * 0.75] * 2]


def test_what_is_stored_are_the_likeliest_tokens_at_the_temperature(
    corpus: TinyCorpus, teacher: Path, tmp_path: Path
) -> None:
    """By torch's own functions, on the logits of the teacher as it is saved."""
    keys = (*SMALL, "train.steps=1", "optim.warmup_steps=0", "distillation.top_k=9", "distillation.temperature=3.0")
    path = write_config(corpus, tmp_path)
    answer = forked("train", path, *keys, f"distillation.teacher={teacher}", "train.evaluate_every=0")
    assert answer.status == 0, answer
    assert "the checkpoint of step 8, about 4 samples, once." in answer.out
    data = open_corpus(load(path, [*SMALL]))
    model = open_trained(teacher / "checkpoints" / "step_00000008", Mesh(), torch.device("cpu"), "fp64")
    carry = model.hidden(data_inputs(data.load(data.training, range(4))))
    assert carry is not None
    logits = model.model.head.logits(carry[0])  # type: ignore[operator,union-attr]
    expected = (logits / 3).log_softmax(-1).topk(9)  # [s, b, 9]
    stored = np.load(tmp_path / "run" / "teacher" / "targets_00000000.npy")  # [b, s, 9]
    assert np.allclose(stored["log_prob"].transpose(1, 0, 2), expected.values.detach().numpy(), atol=1e-10)
    assert (stored["id"].transpose(1, 0, 2) == expected.indices.numpy()).all()


def test_behind_what_a_teacher_has_said_is_a_clear_message(tmp_path: Path) -> None:
    """A store of two full blocks."""
    for number in (0, 1):
        _save(Block(number, 4, 8), tmp_path, np.full((4, 2), number))
    stored = Stored(tmp_path, size=4, stop=8, alpha=0.5, temperature=1.0)
    assert stored._row(3).tolist() == [0, 0] and stored._row(7).tolist() == [1, 1]
    with pytest.raises(DataError, match=r"the run's first 8 samples, and sample 9 is next"):
        stored._row(8)


def test_labels_and_teacher_share_the_loss() -> None:
    """Gradients of softened answers are smaller by the square of the temperature, which is made up for."""
    weights, logits = torch.tensor([[0.5, 0.25]]), torch.ones(2, 3)
    found = with_soft_targets(Inputs(loss_weights=weights), 0.75, 3.0, hidden=None)
    assert found.loss_weights is not None and found.soft is not None
    torch.testing.assert_close(found.loss_weights, weights * 0.25)
    torch.testing.assert_close(found.soft.weights, weights * 0.75 * 9.0)
    labelled = with_soft_labels(LabelInputs(target_weights=weights), 0.75, 3.0, logits)
    assert isinstance(labelled, LabelInputs) and labelled.soft_labels is not None
    assert labelled.target_weights is not None and labelled.soft_labels.logits is logits
    torch.testing.assert_close(labelled.target_weights, weights * 0.25)
    torch.testing.assert_close(labelled.soft_labels.weights, weights * 0.75 * 9.0)
    assert found.soft.temperature == labelled.soft_labels.temperature == 3.0


def test_who_may_teach_is_told_by_what_it_is(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Before its weights are read: tokens, lengths and kind, each to the last that is allowed."""

    weights = ["blocks.0.mlp.up.weight"]

    def said(tokens: int = 275, *more: str, theirs: str | None = "same", **model: object) -> str:
        config = tiny.config(corpus, tmp_path, f"distillation.teacher={tmp_path}", *more)
        teacher = config.model.model_copy(update={"seq_length": 16, **model})
        origin: Any = SimpleNamespace(
            path=Path("it"), labels=(), model={"vocab_size": tokens}, shapes=dict.fromkeys(weights),
            tokenizer=lambda: theirs,
        )  # fmt: skip
        own = SimpleNamespace(is_of=lambda theirs: theirs == "same")
        run: Any = SimpleNamespace(labels=(), vocab_size=275, tokenizer=own)
        try:
            check_teacher(origin, teacher, config, run)
            check_tokenizer(origin, run)
        except ConfigError as error:
            return str(error)
        return ""

    assert said() == said(275, "distillation.top_k=275") == said(275, "model.seq_length=15") == ""
    assert "top_k = 276 is more than the vocabulary's 275 tokens" in said(275, "distillation.top_k=276")
    assert "has 16 positions, and the student's samples are 17 tokens" in said(275, "model.seq_length=17")
    assert said(275, "model.seq_length=17", position="rotary") == "", "any position"
    assert said(theirs=None) == "", "which tokenizer it had is not known"
    assert "tells 300 tokens apart, and the run's vocabulary has 275" in (told := said(300))
    assert told.endswith("Use a teacher with the run's tokenizer, or the teacher's for the run (it).")
    assert (
        "another tokenizer than data.tokenizer" in (told := said(theirs="another"))
        and "data.tokenizer = 'it', and" in told
    )
    assert 'is a bert with head "pretraining", and the student a gpt' in said(kind="bert")
    assert 'is a gpt with head "preferences", and the student a gpt with head "pretraining"' in said(head="preferences")
    weights.append("blocks.0.mlp.up.lora_a")
    assert "has adapters beside its weights, and teaches without them. `colonnade merge it TARGET` makes" in said()
