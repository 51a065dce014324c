"""Cutting the model: BLOOM's cut, every cut of small models by brute force, and what cannot be cut."""

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.architecture.families import architecture_of
from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig
from colonnade.errors import LayoutError
from colonnade.pipeline import partition
from colonnade.pipeline.partition import cut

BLOOM = ModelConfig(
    num_layers=70,
    hidden_size=14336,
    num_heads=112,
    seq_length=2048,
    position="alibi",
    embedding_norm=True,
)
BLOOM_VOCABULARY = 250_880


def chunks(model: ModelConfig, parallel: ParallelConfig, vocab_size: int) -> list[list[str]]:
    """The names of the units of every chunk."""
    return [[unit.name for unit in chunk] for chunk in partition.chunks(architecture_of(model, vocab_size), parallel)]


def unit_parameters(model: ModelConfig, vocab_size: int) -> list[int]:
    architecture = architecture_of(model, vocab_size)
    return [architecture.parameters_of(unit) for unit in architecture.units]


def sums(weights: list[int], counts: list[int]) -> list[int]:
    """The weight of each chunk."""
    return [sum(weights[start:end]) for start, end in pairwise(accumulate(counts, initial=0))]


def every_cut(num_units: int, num_chunks: int) -> list[list[int]]:
    """All ways to give each chunk at least one unit."""
    inner = combinations(range(1, num_units), num_chunks - 1)
    return [[end - start for start, end in pairwise([0, *places, num_units])] for places in inner]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
@settings(deadline=None)
def test_no_other_cut_is_lighter_or_as_light_and_more_even(weights: list[int], data: st.DataObject) -> None:
    num_chunks = data.draw(st.integers(1, len(weights)))

    def badness(counts: list[int]) -> tuple[int, int]:
        loads = sums(weights, counts)
        return max(loads), sum(load**2 for load in loads)

    counts = cut(weights, num_chunks)
    assert badness(counts) == min(map(badness, every_cut(len(weights), num_chunks)))
    assert min(counts) >= 1


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.data())
@settings(deadline=None)
def test_measured_times_are_weights_like_any_other(times: list[float], data: st.DataObject) -> None:
    num_chunks = data.draw(st.integers(1, len(times)))
    counts = cut(times, num_chunks)
    assert (len(counts), sum(counts)) == (num_chunks, len(times))
    heaviest = max(sum(times[start:end]) for start, end in pairwise(accumulate(counts, initial=0)))
    assert heaviest <= sum(times) / num_chunks + max(times) + 1e-9


@pytest.mark.parametrize(
    ("num_units", "num_chunks", "counts"),
    [(72, 12, [6] * 12), (14, 4, [3, 4, 4, 3]), (14, 8, [1, 2, 2, 2, 2, 2, 2, 1]), (4, 4, [1, 1, 1, 1]), (5, 1, [5])],
)
def test_equal_units_are_spread_evenly_with_the_lightest_chunks_at_the_ends(
    num_units: int, num_chunks: int, counts: list[int]
) -> None:
    assert cut([1] * num_units, num_chunks) == counts


def test_a_heavy_unit_stands_alone() -> None:
    assert cut([5, 1, 1, 1, 1, 1], 2) == [1, 5]
    assert cut([1, 1, 9, 1, 1], 3) == [2, 1, 2]


def test_blooms_seventy_blocks_embedding_and_head_are_72_equal_parts() -> None:
    found = chunks(BLOOM, ParallelConfig(pp=12), BLOOM_VOCABULARY)
    assert [len(units) for units in found] == [6] * 12
    assert found[0] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.4"]
    assert found[-1][-1] == "head"
    assert [unit for units in found for unit in units] == architecture_of(BLOOM, 1).unit_names


def test_blooms_embedding_weighs_one_and_a_half_blocks_and_the_cut_by_parameters_is_the_same() -> None:
    weights = unit_parameters(BLOOM, BLOOM_VOCABULARY)
    assert weights[0] / weights[1] == pytest.approx(1.46, abs=0.02)
    assert weights[-1] / weights[1] == pytest.approx(1.46, abs=0.02)
    by_parameters = chunks(BLOOM, ParallelConfig(pp=12, partition="parameters"), BLOOM_VOCABULARY)
    assert by_parameters == chunks(BLOOM, ParallelConfig(pp=12), BLOOM_VOCABULARY)
    loads = sums(weights, [len(units) for units in by_parameters])
    assert max(loads) / (sum(loads) / 12) == pytest.approx(1.06, abs=0.005)


def test_a_large_vocabulary_moves_blocks_away_from_the_ends() -> None:
    model = ModelConfig(num_layers=12, hidden_size=256, num_heads=4)
    found = chunks(model, ParallelConfig(pp=4, partition="parameters"), vocab_size=50_000)
    assert [len(units) for units in found] == [1, 6, 6, 1]
    found = chunks(model, ParallelConfig(pp=4, partition="flops"), vocab_size=50_000)
    assert [len(units) for units in found] == [5, 4, 4, 1], "an embedding computes next to nothing"


@pytest.mark.parametrize("tied", [True, False])
def test_units_weigh_what_the_model_weighs(tied: bool) -> None:
    model = ModelConfig(num_layers=3, hidden_size=64, num_heads=4, seq_length=32, tie_embeddings=tied)
    weights = unit_parameters(model, vocab_size=100)
    assert weights == unit_parameters(model.model_copy(update={"tie_embeddings": not tied}), vocab_size=100)
    assert sum(weights) == architecture_of(model, 100).num_parameters + (100 * 64 if tied else 0)
    assert weights == [(100 + 32) * 64, *[12 * 64**2 + 13 * 64] * 3, (100 + 2) * 64]


def test_units_weigh_what_their_options_add() -> None:
    model = ModelConfig(
        num_layers=1, hidden_size=64, num_heads=4, position="alibi", embedding_norm=True, norm_position="post"
    )
    first, _, last = unit_parameters(model, vocab_size=100)
    assert (first, last) == ((100 + 2) * 64, 100 * 64)


def test_virtual_stages_are_dealt_round_the_stages() -> None:
    model, parallel = ModelConfig(num_layers=6), ParallelConfig(pp=2, virtual_stages=2, schedule="interleaved")
    assert chunks(model, parallel, 100) == [
        ["embedding", "blocks.0"],
        ["blocks.1", "blocks.2"],
        ["blocks.3", "blocks.4"],
        ["blocks.5", "head"],
    ]
    second = partition.chunks_of_stage(architecture_of(model, 100), parallel, 1)
    assert [[unit.name for unit in chunk] for chunk in second] == [["blocks.1", "blocks.2"], ["blocks.5", "head"]]


@pytest.mark.parametrize(
    ("tied", "parallel", "tokens", "encoder", "decoder"),
    [
        (True, ParallelConfig(pp=4), (0, 2, 3), (0, 1), (2, 3)),
        (False, ParallelConfig(pp=4), (0, 2), (0, 1), (2, 3)),
        (True, ParallelConfig(pp=4, cuts=(2, 1, 1, 4)), (0, 3), (0, 1, 2), None),
        (True, ParallelConfig(pp=2, virtual_stages=2, schedule="interleaved"), (0, 1), (0, 1), (0, 1)),
        (True, ParallelConfig(), None, None, None),
        (True, ParallelConfig(virtual_stages=2, schedule="interleaved"), None, None, None),
    ],
)
def test_every_stage_whose_units_need_a_shared_table_holds_it(
    tied: bool,
    parallel: ParallelConfig,
    tokens: tuple[int, ...] | None,
    encoder: tuple[int, ...] | None,
    decoder: tuple[int, ...] | None,
) -> None:
    """Of a T5: three embeddings and blocks, three blocks, two blocks. None: one stage needs it alone."""
    architecture = architecture_of(ModelConfig(kind="t5", num_layers=3, num_decoder_layers=2, tie_embeddings=tied), 100)
    found = partition.holders(architecture, partition.chunks(architecture, parallel), parallel.pp)
    expected = {"embedding.tokens": tokens, "encoder.positions": encoder, "decoder.positions": decoder}
    assert found == {bucket: stages for bucket, stages in expected.items() if stages is not None}


def test_explicit_cuts_are_taken_as_they_are() -> None:
    found = chunks(ModelConfig(num_layers=6), ParallelConfig(pp=3, cuts=(1, 6, 1)), 100)
    assert found == [["embedding"], [f"blocks.{layer}" for layer in range(6)], ["head"]]


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelConfig(pp=9), "= 9 × 1 = 9 chunks, but the model has 8 units .* Use pp = 8 .*, or at least 7 layers"),
        (
            ParallelConfig(pp=4, virtual_stages=3),
            "= 4 × 3 = 12 chunks, .* Use virtual_stages = 2, or at least 10 layer",
        ),
        (ParallelConfig(pp=2, cuts=(4, 3)), r"\[4, 3\] sums to 7 .* Give 2 counts >= 1 .* sum to 8"),
        (ParallelConfig(pp=2, cuts=(4, 2, 2)), "has 3 counts, but .* = 2 chunks. Give 2 counts"),
        (ParallelConfig(pp=2, cuts=(8,)), "has 1 counts, but .* = 2 chunks"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_can(parallel: ParallelConfig, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        chunks(ModelConfig(num_layers=6), parallel, 100)


@pytest.mark.parametrize("parallel", [ParallelConfig(pp=8), ParallelConfig(pp=2, virtual_stages=4)])
def test_each_unit_may_be_a_chunk(parallel: ParallelConfig) -> None:
    names = ["embedding", *(f"blocks.{layer}" for layer in range(6)), "head"]
    assert chunks(ModelConfig(num_layers=6), parallel, 100) == [[name] for name in names]


def test_an_empty_chunk_is_refused() -> None:
    parallel = ParallelConfig(pp=2).model_copy(update={"cuts": (8, 0)})
    with pytest.raises(LayoutError, match="smallest count is 0"):
        chunks(ModelConfig(num_layers=6), parallel, 100)


def test_more_chunks_than_units_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"3 units cannot be cut in 4 chunks.*Use 1 to 3 chunks"):
        cut([1, 1, 1], 4)
