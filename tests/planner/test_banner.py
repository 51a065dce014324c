"""What a run tells of itself before its first step: true numbers, early, and what could not be checked."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade import control_groups
from colonnade.architecture.parts import trained_architecture
from colonnade.config.load import load, loads
from colonnade.config.numbers import amount
from colonnade.config.schema import Config, ParallelConfig
from colonnade.data.indexed import TokenFile
from colonnade.data.tokenize import tokenize_files
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.mesh.shared_memory import SharedMemoryTransport
from colonnade.planner import banner as banners
from colonnade.planner.banner import banner
from colonnade.planner.comparison import Watcher
from colonnade.planner.memory import Memory, rank_memory
from colonnade.planner.memory_limit import within_memory
from colonnade.train import loop, machine
from colonnade.train.corpus import open_corpus
from colonnade.train.loop import Banner
from colonnade.train.machine import free_memory
from colonnade.train.products import settle
from colonnade.train.state import build_state
from tests import tiny
from tests.commands import colonnade, forked
from tests.distributed import run_on_ranks
from tests.parity.runs import Case, Way, configured
from tests.runs import course, events
from tests.tiny import TinyCorpus

CPU = torch.device("cpu")

ALL_EVALUATED = "checkpoint.every=3"
"""Else a note says that some checkpoints are not."""


def told(config: Config, mesh: Mesh | None = None, whole: Config | None = None) -> Banner:
    mesh, opened = mesh or Mesh(), open_corpus(config)
    decision = settle(config, opened.vocab_size, mesh.world, CPU)
    watcher = Watcher(banner, within_memory, active=False)
    return watcher.banner(course(config, whole), mesh, CPU, opened, decision)


def rows(found: Banner) -> dict[str, str]:
    return {line.split()[0]: " ".join(line.split()[1:]) for line in found.text.splitlines()}


def test_its_numbers_are_those_of_the_run(corpus: TinyCorpus, tmp_path: Path) -> None:
    config = tiny.config(corpus, tmp_path, ALL_EVALUATED)
    found, opened = told(config), open_corpus(config)
    parameters = sum(p.numel() for p in build_state(config, Mesh(), opened.vocab_size, CPU).model.parameters())
    held = rank_memory(config.model, config.parallel, config.train, vocab_size=275, device="cpu")
    file = TokenFile(corpus.prefix)
    assert found.fields["parameters"] == parameters and f"{parameters:,} parameters" in rows(found)["model"]
    assert found.fields["memory_predicted"] == held.total
    assert (found.fields["train_documents"], found.fields["train_samples"]) == (20, len(opened.datasets.train))
    assert found.fields["train_tokens"] == file.document_start(20)
    assert rows(found)["data"].startswith(f"train: 20 documents, {file.document_start(20):,} tokens,")
    assert "6 of 4 × 16 tokens, 384 tokens in all" in rows(found)["steps"]
    samples = len(opened.datasets.train)
    assert rows(found)["steps"].endswith(f": {384 / (16 * samples):.3g} epochs of {samples / 4:,.1f} steps")
    assert (found.fields["ranks"], found.fields["trained_parameters"]) == (1, parameters)
    assert found.fields["transport"] == "" and "talk" not in rows(found)["layout"]
    assert found.fields["vocab_size"] == opened.vocab_size == 275
    assert found.fields["products"] == settle(config, 275, Mesh().world, CPU).event() is not None
    assert "note" not in rows(found)


def test_the_first_line_is_said_once_where_ranks_were_started(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config(corpus, tmp_path)
    assert told(config).text.startswith("Colonnade ")
    monkeypatch.setattr(banners.launch, "is_rank", lambda: True)
    assert told(config).text.startswith("  model ")


def test_a_step_on_preferences_has_both_answers_of_each_pair() -> None:
    text = """
    model = { num_layers = 1, hidden_size = 16, num_heads = 2, seq_length = 8, head = "preferences" }
    data.train = "pairs"
    train = { steps = 6, global_batch_size = 4, micro_batch_size = 2, init_from = "w" }
    optim.learning_rate = 1.0
    run.folder = "r"
    """
    corpus: Any = SimpleNamespace(datasets=SimpleNamespace(train=range(20)))
    told = banners._steps(course(loads(text)), corpus)
    assert told == "6 of 4 × 16 tokens, 384 tokens in all: 1.2 epochs of 5.0 steps"


def test_of_changes_to_come_the_length_alone_is_told(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Memory and what is saved are as they are where the run goes on."""
    now = tiny.config(corpus, tmp_path, "checkpoint.every=4")
    coming = ["checkpoint.every=3", "train.steps=9", "train.micro_batch_size=4"]
    found, alone = told(now, whole=tiny.config(corpus, tmp_path, *coming)), told(now)
    assert rows(found)["steps"].startswith("9 of ") and rows(alone)["steps"].startswith("6 of ")
    assert found.fields["notes"] == alone.fields["notes"] and "saved every 4 steps" in found.fields["notes"][-1]
    assert rows(found)["memory"] == rows(alone)["memory"]


@pytest.mark.slow
def test_the_largest_stage_is_told_on_every_rank(corpus: TinyCorpus, tmp_path: Path) -> None:
    config = tiny.config(corpus, tmp_path, "parallel.pp=2", "model.num_layers=3", "train.micro_batch_size=1")
    found = run_on_ranks(lambda rank, _: told(config, build_mesh(Layout(pp=2), rank)), 2)
    stages = [
        rank_memory(config.model, config.parallel, config.train, vocab_size=275, stage=stage, device="cpu").total
        for stage in (0, 1)
    ]
    assert stages[0] != stages[1]
    assert [each.fields["memory_predicted"] for each in found] == [max(stages)] * 2
    assert "ranks talk through" in rows(found[0])["layout"] and "1f1b pipeline" in rows(found[0])["layout"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "tp 1 × pp 1 × dp 1"),
        ({"pp": 2, "schedule": "gpipe"}, "tp 1 × pp 2 × dp 1, gpipe pipeline"),
        (
            {"pp": 2, "schedule": "interleaved", "virtual_stages": 3},
            "tp 1 × pp 2 × dp 1, interleaved pipeline with 3 virtual stages",
        ),
        (
            {"tp": 2, "dp": 4, "zero": 1, "sequence_parallel": True, "recompute": "full", "offload": True},
            "tp 2 × pp 1 × dp 4, ZeRO 1, sequence parallelism, full recomputation, offload",
        ),
        ({"recompute": "selective"}, "tp 1 × pp 1 × dp 1, selective recomputation"),
    ],
)
def test_the_layout_in_words(keys: dict[str, Any], said: str) -> None:
    assert banners._layout(ParallelConfig(**keys), "") == said
    assert banners._layout(ParallelConfig(**keys), "gloo") == f"{said}; ranks talk through gloo"


OFFLOADED = Memory(1_000, 2_000, 3_000, 0, activations=5_000, operators=6_000, host=70_000)


def test_memory_in_words_has_what_is_offloaded_in_its_sum() -> None:
    assert banners._memory(OFFLOADED) == (
        "87.0 kB predicted for a rank (parameters 1.00 kB, gradients 2.00 kB, optimizer 73.0 kB, activations 5.00 kB, "
        "operators 6.00 kB), and what libraries need"
    )
    assert [len(list(banners._too_much(OFFLOADED, (free, 10**9), 1))) for free in (86_999, 87_000)] == [1, 0]
    assert list(banners._too_much(OFFLOADED, None, 1)) == []


def test_what_carries_numbers_is_told_of_every_axis() -> None:
    shared, gloo = object.__new__(SharedMemoryTransport), object()

    def carried(tp: object, pp: object, dp: object, device: str = "cpu") -> str:
        axes: Any = SimpleNamespace(**{name: SimpleNamespace(transport=each) for name, each in zip(
            ("tp", "pp", "dp"), (tp, pp, dp), strict=True
        )})  # fmt: skip
        return banners.transport(axes, torch.device(device))

    assert carried(None, None, None, "cuda") == carried(None, None, None) == ""
    assert [carried(*each) for each in ((gloo, None, None), (None, gloo, None), (None, None, gloo))] == ["gloo"] * 3
    assert carried(shared, None, shared) == "shared memory" and carried(gloo, shared, None) == "shared memory and gloo"
    assert carried(None, None, gloo, "cuda") == "NCCL"


def test_a_model_in_words() -> None:
    """With what of it is trained; of a T5 both stacks."""
    corpus: Any = SimpleNamespace(vocab_size=37)

    def said(case: Case) -> str:
        config = configured(case, Way(micro_batch_size=2))
        return banners._model(config, corpus, trained_architecture(config, 37))

    every = trained_architecture(configured(Case(), Way(micro_batch_size=2)), 37).num_parameters
    assert said(Case()) == (f"gpt, {every:,} parameters: 2 layers, hidden 16, 4 heads, sequences of 8, vocabulary 37")
    partly = trained_architecture(configured(Case(parts="upper"), Way(micro_batch_size=2)), 37)
    assert 0 < partly.num_trained < every
    assert said(Case(parts="upper")).startswith(
        f"gpt, {partly.num_trained:,} of {every:,} parameters trained: 2 layers"
    )
    model = configured(Case(block="t5"), Way(micro_batch_size=2)).model
    assert ": 2 encoder and 3 decoder layers, hidden 16, 4 heads, sequences of 8 tokens to read and " in said(
        Case(block="t5")
    )
    assert f" and {model.decoder_length} to write, vocabulary 37" in said(Case(block="t5"))


def test_why_it_is_a_cpu_is_told_where_nobody_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banners, "device_name", lambda device: "It")
    assert "finds no GPU here" in banners._device(CPU, "auto") and "finds no GPU" not in banners._device(CPU, "cpu")
    assert banners._device(CPU, "cpu").startswith("cpu, It, ") and "core" in banners._device(CPU, "cpu")
    assert banners._device(torch.device("cuda"), "auto") == "cuda, It"
    assert banners._free((1_000, 2_000), torch.device("cuda"), 1) == "1.00 kB of 2.00 kB of memory on the GPU"
    assert banners._free(None, CPU, 1) == "memory of this machine unknown"


def test_a_run_that_ends_with_its_warm_up_is_whole(corpus: TinyCorpus, tmp_path: Path) -> None:
    config = tiny.config(corpus, tmp_path, "train.steps=6", "optim.warmup_steps=6", "optim.decay_steps=6")
    assert "optim.warmup_steps" not in told(config).text


def test_without_a_tokenizer_or_a_validation_part_that_is_told(corpus: TinyCorpus, tmp_path: Path) -> None:
    config = tiny.config(corpus, tmp_path, ALL_EVALUATED)
    opened = open_corpus(config)
    bare = replace(opened, tokenizer=None, datasets=replace(opened.datasets, validation=None))
    notes = list(banners._notes(course(config), bare))
    assert [note.split(":")[0] for note in notes] == [
        "data.tokenizer is not set", "there is no validation part, so that nothing is evaluated"
    ]  # fmt: skip
    never = tiny.config(corpus, tmp_path, "train.evaluate_every=0")
    assert not any("validation part" in note for note in banners._notes(course(never), bare))
    assert "validation" in banners._data(opened) and "validation" not in banners._data(bare)


@pytest.mark.slow
def test_it_comes_before_the_first_step_and_into_the_events(config: Path, tmp_path: Path) -> None:
    answer = forked("train", config, ALL_EVALUATED)
    lines = answer.out.splitlines()
    assert lines[0] == f"Colonnade 0.1.0: training {tmp_path}/run on 1 rank."
    assert lines[1].split()[0] == "model" and "step 1/6" not in "".join(lines[:10]) and "step 1/6" in lines[10]
    assert lines[5].split(maxsplit=1) == ["products", "all blas (not measured: products are small)"]
    (setup,) = (event for event in events(tmp_path / "run") if event["event"] == "setup")
    assert setup["device"] == "cpu" and setup["precision"] == "fp32" and setup["layout"] == "pp1 dp1 tp1"


@pytest.mark.slow
def test_the_first_line_is_there_before_torch_is(config: Path) -> None:
    """Of several ranks: the process that starts them says it, once; the rest is rank 0's."""
    answer = colonnade("train", config, "train.steps=2", "parallel.tp=2")
    assert answer.status == 0, answer
    assert answer.out.count("Colonnade 0.1.0: training") == 1 and answer.out.startswith("Colonnade")
    assert answer.out.count("  layout ") == 1


@pytest.mark.slow
def test_a_token_file_that_does_not_name_its_tokenizer(corpus: TinyCorpus, tmp_path: Path) -> None:
    for ending in (".bin", ".idx"):
        shutil.copy(f"{corpus.prefix}{ending}", f"{tmp_path}/megatron{ending}")
    path = tiny.write_config(corpus, tmp_path)
    answer = forked("train", path, f"data.train={tmp_path}/megatron", ALL_EVALUATED)
    assert answer.out.count("note       ") == 1
    assert f"{tmp_path}/megatron has no megatron.json beside it: that data.tokenizer made it" in answer.out
    assert answer.out.count("tokenizer not checked)") == 2, "both validation lines"
    assert "note" not in rows(told(tiny.config(corpus, tmp_path, ALL_EVALUATED)))


def test_a_cache_for_no_url_is_told(corpus: TinyCorpus, tmp_path: Path) -> None:
    found = told(tiny.config(corpus, tmp_path, ALL_EVALUATED, "data.cache=copies"))
    assert rows(found)["note"] == 'data.cache = "copies" has no effect: no token file is named by a URL.'


def test_what_is_left_out_is_told(corpus: TinyCorpus, tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text("\n".join(corpus.text.read_text().splitlines()[:2]))
    short, other = tmp_path / "short", tmp_path / "other"
    for made in (short, other):
        tokenize_files([tmp_path / "short.jsonl"], made, Tokenizer.load(corpus.tokenizer), workers=1, progress=False)
    path = tiny.write_config(corpus, tmp_path)
    path.write_text(path.read_text().replace(f'train = "{corpus.prefix}"\n', ""))
    found = told(load(path, [f'data.blend={{"{corpus.prefix}"=1.0, "{short}"=1.0}}']))
    assert "1 of 2 files of data.blend have too little text for a validation sample" in found.text
    assert "no validation part" not in found.text
    found = told(load(path, [f'data.blend={{"{short}"=1.0, "{other}"=1.0}}', "train.evaluate_every=0"]))
    assert "2 of 2 files of data.blend have too little text for a validation sample" in found.text


@pytest.mark.parametrize(
    ("keys", "known"),
    [
        ((), "knows the last only"),
        (("checkpoint.every=4",), "knows the last only"),
        (("train.steps=7", "optim.decay_steps=7"), "chooses among those at multiples of 6 and the last"),
        (("checkpoint.every=1", "train.evaluate_every=2"), "chooses among those at multiples of 2 and the last"),
        (("checkpoint.keep_best=false",), None),
        (("train.evaluate_every=1",), None),
        (("train.evaluate_every=0",), None),
        (("checkpoint.every=0",), None),
        (("train.steps=2",), None),
    ],
)
def test_checkpoints_that_cannot_be_the_best_are_told(
    corpus: TinyCorpus, tmp_path: Path, keys: tuple[str, ...], known: str | None
) -> None:
    """Saved every 2 steps of 6 and evaluated every 3, only the last was evaluated when it was saved."""
    text = told(tiny.config(corpus, tmp_path, *keys)).text
    assert re.findall(r"keep_best (.*?)\.", " ".join(text.split())) == ([] if known is None else [known])


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        (("checkpoint.keep_every=3",), ["6"]),
        (("checkpoint.keep_every=6", "checkpoint.every=4"), ["12"]),
        (("checkpoint.keep_every=4",), []),
        (("checkpoint.keep_every=0",), []),
        (("checkpoint.keep_every=3", "checkpoint.every=0"), []),
    ],
)
def test_steps_to_be_kept_that_have_no_checkpoint_are_told(
    corpus: TinyCorpus, tmp_path: Path, keys: tuple[str, ...], kept: list[str]
) -> None:
    """Saved every 2 steps, where nothing else is set."""
    text = told(tiny.config(corpus, tmp_path, *keys)).text
    assert re.findall(r"keep_every = \d keeps those at multiples of (\d+) alone", " ".join(text.split())) == kept


def test_a_trial_within_the_warm_up(corpus: TinyCorpus, tmp_path: Path) -> None:
    """The beginning of the longer run: the same learning rates, and a word."""
    config = tiny.config(corpus, tmp_path, "train.steps=2", "optim.warmup_steps=20")
    assert "the run ends after 2 of optim.warmup_steps = 20: it is the beginning of a longer one" in told(config).text
    rate, longer = (
        build_state(each, Mesh(), 275, CPU).learning_rate
        for each in (config, tiny.config(corpus, tmp_path, "train.steps=50", "optim.warmup_steps=20"))
    )
    assert [rate(step) for step in (1, 2)] == [longer(step) for step in (1, 2)] == pytest.approx([5e-4, 1e-3])


def test_more_than_there_is(corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banners, "free_memory", lambda device: (100_000, 2_000_000))
    found = told(tiny.config(corpus, tmp_path))
    taken = amount(found.fields["memory_predicted"])
    assert taken == "311 kB"
    assert f"1 rank here will take {taken} by prediction, more than is free: lower" in found.text
    assert "100 kB of 2.00 MB of memory on this machine, for 1 rank" in found.text
    assert found.fields["memory_free"] == 100_000


def test_ranks_that_fit_one_by_one_take_more_than_there_is(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(banners, "free_memory", lambda device: (400_000, 2_000_000))
    config = tiny.config(corpus, tmp_path)
    assert "more than is free" not in told(config).text
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = re.search(r"2 ranks here will take (\d+) kB by prediction, more than is free: lower", told(config).text)
    assert found is not None and 400 < int(found[1]) <= 800


def test_a_state_that_no_gpu_can_hold(corpus: TinyCorpus, tmp_path: Path) -> None:
    """It is refused behind the banner; not so on CPUs, nor for what may be freed or is a prediction."""
    memory = Memory(parameters=2 * 10**9, gradients=4 * 10**9, optimizer=12 * 10**9, buffers=10**12, activations=10**12)
    assert banners._impossible(memory, (0, 18 * 10**9)) == ""
    assert banners._impossible(memory, (18 * 10**9, 18 * 10**9 - 1)) == (
        "this rank needs 18.0 GB for parameters, gradients and optimizer alone, and the GPU has 18.0 GB: use "
        "parallel.zero with more parallel.dp, parallel.offload, or more parallel.tp or pp"
    )
    assert banners._impossible(replace(memory, optimizer=0, host=10**12), (0, 7 * 10**9)) == ""
    for dry_run in (False, True):
        with pytest.raises(ConfigError, match="this rank needs"):
            loop.main(
                tiny.config(corpus, tmp_path),
                banner=lambda *_: Banner("", {}, "this rank needs more"),
                dry_run=dry_run,
            )


def test_each_rank_is_held_against_its_own_gpu(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of a pipeline differ, and so may the GPUs; a CPU has its swap space. All tell the most that one takes."""
    config = tiny.config(corpus, tmp_path, "parallel.pp=2")
    needs, has = (100, 60), (141, 80)

    def told_on_ranks(rank: int, device: str, has: Sequence[int]) -> tuple[str, int]:
        mesh, opened = build_mesh(Layout(pp=2), rank), open_corpus(config)
        monkeypatch.setattr(banners, "free_memory", lambda _: (has[rank], has[rank]))
        monkeypatch.setattr(banners, "device_name", lambda _: "a GPU")
        own = Memory(parameters=needs[rank], gradients=0, optimizer=0, buffers=0, activations=90 * rank)
        decision = settle(config, opened.vocab_size, mesh.world, CPU)
        found = banner(course(config), mesh, torch.device(device), opened, decision, own)
        return found.impossible, found.fields["memory_predicted"]

    def impossible(device: str, has: Sequence[int]) -> list[bool]:
        found = run_on_ranks(lambda rank, _: told_on_ranks(rank, device, has), 2)
        assert [predicted for _, predicted in found] == [60 + 90] * 2
        return [bool(text) for text, _ in found]

    assert impossible("cuda", has) == [False, False]
    assert impossible("cuda", has[::-1]) == [True, False]
    assert impossible("cpu", (1, 1)) == [False, False]


@pytest.mark.parametrize("own", ["batch/job", "batch/job/step/task"])
def test_a_limit_of_a_control_group_bounds_what_is_free_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    """As a batch system sets one for a job: not for the whole machine or container, nor for each of its steps."""
    for module in (machine, control_groups):
        monkeypatch.setattr(module, "Path", lambda path: tmp_path / path.lstrip("/"))
    for path, text in {
        "proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n",
        "proc/self/cgroup": f"0::/{own}\n",
        "sys/fs/cgroup/batch/memory.max": "max\n",
        "sys/fs/cgroup/batch/memory.current": "4000000\n",
        "sys/fs/cgroup/batch/job/memory.max": "3000000\n",
        "sys/fs/cgroup/batch/job/memory.current": "1000000\n",
        "sys/fs/cgroup/batch/job/step/memory.max": "max\n",
        "sys/fs/cgroup/batch/job/step/memory.current": "900000\n",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert free_memory(CPU) == (2_000_000, 3_000_000)
    (tmp_path / "sys/fs/cgroup/batch/memory.max").write_text("5500000\n")
    assert free_memory(CPU) == (1_500_000, 5_500_000), "a larger limit of which others have taken more"


def test_free_memory_is_below_what_there_is() -> None:
    found = free_memory(CPU)
    assert found is not None and 0 < found[0] <= found[1]
