"""The best layout for the ranks that are left: one that the checks admit, with the same batch, and with its reasons."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.config.check import check
from colonnade.config.fitting import fitting, speed, state_share
from colonnade.config.load import apply_, build, loads
from colonnade.config.schema import Config
from colonnade.errors import ConfigError


def config(parallel: str = "", train: str = "", model: str = "") -> Config:
    return loads(
        f"[model]\nnum_layers = 4\nhidden_size = 48\nnum_heads = 12\nseq_length = 32\n{model}\n[parallel]\n{parallel}\n"
        '[data]\ntrain = "x"\n[train]\nsteps = 8\nmicro_batch_size = 2\n'
        f'{train or "global_batch_size = 16"}\n[optim]\nlearning_rate = 1e-3\n[run]\nfolder = "r"\n'
    )


def layout(found: Config) -> tuple[int, int, int]:
    return found.parallel.tp, found.parallel.pp, found.parallel.dp


@pytest.mark.parametrize(
    ("parallel", "ranks", "expected"),
    [
        ("tp=2\ndp=2", 4, (2, 1, 2)),
        ("tp=2\ndp=2", 9, (2, 1, 2)),
        ("tp=2\ndp=2", 2, (2, 1, 1)),
        ("tp=2\ndp=2", 1, (1, 1, 1)),
        ("dp=4", 3, (1, 3, 1)),  # 3 does not divide the batch: three even stages wait for a fifth of a step
        ("dp=4", 2, (1, 1, 2)),
        ("tp=4", 3, (1, 3, 1)),
        ("tp=4", 2, (2, 1, 1)),
        ("pp=4", 2, (1, 2, 1)),
        ("tp=4\nzero=3", 2, (2, 1, 1)),  # as near to what it was as it can be
    ],
)
def test_what_is_chosen(parallel: str, ranks: int, expected: tuple[int, int, int]) -> None:
    assert layout(fitting(config(parallel), ranks).config) == expected


def test_a_rank_holds_no_more_where_that_can_be_had() -> None:
    """With 3 of 4 ranks, tp 2 × dp 1 holds what it held; dp 2 would be as fast and hold twice as much."""
    whole = config("tp=2\ndp=2")
    found = fitting(whole, 3)
    assert state_share(found.config) <= state_share(whole) and found.num_ranks in (2, 3)
    assert "no more state than before" in found.reason and "instead of tp 2 × pp 1 × dp 2 for 3 ranks" in found.reason
    assert " for 1 rank: a rank holds 2 times as much state" in fitting(whole, 1).reason


def test_a_rank_holds_what_its_copies_do_not() -> None:
    """Of four: weights, gradients and two moments. ZeRO 1, 2 and 3 leave a half of each; tp and pp a share of all."""
    shares = [state_share(config(f"dp=2\nzero={zero}")) for zero in range(4)]
    assert shares == [1, Fraction(3, 4), Fraction(5, 8), Fraction(1, 2)]
    assert state_share(config("tp=2\npp=2\ndp=2\nzero=1")) == Fraction(3, 16)


def test_stages_may_be_more_than_one_stack_has_layers() -> None:
    """A T5 has two."""
    whole = config("pp=6", model='kind = "t5"\nposition = "relative"')
    assert whole.model.num_layers == 4 and layout(fitting(whole, 5).config) == (1, 5, 1)


def test_stages_wait_less_where_each_has_several_chunks() -> None:
    """Of eight micro-batches; of six units four stages have two at most, as if there were eight."""
    assert speed(config("pp=2")) == 2 * Fraction(8, 9)
    assert speed(config('pp=2\nschedule="interleaved"\nvirtual_stages=2')) == 2 * Fraction(8 * 2, 8 * 2 + 1)
    assert speed(config("pp=4")) == 4 * Fraction(8, 11) * Fraction(6, 8)


def test_ranks_that_nobody_uses_are_told() -> None:
    whole = config("tp=2\ndp=4")
    assert " for 7 ranks, 1 of them idle: a rank holds" in fitting(whole, 7).reason
    assert " for 4 ranks: a rank holds no more state than before; global batch 16 " in fitting(whole, 4).reason


def test_the_batch_of_now_counts_and_those_to_come() -> None:
    """A layout that one of them does not divide would end the run; of the others, the best for the batch of now."""
    began, now = config("dp=4", "global_batch_size=24"), config("dp=4", "global_batch_size=16")
    assert layout(fitting(began, 3).config) == (1, 1, 3)
    for changed in ([now], [began, now], [now, began]):
        found = fitting(began, 3, changed)
        assert layout(found.config) == (1, 3, 1) and found.config.train.global_batch_size == 24
    assert "global batch 16 as before" in fitting(began, 3, [now]).reason
    assert layout(fitting(now, 3, [began]).config) == (1, 3, 1), "nor does what it began with divide it"


def test_what_goes_on_a_command_line() -> None:
    whole = config("tp=2\ndp=2")
    found = fitting(whole, 1)
    assert found.overrides(whole) == ["parallel.tp=1", "parallel.dp=1"]
    assert fitting(whole, 4).overrides(whole) == []
    cut = config("pp=3\ncuts=[1,1,4]")
    assert fitting(cut, 2).overrides(cut) == ["parallel.pp=2", "parallel.cuts=[]"], "the cuts are those of 3 stages"
    copied = config("pp=3\ndp=2\ncuts=[1,1,4]")
    assert fitting(copied, 3).overrides(copied) == ["parallel.dp=1"], "which they stay"


ROUNDS = 'schedule="interleaved"\nvirtual_stages=2'
PLAIN = ['parallel.schedule="1f1b"', "parallel.virtual_stages=1"]


@pytest.mark.parametrize(
    ("parallel", "batch", "ranks", "overrides"),
    [
        ("pp=2\ndp=2", 16, 3, ["parallel.pp=3", "parallel.dp=1", *PLAIN]),
        ("pp=3", 18, 2, ["parallel.pp=2", "train.micro_batch_size=1"]),
    ],
)
def test_where_rounds_cannot_be_filled(parallel: str, batch: int, ranks: int, overrides: list[str]) -> None:
    """8 are no multiple of 3, nor 9 of 2: stages get one chunk each, or micro-batches are smaller."""
    whole = config(f"{parallel}\n{ROUNDS}", f"global_batch_size = {batch}")
    found = fitting(whole, ranks)
    assert found.overrides(whole) == overrides and check(found.config) == []
    size = found.config.train.micro_batch_size
    assert found.reason.endswith(f"; global batch {batch} as before, micro-batches of {size}")


def test_stages_of_one_chunk_are_not_cut_where_those_of_several_were() -> None:
    """Three micro-batches fill no round of two stages."""
    began = config(f"pp=2\ndp=6\ncuts=[1,2,2,1]\n{ROUNDS}", "global_batch_size = 24")
    train = began.train.model_copy(update={"global_batch_size": 12, "micro_batch_size": 1})
    whole = began.model_copy(update={"train": train})
    assert check(whole) == []
    assert fitting(whole, 8).overrides(whole) == ["parallel.dp=4", *PLAIN, "parallel.cuts=[]"]


def test_of_layouts_that_are_as_fast_the_one_with_larger_micro_batches_is_taken() -> None:
    """Two copies would compute a sample each."""
    whole = config("tp=4\nzero=3", "global_batch_size = 2")
    found = fitting(whole, 2).config
    assert layout(found) == (2, 1, 1) and found.train.micro_batch_size == 2


def test_micro_batches_shrink_where_they_must() -> None:
    whole = config("pp=2").model_copy(update={"train": config().train.model_copy(update={"micro_batch_size": 16})})
    found = fitting(whole, 3).config
    assert found.train.micro_batch_size * found.train.num_microbatches(found.parallel.dp) * found.parallel.dp == 16


@st.composite
def configs(draw: st.DrawFn) -> Config:
    content: dict[str, Any] = {
        "model": {
            "num_layers": draw(st.integers(1, 8)),
            "hidden_size": 48,
            "num_heads": draw(st.sampled_from([1, 3, 4, 6, 12])),
            "seq_length": 24,
        },
        "parallel": {
            "tp": draw(st.sampled_from([1, 2, 3, 4])),
            "pp": draw(st.integers(1, 4)),
            "dp": draw(st.integers(1, 4)),
            "zero": draw(st.integers(0, 3)),
            "sequence_parallel": draw(st.booleans()),
            **draw(
                st.sampled_from([{}, {"schedule": "interleaved", "virtual_stages": 2}, {"schedule": "zero_bubble"}])
            ),
        },
        "data": {"train": "x"},
        "train": {
            "steps": 4,
            "global_batch_size": draw(st.sampled_from([6, 8, 12, 16, 24])),
            "micro_batch_size": draw(st.integers(1, 4)),
        },
        "optim": {"learning_rate": 1e-3},
        "run": {"folder": "r"},
    }
    parallel, units = content["parallel"], content["model"]["num_layers"] + 2
    chunks = parallel["pp"] * parallel.get("virtual_stages", 1)
    if draw(st.booleans()) and chunks <= units:
        parallel["cuts"] = [1] * (chunks - 1) + [units - chunks + 1]
    try:
        return build(content, [], source="test")
    except ConfigError:
        from hypothesis import reject

        reject()
        raise AssertionError from None


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(configs(), st.integers(1, 24))
def test_it_always_fits(whole: Config, ranks: int) -> None:
    found = fitting(whole, ranks)
    now = found.config
    assert 1 <= found.num_ranks <= max(ranks, 1) or found.num_ranks == whole.parallel.num_ranks <= ranks
    assert check(now) == []
    assert whole.parallel.tp % now.parallel.tp == 0
    assert now.train.global_batch_size == whole.train.global_batch_size
    assert now.train.micro_batch_size <= whole.train.micro_batch_size
    assert now.model == whole.model and now.optim == whole.optim and now.data == whole.data
    content = whole.model_dump(exclude_none=True)
    problems = [problem for override in found.overrides(whole) for problem in apply_(content, override)]
    assert build(content, problems, source="test") == now
    if ranks >= whole.parallel.num_ranks:
        assert now == whole
    fewer = fitting(whole, max(1, ranks - 1)).config
    assert (state_share(fewer), -speed(fewer)) >= (state_share(now), -speed(now)) or state_share(now) <= state_share(
        whole
    )
