"""Each option of a command reaches what it is for. What would do the work is replaced by what writes down its words."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.convert import convert as conversion
from colonnade.convert import merge as merging
from colonnade.corpus import load as corpus_load
from colonnade.data import cleaning, inspect, rejected, tokenize, train_tokenizer, writer
from colonnade.data import overlap as overlaps
from colonnade.data.tokenizer import Tokenizer
from colonnade.examples import formats, make
from colonnade.examples.conversations import Conversation
from colonnade.generation.sampling import Sampling
from colonnade.launch import launch, slurm
from colonnade.mesh import agreement
from colonnade.report import watch as watching
from colonnade.report import write
from colonnade.serving import encoder, measure, options, own_data, predict, ranks, trained
from colonnade.serving.measurement import OWN, Measurement
from colonnade.train import change_requests, start
from colonnade.train.rollback_options import RollbackOptions
from colonnade.verify import verify as verification
from tests.commands import TINIEST, Answer, here

Told = dict[str, Any]
OF_A_MODEL = [
    ("generate", "--prompt", "a"),
    ("evaluate", "--data", "tokens"),
    ("predict", "rows.tsv"),
    ("fill-mask", "--text", "a"),
    ("embed", "--text", "a", "--text", "b"),
]


def noting(told: Told, name: str, *, answer: Any = None) -> Callable[..., Any]:
    """A function that writes down what it is given, the options apart from what goes before them."""

    def note(*given: Any, **named: Any) -> Any:
        told[name], told[f"{name} options"] = given, named
        return answer

    return note


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What the commands that use a model tell what does their work, on the first of some ranks."""
    told: Told = {}

    @contextmanager
    def opened(path: Path, **named: Any) -> Iterator[tuple[Any, Any]]:
        named.pop("to_take_less", None)
        told["opened"] = {"path": path, **named}
        tokenizer = SimpleNamespace(spelled=lambda text: [])
        settings = SimpleNamespace(model=SimpleNamespace(seq_length=16))
        model = SimpleNamespace(path=path, config=settings, tokenizer=tokenizer)
        yield model, SimpleNamespace(rank=told.get("rank", 0), world="all ranks")

    def check_options(checkpoint: Path, *, more: object, **named: Any) -> None:
        told["checked"] = {"path": checkpoint, **named}

    monkeypatch.setattr(options, "check_options", check_options)
    monkeypatch.setattr(options, "chosen", lambda path, best: path / "best" if best else path)
    monkeypatch.setattr(trained, "opened", opened)
    monkeypatch.setattr(launch, "is_rank", lambda: True)
    for module, name, answer in (
        (trained, "print_continuations", None),
        (measure, "measure", "a report"),
        (measure, "show_with_overlap", None),
        (own_data, "measure_part", None),
        (own_data, "own_corpus", [Path("train")]),
        (predict, "predict_any", "predictions"),
        (predict, "show", None),
        (encoder, "fillings", []),
        (encoder, "embeddings", (torch.zeros(2, 4), 0)),
    ):
        monkeypatch.setattr(module, name, noting(told, name, answer=answer))
    return told


@pytest.mark.parametrize("command", OF_A_MODEL, ids=lambda command: command[0])
def test_a_model_is_opened_as_it_was_asked_for(told: Told, command: tuple[str, ...]) -> None:
    asked = ("--tp", 2, "--pp", 3, "--device", "cpu", "--precision", "bf16", "--threads", 5, "--base", "theirs")
    copies = {"dp": 4} if command[0] in ("evaluate", "predict") else {}
    here(command[0], "run", *command[1:], *asked, "--best", *(("--dp", 4) if copies else ()))
    how = {"tp": 2, "pp": 3, "device": "cpu", "precision": "bf16"}
    assert told["opened"] == {"path": Path("run/best"), "threads": 5, "base": Path("theirs"), **how, **copies}
    assert told["checked"] == {"path": Path("run"), "best": True, **how}


@pytest.mark.parametrize("command", OF_A_MODEL, ids=lambda command: command[0])
def test_as_many_ranks_are_started_as_axes_have_places(
    told: Told, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Each with the words of the command itself; and no model is opened where they are started."""
    monkeypatch.setattr(launch, "is_rank", lambda: False)
    monkeypatch.setattr(launch, "run_ranks", noting(told, "ranks", answer=7))
    words = [command[0], "run", *command[1:], "--tp", "2", "--pp", "3"]
    words += ["--dp", "5"] if command[0] in ("evaluate", "predict") else []
    assert here(*words).status == 7
    assert told["ranks"] == (30 if "--dp" in words else 6, [sys.executable, "-m", "colonnade", *words])
    assert "opened" not in told


@pytest.mark.parametrize("command", OF_A_MODEL[1:], ids=lambda command: command[0])
def test_what_ranks_have_found_together_is_shown_by_the_first(told: Told, command: tuple[str, ...]) -> None:
    told["rank"] = 1
    assert here(command[0], "run", *command[1:], "--tp", 2) == Answer(0, "", "")
    assert "opened" in told and told.keys().isdisjoint({"show_with_overlap", "show"})


def test_a_text_is_written_on_as_it_was_asked_for(told: Told, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("b\n")
    asked = ("--max-new-tokens", 7, "--temperature", 0.5, "--top-k", 3, "--top-p", 0.25, "--seed", 9)
    here("generate", "run", "--prompt", "a", "--prompts", tmp_path / "more.txt", *asked, "--json")
    assert told["print_continuations"][2] == ["a", "b"]
    assert told["print_continuations options"] == {
        "chats": None,
        "control_tokens": False,
        "max_new_tokens": 7,
        "sampling": Sampling(0.5, 3, 0.25, 9),
        "as_json": True,
    }
    (tmp_path / "talks.jsonl").write_text('{"messages": [{"role": "user", "content": "b"}]}\n')
    here("generate", "run", "--prompt", "a", "--control-tokens")
    assert told["print_continuations options"]["control_tokens"]
    here("generate", "run", "--messages", tmp_path / "talks.jsonl")
    assert told["print_continuations options"]["chats"] == [Conversation([{"role": "user", "content": "b"}])]
    here("generate", "run", "--prompt", "a", "--chat")
    (chat,) = told["print_continuations options"]["chats"]
    assert chat.messages[-1]["content"] == "a" and not told["print_continuations options"]["as_json"]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (
            ("wikitext103", "--window", 16, "--stride", 4, "--detokenizer", "wikitext", "--batch-size", 3, "--json"),
            Measurement(
                "wikitext103", data="d", window=16, stride=4, detokenizer="wikitext", batch_size=3, as_json=True
            ),
        ),
        (("lambada", "--variant", "openai"), Measurement("lambada", data="d", variant="openai")),
        (
            ("squad", "--null-threshold", 0.5, "--max-answer-length", 4, "--max-query-length", 5, "--n-best", 6),
            Measurement("squad", data="d", null_threshold=0.5, max_answer_length=4, max_query_length=5, n_best=6),
        ),
    ],
    ids=["wikitext103", "lambada", "squad"],
)
def test_what_is_measured_is_what_was_asked_for(told: Told, words: tuple[object, ...], asked: Measurement) -> None:
    here("evaluate", "run", *words, "--data", "d")
    assert told["measure"][2:] == (Path("run"), asked)
    assert told["show_with_overlap"] == ("a report", [], Path("d"), Path("run"))
    assert told["show_with_overlap options"] == {"as_json": asked.as_json}


def test_a_text_is_compared_with_each_corpus_that_was_named(told: Told) -> None:
    here("evaluate", "run", "lambada", "--data", "d", "--overlap", OWN, "--overlap", "web")
    assert told["show_with_overlap"][1] == [Path("train"), Path("web")]
    here("evaluate", "run", "lambada", "--data", "d", "--overlap", "web")
    assert told["show_with_overlap"][1] == [Path("web")]


def test_a_part_is_measured_as_it_was_asked_for(told: Told) -> None:
    here("evaluate", "run", "--part", "test", "--samples", 6, "--batch-size", 2, "--json")
    assert told["measure_part"][2:] == (Path("run"), "test") and "measure" not in told
    assert told["measure_part options"] == {"samples": 6, "batch_size": 2, "as_json": True}


def test_predictions_are_made_as_they_were_asked_for(told: Told, tmp_path: Path) -> None:
    output = tmp_path / "answers.json"
    asked = ("--format", "squad", "--batch-size", 3, "--null-threshold", 0.5, "--output", output, "--json")
    here("predict", "run", "a.json", "b.json", *asked, "--with", "other", "--with", "third")
    assert told["predict_any"][2] == [Path("a.json"), Path("b.json")]
    assert told["predict_any options"] == {
        "others": [Path("other"), Path("third")],
        "output": output,
        "format_name": "squad",
        "batch_size": 3,
        "null_threshold": 0.5,
    }
    assert (told["show"], told["show options"]) == (("predictions", output), {"as_json": True})


def test_what_an_overlap_needs_is_missed_before_ranks_start(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "colonnade.data.overlap", None)  # as where what it imports is not installed
    monkeypatch.setattr(launch, "is_rank", lambda: False)
    monkeypatch.setattr(launch, "run_ranks", noting(told, "ranks", answer=7))
    words = ("evaluate", "run", "lambada", "--data", "d", "--tp", 2)
    answer = here(*words, "--overlap", "web")
    assert answer.status == 2 and "--overlap needs the package colonnade.data.overlap, which is not" in answer.err
    assert "ranks" not in told
    assert here(*words).status == 7, "which nobody needs who asks for none"


def test_texts_are_read_as_they_were_asked_for(told: Told, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("b\n")
    here("fill-mask", "run", "--text", "a", "--texts", tmp_path / "more.txt", "--top", 3)
    assert (told["fillings"][2], told["fillings options"]) == (["a", "b"], {"top": 3})
    here("embed", "run", "--text", "a", "--texts", tmp_path / "more.txt", "--batch-size", 3, "--no-normalize")
    assert told["embeddings"][2] == ["a", "b"]
    assert told["embeddings options"] == {"batch_size": 3, "normalize": False, "control_tokens": False}


def test_texts_that_lost_their_end_are_told_beside_the_vectors(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose lines are read by another program."""
    monkeypatch.setattr(encoder, "embeddings", lambda *_, **__: (torch.tensor([[0.5, 1.0], [0.25, 2.0]]), 1))
    answer = here("embed", "run", "--text", "a", "--text", "é")
    assert answer.out == '{"text": "a", "vector": [0.5, 1.0]}\n{"text": "é", "vector": [0.25, 2.0]}\n'
    assert answer.err == "1 of 2 texts lost their end: the model reads 16 tokens.\n"


def test_weights_are_converted_as_they_were_asked_for(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "convert", noting(told, "convert"))
    asked = ("--dtype", "bf16", "--max-shard-size", "1GB", "--tokenizer", "t.json", "--vocab-size", 50, "--base", "b")
    here("convert", "theirs", "ours", *asked, "--dry-run")
    assert told["convert"] == (Path("theirs"), Path("ours"))
    wanted = {"dtype": "bf16", "max_shard_size": "1GB", "tokenizer": Path("t.json"), "vocab_size": 50}
    assert told["convert options"] == {**wanted, "base": Path("b"), "dry_run": True, "best": False}
    here("convert", "theirs", "ours", "--best")
    assert told["convert options"] == dict.fromkeys([*wanted, "base"]) | {"dry_run": False, "best": True}
    monkeypatch.setattr(merging, "merge", noting(told, "merge"))
    here("merge", "adapters", "whole", "--base", "b")
    assert told["merge"] == (Path("adapters"), Path("whole"))
    assert told["merge options"] == {"base": Path("b"), "best": False}


def test_data_are_made_as_they_were_asked_for(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(summary=lambda *output: "made")
    monkeypatch.setattr(Tokenizer, "load", lambda path: f"that of {path}")
    monkeypatch.setattr(rejected, "check_inputs", noting(told, "inputs"))
    monkeypatch.setattr(train_tokenizer, "train_tokenizer", noting(told, "trained", answer=made))
    monkeypatch.setattr(tokenize, "tokenize_files", noting(told, "tokenized", answer=made))
    monkeypatch.setattr(formats, "format_of", noting(told, "format", answer="a format"))
    monkeypatch.setattr(make, "make_examples", noting(told, "examples", answer=made))
    here(
        *("data", "train-tokenizer", "a.jsonl", "--output", "t.json", "--vocab-size", 300, "--kind", "wordpiece"),
        *("--sentinels", 28, "--key", "body", "--overwrite"),
    )
    assert told["trained"] == ([Path("a.jsonl")], Path("t.json"), 300)
    assert told["trained options"] == {"kind": "wordpiece", "sentinels": 28, "key": "body", "overwrite": True}
    here(
        *("data", "tokenize", "a.jsonl", "--output", "x", "--tokenizer", "t.json", "--key", "body", "--workers", 3),
        *("--sentences", "--overwrite"),
    )
    assert told["tokenized"] == ([Path("a.jsonl")], "x", "that of t.json")
    how = {"key": "body", "workers": 3, "append_end": False, "sentences": True, "overwrite": True}
    assert told["tokenized options"] == how and told["inputs"] == ("x", [Path("t.json")])
    here(
        *("data", "examples", "squad", "a.json", "--output", "y", "--tokenizer", "t.json", "--overwrite"),
        *("--template", "chatml", "--doc-stride", 4, "--max-query-length", 5),
    )
    windows = {"doc_stride": 4, "max_query_length": 5}
    assert told["format"] == ("squad", "that of t.json", Path("t.json"), "chatml", windows)
    assert told["examples"] == ("a format", [Path("a.json")], "y", "that of t.json")
    assert told["examples options"] == {"overwrite": True} and told["inputs"] == ("y", [Path("t.json")])


def test_an_overlap_is_counted_as_it_was_asked_for(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(as_json=lambda: {"share": 0.5}, summary=lambda: "half of it")
    monkeypatch.setattr(overlaps, "overlap", noting(told, "overlap", answer=found))
    monkeypatch.setattr(overlaps, "holds_tokens", lambda corpus: True)
    asked = ("--ngram", 5, "--key", "body", "--tokenizer", "t.json", "--workers", 3)
    assert here("data", "overlap", "corpus", "exam.jsonl", *asked).out == "half of it\n"
    assert told["overlap"] == ([Path("corpus")], Path("exam.jsonl"))
    assert told["overlap options"] == {"ngram": 5, "key": "body", "tokenizer": Path("t.json"), "workers": 3}
    assert here("data", "overlap", "corpus", "exam.jsonl", "--json").out == '{"share": 0.5}\n'


def test_runs_are_shown_as_they_were_asked_for(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "write_report", noting(told, "report"))
    monkeypatch.setattr(watching, "watch", noting(told, "watch"))
    here("report", "a", "b", "--output", "page.html", "--live", 30, "--task", "rte")
    assert told["report"] == ([Path("a"), Path("b")], Path("page.html"))
    assert told["report options"] == {"live": 30, "task": "rte"}
    here("watch", "a", "--every", 5, "--once")
    assert (told["watch"], told["watch options"]) == ((Path("a"),), {"every": 5.0, "once": True})


def test_layouts_are_compared_as_they_were_asked_for(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "verify", noting(told, "verify", answer=False))
    asked = ("--layout", "tp=2", "--layout", "dp=2", "--steps", 5, "--shrink", "--precision", "fp32", "--json")
    assert here("verify", "a.toml", "train.steps=3", *asked).status == 1
    assert told["verify"] == (Path("a.toml"), ["train.steps=3"], ["tp=2", "dp=2"])
    assert told["verify options"] == {"steps": 5, "shrink": True, "precision": "fp32", "json_only": True}


def test_a_run_returns_as_it_was_asked_to(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "roll_back_folder", noting(told, "back", answer="it is back"))
    answer = here("rollback", "run", 40, "--skip", 3, "--rate-factor", 0.5, "--rate-steps", 20, "--rewarm", 7)
    assert answer.out == "it is back\n", answer
    assert told["back"] == (Path("run"), 40, RollbackOptions(3, 0.5, 20, 7))


def test_a_job_is_asked_for_as_it_was_typed(told: Told, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(slurm, "script", noting(told, "script", answer="#!/bin/bash\n"))
    config = tmp_path / "books.toml"
    config.write_text(TINIEST)
    job = ("--nodes", 2, "--ranks-per-node", 3, "--time", "2:00:00", "--margin", 60, "--array", "1-4")
    more = ("--partition", "long", "--account", "ada", "--cpus-per-rank", 2)
    answer = here(
        "slurm", config, "parallel.dp=6", "train.global_batch_size=6", f"run.folder={tmp_path}/a/b", *job, *more
    )
    assert answer.out == "#!/bin/bash\n", answer
    wanted = {"cpus_per_rank": 2, "margin": 60, "array": "1-4", "partition": "long", "account": "ada", "name": "books"}
    assert told["script"][1] == slurm.Job(2, 3, "2:00:00", gpus=False, logs=f"{tmp_path}/a", **wanted)
    assert told["script"][3] == sys.executable
    here("slurm", config, "train.device=auto", f"run.folder={tmp_path}/a/b", "--gpus-per-node", 1)
    assert told["script"][1] == slurm.Job(1, 1, "24:00:00", cpus_per_rank=4, name="books", logs=f"{tmp_path}/a")
    here("slurm", config, "train.threads=3", f"run.folder={tmp_path}/a/b", "--ranks-per-node", 1)
    assert told["script"][1].cpus_per_rank == 3


def test_a_change_is_asked_for_as_it_was_typed(told: Told, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(change_requests, "ask", noting(told, "ask"))
    monkeypatch.setattr(change_requests, "listed", lambda run: [f"one of {run.name}", "another"])
    keys = ("optim.learning_rate=1e-4", "train.log_every=5")
    answer = here("change", tmp_path, *keys, "--at", 1500, "--by", "ada", "--reason", "it is too high")
    assert "changes behind step 1,500" in answer.out, answer
    run, request = told["ask"]
    assert run == tmp_path and 1.7e9 < request.pop("time") < 1e10
    change = {"optim.learning_rate": 1e-4, "train.log_every": 5}
    assert request == {"change": change, "at": 1500, "by": "ada", "reason": "it is too high"}
    assert "behind the next step" in here("change", tmp_path, keys[0]).out
    assert told["ask"][1].keys() == {"change", "time"}
    assert here("change", tmp_path, "--list").out == f"one of {tmp_path.name}\nanother\n"
    for wrong in ((), (*keys, "--list"), ("--list", "--at", 3), ("--list", "--by", "ada"), ("--list", "--reason", "x")):
        assert "or --list alone" in here("change", tmp_path, *wrong).err, wrong
    assert "is not the folder of a run" in here("change", tmp_path / "nowhere", *keys).err


def test_text_is_cleaned_and_joined_as_it_was_asked_for(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_load, "load", noting(told, "load", answer="a recipe"))
    monkeypatch.setattr(cleaning, "clean", noting(told, "clean", answer="it is clean"))
    assert here("data", "clean", "web.toml", "write.folder=x", "--no-progress").out == "it is clean\n"
    assert told["load"] == (Path("web.toml"), ["write.folder=x"])
    assert (told["clean"], told["clean options"]) == (("a recipe",), {"progress": False})
    here("data", "clean", "web.toml")
    assert told["load"][1] == [] and told["clean options"] == {"progress": True}
    monkeypatch.setitem(sys.modules, "colonnade.data.cleaning", None)  # as where what it imports is not installed
    needs = "data clean needs the package colonnade.data.cleaning, which is not installed. Run `pip install 'colonnade["
    answer = here("data", "clean", "web.toml")
    assert (answer.status, answer.out) == (2, "") and needs in answer.err
    monkeypatch.setattr(writer, "merge", noting(told, "merge", answer=["b"]))
    monkeypatch.setattr(inspect, "inspect", lambda prefix: {"documents": 1, "tokens": 1200, "dtype": "uint16"})
    answer = here("data", "merge", "a", "b", "--output", "x", "--overwrite")
    assert told["merge"] == (["a", "b"], "x") and told["merge options"] == {"overwrite": True}
    first, note = answer.out.splitlines()
    assert first == "x: 1 document, 1,200 tokens (uint16)." and "because b has none" in note


def test_what_a_token_file_holds_none_of_is_told_and_what_is_not_known_is_not(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"documents": 1200, "empty_documents": 0, "tokenizer": None, "dtype": "uint16"}
    monkeypatch.setattr(inspect, "inspect", noting(told, "inspect", answer=found))
    lines = here("data", "inspect", "tokens").out.splitlines()
    assert told["inspect"] == ("tokens",)
    assert list(map(str.split, lines)) == [["documents", "1,200"], ["empty", "documents", "0"], ["dtype", "uint16"]]
    wanted = '{"documents": 1200, "empty_documents": 0, "tokenizer": null, "dtype": "uint16"}\n'
    assert here("data", "inspect", "tokens", "--json").out == wanted


def test_ranks_that_answer_hold_the_model_that_was_asked_for(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "serve", noting(told, "serve"))
    how = ("--tp", 2, "--pp", 3, "--dp", 4, "--device", "cpu", "--precision", "bf16", "--threads", 5, "--base", "b")
    here("rank-of-answers", "run", *how)
    asked = {"tp": 2, "pp": 3, "dp": 4, "device": "cpu", "precision": "bf16", "threads": 5, "base": Path("b")}
    assert told["opened"] == {"path": Path("run"), **asked} and told["serve options"]["is_first"]
    monkeypatch.setattr(agreement, "broadcast_text", noting(told, "broadcast", answer="from rank 0"))
    here("rank-of-answers", "run", *how)
    assert told["serve"][1]("a line") == "from rank 0" and told["broadcast"] == ("a line", "all ranks")
    monkeypatch.setattr(launch, "is_rank", lambda: False)
    monkeypatch.setattr(launch, "run_ranks", noting(told, "ranks", answer=0))
    here("rank-of-answers", "run", *how)
    assert told["ranks"][0] == 24
