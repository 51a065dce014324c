"""Settings of the whole suite, a tiny corpus to train on, a run that has ended, and the bundled text."""

import gc
import json
import lzma
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo  # once, and not in each process that is forked and plans
from hypothesis import settings

from colonnade.data import bundle
from colonnade.data.tokenizer import Tokenizer, train_bpe
from tests import commands, gpus, slow, tiny
from tests.commands import forked
from tests.kernels.loaded import load, shared_folder
from tests.runs import Finished
from tests.tiny import TinyCorpus

# A machine that is busy with something else is not a failure, so examples have no time limit of their own.
settings.register_profile("colonnade", deadline=None)
settings.load_profile("colonnade")

# Ranks are forked from processes that have computed gradients, which torch refuses where there is a GPU to be seen.
gpus.hide()

# Under nohup the suite inherits an ignored SIGHUP, and so would every run that a test starts and hangs up on.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# One thread: tensors here are tiny, and threads that wait for a core of a busy machine cost more than they bring.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before the default suite leaves out what is slow."""
    slow.leave_out(items)


def pytest_collection_finish() -> None:
    """What has been collected stays: neither this process nor a rank that is forked looks through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Whatever a test has set: those behind it would take ten times as long."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _signals_are_heard() -> Iterator[None]:
    """By those behind a test of a run that, once it has ended, hears none."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled kernels are in this process, from this folder; skips where there is no compiler."""
    folder = shared_folder(tmp_path_factory)
    load(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _predictions(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those of all workers of this session are in one folder."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "predicted"
    folder.mkdir(exist_ok=True)
    commands.REMEMBERED[:] = [folder]


@pytest.fixture
def ascii_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no encoding is named, text is read and written as under LC_ALL=C."""
    monkeypatch.setattr("io.text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return tiny.make(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def config(corpus: TinyCorpus, tmp_path: Path) -> Path:
    """A configuration file of a run in tmp_path / "run"."""
    return tiny.write_config(corpus, tmp_path)


@pytest.fixture(scope="session")
def finished(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Not to be changed: copy its folder."""
    folder = tmp_path_factory.mktemp("finished")
    path = tiny.write_config(corpus, folder)
    answer = forked("train", path)
    assert answer.status == 0, answer
    return Finished(path, folder / "run")


@pytest.fixture(scope="session")
def stories() -> list[str]:
    """The bundled stories."""
    with lzma.open(bundle.books(), "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


@pytest.fixture(scope="session")
def tokenizer(stories: list[str]) -> Tokenizer:
    """A small byte-level BPE, end of document included."""
    return train_bpe(stories[:3], 600)


# At a process's first backward torch's autograd looks for devices. With one that a test has registered by then it
# starts threads, and ranks that are forked later cannot compute gradients. So the first backward is here.
torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
