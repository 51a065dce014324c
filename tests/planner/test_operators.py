"""What a plan writes down of each operator of a step."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import call_site
from colonnade.mesh.mesh import paper_mesh
from colonnade.planner.operators import Operator, Recorder, Sent, TracingTransport, Waited
from colonnade.planner.stand_in import META, Device, StandIn


@pytest.mark.parametrize("first", ["device", "host"])
def test_the_same_operator_runs_where_its_operands_are(first: str) -> None:
    """Of an offloaded optimizer: shapes are those of the model's tensors, on the GPU and in CPU memory."""
    with StandIn("cuda") as place, Recorder(place) as recorder:
        on_device, copied = torch.empty(5, 3, device=META), torch.empty(5, 3, device=META)
        on_host = copied.cpu()
        tensors = {"device": on_device, "host": on_host}
        results = {name: tensors[name] * 2.0 for name in sorted(tensors, key=lambda name: name != first)}
        for name in tensors:
            results[name].add_(1.0)
        assert {name: place.is_on_host(each) for name, each in results.items()} == {"device": False, "host": True}
    found = [each for each in recorder.sections[0].operators if each.name in ("mul", "add_")]
    second = "host" if first == "device" else "device"
    assert [where(each) for each in found] == [first, second, "device", "host"]


def test_numbers_are_numbers_though_a_stand_in_of_their_shape_was_seen_first() -> None:
    """Masks are made on the CPU, and what is in them is read."""
    with StandIn("cuda") as place, Recorder(place):
        stand_in = torch.empty(7, 5, dtype=torch.int64, device=META) * 3
        numbers = torch.ones(7, 5, dtype=torch.int64) * 3
    assert stand_in.is_meta and numbers.tolist() == [[3] * 5] * 7


@pytest.mark.parametrize(
    ("device", "dtype", "names"),
    [
        ("cpu", torch.float32, ["_scaled_dot_product_flash_attention_for_cpu"]),
        ("cuda", torch.bfloat16, ["_scaled_dot_product_flash_attention"]),
        ("cuda", torch.float32, ["_scaled_dot_product_efficient_attention"]),
        ("cuda", torch.float64, []),
    ],
    ids=["cpu", "flash", "efficient", "spelled out"],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_the_kernel_that_torch_would_choose(
    device: Device, dtype: torch.dtype, names: list[str], is_causal: bool
) -> None:
    heads = [torch.empty(2, 4, 32, 8, dtype=dtype, device=META) for _ in range(3)]
    with StandIn(device) as place, Recorder(place) as recorder:
        torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=is_causal)
    found = list(recorder.sections[0].operators)
    fused = [each for each in found if each.is_attention]
    assert [each.name for each in fused] == names and all(each.is_causal is is_causal for each in fused)
    assert bool(fused) != ("_softmax" in {each.name.removeprefix("_safe") for each in found})


def test_a_collective_is_waited_for_where_its_result_is_needed() -> None:
    """Not before; whoever waits names the one that it waits for. A broadcast is waited for at once."""
    with StandIn("cuda") as place, Recorder(place) as recorder:
        mesh = paper_mesh(
            Layout(dp=4), 2, lambda name, ranks, ledger: TracingTransport(name, ranks, 2, ledger, recorder)
        )
        assert mesh.dp.transport is not None
        x, site = torch.empty(6, device=META), call_site()
        first, second = (mesh.dp.transport.all_reduce_(x, "sum", site) for _ in range(2))
        x.mul_(2.0)
        second.wait()
        recorder.begin(None)
        first.wait()
        mesh.dp.transport.broadcast_(x, 0, site)
    kinds = [[type(event).__name__ for event in section.events] for section in recorder.sections]
    assert kinds == [["Sent", "Sent", "Operator", "Waited"], ["Waited", "Sent", "Waited"]]
    (one, other, _, waited), (before, sent, at_once) = ([*section.events] for section in recorder.sections)
    assert isinstance(one, Sent) and isinstance(other, Sent) and isinstance(sent, Sent)
    assert one.number != other.number and (waited, before) == (Waited(other.number), Waited(one.number))
    assert at_once == Waited(sent.number)
    assert (one.ranks, one.entry.operation, one.entry.bytes) == ((0, 1, 2, 3), "all_reduce", 24)


def test_what_a_gather_fills_is_there_until_it_is_waited_for() -> None:
    """Beside what was put in, whoever else has let go of both."""
    with StandIn("cuda") as place, Recorder(place) as recorder:
        ledger = paper_mesh(Layout(dp=4), 0).ledger
        transport = TracingTransport("dp", (0, 1, 2, 3), 0, ledger, recorder)
        for begin, put_in, filled in (
            (transport.all_gather_into_, 4, 16),
            (transport.reduce_scatter_into_, 16, 4),
        ):
            pending = begin(made(filled).zero_(), made(put_in).zero_(), call_site())
            assert recorder.bytes.total() == 4 * (4 + 16)
            pending.wait()
            assert recorder.bytes.total() == 0


def test_what_the_device_makes_with_what_lies_in_cpu_memory_lies_on_the_device() -> None:
    """A copy of it, and a product with a number of it."""
    with StandIn("cuda") as place, Recorder(place):
        device, host = made(4).zero_(), made(4).zero_().cpu()
        device.copy_(host)
        scaled, both = device * made().zero_().cpu(), host * 2.0
        assert [place.is_on_host(each) for each in (device, host, scaled, both)] == [False, True, False, True]


def test_what_is_expanded_is_read_once() -> None:
    """As a bias [n, s, s] of scores [b, n, s, s]; also where one as large as the scores was read before."""
    with StandIn("cpu") as place, Recorder(place) as recorder:
        bias, scores = torch.empty(2, 5, 5, device=META), torch.empty(4, 2, 5, 5, device=META)
        torch.add(torch.empty_like(scores), scores)
        torch.add(bias.expand(4, 2, 5, 5), scores)
    large, add = (each for each in recorder.sections[0].operators if each.name == "add")
    assert large.bytes == 4 * 3 * 4 * 2 * 5 * 5
    assert add.bytes == 4 * (2 * 5 * 5 + 2 * 4 * 2 * 5 * 5)


def test_a_whole_number_and_one_with_a_point_make_what_they_make_of_each_tensor() -> None:
    with StandIn("cpu") as place, Recorder(place):
        tokens = made(3, dtype=torch.int64)
        found = [(tokens * number).dtype for number in (2, 2.0, 1, True, 1.0)]
    assert found == [torch.int64, torch.float32, torch.int64, torch.int64, torch.float32]


def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def bf16(*shape: int) -> torch.Tensor:
    return made(*shape, dtype=torch.bfloat16)


def of(call: Callable[[], object]) -> Operator:
    """The last that runs."""
    with StandIn("cuda") as place, Recorder(place) as recorder:
        call()
    *_, found = recorder.sections[0].operators
    return found


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: made(3, 5) @ made(5, 7), ("mm", 210, 4 * (15 + 35 + 21), "float32", (1, 3, 7, 5))),
        (lambda: bf16(2, 3, 5) @ bf16(2, 5, 7), ("bmm", 420, 2 * (30 + 70 + 42), "bfloat16", (2, 3, 7, 5))),
        (
            lambda: torch.addmm(made(7), made(3, 5), made(5, 7)),
            ("addmm", 210, 4 * (7 + 15 + 35 + 21), "float32", (1, 3, 7, 5)),
        ),
        (
            lambda: made(3, 7).addmm_(bf16(3, 5), bf16(5, 7)),
            ("addmm_", 210, 4 * 21 + 2 * (15 + 35) + 4 * 21, "bfloat16", (1, 3, 7, 5)),
        ),
        (
            lambda: made(2, 3, 7).baddbmm_(made(2, 3, 5), made(2, 5, 7)),
            ("baddbmm_", 420, 4 * (42 + 30 + 70 + 42), "float32", (2, 3, 7, 5)),
        ),
        (lambda: bf16(4) + made(4), ("add", 0, 2 * 4 + 4 * 4 + 4 * 4, "float32", None)),
        (lambda: bf16(4) * 2.0, ("mul", 0, 2 * 4 + 2 * 4, "bfloat16", None)),
        (lambda: (x := made(4)).mul_(x), ("mul_", 0, 4 * 4 + 4 * 4, "float32", None)),
        (lambda: made(1, 5).expand(4, 5) + made(4, 5), ("add", 0, 4 * (5 + 20 + 20), "float32", None)),
        (lambda: made(6).zero_(), ("zero_", 0, 4 * 6, "float32", None)),
        (lambda: made(6).fill_(3.0), ("fill_", 0, 4 * 6, "float32", None)),
        (lambda: torch.nn.functional.gelu(made(6)), ("gelu", 0, 4 * 12, "float32", None)),
        (
            lambda: torch.nn.functional.gelu(made(6), approximate="tanh"),
            ("gelu_tanh", 0, 4 * 12, "float32", None),
        ),
        (
            lambda: made(1000, 16).index_add_(0, made(3, dtype=torch.int64), made(3, 16)),
            ("index_add_", 0, 3 * 4 * 3 * 16, "float32", None),
        ),
    ],
    ids=lambda case: case[0] if isinstance(case, tuple) else "",
)
def test_an_operator_has_its_arithmetic_and_what_it_reads_and_writes(
    call: Callable[[], object], expected: tuple[object, ...]
) -> None:
    """Once each; of what was expanded each number once, and of a table the rows that are added to."""
    found = of(call)
    assert (found.name, found.flops, found.bytes, found.dtype, found.product) == expected
    assert not found.is_attention and not found.on_host


def test_elements_are_those_of_the_largest_tensor() -> None:
    assert of(lambda: made(3, 5) @ made(5, 7)).elements == 35
    assert of(lambda: made(3, 5).sum(1)).elements == 15


def test_an_update_of_weights_reads_four_tensors_and_writes_three() -> None:
    """All but gradients: 28 bytes a weight in fp32."""

    def update() -> None:
        tensors = [[made(1000)] for _ in range(4)]
        torch.ops.aten._fused_adamw_(
            *tensors,
            [],
            [made()],
            lr=0.1,
            beta1=0.9,
            beta2=0.9,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    assert of(update).bytes == pytest.approx(28_000, abs=8)


def test_events_are_put_down_to_the_unit_that_is_at_work() -> None:
    ledger: Any = SimpleNamespace(unit="embedding")
    with StandIn("cuda") as place, Recorder(place) as recorder:
        recorder.ledger = ledger
        x = made(4)
        for unit in ("embedding", "blocks.0", "blocks.0", "embedding"):
            ledger.unit = unit
            x.mul_(2.0)
    assert recorder.sections[0].units == [(0, "embedding"), (1, "blocks.0"), (3, "embedding")]


def where(operator: Operator) -> str:
    return operator.on_host or "device"
