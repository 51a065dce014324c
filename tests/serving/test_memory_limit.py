"""A trained model that does not fit: one message with bytes and what to set, exit status 2."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import paper_mesh
from colonnade.serving.memory_limit import InUse, _message, _remedies
from tests.commands import forked
from tests.runs import Finished
from tests.tiny import TinyCorpus

CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB"


def at_the_model(fail: Callable[[], object]) -> Callable[[int], None]:
    """As the first thing that is computed with the model."""

    def first(rank: int) -> None:
        from colonnade.serving import trained

        load = trained.open_trained

        def open_trained(*args, **more):  # type: ignore[no-untyped-def]
            found = load(*args, **more)
            for module in found.stages.model.modules():
                module.forward = lambda *args, **more: fail()
            return found

        trained.open_trained = open_trained

    return first


def refused_by_the_system() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def refused_by_cuda() -> None:
    raise torch.OutOfMemoryError(CUDA)


def refused_by_python() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("fail", "asked"),
    [
        (refused_by_the_system, "1,152,921,504,606,846,976 bytes (1.15 EB) more were refused"),
        (refused_by_cuda, "2,684,354,560 bytes (2.68 GB) more were refused"),
        (refused_by_python, "memory was refused"),
    ],
)
def test_generate(finished: Finished, fail: Callable[[], None], asked: str) -> None:
    answer = forked("generate", finished.folder, "--prompt", "a", first=at_the_model(fail))
    assert answer.status == 2 and "Traceback" not in answer.err, answer
    assert answer.err.startswith(
        f"colonnade: Rank 0 has run out of memory with {finished.newest}: {asked.split(' (')[0]}"
    )
    for said in ("11,248 parameters take 45.0 kB in fp32 on 1 rank", "free of", "--max-new-tokens (now 100)"):
        assert said in answer.err, answer.err
    assert "set --precision bf16 (now fp32)" in answer.err and "--tp (now 1)" in answer.err


@pytest.mark.parametrize("more", [["--part", "validation"], ["--batch-size", 3]])
def test_evaluate(finished: Finished, corpus: TinyCorpus, more: list[object]) -> None:
    data = [] if "--part" in more else ["--data", corpus.text]
    answer = forked("evaluate", finished.folder, *data, *more, first=at_the_model(refused_by_the_system))
    assert answer.status == 2 and "Traceback" not in answer.err and answer.out == "", answer
    assert ("set --batch-size 1" if data == [] else "lower --batch-size (now 3)") in answer.err


@pytest.mark.parametrize(
    ("precision", "device", "wanted"),
    [
        ("fp32", "cpu", ["lower it", "set --precision bf16 (now fp32)", "more machines, under torchrun"]),
        ("bf16", "cpu", ["lower it", "more machines, under torchrun"]),
        ("fp16", "cuda", ["lower it", "more GPUs", "compute on the CPU"]),
    ],
)
def test_what_takes_less_is_something_else_than_there_is(precision: str, device: str, wanted: list[str]) -> None:
    used = InUse(Path("checkpoint"), 100, precision, ("lower it",))
    told = _remedies(used, paper_mesh(Layout(tp=2, pp=3), 0), torch.device(device))
    assert len(told) == len(wanted) and all(words in remedy for words, remedy in zip(wanted, told, strict=True))
    assert any("--tp (now 2) or --pp (now 3)" in remedy for remedy in told)


def test_weights_of_a_model_that_is_cut_are_those_of_all_ranks() -> None:
    used = InUse(Path("checkpoint"), 1000, "bf16", ())
    told = _message(used, paper_mesh(Layout(tp=2, pp=3), 4), torch.device("cpu"), None)
    assert (
        told.startswith("Rank 4 has run out of memory") and "1,000 parameters take 2.00 kB in bf16 on 6 ranks" in told
    )


def test_a_bug_stays_one(finished: Finished) -> None:
    def broken() -> None:
        raise RuntimeError("shapes differ")

    answer = forked("generate", finished.folder, "--prompt", "a", first=at_the_model(broken))
    assert answer.status not in (0, 2) and "RuntimeError: shapes differ" in answer.err


@pytest.mark.slow
def test_the_batch_size_changes_no_number(finished: Finished, corpus: TinyCorpus) -> None:
    for data in (["--data", corpus.text], ["--part", "validation"]):
        told = [forked("evaluate", finished.folder, *data, *more).out for more in ([], ["--batch-size", 1])]
        assert told[0] == told[1]
