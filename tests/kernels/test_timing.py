"""Which kernels are to be had, which of them are exact, and which is taken: with faked processors and clocks."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade.kernels import compiled, timing
from colonnade.kernels.choice import BF16_UNITS, USES, WIDENED, Kernel, Kernels, Use
from colonnade.kernels.timing import SMALL, Seconds, Slices, candidates, chosen, error, is_exact, measure, trial
from tests.emulated import Noted, emulated_amx

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
PRODUCTS: tuple[Use, ...] = ("forward", "input_gradient", "weight_gradient", "output")


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not another test has loaded the compiled kernels into this process."""
    monkeypatch.setattr(compiled, "is_loaded", lambda: False)


def test_compiled_kernels_are_candidates_for_all_that_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "is_loaded", lambda: True)
    for dtype in (FP32, BF16, FP16):
        without = [use for use in USES if "compiled" not in candidates(dtype, use)]
        assert without == (["attention"] if dtype is FP16 else [])
        assert all(("native" in candidates(dtype, use)) == (dtype is not FP32) for use in ("forward", "input_gradient"))


def test_compiled_kernels_that_this_processor_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_no_units(*_: object, **__: object) -> None:
        raise RuntimeError("only supported on X64 with other units")

    monkeypatch.setattr(compiled, "is_loaded", lambda: True)
    monkeypatch.setattr(compiled, "product_", has_no_units)
    for use in ("weight_gradient", "output"):
        assert not is_exact("compiled", use, BF16)
    monkeypatch.setattr(torch, "mm", has_no_units)
    with pytest.raises(RuntimeError, match="other units"):
        error("blas", "output", BF16)  # of others it is an error of the program


def test_fp32_stays_fp32_and_what_is_summed_in_fp32_is_never_native() -> None:
    assert {use: candidates(FP32, use) for use in PRODUCTS} == dict.fromkeys(PRODUCTS, ("blas", "onednn"))
    for dtype in (BF16, FP16):
        assert [use for use in USES if "native" in candidates(dtype, use)] == ["forward", "input_gradient", "attention"]


def test_without_onednn_there_are_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "has_onednn", lambda: False)
    assert candidates(FP32, "forward") == ("blas",) and candidates(BF16, "output") == ("blas",)
    assert candidates(BF16, "forward") == ("blas", "native")
    assert measure(FP32, SMALL) == {}, "nothing to choose"
    assert set(measure(BF16, SMALL)) == {"forward", "input_gradient", "attention"}


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("use", USES)
def test_blas_is_always_exact(use: Use, dtype: torch.dtype) -> None:
    found, allowed = error("blas", use, dtype)
    assert found <= allowed <= 0.01
    assert use not in ("weight_gradient", "output") or allowed == timing.TRUE_FP32


@pytest.mark.parametrize("use", ["forward", "weight_gradient", "output"])
def test_what_rounds_fp32_to_bf16_is_refused(use: Use) -> None:
    """A processor with bf16 units does so under oneDNN's setting: fine for bf16 operands, and for no others."""
    with emulated_amx():
        assert error("onednn", use, FP32)[0] > 1e-3
        exact = {dtype: is_exact("onednn", use, dtype) for dtype in (FP32, BF16, FP16)}
    assert exact == {FP32: False, BF16: True, FP16: False}


@pytest.mark.parametrize(("found", "right"), [(1e-6, True), (2e-6, False), (math.inf, False)])
def test_as_far_off_as_is_allowed_is_exact(found: float, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "error", lambda kernel, use, dtype: (found, 1e-6))
    assert is_exact("blas", "forward", FP32) is right


def test_a_sum_in_16_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.nn.functional.linear

    def in_halves(x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        parts = [plain(a, b) for a, b in zip(x.split(8, -1), weight.split(8, -1), strict=True)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    monkeypatch.setattr(torch.nn.functional, "linear", in_halves)
    assert not is_exact("native", "forward", BF16)


@pytest.fixture
def refused() -> list[Kernel]:
    """What is not exact on this processor."""
    return []


@pytest.fixture
def times(refused: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Kernel, float]]:
    """Seconds of every product by kernel, on this clock."""
    told: dict[Kernel, float] = {"blas": 4.0, "onednn": 2.0, "native": 1.0}

    def seconds(tried: object, kernel: Kernel, clock: Callable[[], float]) -> float:
        return told[kernel]

    monkeypatch.setattr(timing, "_seconds", seconds)
    monkeypatch.setattr(timing, "is_exact", lambda kernel, use, dtype: kernel not in refused)
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    yield told


def test_the_fastest_of_each_use_is_chosen(times: dict[Kernel, float]) -> None:
    found = measure(BF16, SMALL)
    assert found["forward"] == times and found["output"] == {"blas": 4.0, "onednn": 2.0}
    assert chosen([found], WIDENED) == Kernels("native", "native", "onednn", "onednn", "native")
    assert chosen([measure(FP32, SMALL)], WIDENED) == Kernels("onednn", "onednn", "onednn", "onednn", "blas")


@pytest.mark.usefixtures("times")
def test_what_is_refused_is_never_chosen_however_fast(refused: list[Kernel]) -> None:
    refused += ["onednn", "native"]
    for dtype in (FP32, BF16, FP16):
        found = measure(dtype, SMALL)
        assert all(set(kernels) == {"blas"} for kernels in found.values()) and chosen([found], WIDENED) == WIDENED


def test_what_is_hopeless_on_small_products_is_not_tried_on_large_ones(times: dict[Kernel, float]) -> None:
    times["native"] = 2.0 * timing.HOPELESS + 0.1
    assert set(measure(BF16, SMALL)["forward"]) == {"blas", "onednn"}


def test_the_usual_kernel_is_left_only_for_a_clearly_faster_one() -> None:
    def fp32(blas: float, onednn: float) -> Seconds:
        return {use: {"blas": blas, "onednn": onednn} for use in PRODUCTS}

    assert chosen([fp32(1.02, 1.0)], WIDENED) == WIDENED
    assert chosen([fp32(1.05, 1.0)], WIDENED).forward == "onednn"
    assert chosen([fp32(1.0, 1.02)], BF16_UNITS).output == "onednn"


def test_what_spares_memory_is_left_only_for_what_is_clearly_faster_too() -> None:
    def output(blas: float, compiled: float) -> Seconds:
        return {"output": {"blas": blas, "onednn": 1.5, "compiled": compiled}}

    assert chosen([output(1.0, 1.14)], WIDENED).output == "compiled"
    assert chosen([output(1.0, 1.16)], WIDENED).output == "blas"
    assert chosen([output(1.02, 1.16), output(1.0, 1.14)], WIDENED).output == "compiled"
    assert chosen([{"weight_gradient": {"blas": 1.01, "compiled": 1.0}}], WIDENED).weight_gradient == "blas"


@pytest.mark.parametrize("use", ["forward", "input_gradient"])
def test_results_of_16_bits_are_written_as_such_where_that_is_about_as_fast(use: Use) -> None:
    """A slice's in fp32 fit a cache, and a model's do not."""
    for native, expected in ((1.04, "native"), (1.06, "compiled")):
        for usual in (WIDENED, BF16_UNITS):
            found = chosen([{use: {"blas": 2.0, "native": native, "compiled": 1.0}}], usual)
            assert getattr(found, use) == expected


def test_several_processors_get_what_suits_the_one_that_likes_it_least() -> None:
    one: Seconds = {"forward": {"blas": 2.0, "onednn": 1.0, "native": 1.8}}
    other: Seconds = {"forward": {"blas": 1.0, "onednn": 5.0, "native": 1.1}}
    assert chosen([one], WIDENED).forward == "onednn" and chosen([other], WIDENED).forward == "blas"
    assert chosen([one, other], WIDENED).forward == "native"
    del other["forward"]["native"]  # not exact there
    assert chosen([one, other], WIDENED).forward == "blas"
    assert chosen([other, one], WIDENED).forward == "blas", "in whatever order they are"


@pytest.mark.parametrize("usual", [WIDENED, BF16_UNITS])
def test_what_was_not_measured_keeps_the_usual_kernel(usual: Kernels) -> None:
    found = chosen([{"forward": {"blas": 2.0, "native": 3.0, "onednn": 1.0}}], usual)
    assert found == replace(usual, forward="onednn")


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_measuring_takes_true_times_on_one_core_and_leaves_no_trace(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    setting = torch.backends.mkldnn.matmul
    before, threads, seed = setting.fp32_precision, torch.get_num_threads(), torch.initial_seed()
    state = torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        found = measure(dtype, SMALL._replace(tokens=64))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert all(seconds > 0.0 for kernels in found.values() for seconds in kernels.values())
    assert all("blas" in kernels for kernels in found.values())
    assert setting.fp32_precision == before and torch.initial_seed() == seed
    assert torch.equal(torch.get_rng_state(), state)


UNLIKE = Slices(tokens=8, inputs=16, outputs=24, rows=40, width=32, heads=3, positions=12, head_width=56)


class Operators(TorchDispatchMode):
    """Within: operations of matrix products, and the names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        if self.names[-1] in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("use", PRODUCTS)
def test_what_is_timed_is_what_its_flops_say(use: Use) -> None:
    """All three products of the output layer, one of the other uses."""
    tried = trial(use, FP32, UNLIKE)
    with Operators() as done:
        tried.run("blas")
    assert done.flops == UNLIKE.flops[use]


def test_attention_is_timed_forward_and_backward() -> None:
    """Seven products of [n, s, s, d], of which a causal half counts."""
    with Operators() as done:
        trial("attention", BF16, UNLIKE).run("blas")
    names = [name for name in done.names if "attention" in name]
    assert len(names) == 2 and names[1] == f"{names[0]}_backward"
    assert UNLIKE.flops["attention"] == 7 * 2 * (3 * 12 * 12 * 56) / 2


@pytest.mark.parametrize("use", PRODUCTS)
def test_each_kernel_is_timed_as_itself(use: Use) -> None:
    plain = torch.backends.mkldnn.matmul.fp32_precision
    for kernel in candidates(BF16, use):
        tried = trial(use, BF16, SMALL)
        with Noted() as products:
            tried.run(kernel)
        made = "bf16" if kernel == "onednn" else plain, BF16 if kernel == "native" else FP32
        assert {found[1:] for found in products.seen} == {made}


def test_rounds_go_on_until_there_are_enough_and_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a slow product at least ROUNDS are timed, of quick ones as many as there is time for."""
    calls: list[float] = []
    monkeypatch.setattr(timing, "_seconds", lambda *_: calls.append(0.0) or 1.0)
    monkeypatch.setattr(timing, "_promising", lambda dtype, use, kernels, clock: kernels[:1])
    found = []
    for seconds in (0.0, 0.05):
        monkeypatch.setattr(timing, "SECONDS", seconds)
        calls.clear()
        measure(FP32, SMALL)
        found.append(len(calls) / len(PRODUCTS))
    assert found[0] == timing.ROUNDS < found[1]


def test_what_is_timed_is_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only a kernel's work moves on: those whose time is hopeless are left out."""
    took = {"blas": 2.0, "onednn": 0.5, "native": 0.6}
    clock = [0.0]

    def run(kernel: Kernel) -> None:
        clock[0] += took[kernel]

    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(timing, "is_exact", lambda *_: True)
    monkeypatch.setattr(
        timing, "trial", lambda *_: timing.Trial(run, lambda kernel: torch.ones(1), lambda: torch.ones(1))
    )
    assert measure(FP32, SMALL, clock=lambda: clock[0]) == {use: {"blas": 2.0, "onednn": 0.5} for use in PRODUCTS}
    took["onednn"] = 0.4
    assert measure(FP32, SMALL, clock=lambda: clock[0]) == {use: {"onednn": pytest.approx(0.4)} for use in PRODUCTS}


def test_fused_attention_may_be_off_by_two_roundings_more() -> None:
    """It rounds the probabilities that it multiplies with, too."""
    for use in ("forward", "attention"):
        right = timing.trial(use, BF16, SMALL).right()
        rounding = float((right.bfloat16().double() - right).norm() / right.norm())
        assert error("native", use, BF16)[1] == pytest.approx((3.0 if use == "attention" else 1.5) * rounding)


@pytest.mark.parametrize("use", ["output", "attention"])
def test_compiled_kernels_that_are_not_loaded_are_infinitely_wrong(use: Use) -> None:
    """Nothing is tried: who asks why a kernel is refused is told so."""
    assert error("compiled", use, BF16) == (float("inf"), 0.0)


def test_a_kernel_that_the_processor_lacks_is_infinitely_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_no_units(*_: object, **__: object) -> None:
        raise RuntimeError("only supported on X64 with other units")

    monkeypatch.setattr(compiled, "is_loaded", lambda: True)
    monkeypatch.setattr(compiled, "product_", has_no_units)
    assert error("compiled", "output", BF16) == (float("inf"), 0.0)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_errors_are_shares_of_the_norm(dtype: torch.dtype, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is right, whatever its size. What one rounding to 16 bits explains is allowed one and a half times."""
    right = torch.tensor([[3.0, 4.0], [1.2, 0.7]], dtype=torch.float64) * size
    wrong = (1.25 * right).to(dtype)
    monkeypatch.setattr(
        timing, "trial", lambda *_: timing.Trial(lambda kernel: None, lambda kernel: wrong, lambda: right)
    )
    found, allowed = error("blas", "forward", dtype)
    assert found == pytest.approx(float((wrong.double() - right).norm() / right.norm())) == pytest.approx(0.25, 0.02)
    rounding = float((right.to(dtype).double() - right).norm() / right.norm())
    assert allowed == (timing.TRUE_FP32 if dtype is FP32 else pytest.approx(1.5 * rounding))
    assert not is_exact("blas", "forward", dtype)


def test_the_least_time_of_all_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may have had the processor in any of them, the first and the last too."""
    taken = {"blas": [3.0, 1.0, 2.0], "onednn": [0.5, 4.0, 5.0]}
    left = {use: {kernel: list(times) for kernel, times in taken.items()} for use in PRODUCTS}
    tried = {use: trial(use, FP32, SMALL) for use in PRODUCTS}
    of = {id(each): use for use, each in tried.items()}

    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(timing, "_promising", lambda dtype, use, kernels, clock: kernels)
    monkeypatch.setattr(timing, "trial", lambda use, dtype, sizes: tried[use])
    monkeypatch.setattr(timing, "_seconds", lambda each, kernel, clock: left[of[id(each)]][kernel].pop(0))
    assert measure(FP32, SMALL) == {use: {"blas": 1.0, "onednn": 0.5} for use in PRODUCTS}
