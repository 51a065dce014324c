"""How often ranks read a manifest, and look at files, where many of them start: each does so on one file system."""

import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from colonnade.checkpoint import manifest
from colonnade.checkpoint.manifest import Manifest, read_manifest
from colonnade.train import damaged, loop
from tests.commands import here, start
from tests.runs import Finished

PARSED = "parsed"


def noted(folder: Path) -> Callable[[int], None]:
    """Has each rank note what it parses, and whose size it asks for, in a file of its own."""

    def first(rank: int) -> None:
        validate, plain_size, notes = manifest.validate, manifest.plain_size, folder / str(rank)

        def note(what: str) -> None:
            with notes.open("a") as file:
                file.write(f"{what}\n")

        manifest.__dict__.update(
            validate=lambda content: (note(PARSED), validate(content))[1],
            plain_size=lambda path: (note(str(path)), plain_size(path))[1],
        )

    return first


def counts(folder: Path, num_ranks: int) -> list[Counter[str]]:
    return [Counter((folder / str(rank)).read_text().split()) for rank in range(num_ranks)]


def ended(*arguments: object, folder: Path) -> list[Counter[str]]:
    """What two ranks of a command have noted."""
    for answer in start(*arguments, num_ranks=2, first=noted(folder)).answers():
        assert answer.status == 0, answer
    return counts(folder, 2)


def check(ranks: Sequence[Counter[str]], path: Path) -> None:
    """Each parses the manifest once. One looks at each file for all, before; and one of them, as it is read."""
    files = {str(path / name) for name in read_manifest(path).files}
    assert [each[PARSED] for each in ranks] == [1, 1]
    first, second = (Counter({name: each[name] for name in each.keys() & files}) for each in ranks)
    assert first + second == Counter(dict.fromkeys(files, 2))
    assert set(second.values()) == {1} and len(second) < len(files)


def test_ranks_that_go_on_read_the_manifest_once(finished: Finished, config: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    more = [f"run.folder={run}", "parallel.dp=2", "checkpoint.every=0", "train.steps=6"]
    check(ended("train", config, *more, folder=tmp_path), run / "checkpoints" / finished.newest.name)


def test_ranks_that_begin_from_weights_read_their_manifest_once(
    finished: Finished, config: Path, tmp_path: Path
) -> None:
    more = [f"run.folder={tmp_path / 'run'}", "parallel.dp=2", f"train.init_from={finished.newest}", "train.steps=1"]
    check(ended("train", config, *more, "checkpoint.every=0", folder=tmp_path), finished.newest)


def test_ranks_that_serve_read_the_manifest_once(finished: Finished, tmp_path: Path) -> None:
    check(
        ended("generate", finished.newest, "--prompt", "a", "--tp", 2, "--max-new-tokens", 1, folder=tmp_path),
        finished.newest,
    )


def test_a_rank_that_goes_on_gives_up_the_manifest_that_it_has_read(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large model it has gigabytes."""
    look, go_on, seen = damaged.look, loop._to_its_end, list[weakref.ref[Manifest]]()

    def looked(*given: Any) -> Manifest | None:
        found = look(*given)
        assert found is not None
        seen.append(weakref.ref(found))
        return found

    def to_its_end(*given: Any) -> None:
        assert [each() for each in seen] == [None]
        go_on(*given)

    monkeypatch.setattr(damaged, "look", looked)
    monkeypatch.setattr(loop, "_to_its_end", to_its_end)
    run = shutil.copytree(finished.folder, tmp_path / "run")
    answer = here("train", finished.config, f"run.folder={run}")
    assert answer.status == 0 and "Nothing is left to do" in answer.out and seen, answer
