"""What is wrong with a checkpoint of Megatron-LM is one message with the remedy, and nothing of its code runs."""

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.errors import CheckpointError
from colonnade.huggingface.pickled import extent_of
from colonnade.megatron.rank_file import RankFile, _check_file
from colonnade.megatron.ranks import find_ranks
from colonnade.megatron.source import open_megatron, true_vocabulary
from tests.commands import here
from tests.convert.test_refused import refused
from tests.megatron.written import ENUM_ARGS, GPT, VOCAB, weights, write

FILE = "model_optim_rng.pt"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    write(folder / "four", GPT, weights(GPT), tp=2, pp=2)
    write(folder / "one", GPT, weights(GPT))
    return folder


@pytest.fixture
def copied(folders: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(folders / name, tmp_path / "theirs")) / "iter_0005000"

    return copy


def said(tmp_path: Path, where: Path, *options: object) -> str:
    return refused(tmp_path, where.parent, tmp_path / "ours", *(options or ("--vocab-size", VOCAB)))


def change(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Write a rank's file again, changed."""
    content = {key: x for key, x in loaded(file).items() if key not in ("optimizer", "rng_state")}
    edit(content)
    torch.save(content, file.with_suffix(".new"))  # what is mapped stays as it is
    file.with_suffix(".new").replace(file)


def loaded(file: Path) -> dict[str, Any]:
    content = with_numbers(file, RankFile(file).content())
    kept = {key: x for key, x in vars(content["args"]).items() if key not in ENUM_ARGS}
    return {**content, "args": argparse.Namespace(**kept)}


def with_numbers(file: Path, content: Any) -> Any:
    """The same, with tensors that have theirs."""
    if isinstance(content, dict):
        return {key: with_numbers(file, x) for key, x in content.items()}
    if not isinstance(content, torch.Tensor):
        return content
    place = extent_of(file, content)
    assert place is not None
    return place.read()


def args_of(content: dict[str, Any], **keys: Any) -> None:
    content["args"] = argparse.Namespace(**{**vars(content["args"]), **keys})


class Malice:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


class Hidden:
    """Code behind a name that enums have."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("__import__('os').mkdir('ran')",)


@pytest.mark.parametrize("bad", [Malice(), Hidden()], ids=["os.mkdir", "eval"])
def test_code_in_a_pickle_is_refused_by_name_and_does_not_run(
    bad: object, copied: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = copied("one")
    change(where / "mp_rank_00" / FILE, lambda x: x.update(extra=bad))
    message = said(tmp_path, where)
    assert (
        f"names code that no checkpoint of Megatron-LM needs: {'posix.mkdir' if isinstance(bad, Malice) else ''}"
        in (message)
    )
    assert "Nothing of it was run" in message and not (tmp_path / "ran").exists()


def test_a_name_of_megatron_is_not_imported(
    copied: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package beside the user's work that is called as theirs stays where it is."""
    package = tmp_path / "megatron" / "model"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    where = copied("one")
    assert "some of them padding" in refused(tmp_path, where.parent, tmp_path / "ours")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda x: x.pop("args"), "has no args"),
        (lambda x: x.pop("model"), "has no model and no model0"),
        (lambda x: x.update(checkpoint_version=7), "checkpoint_version = 7: 0 to 3 are known"),
        (lambda x: x.update(checkpoint_version="3"), 'checkpoint_version = "3"'),
        (lambda x: x.update(iteration=4000), "has the files of iteration 4,000: they were moved"),
        (lambda x: args_of(x, num_experts=8), "num_experts = 8: its MLP is a mixture of experts"),
        (lambda x: args_of(x, num_attention_heads=None), "num_attention_heads is missing"),
        (lambda x: args_of(x, position_embedding_type="relative"), 'position_embedding_type = "relative"'),
        (lambda x: args_of(x, apply_residual_connection_post_layernorm=True), "the residual is taken before the norm"),
        (lambda x: args_of(x, qk_l2_norm=True), "qk_l2_norm = true: queries and keys are normalised by a norm with"),
        (lambda x: args_of(x, glu_linear_offset=1.0), "glu_linear_offset = 1.0: a gate is multiplied by what it lets"),
        (lambda x: args_of(x, activation_func_clamp_value=7.0), "activation_func_clamp_value = 7.0: what goes into an"),
        (lambda x: args_of(x, num_attention_heads=5, kv_channels=5), "rows are no multiple of 15"),
        (lambda x: args_of(x, num_layers=5), "12 tensors are missing"),
        (lambda x: args_of(x, num_layers=90_000), "says that the model has 90,000 layers"),
        (lambda x: args_of(x, hidden_size=10**12), "describe a model that cannot be"),
        (lambda x: args_of(x, ffn_hidden_size=40), "dense_h_to_4h.weight is [36, 24], and should be [40, 24]"),
        (lambda x: x["model"].update(extra=torch.ones(2)), "1 tensor is there that it does not have: extra"),
        (lambda x: x["model"].update(extra="text"), "has model.extra, which is no plain tensor"),
        (lambda x: x["model"].update(extra=torch.ones(1).expand(10**9)), "has model.extra, which is no plain tensor"),
        (lambda x: args_of(x, tensor_model_parallel_size=2), "run of tensor-parallel size 2, and the folders"),
        (lambda x: args_of(x, padded_vocab_size="64"), 'padded_vocab_size = "64"'),
        (lambda x: x.update(iteration="5000"), 'has iteration = "5000", which is no number'),
    ],
)
def test_what_a_file_says(
    edit: Callable[[dict[str, Any]], object], words: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    where = copied("one")
    change(where / "mp_rank_00" / FILE, edit)
    assert words in (message := said(tmp_path, where)), message


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda x: x.update(iteration=4999), "has iteration 5000, and "),
        (lambda x: x.update(checkpoint_version=1.0), "has checkpoint_version 3.0, and "),
        (lambda x: args_of(x, layernorm_epsilon=1e-3), "arguments of different models (norm_epsilon)"),
        (lambda x: args_of(x, pipeline_model_parallel_size=3), "run of pipeline-parallel size 3, and the folders"),
        (lambda x: x["model"]["language_model"]["encoder"].popitem(), "do not have the same tensors: "),
        (
            lambda x: x["model"]["language_model"]["encoder"].update(
                {"final_layernorm.bias": torch.ones(24, dtype=torch.bfloat16)}
            ),
            "final_layernorm.bias as [24] in F32, and ",
        ),
        (
            lambda x: x["model"]["language_model"]["encoder"]["final_layernorm.bias"].add_(1),
            "have different numbers in",
        ),
        (
            lambda x: x["model"]["word_embeddings_for_head"]["weight"].add_(1),
            "word_embeddings_for_head.weight and language_model.embedding.word_embeddings.weight with different",
        ),
    ],
)
def test_ranks_that_disagree(
    edit: Callable[[dict[str, Any]], object], words: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    where = copied("four")
    change(where / "mp_rank_01_001" / FILE, edit)
    assert words in (message := said(tmp_path, where)), message


def test_stages_of_which_each_has_the_same_tensor(copied: Callable[[str], Path], tmp_path: Path) -> None:
    where = copied("four")
    table = {"word_embeddings.weight": torch.ones(32, 24)}
    for rank in ("00", "01"):
        change(where / f"mp_rank_{rank}_001" / FILE, lambda x: x["model"]["language_model"].update(embedding=table))
    message = said(tmp_path, where)
    assert "both have language_model.embedding.word_embeddings.weight: they are not stages of one pipeline" in message


def test_folders_that_are_not_all_there(copied: Callable[[str], Path], tmp_path: Path) -> None:
    where = copied("four")
    (where / "mp_rank_00_001" / FILE).rename(tmp_path / "kept")
    assert f"has no {FILE}. Copy the whole checkpoint" in said(tmp_path, where)
    shutil.rmtree(where / "mp_rank_00_001")
    assert "lacks 1 of their 4 folders: mp_rank_00_001. Copy all of them" in said(tmp_path, where)
    shutil.rmtree(where / "mp_rank_01_001")
    assert "run of pipeline-parallel size 2, and the folders beside it are those of 1" in said(tmp_path, where)
    (where / "mp_rank_00_000_001").mkdir()
    assert "experts of a mixture" in said(tmp_path, where)
    tracker = where.parent / "latest_checkpointed_iteration.txt"
    for text, words in (("5001", "no folder iter_0005001 beside it"), ("../../etc", "no number of an iteration")):
        tracker.write_text(text)
        assert words in said(tmp_path, where)
    tracker.write_text("5000")
    shutil.rmtree(where)
    where.mkdir()
    assert "has no mp_rank_XX folders. Name the folder" in said(tmp_path, where)
    (where / "__0_0.distcp").write_bytes(b"")
    assert "--ckpt-convert-format torch" in said(tmp_path, where)


def test_folders_of_two_checkpoints(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """Saved with pipeline parallelism and without: which one is meant is unknown."""
    where = copied("four")
    for rank in ("mp_rank_00", "mp_rank_01"):
        shutil.copytree(where / f"{rank}_000", where / rank)
    assert f"{where} has mp_rank_XX and mp_rank_XX_YYY: those of two checkpoints" in said(tmp_path, where)


def test_a_file_may_lie_behind_a_link(copied: Callable[[str], Path], tmp_path: Path) -> None:
    file = copied("one") / "mp_rank_00" / FILE
    file.rename(tmp_path / "elsewhere.pt")
    file.symlink_to(tmp_path / "elsewhere.pt")
    _check_file(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError, match="is no plain file"):
        _check_file(file)


@pytest.mark.parametrize("kept", [0, 100, 5000, -30])
def test_files_that_are_cut_off(kept: int, copied: Callable[[str], Path], tmp_path: Path) -> None:
    file = copied("one") / "mp_rank_00" / FILE
    file.write_bytes(file.read_bytes()[:kept])
    assert str(file) in (message := said(tmp_path, file.parents[1])) and "cut off" in message


@pytest.mark.slow
def test_numbers_that_were_changed_are_not_a_crash(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """Any byte of the part that says what the file holds: it is refused by name, or does not matter."""
    file = copied("one") / "mp_rank_00" / FILE
    whole, refusals = file.read_bytes(), 0
    unharmed = shapes_of(file)
    for place in range(40, 3000, 97):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            assert shapes_of(file) == unharmed, place
        except CheckpointError as error:
            assert str(file.parents[1]) in str(error), place
            refusals += 1
    assert refusals >= 10  # of 31


def shapes_of(file: Path) -> dict[str, tuple[int, ...]]:
    """Of our weights, as a checkpoint with this file would give them."""
    sources = open_megatron(file.parents[1], lambda _: VOCAB).sources
    return {name: source.weight.shape for name, source in sources.items()}


@pytest.mark.parametrize(
    ("said", "given", "tokenizer", "found"),
    [
        ({"padded_vocab_size": 64, "vocab_size": 61}, None, None, 61),
        ({"padded_vocab_size": 64, "vocab_size": 61}, None, 60, 60),  # the tokenizer that is there goes before
        ({"padded_vocab_size": 64, "vocab_size": 61}, 50, 60, 50),
        ({"padded_vocab_size": 64, "vocab_size": 64}, None, None, 64),
        ({"padded_vocab_size": 64, "vocab_size": 50}, None, None, "50 tokens would be padded to 56"),
        ({"padded_vocab_size": 64, "vocab_size": 50, "tensor_model_parallel_size": 2}, None, None, 50),
        ({"padded_vocab_size": 64, "vocab_size": 50, "model_parallel_size": 2}, None, None, 50),
        ({"padded_vocab_size": 256, "make_vocab_size_divisible_by": None}, None, 129, 129),  # 128, unless it is said
        ({"padded_vocab_size": 192, "make_vocab_size_divisible_by": None}, None, 129, "would be padded to 256"),
        ({"padded_vocab_size": 256, "make_vocab_size_divisible_by": 0}, None, 129, 129),
        ({"padded_vocab_size": 64}, None, None, "which are tokens is not in the checkpoint"),
        ({"padded_vocab_size": 64}, 64, None, 64),
        ({"padded_vocab_size": 64}, 65, None, "is said to have 65 tokens"),
        ({"padded_vocab_size": 64}, 0, None, "is said to have 0 tokens"),
    ],
)
def test_which_rows_of_a_padded_table_are_tokens(
    said: dict[str, Any], given: int | None, tokenizer: int | None, found: int | str
) -> None:
    arguments = {"make_vocab_size_divisible_by": 8, **said}
    if isinstance(found, int):
        assert true_vocabulary(arguments, given=given, tokenizer=tokenizer) == found
        return
    with pytest.raises(CheckpointError, match=found):
        true_vocabulary(arguments, given=given, tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["model_optim_rng.pt", "model_rng.pt"])
def test_ranks_are_found_by_their_folders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many ranks as there were, with the name that a run without an optimizer's state gives its files too."""
    folder, tp = tmp_path / "iter_0005000", 101
    for rank in range(tp):
        for stage in range(2):
            (folder / f"mp_rank_{rank:02d}_{stage:03d}").mkdir(parents=True)
            (folder / f"mp_rank_{rank:02d}_{stage:03d}" / name).touch()
    found = find_ranks(folder)
    assert (found.tp, found.pp, found.iteration) == (tp, 2, 5000)
    assert found.files[1][100] == folder / "mp_rank_100_001" / name
    monkeypatch.chdir(folder)
    assert find_ranks(Path(".")).iteration == 5000, "whose name is that of the folder, however it is said"


def test_what_a_checkpoint_keeps_of_its_source(tmp_path: Path) -> None:
    where = write(tmp_path / "theirs", GPT, weights(GPT), tp=2, version=2.0)
    where.rename(tmp_path / "release")  # which says no iteration; the files do
    facts = open_megatron(tmp_path / "release", lambda _: VOCAB).facts
    assert facts == {"iteration": 5000, "checkpoint_version": 2.0, "layout": "tp=2,pp=1"}


def test_files_that_do_not_say_their_version_are_of_the_first(tmp_path: Path) -> None:
    whole = weights(GPT)
    where = write(tmp_path / "theirs", GPT, whole, version=0, style="old")
    change(where / "mp_rank_00" / FILE, lambda content: content.pop("checkpoint_version"))
    found = open_megatron(where, lambda _: VOCAB)
    assert found.facts["checkpoint_version"] == 0.0
    assert torch.equal(found.read("blocks.1.attention.qkv.weight"), whole["layers.1.query_key_value.weight"])


@pytest.mark.slow
def test_the_vocabularys_size(copied: Callable[[str], Path], tmp_path: Path) -> None:
    where = copied("one")
    message = refused(tmp_path, where.parent, tmp_path / "ours")
    assert (
        "has 64 rows, some of them padding" in message and "--tokenizer PATH" in message and "--vocab-size N" in message
    )
    assert "is said to have 65 tokens" in said(tmp_path, where, "--vocab-size", 65)
    change(where / "mp_rank_00" / FILE, lambda x: args_of(x, vocab_size=50))
    message = refused(tmp_path, where.parent, tmp_path / "ours")
    assert "50 tokens would be padded to 56" in message and "--vocab-size 50" in message
    assert "--tokenizer nowhere: nowhere is no tokenizer" in said(tmp_path, where, "--tokenizer", "nowhere")
    assert "--best is of a run's checkpoints, and" in said(tmp_path, where, "--best")
    for size in (50, 64):
        confirmed = here("convert", where.parent, tmp_path / f"ours {size}", "--vocab-size", size)
        assert confirmed.status == 0, confirmed
