"""The commands together, as processes of their own: what they print, how they end, and one JSON object where asked."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.commands import after_banner, colonnade, environment, forked, here
from tests.runs import assert_same, metrics, saved_steps
from tests.tiny import TinyCorpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return tiny.make(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one rank."""
    folder = tmp_path_factory.mktemp("run")
    assert forked("train", tiny.write_config(corpus, folder)).status == 0
    return folder / "run"


def one_object(text: str) -> dict[str, object]:
    assert text.count("\n") == 1 and text.endswith("}\n"), text
    content = json.loads(text)
    assert isinstance(content, dict)
    return content


def test_from_text_to_text(tmp_path: Path) -> None:
    """Tokenizer, token file, two ranks of training, evaluation, generation: each as a user types it."""
    text, tokenizer, prefix = tmp_path / "text.jsonl", tmp_path / "tokenizer.json", tmp_path / "tokens"
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in tiny.made_up(24, seed=0)))
    answers = [forked("data", "train-tokenizer", text, "--output", tokenizer, "--vocab-size", 275)]
    options = ["--output", prefix, "--tokenizer", tokenizer, "--workers", 1]
    answers.append(forked("data", "tokenize", text, *options))
    assert [(answer.status, answer.err, answer.out.count("\n")) for answer in answers] == [(0, "", 1)] * 2, answers
    config = tiny.write_config(TinyCorpus(tmp_path), tmp_path)
    trained = forked("train", config, "parallel.tp=2", num_ranks=2)
    assert (trained.status, trained.err) == (0, ""), trained
    assert after_banner(trained.out).startswith("step 1/6") and "its best checkpoint is step_00000006" in trained.out
    assert saved_steps(tmp_path / "run") == [4, 6] and len(metrics(tmp_path / "run")) == 6
    written = forked("generate", tmp_path / "run", "--prompt", "aeion", "--max-new-tokens", 5)
    assert written.status == 0 and written.out.startswith("aeion")


@pytest.mark.slow
def test_evaluate_in_words_and_in_json(corpus: TinyCorpus, run: Path) -> None:
    told = one_object(forked("evaluate", run, "perplexity", "--data", corpus.prefix, "--json").out)
    assert told.keys() == {
        "step", "loss", "perplexity", "bits_per_byte", "tokens", "bytes", "words", "word_perplexity",
        "tokenizer_checked", "notes", "protocol", "parameters", "checkpoint", "data", "layout", "precision", "versions",
    }  # fmt: skip
    words = forked("evaluate", run, "perplexity", "--data", corpus.prefix).out
    assert words.startswith(f"loss {told['loss']:.4f}, perplexity ")


@pytest.mark.slow
def test_evaluate_on_two_ranks_prints_once(corpus: TinyCorpus, run: Path) -> None:
    answer = forked("evaluate", run, "perplexity", "--data", corpus.prefix, "--json", "--tp", 2, num_ranks=2)
    assert one_object(answer.out)["step"] == 6


def test_inspect_in_words_and_in_json(corpus: TinyCorpus) -> None:
    told = one_object(forked("data", "inspect", corpus.prefix, "--json").out)
    assert (told["documents"], told["dtype"], told["vocab_size"]) == (24, "uint16", 275)
    words = forked("data", "inspect", corpus.prefix).out
    assert f"documents{' ' * 16}24\n" in words


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(["--prompt", "a b " * 20, "--tp", 2], "reads at most 16 positions", marks=pytest.mark.slow),
        pytest.param(["--prompt", "a", "--tp", 3], "--tp 3 does not divide the heads", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_on_local_ranks_is_one_message(run: Path, options: list[object], said: str) -> None:
    """Of ranks that the command itself starts."""
    answer = colonnade("generate", run, *options)
    assert said in answer.err and "Traceback" not in answer.err and answer.err.count("colonnade: ") == 1
    assert answer.status == 2


@pytest.mark.slow
def test_one_ranks_mistake_ends_all(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Ids beyond the vocabulary are seen by the data-parallel rank that reads them."""
    import numpy as np

    from colonnade.data.writer import TokenFileWriter

    with TokenFileWriter(tmp_path / "made", np.dtype("<u2")) as writer:
        for document in [*[[1, 2, 3] * 400] * 30, *[[1, 2, 999] * 400] * 10]:
            writer.add_document(document)
    config = tiny.write_config(corpus, tmp_path)
    overrides = [f"data.train={tmp_path / 'made'}", "train.steps=400", "checkpoint.every=1", "parallel.dp=2"]
    answer = colonnade("train", config, *overrides, "train.evaluate_every=0")
    assert answer.status == 2 and "has token id 999 at its position" in answer.err, answer
    assert "Traceback" not in answer.err and answer.err.count("colonnade: ") == 1


@pytest.mark.slow
def test_torchrun(corpus: TinyCorpus, tmp_path: Path) -> None:
    """The same run as by the program's own launcher; and the wrong number of ranks is told."""
    import subprocess

    config = tiny.write_config(corpus, tmp_path)

    def torchrun(num_ranks: int, *overrides: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command += ["-m", "colonnade", "train", str(config), *overrides]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180)

    done = torchrun(2, "parallel.tp=2", f"run.folder={tmp_path / 'torchrun'}")
    assert done.returncode == 0, done
    assert forked("train", config, "parallel.tp=2", num_ranks=2).status == 0
    assert_same(tmp_path / "torchrun", tmp_path / "run")
    wrong = torchrun(2, f"run.folder={tmp_path / 'wrong'}")
    assert wrong.returncode != 0 and "(WORLD_SIZE = 2), but parallel.tp × parallel.pp × parallel.dp = 1" in wrong.stderr
    assert not (tmp_path / "wrong").exists()


def test_nothing_is_left_of_a_refused_output(corpus: TinyCorpus, tmp_path: Path) -> None:
    """A file where a folder should be: told by the commands that write."""
    (tmp_path / "file").write_text("mine")
    for command in (
        ["data", "train-tokenizer", corpus.text, "--output", tmp_path / "file" / "x.json", "--vocab-size", 275],
        ["data", "tokenize", corpus.text, "--output", tmp_path / "file" / "x", "--tokenizer", corpus.tokenizer],
        ["demo", "--folder", tmp_path / "file" / "x"],
    ):
        answer = here(*command)
        assert answer.status == 2 and "Traceback" not in answer.err, answer
        assert str(tmp_path / "file") in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_an_existing_output_is_kept(corpus: TinyCorpus, tmp_path: Path) -> None:
    shutil.copytree(corpus.folder, tmp_path / "corpus")
    copy = TinyCorpus(tmp_path / "corpus")
    for command in (
        ["data", "train-tokenizer", copy.text, "--output", copy.tokenizer, "--vocab-size", 260],
        ["data", "tokenize", copy.text, "--output", copy.prefix, "--tokenizer", copy.tokenizer],
    ):
        answer = here(*command)
        assert answer.status == 2 and "pass --overwrite" in answer.err, answer
    assert copy.tokenizer.read_bytes() == corpus.tokenizer.read_bytes()
