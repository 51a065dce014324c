"""A run that begins from weights: of a checkpoint under another layout, of a published model, of another depth."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import safetensors.torch
import torch

from colonnade.architecture.statement import Weight
from colonnade.checkpoint.manifest import read_manifest
from colonnade.checkpoint.plan import Shard
from colonnade.config.compare import model_metadata
from colonnade.config.load import load
from colonnade.config.model import RotaryConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError, DamagedError
from colonnade.huggingface.tokenizer import tokenizer_in
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.train import init_from
from colonnade.train.corpus import open_corpus
from colonnade.train.init_from import Origin, based_on, begin_from, check_common_tokens, origin_at
from colonnade.train.metadata import PublishedMetadata
from colonnade.train.state import build_state
from colonnade.train.teacher import teacher_model
from tests.commands import after_banner, forked, here
from tests.distributed import run_on_ranks
from tests.runs import Finished, events, metrics, whole_tensors
from tests.tasks import examples
from tests.tiny import VOCAB_SIZE, TinyCorpus, write_config
from tests.told import Told

WEIGHTS_ONLY = ("optim.learning_rate=1e-30", "optim.min_learning_rate=0.0", "optim.weight_decay=0.0", "train.steps=1")
"""A step that moves nothing, so that what is saved is what the run began with."""


def nothing_published(tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Beside the weights that a test makes up."""


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: x for name, x in whole_tensors(path).items() if not name.startswith("optimizer.")}


def begun(corpus: TinyCorpus, folder: Path, source: Path, *more: str, num_ranks: int = 1) -> str:
    config = write_config(corpus, folder)
    answer = forked("train", config, f"train.init_from={source}", *WEIGHTS_ONLY, *more, num_ranks=num_ranks)
    assert answer.status == 0, answer
    return after_banner(answer.out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.dp=2", "parallel.zero=3"),
        pytest.param(("parallel.tp=2",), marks=pytest.mark.slow),
        pytest.param(("parallel.pp=2",), marks=pytest.mark.slow),
        pytest.param((), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_checkpoints_weights_under_any_layout(
    layout: tuple[str, ...], finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    said = begun(corpus, tmp_path, finished.folder, *layout, num_ranks=2 if layout else 1)
    assert f"Begun from {finished.newest}, the checkpoint of step 6: " in said
    assert "of the optimizer; drawn anew none." in said
    before, after = weights_of(finished.newest), weights_of(tmp_path / "run" / "checkpoints" / "step_00000001")
    assert before.keys() == after.keys()
    for name, x in before.items():
        torch.testing.assert_close(after[name], x, rtol=0, atol=1e-12)
    (event,) = (event for event in events(tmp_path / "run") if event["event"] == "initialized")
    assert (event["taken"], event["left"], event["new"]) == (len(before), [], [])


def test_in_16_bits_it_is_computed_with_them_from_the_first_step_on(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    """Which are rounded, and not those that were drawn."""
    settings = load(write_config(corpus, tmp_path), ["train.precision=bf16"])
    state = build_state(settings, Mesh(), VOCAB_SIZE, torch.device("cpu"))
    told: Any = SimpleNamespace(event=lambda *_, **__: None, say=lambda _: None)
    begin_from(origin_at(finished.folder), state, SimpleNamespace(tokenizer=None, vocab_size=VOCAB_SIZE), told)  # type: ignore[arg-type]
    saved, computed = weights_of(finished.newest), state.model.placements()
    found = {f"{bucket}.{place.name}": place.parameter for bucket, places in computed.items() for place in places}
    assert found.keys() == saved.keys()
    for name, weight in found.items():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, saved[name].bfloat16()), name


def test_what_is_not_taken_is_told_with_what_means_something_else(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    """Such as a classifier of other labels, which has a name that the model has."""
    state = build_state(load(write_config(corpus, tmp_path)), Mesh(), VOCAB_SIZE, torch.device("cpu"))
    whole, events = origin_at(finished.folder), list[dict[str, Any]]()
    put_aside = "head.norm.bias"
    shapes = {name: shape for name, shape in whole.shapes.items() if name != put_aside} | {"pooler.weight": (3, 3)}
    published = PublishedMetadata(begin=3)
    origin = replace(whole, shapes=shapes, unused=frozenset({put_aside}), published_by=lambda *_: published)
    end = read_manifest(finished.newest).metadata["end_of_document"]
    told: Any = SimpleNamespace(event=lambda name, **fields: events.append(fields), say=lambda _: None)
    begin_from(origin, state, SimpleNamespace(tokenizer=None, vocab_size=VOCAB_SIZE), told)  # type: ignore[arg-type]
    (event,) = events
    assert (event["left"], event["new"]) == (["head.norm.bias", "pooler.weight"], ["head.norm.bias"])
    assert state.published == published and end is not None and state.end_of_document == end


def test_a_published_models_weights(finished: Finished, corpus: TinyCorpus, tmp_path: Path) -> None:
    answer = here("convert", finished.folder, tmp_path / "theirs")
    assert answer.status == 0, answer
    said = begun(corpus, tmp_path, tmp_path / "theirs", "parallel.tp=2", num_ranks=2)
    assert f"Begun from {tmp_path / 'theirs'}, a published GPT-2: " in said
    before, after = weights_of(finished.newest), weights_of(tmp_path / "run" / "checkpoints" / "step_00000001")
    for name, x in before.items():
        torch.testing.assert_close(after[name], x, rtol=0, atol=1e-12)


def test_a_published_model_whose_tied_tables_differ_is_refused(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    assert here("convert", finished.folder, tmp_path / "theirs").status == 0
    (file,) = (tmp_path / "theirs").glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({**tensors, "lm_head.weight": tensors["transformer.wte.weight"] + 1}, file)
    answer = forked("train", write_config(corpus, tmp_path), f"train.init_from={tmp_path / 'theirs'}", *WEIGHTS_ONLY)
    assert answer.status == 2 and "lm_head.weight and transformer.wte.weight with different numbers" in answer.err


@pytest.mark.slow
def test_another_depth_says_what_is_left_and_new(finished: Finished, corpus: TinyCorpus, tmp_path: Path) -> None:
    said = begun(corpus, tmp_path, finished.folder, "model.num_layers=3")
    assert "drawn anew 12 (blocks.2.attention.output.bias, " in said
    less = begun(corpus, tmp_path / "less", finished.folder, "model.num_layers=1")
    assert "left 12 (blocks.1.attention.output.bias, " in less and "drawn anew none" in less


@pytest.mark.slow
def test_a_run_that_goes_on_does_not_begin_again(finished: Finished, corpus: TinyCorpus, tmp_path: Path) -> None:
    """The weights may be gone by then."""
    source = Path(shutil.copytree(finished.newest, tmp_path / finished.newest.name))
    config = write_config(corpus, tmp_path)
    options = ("train", config, f"train.init_from={source}", "train.steps=2")
    first = forked(*options)
    assert first.status == 0 and "Begun from" in first.out, first
    shutil.rmtree(source)
    again = forked(*options[:-1], "train.steps=3")
    assert again.status == 0 and "Resumed from" in again.out and "Begun" not in again.out, again
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("source", "override", "said"),
    [
        ("nowhere", "", "train.init_from = 'nowhere' does not exist"),
        ("empty", "", "is no checkpoint, no folder of a run that has one, and no folder of Hugging Face"),
        ("models--x", "", "cache: its model is the folder models--x/snapshots/0a1b. Name one of them."),
        ("run", "model.activation=gelu_tanh", "activation: 'gelu' in the checkpoint, 'gelu_tanh' wanted"),
        pytest.param("run", "model.num_heads=1", "num_heads", marks=pytest.mark.slow),
        pytest.param("run", "model.seq_length=8", "seq_length: 16 in the checkpoint, 8", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_begun_from(
    source: str,
    override: str,
    said: str,
    finished: Finished,
    corpus: TinyCorpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "models--x/snapshots/0a1b").mkdir(parents=True)
    (tmp_path / "models--x/snapshots/0a1b/config.json").touch()
    path = finished.folder if source == "run" else source
    answer = forked("train", write_config(corpus, tmp_path), f"train.init_from={path}", *filter(None, [override]))
    assert answer.status == 2 and said in answer.err, answer
    assert not (tmp_path / "run" / "config.toml").exists(), "the folder belongs to nobody"


def test_the_folder_of_a_sweep_is_told_as_one_where_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    for find, named in (
        (origin_at, f"train.init_from = '{tmp_path}'"),
        (partial(origin_at, named_by="the base"), f"the base = '{tmp_path}'"),
        (teacher_model, f"distillation.teacher = '{tmp_path}'"),
    ):
        with pytest.raises(ColonnadeError) as caught:
            find(tmp_path)
        assert str(caught.value) == (
            f"{named} is the folder of a sweep, and each of its points has a run of its own. Name the folder of one in "
            f"it; {tmp_path / 'summary.csv'} tells their scores."
        )


def test_the_weights_of_a_run_are_those_of_its_newest_checkpoint_with_the_tokenizer_there(
    finished: Finished, tmp_path: Path
) -> None:
    """Which is named where another is wanted. All files are looked at, unless another rank does."""
    origin = origin_at(finished.folder)
    assert origin.path == finished.newest
    assert Tokenizer.load(origin.path).sha256 == origin.tokenizer()
    lacking = Path(shutil.copytree(finished.newest, tmp_path / finished.newest.name))
    (lacking / "__0_0.distcp").unlink()
    with pytest.raises(DamagedError, match=r"__0_0\.distcp is missing"):
        origin_at(lacking)


def test_another_tokenizer_is_refused(finished: Finished, corpus: TinyCorpus, tmp_path: Path) -> None:
    """As many ids, and other text behind them; where rows may be drawn anew, for the ids that both have."""
    theirs = tmp_path / "theirs"
    assert here("convert", finished.folder, theirs).status == 0
    text = (theirs / "tokenizer.json").read_text()
    content = json.loads(text)
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (theirs / "tokenizer.json").write_text(json.dumps(content))
    for resize, said in (("false", ": the same id would mean different text"), ("true", ", and they differ in 2 ids")):
        asked = (f"train.init_from={theirs}", f"train.init_from_resize={resize}")
        answer = here("train", write_config(corpus, tmp_path), *asked)
        assert answer.status == 2 and f"has another tokenizer than data.tokenizer{said}" in answer.err, answer


@pytest.mark.parametrize("stored", ["tokenizer.json", "vocab.json", "vocab.txt", "none", "unreadable"])
def test_the_tokenizer_of_a_published_folder_is_found_as_convert_finds_it(
    stored: str, finished: Finished, corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its file is called, it is held against the run's; where there is none, that is said."""
    theirs = tmp_path / "theirs"
    assert here("convert", finished.folder, theirs).status == 0
    ours, run = Tokenizer.load(corpus.tokenizer), load(write_config(corpus, tmp_path))
    if stored != "tokenizer.json":
        content = json.loads((theirs / "tokenizer.json").read_text())
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            (theirs / name).unlink(missing_ok=True)
    if stored == "vocab.json":
        ends = {token["content"]: token["id"] for token in content["added_tokens"]}
        (theirs / "vocab.json").write_text(json.dumps(content["model"]["vocab"] | ends))
        (theirs / "merges.txt").write_text("\n".join(" ".join(pair) for pair in content["model"]["merges"]) + "\n")
    elif stored in ("vocab.txt", "unreadable"):
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] * (stored == "vocab.txt")
        (theirs / "vocab.txt").write_text("\n".join([*words, "a"]))
    read = list[Path]()
    monkeypatch.setattr(init_from, "tokenizer_in", lambda path: read.append(path) or tokenizer_in(path))
    origin, lines = origin_at(theirs), list[str]()
    nobodys: Any = SimpleNamespace(tokenizer=None)
    alone = init_from.compared(
        origin, nobodys, lambda: init_from._check_tokenizer(origin, nobodys, resize=False), begins=True
    )
    assert alone.note.endswith(": the run has no tokenizer.") and not read, "weights alone are used without theirs"
    if stored == "unreadable":
        with pytest.raises(CheckpointError, match=r"^The tokenizer of .*theirs cannot be read: .* Or remove its files"):
            origin.tokenizer()
        return
    beside: Any = SimpleNamespace(tokenizer=ours, vocab_size=VOCAB_SIZE)
    if stored == "vocab.txt":
        for resize, said in (
            (False, rf"Set data\.tokenizer = '{theirs}', and make"),
            (True, "ids that both have: 0 is "),
        ):
            with pytest.raises(CheckpointError, match=said):
                init_from._check_tokenizer(origin, beside, resize=resize)
        return
    assert origin.tokenizer() == (None if stored == "none" else ours.sha256)
    told: Any = SimpleNamespace(event=lambda *_, **__: None, say=lines.append)
    for tokenizer in (ours, None):
        beside = SimpleNamespace(tokenizer=tokenizer, vocab_size=VOCAB_SIZE)
        known = init_from.compared(origin, beside, lambda: None, begins=True)
        begin_from(known, build_state(run, Mesh(), VOCAB_SIZE, torch.device("cpu")), beside, told)
    unknown = " Whether ids mean the same tokens there and here is not known: "
    without = ["the weights have no tokenizer." if stored == "none" else "", "the run has no tokenizer."]
    assert [line.partition(unknown)[2] for line in lines] == without
    assert read == [theirs], "once"


@pytest.mark.parametrize("error", [CheckpointError("It differs."), ConfigError("It differs."), RuntimeError("a bug")])
def test_a_run_goes_on_beside_another_tokenizer_and_not_behind_an_error_of_the_program(
    error: Exception, tmp_path: Path
) -> None:
    def check() -> None:
        raise error

    nobodys: Any = SimpleNamespace(tokenizer=None)
    origin = Origin(tmp_path, "a checkpoint", {}, {}, 0, lambda: None, lambda _: None, nothing_published)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="a bug"):
            init_from.compared(origin, nobodys, check, begins=False)
        return
    found = init_from.compared(origin, nobodys, check, begins=False)
    assert found.note == " The run goes on with it, and would not begin with it now: It differs."


@pytest.mark.parametrize("words", [["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"], ["a"]], ids=["another", "none"])
def test_a_run_with_adapters_goes_on_beside_a_tokenizer_that_it_would_not_begin_with(
    words: list[str], finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    """It began when a vocab.txt was not compared. And its adapters are used, which takes no tokenizer of the base."""
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    assert here("convert", finished.folder, theirs).status == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (theirs / name).unlink()
    asked = ["train", write_config(corpus, tmp_path), "lora.rank=2", f"train.init_from={theirs}"]
    assert forked(*asked, "train.steps=2").status == 0
    (theirs / "vocab.txt").write_text("\n".join(words))
    went_on = forked(*asked, "train.steps=3")
    said = "has another tokenizer than data.tokenizer" if len(words) > 1 else "vocab.txt is no WordPiece vocabulary"
    assert went_on.status == 0, went_on
    (line,) = (line for line in went_on.out.splitlines() if line.startswith("Beside them the weights of "))
    assert "as the run began with them. The run goes on with it, and would not begin with it now: " in line
    assert said in line
    assert forked("generate", run, "--prompt", "a", "--max-new-tokens", "1").status == 0
    refused = forked(*asked, f"run.folder={tmp_path / 'new'}")
    assert refused.status == 2 and said in refused.err


RESIZED = ("model.vocab_size=300", "model.seq_length=24", "train.init_from_resize=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tp=2",),
        pytest.param(("parallel.dp=2", "parallel.zero=3"), marks=pytest.mark.slow),
        pytest.param(("parallel.pp=2",), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_rows_that_both_have_are_taken_and_others_drawn_the_same_under_any_layout(
    layout: tuple[str, ...], finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    before = weights_of(finished.newest)
    rows, positions = before["embedding.tokens.weight"].shape[0], before["embedding.positions.weight"].shape[0]
    assert (rows, positions) != (300, 24)
    found = []
    for how in ((), layout):
        where = tmp_path / ("several" if how else "one")
        said = begun(corpus, where, finished.folder, *RESIZED, *how, num_ranks=2 if how else 1)
        assert f"of embedding.tokens.weight {rows} rows taken, {300 - rows} drawn and 0 left" in said
        found.append(weights_of(where / "run" / "checkpoints" / "step_00000001"))
    for after in found:
        for name, x in before.items():
            taken = after[name][tuple(slice(size) for size in x.shape)]
            torch.testing.assert_close(taken, x[: taken.shape[0]], rtol=0, atol=1e-12)
        assert after["embedding.tokens.weight"].shape[0] == 300 and after["embedding.tokens.weight"][rows:].std() > 0
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=0, atol=1e-12)


def test_a_run_that_goes_on_needs_no_more_what_it_began_from(finished: Finished, tmp_path: Path) -> None:
    run, gone = Path(shutil.copytree(finished.folder, tmp_path / "run")), tmp_path / "gone"
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("[train]\n", f'[train]\ninit_from = "{gone}"\n'))
    given = (f"run.folder={run}", f"train.init_from={gone}", "train.steps=8")
    answer = here("train", finished.config, *given, "--dry-run")
    assert answer.status == 0 and "with step 7" in answer.out.splitlines()[-1], answer


def test_of_a_part_that_lies_behind_the_rows_of_the_weights_nothing_is_taken() -> None:
    """A table of three rows, and a rank that has the last four of eight."""
    rows = torch.arange(16.0).view(8, 2)
    first, last = Shard("table", (8, 2), (0, 0), rows[:4]), Shard("table", (8, 2), (4, 0), rows[4:])
    (taken,) = init_from._clipped(first, (3, 2))
    assert taken.shape == (3, 2) and taken.data.tolist() == rows[:3].tolist()
    assert init_from._clipped(last, (3, 2)) == []
    (taken,) = init_from._clipped(last, (6, 2))
    assert taken.offsets == (4, 0) and taken.data.tolist() == rows[4:6].tolist(), "of three quarters of the rows"


def test_without_the_key_other_sizes_are_refused_with_its_name(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    config = write_config(corpus, tmp_path)
    answer = forked("train", config, f"train.init_from={finished.folder}", "model.vocab_size=300")
    assert answer.status == 2 and "train.init_from_resize = true" in answer.err and "vocab_size" in answer.err, answer


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ({"seq_length": 8}, {}, "seq_length"),
        ({"seq_length": 8}, {"position": "rotary"}, None),
        ({"position": "rotary"}, {}, "position"),
        ({"num_layers": 7}, {}, None),
        ({"window": 8}, {}, None),
        ({"rotary": RotaryConfig(base=5e5)}, {"position": "rotary"}, None),
        ({"tie_embeddings": False}, {}, "tie_embeddings"),
        ({"tie_embeddings": False, "head": "classification"}, {}, None),
        ({"tie_embeddings": False}, {"head": "classification"}, None),
        ({"hidden_size": 48}, {}, "ffn_hidden_size"),
    ],
)
def test_only_what_no_weight_depends_on_may_be_otherwise_than_it_was(
    was: dict[str, Any], now: dict[str, Any], said: str | None, config: Path
) -> None:
    """Sequences of another length, where positions have no weights; tables that are tied, where nothing is told."""
    base = load(config)
    wanted = base.model.model_copy(update=now)
    origin: Any = SimpleNamespace(path=Path("weights"), model=model_metadata(wanted.model_copy(update=was), 50))
    with (
        nullcontext() if said is None else pytest.raises(CheckpointError, match=rf"another model:\n  (model\.)?{said}")
    ):
        init_from._check_model(
            origin, base.model_copy(update={"model": wanted}), cast(Any, SimpleNamespace(vocab_size=50))
        )


def test_what_was_published_with_a_base_is_asked_for_where_the_run_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(init_from, "shards_of", lambda state, base: [])
    corpus, told = SimpleNamespace(tokenizer=None, vocab_size=50), Told()
    origin: Any = SimpleNamespace(path="base", what="a model", published_by=lambda _, size: f"of {size}", note="")
    for known, expected in (("of the run", "of the run"), (None, "of 50")):
        state: Any = SimpleNamespace(
            published=known, base=SimpleNamespace(weights=frozenset(), fill=lambda shards: None),
            ownership=SimpleNamespace(publish=lambda: None),
        )  # fmt: skip
        init_from.read_base(origin, state, corpus, told)  # type: ignore[arg-type]
        assert state.published == expected


def test_another_tokenizer_must_agree_on_the_ids_that_both_have(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(finished.newest, tmp_path / finished.newest.name))
    content = json.loads((source / "tokenizer.json").read_text())
    names = {content["model"]["vocab"][key]: key for key in content["model"]["vocab"]}
    content["model"]["vocab"] |= {names[40]: 41, names[41]: 40}
    content["model"]["merges"] = []
    (tmp_path / "other.json").write_text(json.dumps(content))
    origin = Origin(source, "a checkpoint", {}, {}, 0, lambda: "?", lambda _: None, nothing_published)
    with pytest.raises(CheckpointError, match="2 ids that both have: 40 is "):
        check_common_tokens(origin, Tokenizer.load(tmp_path / "other.json"))
    check_common_tokens(origin, Tokenizer.load(source))


@pytest.mark.parametrize("resize", [True, False])
def test_a_run_asks_for_tokens_alike_whether_or_not_it_may_resize(
    resize: bool, finished: Finished, tmp_path: Path
) -> None:
    """Of a tokenizer that is not known, nothing is said."""
    content = json.loads((finished.newest / "tokenizer.json").read_text())
    names = {number: name for name, number in content["model"]["vocab"].items()}
    content["model"] |= {"vocab": content["model"]["vocab"] | {names[40]: 41, names[41]: 40}, "merges": []}
    (tmp_path / "other.json").write_text(json.dumps(content))
    ours: Any = SimpleNamespace(tokenizer=Tokenizer.load(tmp_path / "other.json"))
    known = Tokenizer.load(finished.newest).sha256
    origin = Origin(finished.newest, "a checkpoint", {}, {}, 0, lambda: known, lambda _: None, nothing_published)
    said = "differ in 2 ids that both have" if resize else "the same id would mean different text"
    with pytest.raises(CheckpointError, match=said):
        init_from._check_tokenizer(origin, ours, resize=resize)
    init_from._check_tokenizer(replace(origin, tokenizer=lambda: None), ours, resize=resize)
    init_from._check_tokenizer(replace(origin, tokenizer=lambda: ours.tokenizer.sha256), ours, resize=resize)
    init_from._check_tokenizer(origin, SimpleNamespace(tokenizer=None), resize=resize)  # type: ignore[arg-type]
    alike: Any = SimpleNamespace(is_of=lambda theirs: theirs == known, sha256="as this version has it")
    init_from._check_tokenizer(origin, SimpleNamespace(tokenizer=alike), resize=resize)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shapes", "is_drawn"),
    [
        ({"table": (40, 8), "bias": (8,)}, False),
        ({"table": (48, 8), "bias": (8,), "other": (2,)}, False),
        ({"table": (32, 8), "bias": (8,)}, True),
        ({"table": (40, 8)}, True),
    ],
)
def test_of_weights_that_lack_some_or_rows_of_them_the_rest_is_drawn(
    shapes: dict[str, tuple[int, ...]], is_drawn: bool, tmp_path: Path
) -> None:
    origin = Origin(tmp_path, "a checkpoint", {}, shapes, 0, lambda: None, lambda _: None, nothing_published)
    assert origin.leaves_drawn({"table": Weight("table", (40, 8)), "bias": Weight("bias", (8,))}) == is_drawn


def test_a_frozen_weight_of_another_size_is_not_the_bases(tmp_path: Path) -> None:
    """Rows of it were drawn: a run with adapters saves it."""
    weights = {name: Weight(name, (3, 2), is_frozen=name != "trained") for name in ("same", "grown", "new", "trained")}
    state: Any = SimpleNamespace(model=SimpleNamespace(architecture=SimpleNamespace(weights=lambda: weights)))
    shapes = {"same": (3, 2), "grown": (2, 2), "trained": (3, 2)}
    (tmp_path / "model.safetensors").touch()
    origin = Origin(tmp_path, "a checkpoint", {}, shapes, 0, lambda: None, lambda _: None, nothing_published)
    assert based_on(origin, state, Mesh().world).weights == {"same"}


@pytest.mark.parametrize(
    ("labels", "is_taken"),
    [
        (("Entailment", "neutral", "contradiction"), True),
        ((), True),
        (("contradiction", "entailment", "neutral"), False),
        (("joy", "fear", "anger"), False),
    ],
)
def test_a_classifier_is_taken_where_its_numbers_mean_the_runs_labels(
    labels: tuple[str, ...], is_taken: bool, tmp_path: Path
) -> None:
    """Or where nothing says what they mean."""
    config = load(examples.write_config(tmp_path, "mnli", tmp_path))
    corpus: Any = SimpleNamespace(vocab_size=200, labels=["entailment", "neutral", "contradiction"])
    shapes = {"embedding.tokens.weight": (200, 16), "head.classifier.weight": (3, 16)}
    model = model_metadata(config.model, 200)
    origin = Origin(
        tmp_path,
        "a published BERT",
        model,
        shapes,
        0,
        lambda: None,
        lambda _: None,
        nothing_published,
        labels,
    )
    found = init_from._without_other_answers(origin, config, corpus)
    assert found.unused == (set() if is_taken else {"head.classifier.weight"})
    assert found.shapes.keys() == shapes.keys() - found.unused


def test_all_ranks_end_where_one_cannot_read_what_the_run_begins_from(config: Path, finished: Finished) -> None:
    settings = load(config, [f"train.init_from={finished.folder}"])

    def told(rank: int, num_ranks: int) -> str:
        if rank:
            settings.train.__dict__["init_from"] = str(finished.folder / "nowhere")
        with pytest.raises(ConfigError) as raised:
            init_from.opened(settings, open_corpus(settings), build_mesh(Layout(dp=2), rank).world, begins=True)
        return str(raised.value)

    first, second = run_on_ranks(told, 2)
    assert first == second and first.startswith(f"rank 1: train.init_from = '{finished.folder / 'nowhere'}' is no chec")
