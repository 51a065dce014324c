"""A trained model in use: found, opened under any tensor-parallel size, writing and measured."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from colonnade.data.indexed import TokenFile
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import CheckpointError, ConfigError, LayoutError
from colonnade.generation.sampling import Sampling
from colonnade.generation.stream import TextDelta, end_note
from colonnade.launch.launch import rank_and_size
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh, paper_mesh
from colonnade.model.precision import DTYPES
from colonnade.serving import trained
from colonnade.train import init_from, newest
from tests.checkpoint import forging
from tests.commands import forked, here, start
from tests.distributed import run_on_ranks
from tests.runs import Finished, metrics
from tests.tiny import TinyCorpus, write_config

CPU = torch.device("cpu")
GREEDY = ["--temperature", 0, "--max-new-tokens", 8]


@pytest.fixture(scope="session")
def cut(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained on two tensor-parallel ranks, in float64 so that greedy choices are no matter of luck."""
    folder = tmp_path_factory.mktemp("cut")
    answer = forked("train", write_config(corpus, folder), "parallel.tp=2", "train.precision=fp64", num_ranks=2)
    assert answer.status == 0, answer
    return folder / "run"


@pytest.fixture(scope="session")
def whole(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one rank."""
    folder = tmp_path_factory.mktemp("whole")
    answer = forked("train", write_config(corpus, folder), "train.precision=fp64")
    assert answer.status == 0, answer
    return folder / "run"


def test_all_ranks_open_what_rank_0_has_found(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a run that saves between their looks: the second has found another."""
    older = finished.newest.with_name("step_00000004")
    real = newest.checkpoint_at
    for module in (trained, init_from):
        found = lambda path: older if rank_and_size()[0] and path == finished.folder else real(path)  # noqa: E731
        monkeypatch.setattr(module, "checkpoint_at", found)
    text = ["--prompt", "aeion", *GREEDY, "--json"]
    answer = forked("generate", finished.folder, *text, "--tp", 2, num_ranks=2)
    assert (answer.status, answer.err) == (0, "") and json.loads(answer.out)["step"] == 6, answer
    answer = forked("evaluate", finished.folder, "--part", "validation", "--dp", 2, num_ranks=2)
    assert (answer.status, answer.err) == (0, ""), answer
    more = ["parallel.dp=2", f"train.init_from={finished.folder}"]
    answer = forked("train", write_config(corpus, tmp_path), *more, num_ranks=2)
    assert answer.status == 0 and f"Begun from {finished.newest}" in answer.out, answer


def test_a_checkpoint_of_any_layout_writes_the_same_on_any_other(cut: Path, whole: Path) -> None:
    prompts = ["--prompt", "aeion rst", "--prompt", "tos"]
    answers = [
        forked("generate", run, *prompts, *GREEDY, "--tp", tp, num_ranks=tp) for run in (cut, whole) for tp in (1, 2)
    ]
    assert {(answer.status, answer.err) for answer in answers} == {(0, "")}
    assert len({answer.out for answer in answers}) == 1
    assert answers[0].out.startswith("aeion rst") and "\ntos" in answers[0].out


def test_a_base_is_of_adapters_alone(finished: Finished, tmp_path: Path) -> None:
    given = ("--base", tmp_path / "nothing")
    for command in (("generate", "--prompt", "tos"), ("evaluate", "--part", "test"), ("fill-mask", "--text", "[MASK]")):
        answer = here(command[0], finished.folder, *command[1:], *given)
        assert (answer.status, answer.out) == (2, ""), answer
        assert f"--base {tmp_path / 'nothing'}: {finished.newest} has all of its weights" in answer.err


@pytest.mark.slow
def test_sampled_text_is_the_same_too_and_the_seed_changes_it(cut: Path) -> None:
    def text(tp: int, seed: int) -> str:
        return forked("generate", cut, "--prompt", "tos", "--seed", seed, "--tp", tp, num_ranks=tp).out

    assert text(1, 7) == text(2, 7) != text(1, 8)


@pytest.mark.slow
def test_several_prompts_are_answered_as_each_alone(finished: Finished) -> None:
    prompts = ["aeion", "rst tos", ""]
    together = forked("generate", finished.folder, *(w for p in prompts for w in ("--prompt", p)), *GREEDY)
    alone = [forked("generate", finished.folder, "--prompt", prompt, *GREEDY).out for prompt in prompts]
    assert together.out == "\n".join(alone), "an empty line between two, and none at the end"
    assert all(text.count("\n") == 1 and text.endswith("\n") for text in alone[:2])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tp", [1, 2])
def test_texts_as_json_and_prompts_from_a_file(cut: Path, tmp_path: Path, tp: int) -> None:
    """One object and nothing else, with the texts that are streamed otherwise."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("aeion\n\nrst tos\r\n")
    layout = ("--tp", tp)
    shown = forked("generate", cut, "--prompt", "tos", "--prompts", prompts, *GREEDY, *layout, num_ranks=tp)
    answer = forked("generate", cut, "--prompt", "tos", "--prompts", prompts, *GREEDY, *layout, "--json", num_ranks=tp)
    told = json.loads(answer.out)
    assert answer.status == 0 and answer.err == "" and told["step"] == 6
    assert [text["prompt"] for text in told["texts"]] == ["tos", "aeion", "rst tos"]
    assert shown.out == "\n\n".join(text["prompt"] + text["text"] for text in told["texts"]) + "\n"
    assert all((text["tokens"], text["end"]) == (8, "length") or text["end"] == "stop" for text in told["texts"])


def test_text_is_shown_token_by_token(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each further token is asked for, the last one has been printed and flushed."""
    shown: list[str] = []
    printed_before: list[str] = []

    def show(*text: str, end: str = "\n", sep: str = "", flush: bool = False) -> None:
        assert flush
        shown.append(sep.join(text) + end)

    made = trained.generate

    def watched(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for token in made(*args, **kwargs):
            printed_before.append("".join(shown))
            yield token

    monkeypatch.setattr(trained, "print", show, raising=False)
    monkeypatch.setattr(trained, "generate", watched)
    model = trained.open_trained(finished.newest, Mesh(), CPU)
    greedy = Sampling(temperature=0.0, seed=1)
    trained.print_continuations(model, Mesh(), ["aeion", "tos"], max_new_tokens=5, sampling=greedy, as_json=False)
    assert printed_before[0] == "" and printed_before[1].startswith("aeion") and len(printed_before) == 10
    assert all(len(before) <= len(after) for before, after in pairwise(printed_before))
    assert "tos" in printed_before[6] and "tos" not in printed_before[5]


DELTAS = [
    TextDelta(0, "a", None),
    TextDelta(0, "", "stop"),
    TextDelta(1, "b", None),
    TextDelta(1, "", None),
    TextDelta(1, " c", "full"),
]


def test_each_prompt_has_what_was_added_to_it_and_why_that_ends() -> None:
    """Tokens without a text of their own are counted too."""
    assert trained._texts(["one", "two", "three"], DELTAS) == [
        {"prompt": "one", "text": "a", "tokens": 2, "end": "stop"},
        {"prompt": "two", "text": "b c", "tokens": 3, "end": "full"},
        {"prompt": "three", "text": "", "tokens": 0, "end": None},
    ]


def test_texts_stand_below_each_other_with_an_empty_line_between(capsys: pytest.CaptureFixture[str]) -> None:
    trained._stream(["one ", "two "], DELTAS, 16)
    assert capsys.readouterr().out == f"one a\n\ntwo b c\n[{end_note('full', seq_length=16)}]\n"


def test_a_text_that_fills_all_positions_says_so(finished: Finished) -> None:
    answer = forked("generate", finished.folder, "--prompt", "aeion", "--max-new-tokens", 50, "--temperature", 0)
    assert answer.status == 0 and "[stopped: the model has 16 positions" in answer.out


def test_precision_can_be_chosen(finished: Finished) -> None:
    for name, dtype in DTYPES.items():
        model = trained.open_trained(finished.newest, Mesh(), CPU, name).stages.model
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert not any(parameter.requires_grad for parameter in model.parameters()) and not model.training


def test_a_model_beside_another_computes_in_its_precision(finished: Finished) -> None:
    first = trained.open_trained(finished.newest, Mesh(), CPU, "fp64")
    assert trained.open_another(finished.folder, Mesh(), first).precision == "fp64" != first.config.train.precision


def test_all_ranks_open_the_one_beside_another_that_rank_0_has_found(finished: Finished) -> None:
    """Of a run that saves between their looks."""

    def step(rank: int, num_ranks: int) -> int:
        mesh = build_mesh(Layout(dp=2), rank)
        first = trained.open_trained(finished.newest, mesh, CPU)
        found = finished.newest.with_name("step_00000004") if rank else finished.newest
        with mock.patch.object(trained, "checkpoint_at", lambda path: found):
            return trained.open_another(finished.folder, mesh, first).step

    assert run_on_ranks(step, 2) == [6, 6]


def test_what_one_rank_sees_of_damaged_files_is_told_by_all(finished: Finished, tmp_path: Path) -> None:
    """None of them waits for one that has ended: those of another machine would for minutes."""
    path = Path(shutil.copytree(finished.newest, tmp_path / finished.newest.name))
    (path / "__0_0.distcp").unlink()
    ranks = start("generate", path, "--prompt", "a", "--tp", 2, "--max-new-tokens", 1, num_ranks=2)
    for answer in ranks.answers():
        assert answer.status == 2 and "is damaged: __0_0.distcp is missing." in answer.err, answer


def test_what_was_seen_of_a_checkpoint_is_taken_while_it_is_that_one(finished: Finished, tmp_path: Path) -> None:
    """No model is built a second time to be held against its tensors; files are looked at again all the same."""
    seen = trained.described(finished.newest)
    other = trained.described(finished.newest.with_name("step_00000004"))
    assert trained.described(finished.newest, seen) is seen
    assert trained.described(finished.newest, other).metadata.step == 6 == other.metadata.step + 2
    path = Path(shutil.copytree(finished.newest, tmp_path / finished.newest.name))
    (path / "__0_0.distcp").unlink()
    for known in (None, seen):
        with pytest.raises(CheckpointError, match=r"is damaged: __0_0\.distcp is missing\."):
            trained.described(path, known)
        assert trained.described(path, known, looks=False).metadata.step == 6


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_asked_for_reaches_who_opens_and_a_note_comes_from_one_rank(
    rank: int, finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what was seen of the checkpoint before ranks met."""
    mesh, met, opened = paper_mesh(Layout(tp=2), rank), list[object](), list[object]()

    @contextmanager
    def joined(*given: object) -> Iterator[tuple[Mesh, torch.device]]:
        met.append(given)
        yield mesh, CPU

    def open_trained(*given: object, **how: object) -> Any:
        opened.append((given, how))
        return SimpleNamespace(tokenizer=None)

    monkeypatch.setattr(trained, "joined", joined)
    monkeypatch.setattr(trained, "open_trained", open_trained)
    monkeypatch.setattr(trained, "as_rank_0", lambda found, ranks: found)
    monkeypatch.setattr(trained, "check_given_base", lambda *_: None)
    monkeypatch.setattr(trained, "unsaid_end", lambda *_: "a note")
    base = Path("base")
    with trained.opened(finished.folder, tp=2, device="cpu", precision="fp64", threads=3, base=base) as (_, found):
        assert found is mesh
    assert met == [(Layout(tp=2), "cpu", 3)] and capsys.readouterr().err == "a note\n" * (rank == 0)
    seen = trained.described(finished.newest)
    assert opened == [((finished.newest, mesh, CPU, "fp64"), {"base": base, "seen": seen})]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_looks_at_all_files_for_those_of_all_groups(
    rank: int, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here of two data-parallel groups; also for a further model. What one raises is raised on all."""
    looked, checked, together, on_all_ranks = list[Path](), list[Path](), list[str](), trained.on_all_ranks

    def noted(work: Callable[[], Any], ranks: Axis) -> Any:
        together.append(ranks.name)
        return on_all_ranks(work, ranks)

    monkeypatch.setattr(trained, "check_sizes", lambda path, manifest: looked.append(path))
    monkeypatch.setattr(trained, "check_tensors", lambda path, *_: checked.append(path))
    monkeypatch.setattr(trained, "on_all_ranks", noted)
    monkeypatch.setattr(trained, "served_by", lambda *given: together.append(f"products {given[-1].name}"))
    monkeypatch.setattr(trained, "as_rank_0", lambda found, ranks: found)
    mesh = paper_mesh(Layout(dp=2), rank)
    first = trained.open_trained(finished.newest, mesh, CPU)
    assert (looked, together) == ([finished.newest] * (rank == 0), ["world", "products world"])
    trained.open_another(finished.newest, mesh, first)
    assert (looked, together[2:]) == ([finished.newest] * 2 * (rank == 0), ["world"] * 2 + ["products world"])
    assert len(checked) == 2, "each model is held against its tensors once"


def slices_asked_for(rank: int, num_ranks: int, path: Path) -> list[int]:
    asked: list[int] = []
    with mock.patch.object(trained, "slices_of", lambda config, vocab_size, tp: asked.append(tp)):
        trained.open_trained(path, build_mesh(Layout(tp=num_ranks), rank), CPU)
    return asked


def test_products_are_measured_as_they_are_served(finished: Finished) -> None:
    """Not as the run was cut that wrote the checkpoint."""
    assert run_on_ranks(slices_asked_for, 2, finished.newest) == [[2], [2]]


def test_the_folder_of_a_sweep_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        trained.find(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} is the folder of a sweep, and each of its points has a run of its own. Name the folder of one in "
        f"it; {tmp_path / 'summary.csv'} tells their scores."
    )


def test_find(finished: Finished, tmp_path: Path) -> None:
    for path in (finished.folder, finished.folder / "checkpoints", finished.newest):
        assert trained.find(path) == finished.newest
    older = finished.folder / "checkpoints" / "step_00000004"
    assert trained.find(older) == older
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "nowhere", tmp_path / "empty", tmp_path / "file"):
        with pytest.raises(CheckpointError, match="is neither a checkpoint nor the folder of a run"):
            trained.find(path)


def test_evaluation_is_that_of_training(finished: Finished, corpus: TinyCorpus, tmp_path: Path) -> None:
    """On the validation part's own documents, cut out of the text, in the same windows."""
    documents = [json.loads(line)["text"] for line in corpus.text.read_text().splitlines()]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents[20:]))
    answer = forked("evaluate", finished.folder, "perplexity", "--data", tmp_path / "validation.jsonl", "--json")
    told = json.loads(answer.out)
    assert told["step"] == 6 and told["perplexity"] == pytest.approx(math.exp(told["loss"]))
    assert told["loss"] == pytest.approx(metrics(finished.folder)[-1]["validation_loss"], rel=0.1)  # 4 samples of it


AS_TRAINED = {
    "separate": ["data.documents=separate"],
    "joined": [],
    "packed": ["data.documents=separate", "data.packing=best_fit"],
    "all of it": ["data.documents=separate", "data.packing=best_fit", "data.no_loss_on=[{common}]"],
    "labels that do not count": ["data.no_loss_on=[{common}]"],
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("overrides", AS_TRAINED.values(), ids=AS_TRAINED.keys())
def test_evaluation_is_the_runs_own_validation(corpus: TinyCorpus, tmp_path: Path, overrides: list[str]) -> None:
    """On a file whose last sample is full, both read the same samples in the same way: as the run cuts documents."""
    held_out = whole_samples(TokenFile(corpus.prefix), tmp_path / "held_out", seq_length=16)
    common = np.bincount(TokenFile(held_out).read(0, 200)).argmax()
    overrides = [override.format(common=common) for override in overrides]
    changed = [f"data.validation={held_out}", "train.steps=2", "train.precision=fp64", "train.evaluate_samples=1000"]
    trained_on = forked("train", write_config(corpus, tmp_path), "optim.warmup_steps=1", *changed, *overrides)
    assert trained_on.status == 0, trained_on
    answer = forked("evaluate", tmp_path / "run", "perplexity", "--data", held_out, "--json")
    own = metrics(tmp_path / "run")[-1]
    assert json.loads(answer.out)["loss"] == pytest.approx(own["validation_loss"], rel=1e-12)
    assert json.loads(answer.out)["bits_per_byte"] == pytest.approx(own["validation_bits_per_byte"], rel=1e-12)


def whole_samples(file: TokenFile, prefix: Path, *, seq_length: int) -> Path:
    """Documents of `file` in a new one, the last cut short so that samples and an end of document fill it."""
    documents = [file.document(number) for number in range(12)]
    surplus = (sum(map(len, documents)) - 2) % seq_length
    end = documents[-1][-1:]
    with TokenFileWriter(prefix, file.dtype) as writer:
        for document in [*documents[:-1], np.concatenate([documents[-1][: -surplus - 1], end])]:
            writer.add_document(document)
    assert TokenFile(prefix).num_tokens % seq_length == 2
    return prefix


@pytest.mark.slow
def test_a_text_is_measured_as_its_token_file_is(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Of a run on separate documents too, with sliding windows and without."""
    packed = ["data.documents=separate", "data.packing=best_fit", "train.steps=2", "optim.warmup_steps=1"]
    assert forked("train", write_config(corpus, tmp_path), *packed).status == 0
    for stride in ([], ["--stride", 5]):
        tokens, text = (
            json.loads(forked("evaluate", tmp_path / "run", "perplexity", "--data", data, *stride, "--json").out)
            for data in (corpus.prefix, corpus.text)
        )
        assert tokens | {"notes": text["notes"], "data": text["data"]} == text and text["words"] is None
        documents, ends = TokenFile(corpus.prefix).num_documents, 1
        assert tokens["tokens"] == TokenFile(corpus.prefix).num_tokens - ends - documents


@pytest.mark.slow
def test_a_token_file_of_another_program_is_measured_with_a_note(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    for ending in (".bin", ".idx"):
        shutil.copy(f"{corpus.prefix}{ending}", f"{tmp_path}/megatron{ending}")
    answer = forked("evaluate", finished.folder, "perplexity", "--data", tmp_path / "megatron")
    summary, note = answer.out.splitlines()
    assert "tokenizer not checked" in summary
    assert note.startswith(f"Note: {tmp_path}/megatron has no megatron.json beside it") and note.endswith("if it did.")
    told = json.loads(forked("evaluate", finished.folder, "perplexity", "--data", tmp_path / "megatron", "--json").out)
    assert told["tokenizer_checked"] is False and len(told["notes"]) == 1


@pytest.mark.slow
def test_evaluation_under_any_layout(cut: Path, whole: Path, corpus: TinyCorpus) -> None:
    answers = [
        forked("evaluate", run, "perplexity", "--data", corpus.prefix, "--json", "--tp", tp, num_ranks=tp)
        for run in (cut, whole)
        for tp in (1, 2)
    ]
    told = [json.loads(answer.out) for answer in answers]
    for other in told[1:]:
        assert other.keys() == told[0].keys()
        for name in ("loss", "perplexity", "bits_per_byte", "tokens", "bytes"):
            assert other[name] == pytest.approx(told[0][name], rel=1e-9)


@pytest.mark.slow
def test_text_and_token_file_agree(finished: Finished, corpus: TinyCorpus) -> None:
    answers = [
        forked("evaluate", finished.folder, "perplexity", "--data", data, "--stride", 8, "--json")
        for data in (corpus.prefix, corpus.text)
    ]
    tokens, text = (json.loads(answer.out) for answer in answers)
    assert tokens["loss"] == text["loss"] and tokens["bytes"] == text["bytes"] and text["words"] == 480


@pytest.mark.slow
def test_a_run_without_a_tokenizer_cannot_write(corpus: TinyCorpus, tmp_path: Path) -> None:
    config = write_config(corpus, tmp_path)
    config.write_text(config.read_text().replace(f'tokenizer = "{corpus.tokenizer}"\n', ""))
    assert forked("train", config, "train.steps=2").status == 0
    run = tmp_path / "run"
    answer = forked("generate", run, "--prompt", "tos", *GREEDY)
    assert answer.status == 2 and "has no tokenizer.json" in answer.err and "Copy the tokenizer.json" in answer.err
    shutil.copy(corpus.tokenizer, trained.find(run))
    assert forked("generate", run, "--prompt", "tos", *GREEDY).status == 0, "the remedy helps"


@pytest.mark.parametrize(
    ("device", "precision", "said"), [("tpu", None, "--device 'tpu'"), ("cpu", "fp8", "--precision 'fp8'")]
)
def test_no_such_device_or_precision(finished: Finished, device: str, precision: str | None, said: str) -> None:
    with (
        pytest.raises(ConfigError, match=said),
        trained.opened(finished.folder, tp=1, device=device, precision=precision),
    ):
        pass


def test_gpus_are_counted_when_what_their_driver_reads_is_there(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "set, so that it is put back")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")

    def count() -> int:
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "device_count", count)
    with (
        pytest.raises(InterruptedError),
        trained.opened(finished.folder, tp=1, device="auto", precision=None),
    ):
        pass


def test_a_tp_that_does_not_divide_is_refused_before_the_ranks_meet(finished: Finished) -> None:
    for tp in (3, 4):
        with (
            pytest.raises(LayoutError, match=rf"--tp {tp} does not divide the heads.*Use 1, 2\."),
            trained.opened(finished.folder, tp=tp, device="cpu", precision=None),
        ):
            pass


@pytest.mark.parametrize("content", ["", "[model", "[model]\nnum_layers = 3\n"])
def test_a_changed_config_in_the_checkpoint(finished: Finished, tmp_path: Path, content: str) -> None:
    path = tmp_path / finished.newest.name
    shutil.copytree(finished.newest, path)
    (path / "config.toml").write_text(content)
    with pytest.raises(CheckpointError, match=r"config.toml is damaged"):
        trained.open_trained(path, Mesh(), CPU)
    (path / "config.toml").unlink()
    with pytest.raises(CheckpointError, match=r"config.toml is missing"):
        trained.open_trained(path, Mesh(), CPU)


def forged(finished: Finished, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    path = folder / finished.newest.name
    shutil.copytree(finished.newest, path)
    forging.forge(path, change)
    return path


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"model": {"vocab_size": 10**12}}, r"num_layers: absent in the checkpoint, 2 wanted"),
        ({"model": {}}, r"Field required \(at model.vocab_size\)"),
        ({"model": {"vocab_size": "many"}}, r"valid integer \(at model.vocab_size\)"),
        ({"step": 7}, r"its manifest says step 6, its metadata says 7"),
        ({"step": "six"}, r"valid integer \(at step\)"),
        ({"samples": None}, r"valid integer \(at samples\)"),
        ({"loss_scale": {"value": -1.0, "good_steps": 0}}, r"greater than 0 \(at loss_scale.value\)"),
    ],
)
def test_metadata_that_no_run_writes(finished: Finished, tmp_path: Path, metadata: dict[str, Any], said: str) -> None:
    path = forged(finished, tmp_path, lambda content: content["facts"].update(metadata))
    with pytest.raises(CheckpointError, match=said):
        trained.open_trained(path, Mesh(), CPU)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("vocab_size", 10**9, r"tokens.weight: \[275, 16\] in the checkpoint, \[1000000000, 16\] wanted"),
        ("ffn_hidden_size", 10**9, r"mlp.up.bias: \[64\] in the checkpoint, \[1000000000\] wanted"),
        ("num_layers", 10**5, r"its model has 100000 layers, and its manifest only"),
        ("num_layers", 3, r"lacks 12 tensors"),
    ],
)
def test_no_memory_is_taken_for_a_model_that_is_not_there(
    finished: Finished, tmp_path: Path, key: str, value: int, said: str
) -> None:
    """Metadata and configuration agree on a size that the tensors do not have."""
    path = forged(finished, tmp_path, lambda content: content["facts"]["model"].update({key: value}))
    text = re.sub(rf"(?m)^{key} = .*\n", "", (path / "config.toml").read_text())
    (path / "config.toml").write_text(text.replace("[model]", f"[model]\n{key} = {value}"))
    forging.list_again(path, "config.toml")
    with pytest.raises(CheckpointError, match=said):
        trained.open_trained(path, Mesh(), CPU)


def test_what_ended_the_documents_of_a_run_ends_its_texts(finished: Finished, tmp_path: Path) -> None:
    """Where its vocabulary has another name too, for which documents end with another token now; an older checkpoint
    does not say what it was, and is taken as it was meant, which is told.
    """
    path = forged(finished, tmp_path, lambda content: content["facts"].pop("end_of_document"))
    content = json.loads((path / "tokenizer.json").read_text())
    (token,) = content["added_tokens"]
    end, token["content"] = token["id"], "</s>"
    content["added_tokens"].append({**token, "id": end + 1, "content": "[EOS]"})
    (path / "tokenizer.json").write_text(json.dumps(content))
    forging.list_again(path, "tokenizer.json")
    for said in (None, end, end + 1):
        forging.forge(path, lambda content, said=said: content["facts"].update(end_of_document=said))
        taken = said or end
        assert trained.open_trained(path, Mesh(), CPU).stop == {taken}
        written, target = here("generate", path, "--prompt", "", *GREEDY), tmp_path / f"as_{said}"
        converted = here("convert", path, target)
        assert json.loads((target / "config.json").read_text())["eos_token_id"] == taken
        note = f"Note: {path} does not say which token ended the documents of its run: </s> is taken"
        assert (note in written.err, note in converted.out) == (said is None, said is None)


def test_a_tokenizer_that_was_changed_is_refused(finished: Finished, tmp_path: Path) -> None:
    """Of the same size: two tokens that have changed places give other text, and no message of their own."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(finished.newest, checkpoint)
    file = checkpoint / "tokenizer.json"
    text = file.read_text()
    first, second = (re.search(rf'"{token}":\s*(\d+)', text) for token in "ab")
    assert first and second and len(first[1]) == len(second[1]) and first.start() < second.start()
    changed = (
        f"{text[: first.start(1)]}{second[1]}{text[first.end(1) : second.start(1)]}{first[1]}{text[second.end(1) :]}"
    )
    file.write_text(changed)
    assert len(changed) == len(text) and changed != text
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        trained.open_trained(checkpoint, Mesh(), CPU)


@pytest.mark.parametrize("name", ["config.toml", "tokenizer.json"])
def test_what_lies_beside_the_tensors_is_confined_too(finished: Finished, tmp_path: Path, name: str) -> None:
    path = forged(finished, tmp_path, lambda content: content["files"].pop(name))
    shutil.move(path / name, tmp_path / name)
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match=r"is a FIFO" if name == "tokenizer.json" else r"has no config.toml"):
        trained.open_trained(path, Mesh(), CPU)


def test_a_manifest_that_is_a_folder(finished: Finished, tmp_path: Path) -> None:
    path = tmp_path / finished.newest.name
    shutil.copytree(finished.newest, path)
    (path / "manifest.json").unlink()
    (path / "manifest.json").mkdir()
    answer = here("generate", path, "--prompt", "a")
    assert answer.status == 2 and "manifest.json is a folder" in answer.err


def test_padding_of_the_vocabulary_is_zero_whatever_its_memory_held(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = trained.build_model

    def filled(*given: Any, **how: Any) -> Any:
        model = build(*given, **how)
        for parameter in model.parameters():
            parameter.data.fill_(7.0)
        return model

    monkeypatch.setattr(trained, "build_model", filled)
    model = trained.open_trained(finished.newest, paper_mesh(Layout(tp=2), 1), CPU).stages.model
    rows = model.embedding.tokens.weight
    assert not rows[-1].any() and rows[:-1].any(-1).all() and not (rows == 7.0).any()


@pytest.mark.slow
def test_padding_of_the_vocabulary_is_zero_and_never_written(cut: Path) -> None:
    from colonnade.mesh.layout import Layout
    from colonnade.mesh.mesh import build_mesh

    def rows(rank: int, num_ranks: int) -> Sequence[float]:
        model = trained.open_trained(trained.find(cut), build_mesh(Layout(tp=2), rank), CPU).stages.model
        return [float(model.embedding.tokens.weight[-1].abs().sum()), len(model.embedding.tokens.weight)]

    (first, size), (last, same) = run_on_ranks(rows, 2)
    assert first > 0 and size == same
    assert (last == 0) == (size * 2 > 275)
