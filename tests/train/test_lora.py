"""A run with adapters: what it saves, and that it goes on beside the same base alone."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from colonnade.checkpoint.manifest import read_manifest
from colonnade.checkpoint.names import MANIFEST
from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.data.sidecar import sidecar_path
from colonnade.errors import CheckpointError, ColonnadeError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.train import init_from, recovery
from colonnade.train.base import Base, BaseMetadata, base_path, content_of, content_together
from colonnade.train.corpus import Corpus, open_corpus
from colonnade.train.divergence import Divergence
from colonnade.train.repair import return_with_base
from colonnade.train.state import TrainState, build_state
from colonnade.train.undo import roll_back
from tests.commands import Answer, after_banner, forked, here
from tests.distributed import run_on_ranks
from tests.runs import Finished, metrics, tensors
from tests.tasks import examples
from tests.tiny import TinyCorpus, write_config
from tests.told import Told

LORA = ("optim.decay_steps=6", "lora.rank=4", "lora.dropout=0.1", 'lora.targets=["attention.*", "mlp.up"]')


def lora(corpus: TinyCorpus, folder: Path, base: Path, *more: str, num_ranks: int = 1) -> Answer:
    return forked("train", write_config(corpus, folder), f"train.init_from={base}", *LORA, *more, num_ranks=num_ranks)


@pytest.fixture(scope="module")
def adapted(finished: Finished, corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps beside a run's newest checkpoint. Not to be changed."""
    folder = tmp_path_factory.mktemp("adapted")
    answer = lora(corpus, folder, finished.folder)
    assert answer.status == 0 and "parameters trained" in answer.out, answer
    return folder / "run"


@pytest.fixture(scope="module")
def drawn(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a step with adapters beside its initial weights. Not to be changed."""
    folder = tmp_path_factory.mktemp("drawn")
    answer = forked("train", write_config(corpus, folder), "lora.rank=2", "train.steps=1")
    assert answer.status == 0, answer
    return folder / "run"


def test_adapters_and_their_moments_are_saved_alone(adapted: Path, finished: Finished) -> None:
    names = tensors(adapted).keys()
    of_adapters = {name for name in names if not name.startswith("optimizer.")}
    assert of_adapters == {
        f"blocks.{layer}.{module}.{each}"
        for layer in (0, 1)
        for module in ("attention.qkv", "attention.output", "mlp.up")
        for each in ("lora_a", "lora_b")
    }
    moments = {f"optimizer.{moment}.{name}" for name in of_adapters for moment in ("exp_avg", "exp_avg_sq")}
    assert names == of_adapters | moments
    base = read_manifest(adapted / "checkpoints" / "step_00000006").metadata["base"]
    assert base["path"] == str(finished.newest) and len(base["weights"]) == len(tensors(finished.folder)) // 3
    assert base["model"] == read_manifest(finished.newest).metadata["model"]


def beside(base: Path, run: Path, *more: str) -> tuple[TrainState, Config, Corpus]:
    """The state of a run with adapters, read from its newest checkpoint, and what it trains by."""
    settings = load(run / "config.toml", [f"train.init_from={base}", f"run.folder={run}", *more])
    corpus = open_corpus(settings)
    state = build_state(settings, Mesh(), corpus.vocab_size, torch.device("cpu"), draw=False)
    origin = init_from.opened(settings, corpus, Mesh().world, begins=False)
    assert origin is not None
    state.base = init_from.based_on(origin, state, Mesh().world)
    recovery.restore(state, settings, corpus)
    init_from.read_base(origin, state, corpus, cast(Any, Told()))
    return state, settings, corpus


def test_a_run_whose_copies_differ_reads_its_base_again(adapted: Path, finished: Finished, tmp_path: Path) -> None:
    """What is wrong with it in memory is in no checkpoint. It has to be the base that the run began with."""
    base = Path(shutil.copytree(finished.newest, tmp_path / "base"))
    state, settings, corpus = beside(base, adapted)
    sound = [bucket.master.clone() for bucket in state.buckets]
    for bucket in state.buckets:
        bucket.master += 1
    monitor: Any = SimpleNamespace(go_back=lambda step: None)
    return_with_base(state, settings, corpus, monitor)
    for bucket, expected in zip(state.buckets, sound, strict=True):
        assert torch.equal(bucket.master, expected), bucket.name
    shutil.rmtree(base)
    shutil.copytree(finished.newest.with_name("step_00000004"), base)
    with pytest.raises(CheckpointError, match="adapters of another base"):
        return_with_base(state, settings, corpus, monitor)


def test_a_run_that_has_diverged_returns_though_its_base_is_gone(
    adapted: Path, finished: Finished, tmp_path: Path
) -> None:
    """It has what it needs of it. In the base's own run that checkpoint may have been deleted meanwhile."""
    run = Path(shutil.copytree(adapted, tmp_path / "run"))
    asked = ["divergence.then=roll_back", "divergence.healthy_for=0", "divergence.patience=1"]
    base = Path(shutil.copytree(finished.newest, tmp_path / "base"))
    state, settings, corpus = beside(base, run, *asked)
    sound = [bucket.master.clone() for bucket in state.buckets]
    shutil.rmtree(base)
    for bucket in state.buckets:
        if not bucket.is_frozen:
            bucket.master.fill_(torch.nan)
    told = Told()
    roll_back(
        Divergence(7, 7, "has loss nan"),
        state,
        cast(Any, SimpleNamespace(wait_out=lambda _: None)),
        config=settings,
        mesh=Mesh(),
        corpus=corpus,
        monitor=cast(Any, SimpleNamespace(event=told.event, say=told.say, go_back=lambda step: None)),
        copies=cast(Any, SimpleNamespace(forget=lambda: None)),
    )
    assert state.step == 6 and len(told.of("rolled back")) == 1
    for bucket, expected in zip(state.buckets, sound, strict=True):
        assert torch.equal(bucket.master, expected), bucket.name


def test_a_base_is_known_by_where_it_lies_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes on may stand in another folder than who began."""
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    base = Base(Path("base"), {"manifest.json": "0" * 64}, frozenset({"b", "a"}), {"window": 8}, lambda shards: None)
    written = base.metadata()
    content = {"files": {"manifest.json": "0" * 64}, "weights": ["a", "b"], "model": {"window": 8}}
    assert written == {"path": str(tmp_path / "base"), **content}
    monkeypatch.chdir("/")
    wanted = BaseMetadata.model_validate(written)
    assert base_path(Path("adapters"), wanted, None) == tmp_path / "base"
    assert base_path(Path("adapters"), wanted, tmp_path) == tmp_path
    with pytest.raises(
        CheckpointError, match=r"their base '.*elsewhere' is not there\. Name where it lies with --base"
    ):
        base_path(Path("adapters"), wanted, tmp_path / "elsewhere")


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_never_ended(
    adapted: Path, finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    """On another layout too, up to rounding."""
    first = lora(corpus, tmp_path, finished.folder, "train.steps=3")
    assert first.status == 0
    again = lora(corpus, tmp_path, finished.folder)
    assert again.status == 0 and "Beside them the weights of" in again.out, again
    for name, x in tensors(adapted).items():
        assert torch.equal(tensors(tmp_path / "run")[name], x), name
    other = lora(corpus, tmp_path / "tp", finished.folder, "train.steps=3")
    assert other.status == 0
    other = lora(
        corpus, tmp_path / "tp", finished.folder, "parallel.tp=2", "parallel.sequence_parallel=true", num_ranks=2
    )
    assert other.status == 0
    pairs = zip(metrics(tmp_path / "tp" / "run"), metrics(adapted), strict=True)
    assert all(mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5) for mine, theirs in pairs)


@pytest.mark.slow
def test_evaluating_and_generating_beside_the_base(adapted: Path, finished: Finished, tmp_path: Path) -> None:
    told = [here("evaluate", folder, "--part", "validation", "--json") for folder in (adapted, finished.folder)]
    assert [answer.status for answer in told] == [0, 0], told
    assert told[0].out != told[1].out
    answer = here("generate", adapted, "--prompt", "a", "--max-new-tokens", "2", "--json")
    assert answer.status == 0, answer


def test_a_base_is_read_by_one_rank_for_all(tmp_path: Path) -> None:
    """It may have hundreds of gigabytes, and on a machine of its own a rank may see another one."""
    for name in ("first", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
        (tmp_path / name / "model.safetensors").write_text(name)
    (tmp_path / "other" / MANIFEST).write_text("{")  # whoever reads it fails

    def told(rank: int, num_ranks: int) -> dict[str, str]:
        world = build_mesh(Layout(dp=num_ranks), rank).world
        return content_together(tmp_path / ("other" if rank else "first"), world)

    expected = content_of(tmp_path / "first")
    assert run_on_ranks(told, 2) == [expected, expected] and list(expected) == ["config.json", "model.safetensors"]


def test_a_base_that_the_rank_that_reads_it_cannot_read_is_told_on_all(tmp_path: Path) -> None:
    """They would wait for it."""
    (tmp_path / MANIFEST).write_text("{")

    def told(rank: int, num_ranks: int) -> str:
        with pytest.raises(ColonnadeError) as raised:
            content_together(tmp_path, build_mesh(Layout(dp=num_ranks), rank).world)
        return str(raised.value)

    first, other = run_on_ranks(told, 2, time_limit=20.0)
    assert first == other and first.startswith("rank 0: ") and str(tmp_path) in first


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_published_base_is_known_by_all_of_its_files_and_by_its_configuration(tmp_path: Path, changed: int) -> None:
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in (*names, "notes.txt"):
        (tmp_path / name).write_text(name)
    before = content_of(tmp_path)
    assert list(before) == names
    (tmp_path / names[changed]).write_text("another")
    after = content_of(tmp_path)
    assert [name for name in before if before[name] != after[name]] == [names[changed]]


def test_a_dry_run_refuses_another_base_as_the_run_would(
    adapted: Path, finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    """Here the same run, of which only an older checkpoint is left."""
    shutil.copytree(adapted, tmp_path / "run")
    older = Path(shutil.copytree(finished.folder, tmp_path / "older"))
    shutil.rmtree(older / "checkpoints" / finished.newest.name)
    settings = write_config(corpus, tmp_path)
    answer = here("train", settings, f"train.init_from={older}", *LORA, "train.steps=7", "--dry-run")
    assert answer.status == 2 and "adapters of another base" in answer.err, answer


@pytest.mark.slow
def test_a_base_that_has_changed_or_moved(
    adapted: Path, finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    assert forked("train", write_config(corpus, other), "train.seed=7", "train.steps=1").status == 0
    answer = here("evaluate", adapted, "--part", "validation", "--base", other / "run")
    assert answer.status == 2 and "adapters of another base" in answer.err and "manifest.json: " in answer.err, answer
    run = Path(shutil.copytree(adapted, tmp_path / "run"))
    moved = Path(shutil.copytree(finished.folder, tmp_path / "moved"))
    assert here("evaluate", run, "--part", "validation", "--base", moved).status == 0
    settings = write_config(corpus, tmp_path)
    for more in ([], ["--dry-run"], ["--dry-run", "train.steps=6"]):
        answer = forked("train", settings, f"train.init_from={other / 'run'}", *LORA, "train.steps=7", *more)
        assert answer.status == 2 and "adapters of another base" in answer.err, answer
    assert forked("train", settings, f"train.init_from={moved}", *LORA, "train.steps=7", "--dry-run").status == 0
    answer = forked("train", settings, f"train.init_from={moved}", *LORA, "train.steps=7")
    assert answer.status == 0 and "Resumed from" in after_banner(answer.out), answer


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_run_goes_on_with_the_classifier_that_it_began_with(is_taken: bool, tmp_path: Path) -> None:
    """Of its base, or drawn for other labels and saved: whatever the files call their labels since."""
    folder, path = examples.write_examples(tmp_path, ["qqp"]), examples.write_config(tmp_path, "qqp", tmp_path)
    names, classifier = sidecar_path(folder / "qqp"), {"head.classifier.bias", "head.classifier.weight"}
    same, other = names.read_text(), names.read_text().replace("duplicate", "paraphrase")
    assert forked("train", path, "train.steps=1", f"run.folder={tmp_path / 'base'}").status == 0
    beside = (f"train.init_from={tmp_path / 'base'}", "lora.rank=2")
    names.write_text(same if is_taken else other)
    assert forked("train", path, *beside, "train.steps=2").status == 0
    assert (tensors(tmp_path / "run").keys() >= classifier) != is_taken
    names.write_text(other if is_taken else same)
    told = forked("train", path, *beside, "--dry-run")
    assert told.status == 0 and "step_00000002 with step 3." in told.out, told
    answer = forked("train", path, *beside)
    assert answer.status == 0 and "Finished 4 steps" in answer.out, answer
    assert (tensors(tmp_path / "run").keys() >= classifier) != is_taken
    base = read_manifest(tmp_path / "run" / "checkpoints" / "step_00000004").metadata["base"]
    assert (classifier <= {*base["weights"]}) == is_taken


def test_adapters_are_no_weights_to_begin_from(adapted: Path, corpus: TinyCorpus, tmp_path: Path) -> None:
    answer = forked("train", write_config(corpus, tmp_path), f"train.init_from={adapted}")
    assert answer.status == 2 and "has adapters alone" in answer.err and "colonnade merge" in answer.err, answer


@pytest.mark.parametrize(
    ("lora", "is_refused"),
    [
        ((), True),
        (("lora.rank=4",), True),
        (("lora.rank=2", "lora.alpha=400.0"), True),
        (("lora.rank=2", "lora.alpha=4.0"), False),
        (("lora.rank=2",), False),
    ],
)
def test_weights_with_adapters_beside_them_are_begun_from_by_a_run_that_has_these(
    lora: tuple[str, ...], is_refused: bool, drawn: Path, corpus: TinyCorpus, tmp_path: Path
) -> None:
    """Without them they are the initial weights, and multiplied with another number another model's."""
    answer = forked("train", write_config(corpus, tmp_path), f"train.init_from={drawn}", *lora, "--dry-run")
    path = f"{drawn}/checkpoints/step_00000001"
    said = (
        f"colonnade: train.init_from = '{path}' has adapters beside its weights, and the run has not the same: it "
        f"would begin from another model. `colonnade merge {path} TARGET` makes one model of both: name that, or set "
        "lora.rank, lora.alpha and lora.targets as they are there.\n"
    )
    assert (answer.status, answer.err) == ((2, said) if is_refused else (0, "")), answer


@pytest.mark.slow
def test_without_a_base_everything_is_saved(corpus: TinyCorpus, tmp_path: Path) -> None:
    """The base are the initial weights then."""
    answer = forked("train", write_config(corpus, tmp_path), "train.steps=2", *LORA)
    assert answer.status == 0, answer
    assert {"embedding.tokens.weight", "blocks.0.mlp.up.lora_a"} <= tensors(tmp_path / "run").keys()
    assert here("evaluate", tmp_path / "run", "--part", "validation").status == 0
    assert here("merge", tmp_path / "run", tmp_path / "merged").status == 0
    answer = here("merge", tmp_path / "merged", tmp_path / "again")
    assert answer.status == 2 and "has no adapters" in answer.err, answer


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lora.rank=17", "lora.rank = 17 is larger than blocks.0.attention.qkv is"),
        (
            'lora.targets=["attention.qvk"]',
            'lora.targets has "attention.qvk", which matches no linear layer',
        ),
        ("lora.targets=[]", "lora.targets is empty"),
        ("lora.dropout=1.0", "lora.dropout = 1.0 is out of range"),
        ("lora.alpha=0.0", "lora.alpha = 0.0 is out of range"),
    ],
)
def test_what_cannot_be_is_said_before_ranks_start(config: Path, tmp_path: Path, override: str, said: str) -> None:
    answer = here("train", config, f"run.folder={tmp_path / 'run'}", "lora.rank=4", override, "parallel.tp=2")
    assert answer.status == 2 and said in answer.err and "on rank" not in answer.err, answer
    assert not (tmp_path / "run").exists()
