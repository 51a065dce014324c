"""Which kernels multiply what, where nothing was measured."""

import pytest
import torch

from colonnade.kernels.choice import AS_THEY_ARE, BF16_UNITS, WIDENED, Kernels, Products, usual

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("units", [True, False])
def test_bf16_is_multiplied_as_it_is_where_the_processor_has_units_for_it(
    units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those multiply bf16 alone: fp16 is widened on every processor."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: units)
    found = {dtype: usual().of(torch.empty(1, dtype=dtype)) for dtype in (FP32, BF16, FP16)}
    assert found == {FP32: WIDENED, BF16: BF16_UNITS if units else WIDENED, FP16: WIDENED}


def test_each_number_format_has_kernels_of_its_own() -> None:
    one, two, three = (Kernels(forward=each) for each in ("blas", "onednn", "native"))
    products = Products(fp32=one, bf16=two, fp16=three)
    assert [products.of(torch.empty(1, dtype=dtype)) for dtype in (FP32, BF16, FP16)] == [one, two, three]
    assert products.of(torch.empty(1, dtype=torch.float64)) == AS_THEY_ARE, "in which there is no choice"
    assert products.having("fp16", one) == Products(fp32=one, bf16=two, fp16=one)


def test_what_is_summed_in_fp32_is_never_a_16_bit_product() -> None:
    for kernels in (AS_THEY_ARE, WIDENED, BF16_UNITS):
        assert "native" not in (kernels.weight_gradient, kernels.output)
    assert {WIDENED.table()[use] for use in WIDENED.table()} == {"blas"}, "every use is widened"
