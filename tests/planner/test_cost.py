"""What operators and collectives take, and what of it overlaps: by hand, of machines with round figures."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from colonnade.mesh.ledger import Entry
from colonnade.pipeline.schedule import Action
from colonnade.planner.cost import Cost
from colonnade.planner.hardware import hardware
from colonnade.planner.operators import Operator, Section, Sent, Waited
from colonnade.planner.timeline import Clock, of_actions, play
from tests.parity.runs import Case, Way, configured

A100 = hardware("a100-80gb").having(products__half_area=0, products__half_depth=0, device__kernel_seconds=0)
TWO = Way(micro_batch_size=2)
PLAIN = Case(drop=0.0, num_layers=2, precision="fp32")


@pytest.mark.parametrize(
    ("operation", "messages", "moved"),
    [
        ("all_reduce", 6, 2 * 4 / 5),
        ("all_gather", 4, 4.0),
        ("reduce_scatter", 4, 4 / 5),
        ("broadcast", 3, 1.0),
        ("send", 1, 1.0),
    ],
)
def test_collectives_have_their_messages_and_their_bytes(operation: str, messages: int, moved: float) -> None:
    """Of five ranks, each of which puts 10⁹ bytes in."""
    gpu = A100.having(island__call=0.5, island__latency=0.1, network__efficiency=0.5, island__bandwidth=1e9)
    assert Cost(gpu, 8).move(operation, 10**9, range(5)) == pytest.approx(0.5 + 0.1 * messages + 2 * moved)


def test_ranks_that_share_a_core_take_their_time_for_collectives_too() -> None:
    cpu = replace(hardware("cpu").having(device__crowded=1.0), cores=2)
    alone, shared = (Cost(cpu, ranks).move("all_reduce", 10**6, range(2)) for ranks in (2, 6))
    assert shared == pytest.approx(3 * alone)


def test_between_islands_of_a_machine_and_between_machines_it_is_the_network_that_counts() -> None:
    """Its latency, and each device's share of it."""
    machine = A100.having(
        island__size=4, node__size=8, island__call=0, island__latency=1e-6, network__latency=0.25,
        network__bandwidth=8e8, network__efficiency=0.5,
    )  # fmt: skip
    assert Cost(machine, 64).move("send", 10**8, (3, 4)) == pytest.approx(0.25 + 1e8 / (1e8 * 0.5))
    assert Cost(machine, 64).move("send", 10**8, (3, 8)) == pytest.approx(0.25 + 1e8 / (1e8 * 0.5))
    fast = machine.having(island__bandwidth=1e7)
    for ranks in ((3, 4), (3, 8)):
        assert Cost(fast, 64).move("send", 10**8, ranks) == pytest.approx(0.25 + 1e8 / (1e7 * 0.5)), "the slowest link"


def test_a_collective_waits_for_the_one_before_it_on_its_axis() -> None:
    """Also where the device has been at work before both; another axis' link is free."""
    cost = Cost(A100, 8)
    entry = Entry("all_reduce", "dp", (10**8,), "float32", 4 * 10**8, "", False, 0.0)
    sent = [Sent(1, entry, (0, 1)), Sent(2, entry, (0, 1)), Sent(3, replace(entry, axis="tp"), (0, 1))]
    seconds = cost.collective(entry, (0, 1))
    for number, done in ((1, seconds), (2, 2 * seconds), (3, seconds)):
        clock = Clock(cost, device=5.0)
        assert clock.play([*sent, Waited(number)]) == pytest.approx(done)


def test_ranks_of_a_group_in_one_machine_have_the_links_of_all_of_them() -> None:
    """Three in one machine and two in another: two and a half devices' share of a machine's eight."""
    machine = A100.having(
        island__size=8, node__size=8, island__call=0, island__bandwidth=1e12, network__latency=0,
        network__bandwidth=8e8, network__efficiency=0.5,
    )  # fmt: skip
    assert Cost(machine, 16).move("send", 10**8, (0, 1, 2, 8, 9)) == pytest.approx(1e8 / (2.5e8 * 0.5))
    assert Cost(machine.having(island__call=1), 16).move("all_reduce", 10**8, (3,)) == 0.0, "alone it sends nothing"


def test_two_machines_under_two_switches_are_beyond_one() -> None:
    shared = A100.having(network__switch_nodes=2, network__oversubscription=4, network__latency=0, island__call=0)
    under_one, under_two = (Cost(shared, 64).move("send", 10**9, (0, 8 * node)) for node in (1, 2))
    assert under_two == pytest.approx(4 * under_one)
    assert Cost(shared, 64).move("send", 10**9, (8, 16)) == under_two


def test_what_is_on_the_host_takes_its_memory_and_what_is_copied_its_link() -> None:
    machine = A100.having(host__memory_bandwidth=1e9, host__link_bandwidth=4e9)
    added = Operator("add", 0, 10**9, "float32", on_host="host")
    assert Cost(machine).operator(added) == pytest.approx(1.0)
    assert Cost(machine).operator(added._replace(on_host="copy")) == pytest.approx(1 / 8), "read here, written there"


def test_a_kernel_takes_its_least_time_beside_its_work() -> None:
    product = Operator("mm", 10**12, 0, "bfloat16", (1, 1000, 1000, 1000))
    work = Cost(A100).operator(product)
    assert Cost(A100.having(device__kernel_seconds=1e-4)).operator(product) == pytest.approx(work + 1e-4)


def test_the_results_of_all_matrices_of_a_batch_count() -> None:
    cost, flops = Cost(hardware("a100-80gb")), 2 * 12 * 64**3
    batch, one = (
        cost.arithmetic(Operator("bmm", flops, 0, "bfloat16", product))
        for product in ((12, 64, 64, 64), (1, 768, 64, 64))
    )
    assert batch == pytest.approx(one)


def test_everything_that_crowded_cores_do_is_slower() -> None:
    """Products, what waits for memory, arithmetic of elements, kernels, asking for them, and reading."""
    cpu = replace(
        hardware("cpu").having(device__together=0.5, device__crowded=1.0, device__dispatch_seconds=1e-4),
        cores=4, operators={"gelu": 1e-6},
    )  # fmt: skip
    alone, all_of_them, twice = (Cost(cpu, ranks) for ranks in (1, 4, 8))
    assert (alone.crowding, all_of_them.crowding, twice.crowding) == (1, 2, 4)
    operators = (
        Operator("mm", 10**9, 10**6, "float32", (1, 500, 1000, 1000)),
        Operator("add", 0, 10**9, "float32"),
        Operator("gelu", 0, 10**3, "float32", elements=10**6),
        Operator("add", 0, 0, "float32"),
    )
    for operator in operators:
        assert twice.operator(operator) == pytest.approx(4 * alone.operator(operator))
    config = configured(PLAIN, TWO)
    assert twice.dispatch == 4 * alone.dispatch == 4e-4
    assert twice.reading(config, 0.0) == pytest.approx(4 * alone.reading(config, 0.0))


def test_ranks_on_other_machines_crowd_no_cores() -> None:
    cpu = replace(hardware("cpu").having(node__size=4), cores=4)
    assert Cost(cpu, 64).crowding == Cost(cpu, 4).crowding


def test_every_text_of_a_sample_is_read() -> None:
    config = configured(Case(block="choice", drop=0.0), TWO)
    cpu = replace(hardware("cpu").having(host__token_seconds=1e-3), cores=1)
    assert config.model.sample_length > config.model.seq_length
    tokens = config.train.global_batch_size * config.model.sample_length
    assert Cost(cpu).reading(config, 0.0) == pytest.approx(tokens * 1e-3)
    copies = configured(Case(block="choice", drop=0.0), Way(dp=2, micro_batch_size=2))
    assert Cost(cpu).reading(copies, 0.0) == pytest.approx(tokens / 2 * 1e-3), "each rank its part of the batch"


def test_a_rank_is_no_faster_than_alone() -> None:
    """Where all stages of a pipeline wait for a part of the time, less than one is at work."""
    cpu = Cost(replace(hardware("cpu").having(device__together=0.5), cores=4), 4)
    assert cpu.pace(1 / 4) == cpu.pace(1 / 100) == cpu.crowding == 2.0


def test_time_is_spent_on_what_it_was_for() -> None:
    """Products, memory, the host that asks for both, and an axis; messages between stages are the pipeline's affair."""
    gpu = A100.having(device__dispatch_seconds=1e-3)
    large = Operator("mm", 10**12, 0, "bfloat16", (1, 1, 1, 1))
    moved = Operator("add", 0, 10**11, "bfloat16")
    entry = Entry("all_reduce", "dp", (1,), "float32", 10**9, "", False, 0.0)
    messages = [
        each
        for number, operation in enumerate(("send", "receive"), 2)
        for each in (Sent(number, replace(entry, operation=operation, axis="pp"), (0, 8)), Waited(number))
    ]
    events = [large, moved, *messages, Sent(1, entry, tuple(range(8))), Waited(1)]
    for kind in ("cuda", "cpu"):
        cost = Cost(replace(gpu, kind=kind))
        asked = 1e-3 if kind == "cuda" else 2e-3
        found = play([Section(None, events)], cost)
        assert found.spent == pytest.approx(
            {
                "launches": asked,
                "products": cost.operator(large),
                "memory": cost.operator(moved),
                "dp": cost.collective(entry, range(8)),
            }
        )
        assert found.total == pytest.approx(sum(found.spent.values()))


def test_a_product_that_waits_for_its_operands_spends_its_time_on_memory() -> None:
    thin = Operator("mm", 2 * 8192**2, 2 * 8192**2, "bfloat16", (1, 1, 8192, 8192))
    cost = Cost(A100.having(device__dispatch_seconds=0))
    assert play([Section(None, [thin])], cost).spent == pytest.approx({"memory": cost.operator(thin)})


def test_a_collective_begins_when_its_tensors_are_there() -> None:
    """Behind the product before it, though the host is ahead of that."""
    large = Operator("mm", 10**13, 0, "bfloat16", (1, 1, 1, 1))
    entry = Entry("all_reduce", "dp", (1,), "float32", 10**9, "", False, 0.0)
    sent, cost = Sent(1, entry, tuple(range(8))), Cost(A100.having(device__dispatch_seconds=0))
    assert play([Section(None, [large, sent, Waited(1)])], cost).total == pytest.approx(
        cost.operator(large) + cost.collective(entry, range(8))
    )


def test_on_a_cpu_the_host_is_as_late_as_what_it_has_sent() -> None:
    cpu = Cost(replace(A100.having(device__dispatch_seconds=1e-3), kind="cpu"))
    small = Operator("add", 0, 0, "float32")
    entry = Entry("all_reduce", "dp", (1,), "float32", 10**9, "", False, 0.0)
    found = play([Section(None, [Sent(1, entry, tuple(range(8))), Waited(1), small])], cpu)
    assert found.total == pytest.approx(cpu.collective(entry, range(8)) + 1e-3)


def test_of_actions_of_a_kind_the_median_counts() -> None:
    actions = [("F", 0, 0), ("F", 1, 0), ("F", 2, 0), ("B", 0, 0), ("F", 0, 1)]
    sections = [Section(None), *(Section(Action(*each)) for each in actions), Section(None)]  # type: ignore[arg-type]
    found = of_actions(sections, (99.0, 2.0, 9.0, 1.0, 5.0, 3.0, 99.0))
    assert found == {("F", 0): 2.0, ("B", 0): 5.0, ("F", 1): 3.0}


@pytest.mark.parametrize(("beside", "far"), [(3, False), (4, False), (5, True), (8, True)])
def test_a_message_takes_as_long_as_the_slowest_of_those_that_go_beside_it(beside: int, far: bool) -> None:
    """Of five ranks in each of two stages on machines of eight, the last two send to another machine."""
    cost = Cost(A100.having(island__size=8, node__size=8), 2 * beside)
    slowest = max(cost.move("send", 10**8, (each, beside + each)) for each in range(beside))
    assert cost.message(10**8, (0, 1), beside) == slowest
    assert (slowest > cost.move("send", 10**8, (0, 1))) is far


def test_a_step_waits_for_the_slowest_of_all_groups_of_an_axis() -> None:
    """Of three machines with eight devices, the second and the third of four groups of six lie in two of them."""
    machine = A100.having(island__call=0, island__latency=0, network__latency=1.0, network__bandwidth=8e8)
    entry = Entry("all_reduce", "tp", (10**8,), "float32", 4 * 10**8, "", False, 0.0)
    alone, all_of_them = Cost(machine, 6), Cost(machine, 24)
    within, across = (alone.move("all_reduce", 4 * 10**8, range(first, first + 6)) for first in (0, 6))
    assert across > 1000 * within
    assert alone.collective(entry, range(6)) == within
    for first in (0, 6, 18):
        assert all_of_them.collective(entry, range(first, first + 6)) == across


@pytest.mark.parametrize(
    ("ranks", "slowest"),
    [
        ((0, 1, 2, 3), (0, 1, 2, 3)),  # two of these in the first machine, one in the second
        ((0, 2), (0, 2)),  # 0 and 2, 1 and 3, 4 and 6, …: never 6 and 8
        ((0, 3, 6), (2, 5, 8)),
        ((0, 6), (2, 8)),  # of these two of six pairs are in one machine
        ((0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)),
        ((0, 1, 6, 7), (0, 1, 6, 7)),  # along two axes
        ((5,), (5,)),
    ],
    ids=str,
)
def test_groups_along_an_axis_have_as_many_ranks_as_far_apart(ranks: Sequence[int], slowest: Sequence[int]) -> None:
    """Of 12 ranks in machines of eight."""
    machine = A100.having(island__call=0, island__latency=0, network__latency=1.0)
    cost = Cost(machine, 12)
    assert cost.slowest("all_reduce", 10**6, ranks) == cost.move("all_reduce", 10**6, slowest)


def test_a_group_beyond_a_switch_is_slower_than_one_between_machines() -> None:
    """Of six groups of six in machines of eight the second is under one switch, the third under two."""
    cost = Cost(A100.having(network__switch_nodes=2, network__oversubscription=4), 36)
    under, beyond = (cost.move("all_reduce", 10**9, range(first, first + 6)) for first in (6, 12))
    assert cost.slowest("all_reduce", 10**9, range(6)) == beyond > 2 * under


def test_what_is_known_of_an_axis_is_taken_for_no_other() -> None:
    """Of a network that is as fast as what links an island, and answers later."""
    machine = A100.having(network__latency=1.0, network__bandwidth=1e15)
    cost, axes = Cost(machine, 12), [(0, 1), (0, 3), (0, 6), (0, 1, 2), (0, 3, 6), (0, 2), (0, 1, 2, 3, 4, 5)]
    found = [cost.slowest("all_reduce", 10**6, ranks) for ranks in axes]
    assert found == [Cost(machine, 12).slowest("all_reduce", 10**6, ranks) for ranks in axes]
    assert [each > 1.0 for each in found] == [False, True, True, True, True, False, True]


def test_the_ends_of_three_stages_are_no_further_than_the_last_rank() -> None:
    """Of two ranks each, on one machine of six devices."""
    cost = Cost(A100.having(island__size=6, node__size=6, network__latency=1.0), 6)
    assert cost.slowest("all_reduce", 10**6, (0, 4)) == cost.move("all_reduce", 10**6, (0, 4)) < 1.0
