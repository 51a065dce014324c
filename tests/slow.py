"""Which of many alike cases run in the default suite: the others are slow, and run with `make test-all`."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest

ONE_IN: Mapping[str, int] = MappingProxyType(
    {
        "tests/checkpoint/test_save_and_load.py::test_any_ranks_read_what_other_ranks_wrote": 2,
        "tests/corpus/test_real_data.py::test_passages_are_found_in_whatever_form": 2,
        "tests/cuda/test_fake_device.py::test_the_host_waits_for_nothing": 3,
        "tests/data/test_tokenize.py::test_a_cut_input_gives_what_it_has_and_the_cut_is_told": 2,
        "tests/data_parallel/test_clip.py::test_the_norm_is_torchs_norm_of_the_whole": 3,
        "tests/data_parallel/test_zero.py::test_nothing_is_used_before_it_is_there_nor_changed_while_it_is_sent": 3,
        "tests/parity/test_parity.py::test_losses": 2,
        "tests/parity/test_precision.py::test_16_bits_stay_near_fp32": 3,
        "tests/parity/test_precision.py::test_256_microbatches_add_up_in_fp32": 3,
        "tests/parity/test_precision.py::test_offload_changes_no_bit": 3,
        "tests/pipeline/test_runner.py::test_loss_and_gradients_are_those_of_one_graph": 3,
        "tests/planner/test_kept.py::test_what_each_option_of_llama_keeps_to_the_byte": 3,
        "tests/planner/test_kept.py::test_what_each_unit_keeps_to_the_byte": 3,
        "tests/planner/test_memory.py::test_every_schedule": 2,
        "tests/planner/test_memory.py::test_every_stage_of_zero": 3,
        "tests/planner/test_memory.py::test_frozen_parts": 5,
        "tests/planner/test_memory.py::test_llama": 3,
        "tests/planner/test_memory.py::test_recomputation": 3,
        "tests/planner/test_memory.py::test_tensor_and_sequence_parallel": 3,
        "tests/planner/test_memory.py::test_virtual_stages": 5,
        "tests/planner/test_traffic.py::test_one_kind_of_weight_is_trained": 5,
        "tests/planner/test_traffic.py::test_theory_holds_in_any_combination": 4,
        "tests/planner/test_traffic.py::test_theory_is_what_the_ledger_sees": 3,
        "tests/planner/test_traffic.py::test_two_losses": 4,
        "tests/planner/test_traffic.py::test_two_stacks": 4,
        "tests/serving/test_trained.py::test_evaluation_is_the_runs_own_validation": 3,
        "tests/tasks/test_labels.py::test_every_layout_trains_the_same": 2,
        "tests/train/test_bad_input.py::test_a_full_disk": 2,
        "tests/train/test_copies.py::test_one_bit_on_one_rank_is_named": 4,
        "tests/train/test_data_identity.py::test_data_that_has_changed_is_refused": 3,
        "tests/train/test_distilled_states.py::test_every_layout_is_the_serial_run": 2,
        "tests/train/test_interrupt.py::test_every_rank_gets_the_signal": 2,
        "tests/train/test_memory_copies.py::test_a_damaged_copy_is_passed_over": 2,
        "tests/train/test_products.py::test_a_run_that_goes_on_multiplies_as_before_to_the_bit": 2,
        "tests/train/test_start.py::test_who_has_a_folder_is_said_and_a_dead_run_never_blocks": 2,
    }
)
"""Of so many cases of a test, one runs in the default suite: the first, and each that is so much further."""


def first_fast(cases: Sequence[Any], fast: int = 1) -> list[Any]:
    """The cases of a `parametrize`, with all but the first few left to the slow suite."""
    rest = [case if isinstance(case, tuple) else (case,) for case in cases[fast:]]
    return [*cases[:fast], *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]


def spread(items: Sequence[pytest.Item]) -> None:
    """Mark as slow, of the tests in ONE_IN, the cases that the default suite passes over."""
    seen: dict[str, int] = dict.fromkeys(ONE_IN, 0)
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in seen and item.get_closest_marker("slow") is None:
            if seen[name] % ONE_IN[name]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1
