"""The file with what the reference of preferences thinks: read only where it is of the run's own pairs."""

import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from colonnade.errors import CheckpointError, ColonnadeError, ConfigError, DataError, DiskError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.train import init_from, reference, taught
from colonnade.train.reference import _parts, attach_stored, path_of, read, stored
from tests.distributed import run_on_ranks

KNOWN = {
    "data": {"data.train": "a"},
    "seq_length": 16,
    "model": {"kind": "gpt"},
    "precision": "fp32",
    "drawn weights": {"train.seed": 1, "model.init_std": 0.02},
}
PARTS: Any = {"train.0": range(3), "validation.0": range(2)}
FOUND = {"train.0": np.arange(6.0).reshape(3, 2), "validation.0": np.ones((2, 2))}


def write(path: Path, about: dict[str, Any], found: dict[str, Any]) -> Path:
    np.savez(path, of=np.array(json.dumps(about)), **found)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("lacks", ["", "model", "precision", "drawn weights"])
def test_a_file_of_before_says_less_and_is_read(lacks: str, tmp_path: Path) -> None:
    path = write(tmp_path / "reference.npz", {key: each for key, each in KNOWN.items() if key != lacks}, FOUND)
    found = read(path, KNOWN, PARTS)
    assert {name: each.tolist() for name, each in found.items()} == {name: x.tolist() for name, x in FOUND.items()}


@pytest.mark.parametrize(("weights", "is_other"), [({}, False), ({"w": "2"}, True), ("w", True)])
def test_of_weights_those_files_count_that_are_read(weights: Any, is_other: bool, tmp_path: Path) -> None:
    """Earlier versions recorded others beside them too."""
    known = {**KNOWN, "weights": {"w": "1"}}
    written = {"w": "1", "tokens.bin": "3", **weights} if isinstance(weights, dict) else weights
    path = write(tmp_path / "reference.npz", {**known, "weights": written}, FOUND)
    with pytest.raises(DataError, match="of other weights than the run's") if is_other else nullcontext():
        assert read(path, known, PARTS).keys() == FOUND.keys()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ESTALE, DiskError), (errno.EACCES, DataError)], ids=["away", "forbidden"]
)
def test_a_file_that_a_disk_does_not_give_for_a_while_is_no_wrong_file(
    number: int, kind: type[ColonnadeError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is started again waits for it: the reference's, and the one that says who has taught the run."""

    def away(path: Path, *words: Any, **more: Any) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    (tmp_path / taught.ABOUT).write_text("{}")
    monkeypatch.setattr(np, "load", away)
    monkeypatch.setattr(Path, "read_text", away)
    for file, reads in (
        ("reference.npz", lambda: read(tmp_path / "reference.npz", KNOWN, PARTS)),
        (taught.ABOUT, lambda: taught._check(tmp_path, {})),
    ):
        with pytest.raises(ColonnadeError, match=os.strerror(number)) as told:
            reads()
        assert type(told.value) is kind and str(told.value).startswith(str(tmp_path / file))
        assert ("when its disk answers" in str(told.value)) is (kind is DiskError)


@pytest.mark.parametrize("what", list(KNOWN))
def test_a_file_of_another_run_is_told_by_what_differs(what: str, tmp_path: Path) -> None:
    path = write(tmp_path / "reference.npz", {**KNOWN, what: "other"}, FOUND)
    with pytest.raises(DataError) as told:
        read(path, KNOWN, PARTS)
    first, theirs, own, _ = str(told.value).splitlines()
    assert first == f"{path} has log-probabilities of other {what} than the run's:"
    assert (theirs, own) == ('  "other"', f"  {json.dumps(KNOWN[what], sort_keys=True)} (the run's)")


@pytest.mark.parametrize(("name", "rows"), [("validation.0", None), ("train.0", 2), ("train.0", 4)])
def test_every_pair_has_to_be_there(name: str, rows: int | None, tmp_path: Path) -> None:
    found = {each: x for each, x in FOUND.items() if each != name} | (
        {} if rows is None else {name: np.ones((rows, 2))}
    )
    path = write(tmp_path / "reference.npz", KNOWN, found)
    with pytest.raises(DataError, match=f"no log-probabilities of all {len(PARTS[name])} pairs of {name}"):
        read(path, KNOWN, PARTS)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_is_no_log_probability(wrong: float, tmp_path: Path) -> None:
    found = {**FOUND, "validation.0": np.array([[1.0, 1.0], [1.0, wrong]])}
    with pytest.raises(DataError, match=r"no log-probabilities of all 2 pairs of validation\.0"):
        read(write(tmp_path / "reference.npz", KNOWN, found), KNOWN, PARTS)


@pytest.mark.parametrize("step", [0, 1])
def test_before_the_first_step_there_is_none_and_behind_it_it_is_needed(step: int, tmp_path: Path) -> None:
    config: Any = SimpleNamespace(
        preferences=SimpleNamespace(reference=None), run=SimpleNamespace(folder=str(tmp_path))
    )
    corpus: Any = None
    if step == 0:
        assert stored(config, corpus, Mesh(), step=step) is None
        return
    with pytest.raises(ConfigError, match=f"^{tmp_path / 'reference.npz'} is gone: .* the weights of step 1 cannot"):
        stored(config, corpus, Mesh(), step=step)


def test_pairs_are_measured_beside_what_the_file_says(tmp_path: Path) -> None:
    """Where it is of these pairs, whatever else it was made with."""

    class Part(list[int]):
        reference: Any = None

    train, validation = Part(range(3)), Part(range(2))
    datasets = SimpleNamespace(
        train=SimpleNamespace(parts=[train]), validation=SimpleNamespace(parts=[validation]), test=None
    )
    corpus: Any = SimpleNamespace(datasets=datasets, identities={"data.train": "a"})
    path = write(tmp_path / "mine.npz", KNOWN, FOUND)
    settings: Any = SimpleNamespace(
        model=SimpleNamespace(head="preferences"), preferences=SimpleNamespace(reference=str(path))
    )
    attach_stored(settings, corpus)
    assert train.reference.tolist() == FOUND["train.0"].tolist()
    assert validation.reference.tolist() == FOUND["validation.0"].tolist()
    corpus.identities = {"data.train": "b"}
    with pytest.raises(DataError, match=rf"^{path} has log-probabilities of other data than the run's"):
        attach_stored(settings, corpus)


def test_a_file_that_is_named_takes_the_place_of_the_runs_own(tmp_path: Path) -> None:
    def config(reference: str | None, head: str = "preferences") -> Any:
        return SimpleNamespace(
            model=SimpleNamespace(head=head),
            preferences=SimpleNamespace(reference=reference),
            run=SimpleNamespace(folder=str(tmp_path / "run")),
        )

    assert path_of(config(None)) == tmp_path / "run" / "reference.npz" and path_of(config("mine.npz")) == Path(
        "mine.npz"
    )
    dataset = SimpleNamespace(train=SimpleNamespace(parts=[range(3)]), validation=None, test=None)
    corpus: Any = SimpleNamespace(datasets=dataset, identities={})
    with pytest.raises(DataError, match=f"^{tmp_path / 'gone.npz'} is not there: "):
        attach_stored(config(str(tmp_path / "gone.npz")), corpus)
    attach_stored(config(None, head="pretraining"), corpus)


def test_every_part_that_a_run_reads_has_its_log_probabilities() -> None:
    """The test part too, in each of its files; a run may have none."""
    train, validation, test = (SimpleNamespace(parts=parts) for parts in (["a", "b"], ["c"], ["d"]))
    datasets = SimpleNamespace(train=train, validation=validation, test=test)
    corpus: Any = SimpleNamespace(datasets=datasets)
    assert _parts(corpus) == {"train.0": "a", "train.1": "b", "validation.0": "c", "test.0": "d"}
    datasets.test = None
    assert "test.0" not in _parts(corpus)


def test_a_file_that_is_no_reference_is_told(tmp_path: Path) -> None:
    path = tmp_path / "reference.npz"
    contents = (lambda: path.write_bytes(b"no archive"), lambda: path.write_bytes(b""), lambda: np.savez(path, **FOUND))
    for write in (*contents, path.unlink):
        write()
        with pytest.raises(DataError, match=rf"^{path} has no log-probabilities of a reference model .*Put the run's"):
            read(path, KNOWN, PARTS)


@pytest.mark.parametrize("is_there", [False, True])
def test_what_the_reference_thinks_is_computed_once_and_given_to_all_pairs(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the run's own model, all of whose messages between stages have arrived then."""
    done: list[object] = []

    class Part(list[int]):
        reference: Any = None

    sized = {name: Part(range(3)) for name in FOUND}
    found = {name: f"of {name}" for name in sized}
    monkeypatch.setattr(reference, "_parts", lambda corpus: sized)
    monkeypatch.setattr(reference, "stored", lambda *_, step: found if is_there else None)
    monkeypatch.setattr(reference, "_known", lambda *_: KNOWN)
    monkeypatch.setattr(reference, "_computed", lambda state, corpus, part, *_: done.append("computed") or "made")
    monkeypatch.setattr(reference, "_write", lambda path, known, made: done.append((path, known, made)))
    monitor: Any = SimpleNamespace(say=done.append)
    state: Any = SimpleNamespace(step=0, inference=SimpleNamespace(close=lambda: done.append("closed")))
    config: Any = SimpleNamespace(
        model=SimpleNamespace(head="preferences"),
        preferences=SimpleNamespace(reference=None),
        run=SimpleNamespace(folder=str(tmp_path)),
    )
    nobody: Any = None
    reference.attach(state, config, nobody, Mesh(), monitor)
    made = dict.fromkeys(sized, "made")
    said, written = (
        "Reading 6 pairs with the weights of the reference, once.",
        (tmp_path / "reference.npz", KNOWN, made),
    )
    assert done == ([] if is_there else [said, "computed", "computed", "closed", written])
    assert {name: part.reference for name, part in sized.items()} == (found if is_there else made)


def test_a_file_says_all_that_log_probabilities_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights too, where they are there, and how those were drawn that they lack."""
    lacking: set[str] = set()
    origin = SimpleNamespace(path=tmp_path / "begun", leaves_drawn=lambda weights: bool(lacking))
    monkeypatch.setattr(reference, "model_metadata", lambda model, vocab_size: {"size": [vocab_size]})
    monkeypatch.setattr(reference, "architecture_of", lambda model, vocab_size: SimpleNamespace(weights=dict))
    monkeypatch.setattr(reference, "origin_together", lambda source, ranks: origin)
    monkeypatch.setattr(reference, "content_together", lambda path, world: {"weights of": path.name})
    config: Any = SimpleNamespace(
        model=SimpleNamespace(seq_length=16, init_std=0.1),
        train=SimpleNamespace(init_from=str(origin.path), precision="bf16", seed=3),
    )
    corpus: Any = SimpleNamespace(vocab_size=300, identities={"data.train": 7})
    known = {"data": {"data.train": "7"}, "seq_length": 16, "model": {"size": [300]}, "precision": "bf16"}
    assert reference._known(config, corpus, Mesh()) == known
    origin.path.mkdir()
    known["weights"] = {"weights of": "begun"}
    assert reference._known(config, corpus, Mesh()) == known
    lacking.add("blocks.2.attention.qkv.weight")
    drawn = {"train.seed": 3, "model.init_std": 0.1}
    assert reference._known(config, corpus, Mesh()) == {**known, "drawn weights": drawn}


def test_weights_that_one_machine_has_lost_are_missed_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "model_metadata", lambda model, vocab_size: {})
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "config.json").write_text("{}")
    corpus: Any = SimpleNamespace(vocab_size=300, identities={})

    def known(rank: int, num_ranks: int) -> dict[str, Any]:
        train = SimpleNamespace(init_from=str(tmp_path / str(rank)), precision="bf16")
        config: Any = SimpleNamespace(model=SimpleNamespace(seq_length=16), train=train)
        return reference._known(config, corpus, build_mesh(Layout(dp=2), rank))

    assert run_on_ranks(known, 2) == [{"data": {}, "seq_length": 16, "model": {}, "precision": "bf16"}] * 2


def test_weights_that_one_rank_cannot_read_end_the_run_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for it: beside the reference's file, and beside what a teacher has said."""

    def told(rank: int, num_ranks: int) -> list[str]:
        def checkpoint_at(path: Path) -> Path:
            if rank == 1:
                raise CheckpointError(f"{path.name} is damaged.")
            return path

        config: Any = SimpleNamespace(
            model=SimpleNamespace(seq_length=16),
            train=SimpleNamespace(init_from=str(tmp_path), precision="bf16"),
            distillation=SimpleNamespace(teacher=str(tmp_path), top_k=None),
        )
        corpus: Any = SimpleNamespace(vocab_size=300, identities={})
        mesh, said = build_mesh(Layout(dp=2), rank), list[str]()
        monkeypatch.setattr(init_from, "checkpoint_at", checkpoint_at)
        for known in (reference._known, taught._about):
            with pytest.raises(ColonnadeError) as raised:
                known(config, corpus, mesh)
            said.append(str(raised.value))
        return said

    monkeypatch.setattr(reference, "model_metadata", lambda model, vocab_size: {})
    (tmp_path / "config.json").write_text("{}")
    assert run_on_ranks(told, 2, time_limit=20.0) == [[f"rank 1: {tmp_path.name} is damaged."] * 2] * 2
