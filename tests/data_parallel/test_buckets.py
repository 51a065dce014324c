"""Flat buffers: every weight has its place in them, slices tile them, and what is freed comes back whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colonnade.data_parallel.buckets import ALIGNMENT, Bucket, Storage, flatten, named_ranges
from colonnade.mesh import mesh as mesh_module
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh, paper_mesh
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_
from colonnade.tensor_parallel.parallel import Parallel
from tests.data_parallel.flat import CPU, MODEL, VOCAB, flat_model, storage, weights
from tests.data_parallel.late import late_mesh
from tests.distributed import run_on_ranks
from tests.emulated import Copies

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
STAGES = [0, 1, 2, 3]
some_shapes = st.lists(
    st.one_of(st.tuples(st.integers(1, 70)), st.tuples(st.integers(1, 9), st.integers(1, 9))), min_size=1, max_size=6
)


def dp_ranks(size: int) -> list[Axis]:
    return [Axis("dp", size, rank, tuple(range(size))) for rank in range(size)]


# --- where everything lies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_weight_is_a_view_of_its_bucket(dtype: torch.dtype, tied: bool) -> None:
    gpt, buckets = flat_model(storage(dtype), tied=tied)
    ranges = {name: (bucket, param) for name, bucket, param in named_ranges(buckets)}
    assert ranges.keys() == dict(gpt.named_parameters()).keys()
    for name, parameter in gpt.named_parameters():
        bucket, param = ranges[name]
        assert parameter.dtype is dtype and parameter.grad is not None
        assert parameter.data_ptr() == param.view(bucket.parameters).data_ptr()
        assert parameter.grad.data_ptr() == param.view(bucket.gradients).data_ptr()
        assert parameter.grad.dtype is bucket.master.dtype is torch.promote_types(dtype, torch.float32)


def test_weights_lie_apart_on_cache_lines_and_segments_cover_them() -> None:
    _, buckets = flat_model(tp=paper_mesh(Layout(tp=4), 3).tp)
    for bucket in buckets:
        used = torch.zeros_like(bucket.master)
        for param in bucket.ranges:
            assert param.start % ALIGNMENT == 0
            param.view(used).add_(1)
        assert used.max() == 1
        assert [group.start for group in bucket.groups[1:]] == [group.stop for group in bucket.groups[:-1]]
        assert bucket.groups[0].start == 0 and bucket.groups[-1].stop == len(bucket.master)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_segments_say_what_is_decayed_and_what_is_cut(tp_size: int) -> None:
    _, buckets = flat_model(tp=paper_mesh(Layout(tp=tp_size), 0).tp, tied=False)
    for bucket in buckets:
        for param in bucket.ranges:
            (group,) = [s for s in bucket.groups if s.start <= param.start and param.stop <= s.stop]
            matrix = param.placement.parameter.ndim == 2
            assert group.decayed == matrix, "matrices decay; biases and norms do not"
            assert group.cut == (param.placement.dim is not None)


def test_a_tied_weight_belongs_to_the_table() -> None:
    _, buckets = flat_model(tied=True)
    names = [name for name, _, _ in named_ranges(buckets)]
    assert "embedding.tokens.weight" in names and "head.output.weight" not in names
    _, buckets = flat_model(tied=False)
    assert "head.output.weight" in [name for name, _, _ in named_ranges(buckets)]
    _, buckets = flat_model(tied=True, units=["blocks.1", "head"])
    assert "embedding.tokens.weight" in [name for name, _, _ in named_ranges(buckets)], (
        "the same name without embedding"
    )


def test_taking_weights_over_changes_no_number() -> None:
    gpt, _ = flat_model(storage(torch.float32))
    fresh = GPT(MODEL, VOCAB, Parallel(Mesh().tp))
    initialize_(fresh, Mesh().tp, 1)
    assert all(torch.equal(a, b) for a, b in zip(gpt.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", STAGES)
def test_masters_of_16_bits_begin_as_the_weights_of_fp32_do(zero: int, dtype: torch.dtype) -> None:
    """To the bit: only what the layers multiply with is rounded."""
    for dp in dp_ranks(2):
        _, narrow = flat_model(storage(dtype, zero), dp=dp)
        _, exact = flat_model(storage(torch.float32, zero), dp=dp)
        for mine, theirs in zip(narrow, exact, strict=True):
            assert torch.equal(mine.master, theirs.master) and torch.equal(mine.shard, theirs.shard.to(dtype))


# --- slices -----------------------------------------------------------------------------------------------------------


@given(some_shapes, st.integers(1, 5), st.sampled_from(STAGES))
def test_slices_tile_the_buffer_and_spans_tile_every_weight(
    shapes: list[tuple[int, ...]], dp_size: int, zero: int
) -> None:
    """Whatever the shapes: each element of each weight is in exactly one rank's slice (in all of them under stage 0),
    where that rank's master has that element.
    """
    names = {f"w{i}": shape for i, shape in enumerate(shapes)}
    expected = {place.name: place.parameter.detach().flatten().clone() for place in weights(names)}
    seen = {name: torch.zeros_like(whole) for name, whole in expected.items()}
    covered = 0
    for dp in dp_ranks(dp_size):
        bucket = Bucket("bucket", weights(names), dp, storage(zero=zero))
        assert bucket.size % (ALIGNMENT * dp_size) == 0 and bucket.size < sum(
            map(len, expected.values())
        ) + ALIGNMENT * (dp_size + len(shapes))
        covered += bucket.mine.stop - bucket.mine.start
        for local in bucket.local_ranges():
            part = slice(local.first, local.first + local.at.stop - local.at.start)
            name = local.name.removeprefix("bucket.")
            assert torch.equal(bucket.master[local.at], expected[name][part])
            seen[name][part] += 1
    copies = dp_size if zero == 0 else 1
    assert covered == copies * bucket.size
    assert all((count == copies).all() for count in seen.values())


@given(some_shapes, st.integers(1, 5), st.sampled_from(STAGES))
def test_segments_of_all_slices_tile_the_weights_too(shapes: list[tuple[int, ...]], dp_size: int, zero: int) -> None:
    """Every local lies in one group that treats it as its weight wants; groups of a slice do not overlap."""
    names = {f"w{i}": shape for i, shape in enumerate(shapes)}
    for dp in dp_ranks(dp_size):
        bucket = Bucket("bucket", weights(names), dp, storage(zero=zero))
        groups = list(bucket.local_groups())
        ends = [at.stop for _, at in groups]
        assert all(at.start >= end for (_, at), end in zip(groups[1:], ends, strict=False))
        for local in bucket.local_ranges():
            (group,) = [s for s, at in groups if at.start <= local.at.start and local.at.stop <= at.stop]
            assert group.decayed == (len(names[local.name.removeprefix("bucket.")]) == 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", STAGES)
def test_memory_between_uses_falls_as_the_stages_say(zero: int, dtype: torch.dtype) -> None:
    """Bytes of each buffer of N elements on one of D ranks: c·N (or c·N/D) of parameters, e·N (/D) of gradients and of
    master weights, none of these where parameters are the master weights themselves.
    """
    dp_size = 4
    for dp in dp_ranks(dp_size):
        _, buckets = flat_model(storage(dtype, zero), dp=dp)
        total = sum(bucket.size for bucket in buckets)
        c, e = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
        found = {
            name: sum(bytes_of(getattr(bucket, name)) for bucket in buckets)
            for name in ("parameters", "shard", "gradients", "reduced", "master")
        }
        assert found["parameters"] == (0 if zero == 3 else c * total)
        assert found["shard"] == (c * total // dp_size if zero == 3 else found["parameters"]), "a view unless stage 3"
        assert found["gradients"] == (0 if zero >= 2 else e * total)
        assert found["reduced"] == (e * total // dp_size if zero >= 2 else found["gradients"])
        if dtype is torch.bfloat16:
            assert found["master"] == (e * total // dp_size if zero else e * total)
        else:
            assert all(bucket.master.data_ptr() == bucket.shard.data_ptr() for bucket in buckets), "one copy"


def bytes_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().size()


@pytest.mark.parametrize("zero", STAGES)
def test_frozen_weights_stay_on_their_device_and_only_stage_3_cuts_them(zero: int) -> None:
    """Nothing of them is updated elsewhere, and no gradient of theirs crosses ranks."""
    frozen = weights({"a": (5, 3), "b": (41,)})
    for each in frozen:
        each.parameter.requires_grad_(False)
    kept = Storage(torch.bfloat16, CPU, zero=zero, offload=True, reduce_dtype=torch.bfloat16)
    bucket = Bucket("bucket", frozen, Axis("dp", 2, 1, (0, 1)), kept)
    assert bucket.storage == Storage(torch.bfloat16, CPU, zero=3 if zero == 3 else 0)
    assert bucket.master.dtype is torch.bfloat16 and bucket.master.data_ptr() == bucket.shard.data_ptr()
    assert bytes_of(bucket.gradients) == bytes_of(bucket.reduced) == bytes_of(bucket.optimizer_gradients) == 0
    assert bytes_of(bucket.parameters) == (0 if zero == 3 else 2 * bucket.size)
    assert all(each.parameter.grad is None for each in frozen)


def test_trained_weights_of_a_name_are_a_bucket_and_frozen_ones_another() -> None:
    """Trained ones first, with gradients; none is made of nothing."""
    mixed, frozen = weights({"a": (5, 3), "b": (41,), "c": (2,)}), weights({"d": (7,)})
    for each in (mixed[0], mixed[2], *frozen):
        each.parameter.requires_grad_(False)
    named = {"mixed": mixed, "frozen": frozen, "trained": weights({"e": (4,)})}
    buckets = flatten(named, Axis("dp"), storage())
    listed = [(bucket.name, bucket.is_frozen, {p.placement.name for p in bucket.ranges}) for bucket in buckets]
    assert listed == [
        ("mixed", False, {"b"}), ("mixed", True, {"a", "c"}), ("frozen", True, {"d"}), ("trained", False, {"e"}),
    ]  # fmt: skip
    assert [len(bucket.gradients) > 0 for bucket in buckets] == [True, False, False, True]


# --- parameters -------------------------------------------------------------------------------------------------------


def test_weights_without_elements_lie_nowhere() -> None:
    """And have not been moved from there."""
    (bucket,) = flatten({"head": weights({"a": (3,), "none": (0, 4), "b": (2, 2)})}, Mesh().dp, storage())
    bucket.check_weights()
    parameter = bucket.ranges[-1].placement.parameter
    parameter.data = torch.ones(parameter.shape, dtype=torch.float64)
    name = bucket.ranges[-1].placement.name
    with pytest.raises(RuntimeError) as told:
        bucket.check_weights()
    assert str(told.value) == (
        f"head.{name} does not lie in the memory that a step trains any more: `model.to(dtype)`, "
        "`load_state_dict(assign=True)`, or whatever else gives a layer another tensor, has put one in its place. Set "
        "the number format by train.precision before `build_state`; other numbers are written into each bucket's "
        "`master`, and handed on by `state.ownership.publish()`"
    )


def test_a_weight_that_lies_in_its_bucket_at_anothers_place_is_missed() -> None:
    """As of two layers of which one was given the other's tensor."""
    (bucket,) = flatten({"head": weights({"a": (2, 3), "b": (2, 3)})}, Mesh().dp, storage())
    one, other = (param.placement for param in bucket.ranges)
    other.parameter.data = one.parameter.data
    with pytest.raises(RuntimeError, match=f"^head.{other.name} does not lie in the memory"):
        bucket.check_weights()


def test_bf16_parameters_are_rounded_masters() -> None:
    gpt, buckets = flat_model(storage(torch.bfloat16))
    for bucket in buckets:
        assert bucket.master.dtype is torch.float32 and torch.equal(bucket.parameters, bucket.master.bfloat16())
        bucket.master.mul_(1.0009765625)  # less than half a bucket in the last place of bf16: kept by the master alone
        bucket.master.add_(0.5)
        bucket.publish()
    for name, bucket, param in named_ranges(buckets):
        parameter = dict(gpt.named_parameters())[name]
        assert torch.equal(parameter, param.view(bucket.master).bfloat16())


def test_what_the_optimizer_has_copied_is_not_copied_again() -> None:
    _, buckets = flat_model(storage(torch.bfloat16))
    for bucket in buckets:
        read = bucket.copied_to
        assert read is not None and read.dtype is torch.bfloat16
        bucket.master.add_(1.0)
        before = read.clone()
        bucket.publish(copied=True)
        assert torch.equal(read, before)
        bucket.publish()
        assert torch.equal(read, bucket.master.bfloat16()) and not torch.equal(read, before)


def test_small_updates_are_not_lost_in_bf16() -> None:
    _, buckets = flat_model(storage(torch.bfloat16))
    bucket = buckets[1]
    before = bucket.master.clone()
    for _ in range(100):
        bucket.master.add_(before.abs() * 1e-4)
        bucket.publish()
    moved = (bucket.parameters.float() / before)[before != 0]
    assert ((moved - 1).abs() > 0.005).all(), "a hundred steps of a ten-thousandth make a hundredth"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", STAGES)
def test_every_rank_gets_every_ranks_new_weights(zero: int, dtype: torch.dtype) -> None:
    """Twice: the second time into memory that has been freed in between."""

    def on_a_rank(rank: int, num_ranks: int) -> list[Tensor]:
        bucket = Bucket(
            "bucket", weights({"a": (5, 3), "b": (41,)}), build_mesh(Layout(dp=2), rank).dp, storage(dtype, zero)
        )
        found = []
        for _ in range(2):
            bucket.master.add_(1.0)
            bucket.publish()
            bucket.unshard()
            found += [param.placement.parameter.detach().flatten().clone() for param in bucket.ranges]
            bucket.reshard()
            assert (bytes_of(bucket.parameters) == 0) == (zero == 3)
        return found

    expected = [p.parameter.detach().flatten() + step for step in (1, 2) for p in weights({"a": (5, 3), "b": (41,)})]
    for rank in run_on_ranks(on_a_rank, 2):
        assert all(torch.equal(mine, other.to(dtype)) for mine, other in zip(rank, expected, strict=True))


def test_fetching_twice_gathers_once_and_dropping_waits_for_what_is_under_way() -> None:
    mesh = paper_mesh(Layout(dp=2), 0)
    bucket = Bucket("bucket", weights({"a": (40,)}), mesh.dp, storage(zero=3))
    bucket.fetch()
    bucket.fetch()
    bucket.unshard()
    assert [e.operation for e in mesh.ledger.entries] == ["all_gather"]
    bucket.reshard()
    bucket.fetch()
    bucket.reshard()
    assert bytes_of(bucket.parameters) == 0 and len(mesh.ledger.entries) == 2


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", STAGES)
def test_reduced_is_the_sum_over_ranks_and_microbatches(zero: int) -> None:
    """Stages 2 and 3 reduce after each of three micro-batches, 0 and 1 once."""
    shapes = {"a": (5, 3), "b": (41,)}

    def on_a_rank(rank: int, num_ranks: int) -> dict[str, tuple[int, Tensor]]:
        bucket = Bucket("bucket", weights(shapes), build_mesh(Layout(dp=2), rank).dp, storage(zero=zero))
        for step in range(2):
            bucket.zero_gradients()
            for microbatch in range(3):
                bucket.open_gradients()
                for param in bucket.ranges:
                    gradient = param.placement.parameter.grad
                    assert gradient is not None
                    gradient.add_(param.placement.parameter.shape.numel() + 10.0 * microbatch + 100.0 * rank + step)
                if zero >= 2 or microbatch == 2:
                    bucket.start_reduction()
            bucket.finish_reduction()
        assert (bytes_of(bucket.gradients) == 0) == (zero >= 2)
        return {local.name: (local.first, bucket.reduced[local.at].clone()) for local in bucket.local_ranges()}

    for rank in run_on_ranks(on_a_rank, 2):
        for name, (_, values) in rank.items():
            size = torch.Size(shapes[name.removeprefix("bucket.")]).numel()
            expected = sum(size + 10.0 * m + 100.0 * r + 1 for m in range(3) for r in range(2))
            assert (values == expected).all()


def test_dropping_waits_however_late_the_parameters_arrive() -> None:
    """Their memory is somebody else's from then on."""
    mesh, transport = late_mesh(Layout(dp=2), 0)
    _, buckets = flat_model(storage(zero=3), dp=mesh.dp)
    buckets[1].fetch()
    assert len(transport.under_way) == 1
    buckets[1].reshard()
    assert transport.under_way == [] and buckets[1].parameters.untyped_storage().size() == 0


def test_an_optimizer_elsewhere_is_handed_each_steps_gradients() -> None:
    _, (bucket, *_) = flat_model()
    bucket.optimizer_gradients = torch.zeros_like(bucket.reduced)  # as where it works on the CPU beside a GPU
    for value in (1.0, 2.0):
        bucket.reduced.fill_(value)
        bucket.copy_to_optimizer()
        assert torch.equal(bucket.optimizer_gradients, bucket.reduced)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_gpu_offloads_is_pinned_and_there_before_the_optimizer_reads_it(dtype: torch.dtype) -> None:
    """Copies between a device and memory that is not pinned are several times slower; the CPU reads at once."""
    with Copies(on_device=True) as copies:
        (bucket,) = flatten({"b": weights({"a": (5, 3)})}, Mesh().dp, Storage(dtype, CPU, offload=True))
        assert copies.is_pinned(bucket.master) and copies.is_pinned(bucket.optimizer_gradients)
        assert not any(copies.is_pinned(each) for each in (bucket.parameters, bucket.gradients, bucket.reduced))
        copies.in_place.clear()
        bucket.reduced.fill_(2.0)
        bucket.copy_to_optimizer()
        assert copies.in_place == [False] and torch.equal(bucket.optimizer_gradients, bucket.reduced)


def test_a_sum_is_not_started_twice() -> None:
    bucket = Bucket("bucket", weights({"a": (40,)}), paper_mesh(Layout(dp=2), 0).dp, storage())
    bucket.start_reduction()
    with pytest.raises(AssertionError, match="bucket is being summed already"):
        bucket.start_reduction()


@pytest.mark.parametrize("zero", STAGES)
def test_the_buffer_crosses_once_in_the_type_that_was_asked_for(zero: int) -> None:
    for narrow, size in ((None, 4), (torch.bfloat16, 2)):
        mesh = paper_mesh(Layout(dp=2), 0)
        bucket = Bucket("bucket", weights({"a": (40,)}), mesh.dp, storage(torch.bfloat16, zero, narrow))
        bucket.open_gradients()
        bucket.start_reduction()
        bucket.finish_reduction()
        (entry,) = mesh.ledger.entries
        assert entry.operation == ("all_reduce" if zero == 0 else "reduce_scatter")
        assert entry.bytes == size * bucket.size and bucket.reduced.dtype is torch.float32


@pytest.mark.parametrize("zero", STAGES)
def test_gradients_of_one_rank_are_not_rounded_for_a_way_they_do_not_take(zero: int) -> None:
    """16-bit reduction over a dp of 1."""
    _, buckets = flat_model(storage(torch.bfloat16, zero=zero, reduce_dtype=torch.bfloat16))
    bucket = buckets[0]
    bucket.open_gradients()
    bucket.gradients.fill_(1.0 + 2.0**-20)
    bucket.start_reduction()
    bucket.finish_reduction()
    assert (bucket.reduced == 1.0 + 2.0**-20).all()


@pytest.mark.parametrize("one_machine", [True, False])
@pytest.mark.parametrize("zero", STAGES)
def test_a_16_bit_sum_is_rounded_alike_whatever_is_cut(
    zero: int, one_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 + 2⁻⁹ is no bf16: no stage sums what was sent in a wider type than the others. Through memory that ranks share,
    and through torch's groups where they share none."""
    if not one_machine:
        monkeypatch.setattr(mesh_module, "share_memory", lambda *_: None)

    def summed(rank: int, num_ranks: int) -> bool:
        dp = build_mesh(Layout(dp=num_ranks), rank).dp
        bucket = Bucket("bucket", weights({"a": (40,)}), dp, storage(torch.bfloat16, zero, torch.bfloat16))
        bucket.open_gradients()
        bucket.gradients.fill_((1.0, 2.0**-9)[rank])
        bucket.start_reduction()
        bucket.finish_reduction()
        return bool((bucket.reduced == 1.0).all())

    assert run_on_ranks(summed, 2) == [True, True]
