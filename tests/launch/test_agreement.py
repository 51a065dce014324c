"""Ranks that were started for different runs: they say so before the first step, all of them, and train nothing."""

import contextlib
import io
import os
import shutil
import socket
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import colonnade
from colonnade.config.describe import all_keys
from colonnade.config.load import load
from colonnade.data.tokenizer import train_bpe
from colonnade.errors import ConfigError, DataError
from colonnade.launch import agreement, launch
from colonnade.mesh.agreement import Properties, broadcast_text, disagreements, gather_texts
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, build_mesh
from colonnade.train import loop
from tests.commands import Answer, start
from tests.distributed import run_on_ranks
from tests.tiny import TinyCorpus, made_up

DP2 = ("parallel.dp=2",)
assert loop, "imported once, here, and not by every forked rank"


def with_more(rank: int, *arguments: str) -> Callable[[int], None]:
    """Gives one rank other arguments than the others."""
    return lambda own: sys.argv.extend(arguments) if own == rank else None


def refused(config: Path, *arguments: str, first: Callable[[int], None], num_ranks: int = 2) -> str:
    """The one message of a run that all ranks refuse: status 2 on each, no traceback, nothing trained."""
    answers: list[Answer] = start("train", config, *arguments, num_ranks=num_ranks, first=first).answers()
    assert [answer.status for answer in answers] == [2] * num_ranks, answers
    assert len({answer.err for answer in answers}) == 1, answers
    assert "Traceback" not in answers[0].err and "step 1/" not in answers[0].out
    assert not (config.parent / "run" / "metrics.jsonl").exists()
    return answers[0].err


def test_ranks_with_other_values_are_named_key_by_key(config: Path) -> None:
    error = refused(config, *DP2, first=with_more(1, "train.seed=2", "optim.learning_rate=2e-3"))
    assert "train.seed: rank 0 has 1234, rank 1 has 2\n" in error
    assert "optim.learning_rate: rank 0 has 0.01, rank 1 has 0.002\n" in error
    assert "same configuration file and overrides" in error and "Install" not in error


def test_ranks_of_other_layouts_do_not_hang(config: Path) -> None:
    """They would make other groups, in another order."""
    error = refused(config, first=lambda rank: sys.argv.append(("parallel.dp=2", "parallel.tp=2")[rank]))
    assert "parallel.tp: rank 0 has 1, rank 1 has 2" in error and "parallel.dp: rank 0 has 2, rank 1 has 1" in error


def test_ranks_that_find_each_other_through_the_environment(config: Path) -> None:
    """As torchrun starts them: without this program's supervisor."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def launched(rank: int) -> None:
        del os.environ[launch.FOLDER]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with_more(1, "train.seed=2", "optim.learning_rate=2e-3")(rank)

    error = refused(config, *DP2, first=launched)
    assert "train.seed: rank 0 has 1234, rank 1 has 2\n" in error


@pytest.mark.slow
def test_what_belongs_to_a_machine_may_differ(config: Path, corpus: TinyCorpus, tmp_path: Path) -> None:
    """Paths of the same files, and how a device is named (threads too, but a forked rank may only have one)."""
    for ending in (".bin", ".idx", ".json"):
        shutil.copy(f"{corpus.prefix}{ending}", tmp_path / f"here{ending}")
    shutil.copy(corpus.tokenizer, tmp_path / "tokenizer.json")
    elsewhere = (
        f"data.train={tmp_path / 'here'}",
        f"data.tokenizer={tmp_path / 'tokenizer.json'}",
        "train.device=auto",
        f"data.cache={tmp_path}",
    )
    answers = start("train", config, *DP2, num_ranks=2, first=with_more(1, *elsewhere)).answers()
    assert [answer.status for answer in answers] == [0, 0], answers


def test_ranks_with_other_tokens(config: Path, corpus: TinyCorpus, tmp_path: Path) -> None:
    """Same sizes, same index: a block of the tokens differs."""
    for ending in (".idx", ".json"):
        shutil.copy(f"{corpus.prefix}{ending}", tmp_path / f"other{ending}")
    tokens = bytearray(Path(f"{corpus.prefix}.bin").read_bytes())
    tokens[100] ^= 1
    (tmp_path / "other.bin").write_bytes(tokens)
    error = refused(config, *DP2, first=with_more(1, f"data.train={tmp_path / 'other'}"))
    assert "data.train: rank 0 has " in error and "tokens in " in error
    assert "Copy the files again from one source" in error


def test_ranks_with_another_tokenizer(config: Path, tmp_path: Path) -> None:
    error = refused(
        config, *DP2, "model.vocab_size=300", first=with_more(1, "data.tokenizer=" + str(make_tokenizer(tmp_path)))
    )
    assert "rank 1: " in error and "another tokenizer" in error


def make_tokenizer(folder: Path) -> Path:
    tokenizer = folder / "other.json"
    tokenizer.write_text(train_bpe(made_up(50, seed=9), 270).to_json())
    return tokenizer


def test_a_file_that_one_rank_lacks(config: Path, tmp_path: Path) -> None:
    """All ranks end with the mistake of one of them."""
    error = refused(config, *DP2, first=with_more(1, f"data.train={tmp_path / 'nowhere'}"))
    assert error.startswith("colonnade: rank 1: ") and "nowhere.bin" in error


def test_ranks_with_other_code(config: Path) -> None:
    def patched(rank: int) -> None:
        if rank == 1:
            agreement.__dict__["__version__"] = "9.9"
            agreement.__dict__["SOURCES"] = "0123456789ab"

    error = refused(config, *DP2, first=patched)
    assert "colonnade: rank 0 has " in error and ", rank 1 has 9.9\n" in error
    assert "colonnade's source files: rank 0 has " in error and ", rank 1 has 0123456789ab\n" in error
    assert "Install the same versions" in error and "same configuration file" not in error


def test_ranks_with_other_code_and_other_values_are_told_both_remedies(config: Path) -> None:
    def patched(rank: int) -> None:
        if rank == 1:
            agreement.__dict__["SOURCES"] = "0123456789ab"
            sys.argv.append("train.seed=2")

    error = refused(config, *DP2, first=patched)
    assert "Install the same versions" in error and "same configuration file and overrides" in error


def test_the_digest_is_of_the_packages_own_files(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "sub").mkdir(parents=True)
    (package / "a.py").write_text("x = 1\n")
    (package / "sub" / "b.py").write_text("y = 1\n")
    before = agreement.digest_of(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"compiled")
    assert agreement.digest_of(package) == before
    (package / "sub" / "b.py").write_text("y = 2\n")
    changed = agreement.digest_of(package)
    (package / "sub" / "b.py").rename(package / "b.py")
    assert len({before, changed, agreement.digest_of(package)}) == 3
    assert agreement.digest_of(Path(agreement.__file__).parents[1]) == agreement.SOURCES


def test_the_digest_is_the_same_wherever_a_package_lies_and_its_disk_lists_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that have installed it in different folders, in another order."""
    digests, listed = [], Path.rglob
    for place in ("here", "there"):
        for name in sorted(("b.py", "a.py", "c.py"), reverse=place == "there"):
            (tmp_path / place / "package").mkdir(parents=True, exist_ok=True)
            (tmp_path / place / "package" / name).write_text(f"{name} = 1\n")
        backwards = place == "there"
        monkeypatch.setattr(
            Path, "rglob", lambda path, what, backwards=backwards: sorted(listed(path, what), reverse=backwards)
        )
        digests.append(agreement.digest_of(tmp_path / place / "package"))
    assert digests[0] == digests[1]


def test_all_that_computes_is_part_of_the_program() -> None:
    """What may give other numbers from the same configuration; of hardware what rounds."""
    assert agreement.program(torch.device("cpu")) == {
        "colonnade": colonnade.__version__,
        "colonnade's source files": agreement.SOURCES,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "CUDA": str(torch.version.cuda),
        "kind of device": "cpu",
        "precision of fp32 products": torch.get_float32_matmul_precision(),
    }
    processor = torch.backends.cpu.get_cpu_capability()
    assert agreement.hardware(torch.device("cpu")) == {"processor": processor, "GPU": "none"}


def test_the_gpu_of_a_rank_is_told_and_not_another_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {0: "A100", 1: "H100"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: names[device.index if device else 0])
    assert [agreement.hardware(torch.device("cuda", index))["GPU"] for index in (0, 1)] == ["A100", "H100"]


def test_every_key_is_compared_but_those_of_a_machine(config: Path) -> None:
    compared = set(agreement.settings(load(config)))
    assert set(all_keys()) - compared == {"model.preset", *agreement.MAY_DIFFER}
    assert {"data.cache", "train.threads", "train.device"} == agreement.MAY_DIFFER


# --- the exchange -----------------------------------------------------------------------------------------------------


def _mesh(rank: int, num_ranks: int) -> Axis:
    return build_mesh(Layout(dp=num_ranks), rank).world


def _texts(rank: int, num_ranks: int) -> list[str]:
    return gather_texts("é" * rank + "\0", _mesh(rank, num_ranks))


def test_texts_of_any_length_arrive_whole() -> None:
    expected = ["\0", "é\0", "éé\0"]
    assert run_on_ranks(_texts, 3) == [expected] * 3
    assert gather_texts("alone", Axis("world")) == ["alone"]


def _texts_of_the_first(rank: int, num_ranks: int) -> tuple[list[str], dict[tuple[str, str], int]]:
    axis = _mesh(rank, num_ranks)
    assert axis.transport is not None
    told = [broadcast_text(text if rank == 0 else "not mine" * rank, axis) for text in ("é" * 1000, "")]
    return told, dict(axis.transport.ledger.bytes)


def test_the_first_ranks_text_reaches_the_others_and_no_other_is_sent() -> None:
    """The ledger has its bytes and those of the lengths, however many ranks there are."""
    expected = ["é" * 1000, ""], {("broadcast", "world"): 2000 + 2 * 8}
    assert run_on_ranks(_texts_of_the_first, 3) == [expected] * 3
    assert broadcast_text("alone", Axis("world")) == "alone"


def test_a_text_takes_memory_for_its_bytes_alone() -> None:
    """Not for a number each, as a list has them."""
    text, alone = "x" * 1_000_000, Axis("world")
    tracemalloc.start()
    try:
        assert broadcast_text(text, alone) == text and gather_texts(text, alone) == [text]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 7 * len(text)


def _compared(rank: int, num_ranks: int) -> tuple[dict[str, dict[str, list[int]]], int]:
    axis = _mesh(rank, num_ranks)
    assert axis.transport is not None
    properties: Properties = {"same": "1", "odd": str(rank % 2), "gone": "here"}
    if rank == 2:
        del properties["gone"]
        properties["own"] = "here"
    found = disagreements(properties, axis)
    before = axis.transport.ledger.bytes["all_gather", "world"]
    assert disagreements({"equal": "x" * 1000}, axis) == {}
    return found, axis.transport.ledger.bytes["all_gather", "world"] - before


def test_each_fact_that_differs_with_its_ranks() -> None:
    """Where nothing differs, a rank sends no more than a digest; the ledger has it."""
    expected = {
        "gone": {"here": [0, 1], "(none)": [2]},
        "odd": {"0": [0, 2], "1": [1]},
        "own": {"(none)": [0, 1], "here": [2]},
    }
    assert run_on_ranks(_compared, 3) == [(expected, 32)] * 3


def _told_of_hardware(rank: int, num_ranks: int) -> str:
    agreement.__dict__["hardware"] = lambda device: {"processor": "the same", "GPU": ("H100", "A100")[rank]}
    with contextlib.redirect_stdout(io.StringIO()) as told:
        agreement.agree_on_program({}, torch.device("cpu"), _mesh(rank, num_ranks))
    return told.getvalue()


def test_the_first_rank_alone_says_that_hardware_differs() -> None:
    first, second = run_on_ranks(_told_of_hardware, 2)
    assert first == (
        "The ranks have different hardware, whose rounding may differ:\n  GPU: rank 0 has H100, rank 1 has A100\n"
    )
    assert second == ""


def _refused_beside_a_gpu(rank: int, num_ranks: int) -> str:
    agreement.__dict__["hardware"] = lambda device: {"GPU": device.type}
    with pytest.raises(ConfigError) as caught:
        agreement.agree_on_program({}, torch.device(("cuda", "cpu")[rank]), _mesh(rank, num_ranks))
    return str(caught.value)


def test_a_machine_that_finds_no_gpu_does_not_compute_beside_those_that_do() -> None:
    expected = (
        "The ranks were not started for the same run:\n  kind of device: rank 0 has cuda, rank 1 has cpu\n"
        "Install the same versions on all machines, and use the same kind of device."
    )
    assert run_on_ranks(_refused_beside_a_gpu, 2) == [expected] * 2


def test_ranks_in_words() -> None:
    lines = agreement.lines({"train.seed": {"1": [0, 1, 2, 7], "2": [3], "3": [4, 5]}})
    assert lines == ["  train.seed: ranks 0-2 and 7 have 1, rank 3 has 2, ranks 4 and 5 have 3"]


@pytest.mark.parametrize("wrong", [ConfigError, DataError])
def test_one_rank_alone_raises_its_own_mistake(wrong: type[Exception]) -> None:
    def fail() -> None:
        raise wrong("mine")

    with pytest.raises(wrong, match=r"^mine$"):
        agreement.on_all_ranks(fail, Axis("world"))


def test_precision_of_products_is_part_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    before = agreement.program(torch.device("cpu"))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert agreement.program(torch.device("cpu")) != before
