"""By which kernels a run multiplies: one decision for all ranks, remembered, kept, and told."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade import gpu_kernels
from colonnade.checkpoint.manifest import read_manifest, to_json
from colonnade.checkpoint.names import MANIFEST
from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.errors import ConfigError
from colonnade.kernels import choice, compiled, timing
from colonnade.kernels.choice import BF16_UNITS, USES, WIDENED, Kernel, Kernels, Products, Use, usual
from colonnade.kernels.timing import Seconds, Slices
from colonnade.launch import launch
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.model.attention import Attention
from colonnade.train import loop, machine, products
from colonnade.train.metadata import ProductMetadata
from colonnade.train.products import Decision, served_by, settle, slices_of
from colonnade.train.remembered import FILE, MOST, recall, remember
from tests import tiny
from tests.commands import forked
from tests.distributed import run_on_ranks
from tests.emulated import emulated_amx
from tests.runs import Finished, assert_same, events, tensors
from tests.tiny import TinyCorpus

CPU = torch.device("cpu")
ONEDNN = Kernels("onednn", "onednn", "onednn", "onednn", "blas")


ALIKE = replace(WIDENED, forward="native", input_gradient="native")
"""What is chosen for bf16 where all kernels are as fast."""


class Timer:
    """Stands in for measuring: counts, and says that one kernel is the fastest wherever it is to be had."""

    def __init__(self, best: Kernel = "onednn") -> None:
        self.calls, self.best = 0, best

    def __call__(self, dtype: torch.dtype, sizes: Slices) -> Seconds:
        self.calls += 1
        every = {use: timing.candidates(dtype, use) for use in USES}
        several = {use: kernels for use, kernels in every.items() if len(kernels) > 1}
        return {use: {k: 1.0 if k == self.best else 2.0 for k in kernels} for use, kernels in several.items()}


@pytest.fixture(autouse=True)
def plain_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AMX, whatever runs the test, and without the compiled kernels that another test may have loaded."""
    monkeypatch.setattr(choice, "has_bf16_units", lambda: False)
    monkeypatch.setattr(compiled, "is_loaded", lambda: False)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Timer]:
    """Products are worth measuring, and what is measured is remembered in this test's folder."""
    timer = Timer()
    monkeypatch.setattr(products, "WORTH_IT", 0.0)
    monkeypatch.setattr(timing, "measure", timer)
    monkeypatch.setattr(launch, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(compiled, "prepare", lambda folder, processor: "")
    yield timer


def served(
    metadata: ProductMetadata | None, precision: str, sizes: Slices | None = None, device: torch.device = CPU
) -> Products:
    return served_by(metadata, precision, sizes, device, Mesh().world)


def settled(config: Config) -> Decision:
    return settle(config, 275, Mesh().world, CPU)


def test_small_products_are_not_measured(corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer()
    monkeypatch.setattr(timing, "measure", timer)
    for precision in ("fp32", "bf16", "fp16"):
        found = settled(tiny.config(corpus, tmp_path, f"train.precision={precision}"))
        assert (found.kernels, found.how) == (getattr(usual(), precision), "usual")
        assert found.products == usual()
    assert timer.calls == 0


def test_what_is_measured_are_slices_of_the_models_own_products(corpus: TinyCorpus, tmp_path: Path) -> None:
    large = ["model.hidden_size=384", "model.num_heads=6", "model.seq_length=256", "train.micro_batch_size=4"]
    config = tiny.config(corpus, tmp_path, *large)
    assert slices_of(config, 50304, 1) == Slices(256, 384, 1024, 8128, 384, 6, 256, 64)
    assert slices_of(config, 50304, 2) == Slices(256, 384, 768, 8128, 384, 3, 256, 64)
    assert slices_of(tiny.config(corpus, tmp_path), 275, 1) is None


def test_a_measurement_is_remembered(corpus: TinyCorpus, tmp_path: Path, timer: Timer) -> None:
    config = tiny.config(corpus, tmp_path, "train.precision=bf16")
    first, second = settled(config), settled(config)
    assert (timer.calls, first.how, second.how) == (1, "measured", "remembered")
    assert first.kernels == second.kernels == Kernels("onednn", "onednn", "onednn", "onednn", "blas")
    assert first.products.bf16 == first.kernels and first.products.fp32 == usual().fp32
    assert first.rates == second.rates and first.rates["forward"].keys() == {"blas", "onednn", "native"}
    sizes = slices_of(config, 275, 1)
    assert sizes is not None and first.rates["forward"]["onednn"] == sizes.flops["forward"] / 1e9, "in one second"
    event, rounded = first.event(), {name: round(rate, 1) for name, rate in first.rates["forward"].items()}
    assert event is not None and event["gflops"]["forward"] == rounded and event["gflops"].keys() == first.rates.keys()
    assert (event["kernels"], event["how"], event["precision"]) == (ONEDNN.table(), "measured", "bf16")
    settled(tiny.config(corpus, tmp_path, "train.precision=fp32"))
    assert timer.calls == 2, "another number format"
    settled(tiny.config(corpus, tmp_path, "train.precision=bf16", "model.hidden_size=32"))
    assert timer.calls == 3, "another model"


def test_another_version_of_the_compiled_kernels_is_measured_again(
    corpus: TinyCorpus, tmp_path: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "is_loaded", lambda: True)
    config = tiny.config(corpus, tmp_path, "train.precision=bf16")
    found = [settled(config).how for _ in range(2)]
    monkeypatch.setattr(compiled, "version", lambda: "after a change")
    assert [*found, settled(config).how] == ["measured", "remembered", "measured"] and timer.calls == 2


def test_a_processor_is_known_by_its_name_and_its_vector_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what else the system says of it, which the next kernel may say differently."""
    lines = ["model name\t: A  CPU", "flags\t\t: fpu fma avx2 sse2 hypervisor avx"]
    monkeypatch.setattr(machine, "lines_in", lambda path: lines)
    assert products.processor() == "A CPU; avx avx2 fma"


@pytest.mark.parametrize("damage", ["a file in the way", "no home", "not JSON", "another program's"])
def test_without_a_memory_it_is_measured_each_time(
    corpus: TinyCorpus, tmp_path: Path, timer: Timer, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    if damage == "a file in the way":
        folder.write_text("")
    elif damage == "no home":
        monkeypatch.setattr(launch, "cache_folder", lambda: None)
    else:
        folder.mkdir()
        (folder / FILE).write_text("{" if damage == "not JSON" else '{"a": {"forward": {"gpu": 1}}}')
    config = tiny.config(corpus, tmp_path)
    found = [settled(config).how for _ in range(2)]
    lost = damage in ("a file in the way", "no home")
    assert found == ["measured", "measured" if lost else "remembered"] and timer.calls == 1 + lost


def test_the_memory_is_bounded(tmp_path: Path) -> None:
    for number in range(MOST + 3):
        remember(tmp_path, str(number), {"forward": {"blas": 1.0}})
    known = [number for number in range(MOST + 3) if recall(tmp_path, str(number))]
    assert known == list(range(3, MOST + 3))


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert launch.cache_folder() == tmp_path / "colonnade"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = launch.cache_folder()
    assert found is not None and found.parent.parent in (tmp_path, tmp_path / "Library")


def on_ranks(config: Config, of_rank: Callable[[int], None]) -> list[tuple[Decision, int]]:
    """What two ranks decide, and how often each has measured; `of_rank` makes them differ."""

    def decide(rank: int, num_ranks: int) -> tuple[Decision, int]:
        of_rank(rank)
        timer = timing.measure
        assert isinstance(timer, Timer)
        found = settle(config, 275, build_mesh(Layout(tp=2), rank).world, CPU)
        return found, timer.calls

    return run_on_ranks(decide, 2)


def patched(**named: Any) -> None:
    for name, value in named.items():
        setattr(products, name, value)


@pytest.mark.usefixtures("timer")
def test_ranks_take_the_decision_of_one(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Each would measure something else."""

    def differ(rank: int) -> None:
        patched(timing=timing)
        timing.measure = Timer("native" if rank else "onednn")

    found = on_ranks(tiny.config(corpus, tmp_path, "train.precision=bf16"), differ)
    assert [decision.kernels for decision, _ in found] == [ONEDNN, ONEDNN]
    assert [calls for _, calls in found] == [1, 0]
    assert found[0][0].notes == ()


@pytest.mark.usefixtures("timer")
def test_ranks_on_different_processors_take_what_suits_both_and_say_so(corpus: TinyCorpus, tmp_path: Path) -> None:
    def times(rank: int) -> Timer:
        timer = Timer()
        seconds: Seconds = {"forward": {"blas": 2.0, "onednn": 1.0} if rank else {"blas": 1.0, "onednn": 9.0}}
        timer.__class__ = type("Timer", (Timer,), {"__call__": lambda self, dtype, sizes: _counted(self, seconds)})
        return timer

    def differ(rank: int) -> None:
        patched(processor=lambda: f"CPU {rank}; avx2")
        timing.measure = times(rank)

    found = on_ranks(tiny.config(corpus, tmp_path), differ)
    assert [calls for _, calls in found] == [1, 1]
    assert [decision.kernels for decision, _ in found] == [WIDENED, WIDENED], "9 times as slow on one is too slow"
    note = "ranks run on different processors (CPU 0 + CPU 1): products are those that suit all of them"
    assert all(decision.notes == (note,) for decision, _ in found)
    assert found[0][0].rates["forward"]["onednn"] < found[0][0].rates["forward"]["blas"]


@pytest.mark.usefixtures("timer")
def test_what_is_measured_for_one_of_two_processors_is_not_called_remembered(
    corpus: TinyCorpus, tmp_path: Path
) -> None:
    config = tiny.config(corpus, tmp_path)
    on_ranks(config, lambda rank: patched(processor=lambda: "CPU 0; avx2"))
    found = on_ranks(config, lambda rank: patched(processor=lambda: f"CPU {rank}; avx2"))
    assert [(decision.how, calls) for decision, calls in found] == [("measured", 0), ("measured", 1)]


def _counted(timer: Timer, seconds: Seconds) -> Seconds:
    timer.calls += 1
    return seconds


def test_ranks_whose_usual_kernels_differ_take_blas(corpus: TinyCorpus, tmp_path: Path) -> None:
    """One has bf16 units, the other has not, and products are too small to be measured."""
    config = tiny.config(corpus, tmp_path, "train.precision=bf16")

    def decide(rank: int, num_ranks: int) -> Decision:
        choice.has_bf16_units = lambda: rank == 0
        patched(processor=lambda: f"CPU {rank}; avx2")
        return settle(config, 275, build_mesh(Layout(tp=2), rank).world, CPU)

    assert [decision.kernels for decision in run_on_ranks(decide, 2)] == [WIDENED, WIDENED]


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "kernel", "expected"),
    [
        ("fp32", "blas", WIDENED),
        ("bf16", "blas", WIDENED),
        ("bf16", "onednn", ONEDNN),
        ("bf16", "native", BF16_UNITS),
        ("fp16", "blas", WIDENED),
    ],
)
def test_products_are_set_by_hand(
    corpus: TinyCorpus, tmp_path: Path, timer: Timer, precision: str, kernel: str, expected: Kernels
) -> None:
    found = settled(tiny.config(corpus, tmp_path, f"train.precision={precision}", f"train.products={kernel}"))
    assert (found.kernels, found.how, timer.calls) == (expected, "set", 0)
    assert kernel in found.line() and found.line().endswith("(as train.products says)")


def test_what_is_not_exact_here_is_refused(corpus: TinyCorpus, tmp_path: Path) -> None:
    with emulated_amx(), pytest.raises(ConfigError) as refused:
        settled(tiny.config(corpus, tmp_path, "train.products=onednn"))
    said = str(refused.value)
    assert said.startswith('train.products = "onednn" cannot be used here: on this processor (')
    assert "(forward) is off by" in said and said.endswith('Use one of "auto", "blas".')
    with emulated_amx(), pytest.raises(ConfigError, match=r'"native" cannot be .*Use one of "auto", "blas"\.$'):
        settled(tiny.config(corpus, tmp_path, "train.products=native"))


@pytest.mark.parametrize("use", USES)
def test_each_use_is_judged_by_the_kernel_that_it_would_have(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set by hand may stand for another kernel, where a use has no such."""
    judged: dict[Use, Kernel] = {}

    def error(kernel: Kernel, of: Use, dtype: torch.dtype) -> tuple[float, float]:
        judged[of] = kernel
        return (0.5 if of == use else 0.01), 0.01

    monkeypatch.setattr(timing, "error", error)
    with pytest.raises(ConfigError, match=r"is off by 5\.0e-01 of its norm, where rounding explains 1\.0e-02"):
        products.by_hand("native", "bf16")
    expected = BF16_UNITS.table()
    assert use in judged and judged.items() <= expected.items()


def test_what_is_not_there_is_refused(corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match='"native" cannot be used here: fp32 has one way'):
        settled(tiny.config(corpus, tmp_path, "train.products=native"))
    for module in (timing, products):
        monkeypatch.setattr(module, "has_onednn", lambda: False)
    with pytest.raises(ConfigError, match="built without oneDNN"):
        settled(tiny.config(corpus, tmp_path, "train.products=onednn"))


def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "prepare", lambda folder, processor: "there is no C++ compiler")


def test_without_a_compiler_there_are_the_others_and_that_is_said(
    corpus: TinyCorpus, tmp_path: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking(monkeypatch)
    timer.best = "compiled"
    found = settled(tiny.config(corpus, tmp_path, "train.precision=bf16"))
    (note,) = found.notes
    assert note.startswith("kernels could not be compiled on this machine (there is no C++ compiler): ")
    assert found.kernels == ALIKE and timer.calls == 1
    assert settled(tiny.config(corpus, tmp_path, "train.precision=fp32")).notes == found.notes
    with pytest.raises(
        ConfigError, match=r'"compiled" cannot be used here: there is no C\+\+ compiler\. Use one of "auto"'
    ):
        settled(tiny.config(corpus, tmp_path, "train.precision=bf16", "train.products=compiled"))


def test_nothing_is_compiled_where_it_does_not_matter(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(folder: Path | None, processor: str) -> str:
        raise AssertionError("7 seconds of a user's time")

    monkeypatch.setattr(compiled, "prepare", prepare)
    for given in (["train.precision=bf16"], ["train.precision=fp32"], ["train.precision=bf16", "train.products=blas"]):
        settled(tiny.config(corpus, tmp_path, *given))
    monkeypatch.setattr(products, "WORTH_IT", 0.0)
    settled(tiny.config(corpus, tmp_path, "train.precision=fp64"))
    settled(tiny.config(corpus, tmp_path, "train.products=blas"))
    with pytest.raises(AssertionError, match="7 seconds"):
        settled(tiny.config(corpus, tmp_path))


@pytest.mark.usefixtures("timer")
def test_compiled_kernels_are_used_where_every_rank_has_them(corpus: TinyCorpus, tmp_path: Path) -> None:
    def has_them(*ranks: int) -> Callable[[int], None]:
        def differ(rank: int) -> None:
            timing.measure = Timer("compiled")
            compiled.prepare = lambda folder, processor: "" if rank in ranks else "no compiler on that machine"
            compiled.is_loaded = lambda: rank in ranks

        return differ

    config = tiny.config(corpus, tmp_path, "train.precision=bf16")
    for decision, _ in on_ranks(config, has_them(0, 1)):
        assert decision.kernels is not None and decision.notes == ()
        assert (decision.kernels.weight_gradient, decision.kernels.output) == ("compiled", "compiled")
    shutil.rmtree(tmp_path / "cache")
    for decision, _ in on_ranks(config, has_them(0)):
        assert decision.kernels == ALIKE and "no compiler on that machine" in decision.notes[0]


def test_a_mistake_has_status_2_and_no_traceback(config: Path) -> None:
    for value, said in (
        ("native", "native to bf16 and fp16"),
        ("mkl", 'Use "auto", "blas", "onednn", "native" or "compiled"'),
    ):
        answer = forked("train", config, f"train.products={value}")
        assert answer.status == 2 and said in answer.err and "Traceback" not in answer.err


@pytest.mark.parametrize(("device", "precision", "where"), [("cuda", "bf16", "on CUDA"), ("cpu", "fp64", "in fp64")])
def test_where_there_is_no_choice_the_key_has_no_effect_and_that_is_said(
    corpus: TinyCorpus, tmp_path: Path, device: str, precision: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernels, "lacking", lambda: "")
    given = tiny.config(corpus, tmp_path, f"train.precision={precision}", "train.products=blas")
    found = settle(given, 275, Mesh().world, torch.device(device))
    assert found.kernels is found.metadata() is found.event() is None
    assert found.products == usual() and found.line() == ""
    assert found.notes == (f'train.products = "blas" has no effect {where}, where matrices are multiplied as they are',)
    unset = tiny.config(corpus, tmp_path, f"train.precision={precision}")
    assert settle(unset, 275, Mesh().world, torch.device(device)).notes == ()


def test_kernels_that_cannot_be_had_on_a_gpu_are_told(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernels, "lacking", lambda: "there is no Triton")
    bf16 = tiny.config(corpus, tmp_path, "train.precision=bf16")
    assert settle(bf16, 275, Mesh().world, torch.device("cuda")).notes == (
        "on 1 rank there is no Triton: masks and norms take several kernels each, on all ranks",
    )
    assert settle(bf16.model_copy(), 275, Mesh().world, torch.device("cpu")).notes == ()


@pytest.mark.parametrize("lacks", [True, False])
def test_all_ranks_do_without_the_kernels_that_one_has_not(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: bool
) -> None:
    config = tiny.config(corpus, tmp_path, "train.precision=bf16", "parallel.tp=2")

    def decided(rank: int, num_ranks: int) -> tuple[tuple[str, ...], bool]:
        monkeypatch.setattr(gpu_kernels, "lacking", lambda: "there is no Triton" if lacks and rank == 1 else "")
        notes = settle(config, 275, build_mesh(Layout(tp=2), rank).world, torch.device("cuda")).notes
        return notes, gpu_kernels.takes(torch.device("cuda"))

    notes = ("on 1 rank there is no Triton: masks and norms take several kernels each, on all ranks",) if lacks else ()
    assert run_on_ranks(decided, 2) == [(notes, not lacks)] * 2


# --- a run ------------------------------------------------------------------------------------------------------------


def train(config: Path, run: Path, *more: str, best: Kernel = "onednn", processor: str = "", num_ranks: int = 1) -> str:
    """Train with products that are worth a measurement, of which `best` is the fastest; returns what was said."""

    def first(rank: int) -> None:
        products.WORTH_IT = 0.0
        launch.cache_folder = lambda: None
        timing.measure = Timer(best)
        if processor:
            products.processor = lambda: processor

    answer = forked("train", config, f"run.folder={run}", *more, num_ranks=num_ranks, first=first)
    assert answer.status == 0, answer
    return answer.out


BF16 = "train.precision=bf16"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("parallel.tp=2",)], ids=["serial", "tp=2"])
def test_a_run_that_goes_on_multiplies_as_before_to_the_bit(
    config: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """Though another kernel would be chosen now."""
    ranks = 1 + len(layout)
    train(config, tmp_path / "whole", BF16, *layout, best="native", num_ranks=ranks)
    train(
        config, tmp_path / "cut", BF16, "train.steps=3", "optim.decay_steps=6", *layout, best="native", num_ranks=ranks
    )
    said = train(config, tmp_path / "cut", BF16, *layout, best="onednn", num_ranks=ranks)
    assert "forward native, input gradient native, weight gradient " in said and "(as before)" in said
    assert_same(tmp_path / "cut", tmp_path / "whole")
    ours, theirs = tensors(tmp_path / "cut"), tensors(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_kernels_are_told_and_written_down(config: Path, tmp_path: Path) -> None:
    said = train(config, tmp_path / "run", BF16)
    assert "  products   forward onednn " in said and "(GFLOP/s of a core, measured now)" in said
    (setup,) = [event for event in events(tmp_path / "run") if event["event"] == "setup"]
    assert setup["products"]["kernels"] == ONEDNN.table() and setup["products"]["how"] == "measured"
    assert set(setup["products"]["gflops"]["output"]) == {"blas", "onednn"}
    written = read_manifest(tmp_path / "run/checkpoints/step_00000006").metadata["products"]
    metadata = ProductMetadata.model_validate(written)
    assert metadata.kernels == ONEDNN.table() and metadata.precision == "bf16" and metadata.torch == torch.__version__
    assert metadata.processor == products.processor()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("best", ["native", "onednn", "blas"])
def test_the_layers_of_the_run_get_them(config: Path, tmp_path: Path, best: Kernel) -> None:
    """A run's layers, not only its banner."""
    build = loop.build_state

    def first(rank: int) -> None:
        products.WORTH_IT = 0.0
        launch.cache_folder = lambda: None
        timing.measure = Timer(best)
        loop.build_state = tell

    def tell(*given: Any, **more: Any) -> Any:
        state = build(*given, **more)
        blocks = [module for module in state.model.modules() if isinstance(module, Attention)]
        print("layers have", state.model.parallel.products.bf16.forward, {b.products.bf16.forward for b in blocks})
        return state

    answer = forked("train", config, f"run.folder={tmp_path / 'run'}", BF16, first=first)
    assert f"layers have {best} {{'{best}'}}" in answer.out, answer


@pytest.mark.slow
def test_on_another_processor_it_is_measured_again_and_said(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config, run, BF16, "train.steps=2", "optim.decay_steps=6", best="native", processor="Old CPU; avx2")
    said = train(config, run, BF16, "train.steps=4", "optim.decay_steps=6", best="onednn", processor="New CPU; avx2")
    again = "products were chosen on another processor (Old CPU, now New CPU), and are chosen again"
    assert again in said and "forward onednn" in said
    said = train(config, run, BF16, best="native", processor="New CPU; avx2 avx512f")
    assert "(New CPU, now with other vector units)" in said and "forward native" in said


@pytest.mark.slow
def test_setting_them_by_hand_ends_what_was_kept_and_unsetting_measures(config: Path, tmp_path: Path) -> None:
    run, end = tmp_path / "run", "optim.decay_steps=6"
    train(config, run, BF16, "train.steps=2", end, best="native")
    said = train(config, run, BF16, "train.steps=4", end, "train.products=blas")
    assert "all blas (as train.products says)" in said and 'train.products: "auto" -> "blas"' in said
    said = train(config, run, BF16, best="onednn")
    assert "forward onednn" in said and "measured now" in said and 'train.products: "blas" -> "auto"' in said


@pytest.mark.slow
def test_a_checkpoint_that_does_not_say_is_no_hindrance(config: Path, tmp_path: Path, timer: Timer) -> None:
    run = tmp_path / "run"
    train(config, run, "train.steps=2", "optim.decay_steps=6")
    given = load(config, [f"run.folder={run}"])
    path = run / "checkpoints/step_00000002" / MANIFEST
    kept, manifest = path.read_text(), read_manifest(path.parent)
    older = {name: fact for name, fact in manifest.metadata.items() if name != "products"}
    path.write_text(to_json(replace(manifest, metadata=older)))
    found = settled(given)
    assert found.how == "measured" and "does not say by what its matrices were multiplied" in found.notes[0]
    path.write_text("{")
    assert settled(given).notes == (), "whoever resumes will tell what is wrong with it"
    path.write_text(kept)
    assert settled(given).how == "kept"
    shutil.rmtree(run)
    assert settled(given).notes == ()


def having_widened(finished: Finished, folder: Path, **written: Any) -> Config:
    """A run whose checkpoint has kernels that would not be chosen now, with other things written beside them."""
    run = Path(shutil.copytree(finished.folder, folder / "run"))
    path = run / "checkpoints" / finished.newest.name / MANIFEST
    manifest = read_manifest(path.parent)
    before = {**manifest.metadata["products"], "kernels": WIDENED.table(), **written}
    path.write_text(to_json(replace(manifest, metadata={**manifest.metadata, "products": before})))
    return load(finished.config, [f"run.folder={run}"])


def gone_on(finished: Finished, folder: Path, **written: Any) -> Decision:
    """What such a run decides."""
    return settled(having_widened(finished, folder, **written))


@pytest.mark.parametrize(("before", "now"), [("kept", "kept"), ("measured", "kept"), ("set", "measured")])
def test_what_was_chosen_is_kept_and_what_was_set_is_not(
    finished: Finished, tmp_path: Path, timer: Timer, before: str, now: str
) -> None:
    """train.products is "auto" again: what a user had set is no choice of the run's own."""
    found = gone_on(finished, tmp_path, how=before)
    assert (found.how, found.kernels) == (now, WIDENED if now == "kept" else ONEDNN)
    assert timer.calls == (now != "kept") and found.notes == ()


def test_that_a_checkpoint_does_not_say_by_what_it_was_computed_is_told(
    finished: Finished, tmp_path: Path, timer: Timer
) -> None:
    config = having_widened(finished, tmp_path)
    path = Path(config.run.folder) / "checkpoints" / finished.newest.name / MANIFEST
    manifest = read_manifest(path.parent)
    del manifest.metadata["products"]
    path.write_text(to_json(manifest))
    found = settled(config)
    assert (found.how, found.kernels, timer.calls) == ("measured", ONEDNN, 1)
    assert [note.partition(":")[0] for note in found.notes] == [
        "the checkpoint does not say by what its matrices were multiplied"
    ]


@pytest.mark.usefixtures("timer")
def test_what_rank_0_has_read_of_the_checkpoint_all_ranks_keep(finished: Finished, tmp_path: Path) -> None:
    """The others read nothing: they would decide otherwise where they do not see it."""
    config = having_widened(finished, tmp_path)

    def decide(rank: int, num_ranks: int) -> Decision:
        if rank != 0:
            patched(checkpoints=lambda run: pytest.fail("it reads"))
        return settle(config, 275, build_mesh(Layout(dp=2), rank).world, CPU)

    assert [(each.how, each.kernels) for each in run_on_ranks(decide, 2)] == [("kept", WIDENED)] * 2


@pytest.mark.parametrize(
    ("written", "note"),
    [
        ({"processor": "Old CPU; avx2"}, "products were chosen on another processor (Old CPU, now "),
        (
            {"torch": "2.0"},
            "products were chosen under torch 2.0, and are chosen again: numbers may differ in rounding",
        ),
        ({"precision": "bf16"}, ""),
    ],
)
def test_elsewhere_they_are_chosen_again_and_that_is_said(
    finished: Finished, tmp_path: Path, timer: Timer, written: dict[str, str], note: str
) -> None:
    """In another number format there is nothing to keep."""
    found = gone_on(finished, tmp_path, how="kept", **written)
    assert (found.how, found.kernels, timer.calls) == ("measured", ONEDNN, 1)
    assert [said.startswith(note) for said in found.notes] == [True] * bool(note)


@pytest.mark.parametrize("content", [None, "{", "[]"], ids=["none", "cut off", "of another kind"])
def test_a_faulty_checkpoint_is_the_business_of_who_resumes(
    corpus: TinyCorpus, tmp_path: Path, content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone looks: what it raised here the others would not hear of."""
    config = tiny.config(corpus, tmp_path)
    folder = Path(config.run.folder) / "checkpoints" / "step_00000002"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / MANIFEST).write_text(content)
    assert (settled(config).how, settled(config).notes) == ("usual", ())

    def refused(*_: object) -> None:
        raise OSError("Input/output error")

    monkeypatch.setattr(products, "read_manifest", refused)
    assert (settled(config).how, settled(config).notes) == ("usual", ())


def going_on(
    finished: Finished, run: Path, version: str | None = None, **changed: Kernel
) -> tuple[Config, ProductMetadata]:
    """A run that may go on, and what its checkpoint says: as if some uses had other kernels, the compiled ones of some
    version (None: of this one).
    """
    shutil.copytree(finished.folder, run)
    path = run / "checkpoints/step_00000006" / MANIFEST
    manifest = read_manifest(path.parent)
    written = manifest.metadata["products"]
    assert written["compiled"] == "", "it had none"
    written["compiled"] = compiled.version() if version is None else version
    metadata = {**written, "kernels": {**written["kernels"], **changed}}
    path.write_text(to_json(replace(manifest, metadata={**manifest.metadata, "products": metadata})))
    return load(finished.config, [f"run.folder={run}"]), ProductMetadata.model_validate(metadata)


def test_a_run_that_goes_on_without_its_compiler_chooses_again_and_says_so(
    finished: Finished, tmp_path: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, before = going_on(finished, tmp_path / "run", output="compiled")
    kept = settled(given)
    assert kept.kernels == Kernels(**before.kernels) and kept.products.fp32.output == "compiled"
    assert (kept.how, kept.notes, timer.calls) == ("kept", (), 0)
    lacking(monkeypatch)
    found = settled(given)
    assert found.how == "measured" and found.products.fp32.output == "onednn"
    assert any("there is no C++ compiler" in note for note in found.notes)
    assert any("numbers may differ in rounding from here on" in note for note in found.notes)
    assert served(before, "fp32") == usual()
    monkeypatch.setattr(compiled, "prepare", lambda folder, processor: "")
    assert served(before, "fp32").fp32.output == "compiled"


@pytest.mark.parametrize("how", ["kept", "set"])
@pytest.mark.parametrize(("version", "said"), [(None, False), ("0123", True), ("", True)])
def test_another_version_of_the_compiled_kernels_is_said(
    finished: Finished, tmp_path: Path, version: str | None, said: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sums may have other bits. Older checkpoints do not say which they were."""
    monkeypatch.setattr(compiled, "prepare", lambda folder, processor: "")
    monkeypatch.setattr(products, "by_hand", lambda name, *_: Kernels(output=name))
    given, before = going_on(finished, tmp_path / "run", version, output="compiled")
    if how == "set":
        given = replace_products(given, "compiled")
    found = settled(given)
    which = "was computed by another" if version else "does not say by which"
    note = f"the checkpoint {which} version of the compiled kernels: numbers may differ in rounding"
    assert found.how == how and [text.startswith(note) for text in found.notes] == [True] * said
    metadata = found.metadata()
    assert metadata is not None and metadata["compiled"] == compiled.version() != before.compiled * said
    if how == "set":
        assert settled(replace_products(given, "blas")).notes == (), "there are none now"


def replace_products(config: Config, value: str) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"products": value})})


def test_a_kept_decision_without_compiled_kernels_compiles_nothing(
    finished: Finished, tmp_path: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, asked = going_on(finished, tmp_path / "run", **ONEDNN.table())[0], list[Path | None]()

    def prepare(folder: Path | None, processor: str) -> str:
        asked.append(folder)
        return ""

    monkeypatch.setattr(compiled, "prepare", prepare)
    found = settled(given)
    assert (found.how, found.kernels, timer.calls, asked) == ("kept", ONEDNN, 0, [])


def test_a_trained_model_in_use_multiplies_as_it_was_trained() -> None:
    metadata = ProductMetadata(
        precision="bf16", kernels=ONEDNN.table(), processor=products.processor(), torch=torch.__version__, how="kept"
    )
    assert served(metadata, "bf16") == usual().having("bf16", ONEDNN) != usual()
    assert served(None, "bf16") == served(metadata, "fp32") == usual()
    for other in ({"processor": "another"}, {"torch": "2.0"}):
        assert served(metadata.model_copy(update=other), "bf16") == usual()


def test_a_trained_model_from_elsewhere_multiplies_by_what_is_fastest_here(timer: Timer) -> None:
    assert served(None, "fp32", timing.SMALL) == usual().having("fp32", ONEDNN)
    assert served(None, "fp32", timing.SMALL).fp32 == ONEDNN and timer.calls == 1, "it is remembered"
    assert served(None, "fp64", timing.SMALL) == usual()
    assert served(None, "fp32", timing.SMALL, torch.device("cuda")) == usual() and timer.calls == 1
