"""What is told of the kernels that a run multiplies by, and which stand in for those that a use has not got."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colonnade.checkpoint.manifest import read_manifest, to_json
from colonnade.checkpoint.names import MANIFEST
from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.kernels import compiled, timing
from colonnade.kernels.choice import USES, WIDENED, Kernel, Kernels
from colonnade.kernels.timing import Slices
from colonnade.train import products
from colonnade.train.products import slices_of
from tests import tiny
from tests.runs import Finished
from tests.tiny import TinyCorpus
from tests.train import test_products
from tests.train.test_products import ONEDNN, Timer, gone_on, lacking, on_ranks, patched, settled

plain_processor, timer = test_products.plain_processor, test_products.timer


@pytest.mark.parametrize("best", ["blas", "onednn"])
def test_what_was_measured_is_told_of_each_use_though_one_kernel_is_the_fastest_for_all(
    corpus: TinyCorpus, tmp_path: Path, timer: Timer, best: Kernel
) -> None:
    timer.best = best
    config = tiny.config(corpus, tmp_path, "train.precision=fp32")
    for how in ("now", "before on this machine"):
        found = settled(config)
        told = [f"{use.replace('_', ' ')} {best} {found.rates[use][best]:,.0f}" for use in USES if use != "attention"]
        assert found.line() == f"{', '.join(told)} (GFLOP/s of a core, measured {how})"


def test_what_was_not_measured_is_told_in_one_word_where_that_says_as_much(corpus: TinyCorpus, tmp_path: Path) -> None:
    assert settled(tiny.config(corpus, tmp_path)).line() == "all blas (not measured: products are small)"
    several = products.Decision("fp32", Kernels(forward="onednn"), "kept")
    words = "forward onednn, input gradient blas, weight gradient blas, output blas (as before)"
    assert several.line() == words


def test_where_each_product_has_one_kernel_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch is built without oneDNN, on macOS say."""
    monkeypatch.setattr(products.timing, "candidates", lambda *_: ["blas"])
    assert products.Decision("fp32", Kernels(), "usual").line() == ""


@pytest.mark.parametrize(
    ("kernel", "precision", "in_their_place"),
    [
        ("compiled", "fp32", {}),
        ("compiled", "bf16", {}),
        ("compiled", "fp16", {"attention": "native"}),
        ("native", "fp16", {"weight_gradient": "onednn", "output": "onednn"}),
        ("onednn", "bf16", {"attention": "blas"}),
    ],
)
def test_a_use_without_the_kernel_that_is_set_has_what_comes_closest(
    kernel: Kernel, precision: str, in_their_place: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (timing, products):
        monkeypatch.setattr(module, "has_onednn", lambda: True)
    monkeypatch.setattr(compiled, "is_loaded", lambda: True)
    monkeypatch.setattr(timing, "error", lambda *_: (0.0, 1.0))
    assert products.by_hand(kernel, precision).table() == dict.fromkeys(USES, kernel) | in_their_place


@pytest.mark.parametrize(("how", "is_said"), [("kept", True), ("measured", True), ("set", False)])
def test_compiled_kernels_are_missed_by_a_run_that_had_chosen_them_itself(
    finished: Finished, tmp_path: Path, timer: Timer, how: str, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a user had set are told with the key that has changed."""
    lacking(monkeypatch)
    found = gone_on(finished, tmp_path, how=how, kernels={**WIDENED.table(), "output": "compiled"})
    note = "products were computed by compiled kernels, and are chosen again without: "
    assert (found.how, timer.calls) == ("measured", 1)
    assert [said.startswith(note) for said in found.notes] == [False, True][: 1 + is_said]


def going_on(finished: Finished, folder: Path, **written: Any) -> Config:
    """A run whose checkpoint says these things of its products; with none of them, nothing."""
    run = Path(shutil.copytree(finished.folder, folder / "run"))
    path = run / "checkpoints" / finished.newest.name / MANIFEST
    manifest = read_manifest(path.parent)
    rest = {name: each for name, each in manifest.metadata.items() if name != "products"}
    said = {"products": {**manifest.metadata["products"], **written}} if written else {}
    path.write_text(to_json(replace(manifest, metadata=rest | said)))
    return load(finished.config, [f"run.folder={run}"])


def test_a_checkpoint_that_does_not_say_matters_where_other_kernels_than_the_usual_are_chosen(
    finished: Finished, tmp_path: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = going_on(finished, tmp_path)
    (note,) = settled(given).notes
    assert note.startswith("the checkpoint does not say by what its matrices were multiplied: numbers may differ")
    monkeypatch.setattr(products, "WORTH_IT", 2.0**60)
    assert (settled(given).how, settled(given).notes) == ("usual", ())


def test_ranks_on_different_processors_say_so_in_each_start(finished: Finished, tmp_path: Path, timer: Timer) -> None:
    given = going_on(finished, tmp_path, processor="CPU 0; avx2 + CPU 1; avx2", kernels=ONEDNN.table())
    note = "ranks run on different processors (CPU 0 + CPU 1): products are those that suit all of them"
    for decision, calls in on_ranks(given, lambda rank: patched(processor=lambda: f"CPU {rank}; avx2")):
        assert (decision.how, decision.kernels, decision.notes, calls) == ("kept", ONEDNN, (note,), 0)


def test_what_was_measured_without_compiled_kernels_is_measured_again_with_them(
    corpus: TinyCorpus, tmp_path: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a compiler has been installed."""
    config, timer.best = tiny.config(corpus, tmp_path), "compiled"
    assert settled(config).kernels == WIDENED
    monkeypatch.setattr(compiled, "is_loaded", lambda: True)
    found = settled(config)
    assert found.how == "measured" and found.kernels is not None and found.kernels.output == "compiled"
    assert [settled(config).how, timer.calls] == ["remembered", 2]


def test_compiled_kernels_of_a_run_that_had_none_are_no_other_version(
    finished: Finished, tmp_path: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "is_loaded", lambda: True)
    timer.best = "compiled"
    found = gone_on(finished, tmp_path, how="set")
    assert (found.how, found.notes) == ("measured", ()) and found.products.fp32.output == "compiled"


def test_a_processor_that_has_other_vector_units_by_now_is_named_once(
    finished: Finished, tmp_path: Path, timer: Timer
) -> None:
    name = products.processor().partition(";")[0]
    (note,) = gone_on(finished, tmp_path, processor=f"{name}; none").notes
    assert note.startswith(f"products were chosen on another processor ({name}, now with other vector units), and are")


def test_a_product_with_the_vocabulary_is_worth_a_measurement_though_no_other_is(
    corpus: TinyCorpus, tmp_path: Path
) -> None:
    config = tiny.config(corpus, tmp_path, "train.micro_batch_size=4", "train.global_batch_size=8")
    assert slices_of(config, 275, 1) is None
    assert slices_of(config, 64_000, 1) == Slices(64, 16, 64, 8128, 16, config.model.num_heads, 16, 8)
    assert slices_of(config, 64_000, 4) is None, "of which each rank has a part"
