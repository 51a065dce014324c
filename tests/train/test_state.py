"""What the state is built with: each key of [train], [optim] and [parallel] where it belongs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.data_parallel.buckets import Storage
from colonnade.kernels.choice import Kernels, usual
from colonnade.mesh.mesh import Mesh
from colonnade.optim.adamw import AdamW
from colonnade.optim.lamb import Lamb
from colonnade.optim.loss_scale import LossScale
from colonnade.train import state
from colonnade.train.rollback import Rollback
from colonnade.train.state import build_state, learning_rate_of, parallel_of, storage_of
from tests.parity.runs import CPU, SERIAL, Case, Way, configured
from tests.tiny import TinyCorpus, write_config


def having(config: Config, section: str, **values: object) -> Config:
    """A configuration with other values in one section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


CONFIG = configured(Case(), SERIAL)


def test_only_fp16_has_a_loss_scale_with_all_that_the_configuration_says() -> None:
    scaled = {"loss_scale": 64.0, "loss_scale_window": 7, "min_loss_scale": 4.0}
    for precision, scale in {"fp16": LossScale(64.0, 0, 7, 4.0), "bf16": LossScale(), "fp64": LossScale()}.items():
        config = having(CONFIG, "train", precision=precision, **scaled)
        assert build_state(config, Mesh(), 37, CPU).loss_scale == scale


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_the_optimizer_has_all_that_the_configuration_says(name: str) -> None:
    config = having(CONFIG, "optim", name=name, beta1=0.8, beta2=0.7, epsilon=1e-3, weight_decay=0.6)
    expected = {"adamw": AdamW, "lamb": Lamb}[name](beta1=0.8, beta2=0.7, epsilon=1e-3, weight_decay=0.6)
    assert build_state(config, Mesh(), 37, CPU).optimizer == expected


def test_the_learning_rate_has_all_that_the_configuration_says() -> None:
    given = {"learning_rate": 8.0, "min_learning_rate": 2.0, "warmup_steps": 4, "decay_steps": 10, "decay": "linear"}
    rate = learning_rate_of(having(CONFIG, "optim", **given))
    assert [rate(step) for step in (1, 4, 7, 10, 11)] == [2.0, 8.0, 5.0, 2.0, 2.0]
    given = {**given, "decay_steps": None}
    rate = learning_rate_of(having(having(CONFIG, "optim", **given), "train", steps=16))
    assert [rate(step) for step in (10, 16)] == [5.0, 2.0], "train.steps, where nothing is said"


@pytest.mark.parametrize(("start", "middle"), [(20, 25), (5, 22)])
def test_behind_a_second_warm_up_the_decay_begins_where_the_configuration_says(start: int, middle: int) -> None:
    """Where that is over by then, with the end of the warm-up."""
    given = {"learning_rate": 8.0, "min_learning_rate": 2.0, "warmup_steps": 0, "decay_steps": 30, "decay": "linear"}
    rate = learning_rate_of(having(CONFIG, "optim", **given, decay_start=start, rewarm_at=10, rewarm_steps=4))
    steps = (11, 12, 14, max(14, start), middle, 30)
    assert [rate(step) for step in steps] == [3.5, 5.0, 8.0, 8.0, 5.0, 2.0]


@pytest.mark.parametrize("again", [{}, {"rewarm_at": 10, "rewarm_steps": 4}])
def test_a_rollback_lowers_the_rate_of_any_run_also_of_one_that_warms_up_again(again: dict[str, int]) -> None:
    optim = {"learning_rate": 8.0, "warmup_steps": 0, "decay": "constant"}
    config = having(CONFIG, "optim", **optim, **again)
    rate, lower = learning_rate_of(config), learning_rate_of(config, [Rollback(to=20, rate_factor=0.5, rate_until=22)])
    assert [lower(step) for step in range(1, 26)] == [
        rate(step) * (0.5 if step in (21, 22) else 1.0) for step in range(1, 26)
    ]


@pytest.mark.parametrize(
    ("precision", "reduce_precision", "dtype", "wire"),
    [
        ("fp32", "fp32", torch.float32, None),
        ("bf16", "fp32", torch.bfloat16, None),
        ("bf16", "16-bit", torch.bfloat16, torch.bfloat16),
        ("fp16", "16-bit", torch.float16, torch.float16),
    ],
)
def test_buffers_are_kept_as_the_configuration_says(
    precision: str, reduce_precision: str, dtype: torch.dtype, wire: torch.dtype | None
) -> None:
    config = having(CONFIG, "train", precision=precision, reduce_precision=reduce_precision)
    config = having(config, "parallel", zero=2, offload=True)
    meta = torch.device("meta")
    expected = Storage(dtype=dtype, device=meta, zero=2, offload=True, reduce_dtype=wire)
    assert storage_of(config.train, config.parallel, meta) == expected


def test_only_selective_recomputation_is_the_layers_affair_and_only_full_is_the_chunks() -> None:
    for way, in_layers, in_chunks in (
        (Way(), False, False),
        (Way(recompute="selective", recompute_every=1), True, False),
        (Way(recompute="full", recompute_every=1), False, True),
    ):
        state = build_state(configured(Case(), way), Mesh(), 37, CPU)
        assert state.model.parallel.recompute_attention is in_layers
        assert any(again for chunk in state.runner.chunks for _, again in chunk.groups) is in_chunks


def test_layers_are_cut_as_the_configuration_says() -> None:
    mesh = Mesh()
    for sequence_parallel in (False, True):
        built = parallel_of(Way(sequence_parallel=sequence_parallel).parallel, mesh.tp)
        assert built.tp is mesh.tp and built.sequence_parallel is sequence_parallel
        assert built.products == usual()


def test_layers_multiply_by_the_kernels_that_were_chosen() -> None:
    chosen = usual().having("fp32", Kernels("onednn", "onednn", "onednn", "onednn", "blas"))
    assert chosen != usual()
    assert build_state(CONFIG, Mesh(), 37, CPU, products=chosen).model.parallel.products == chosen
    assert build_state(CONFIG, Mesh(), 37, CPU).model.parallel.products == usual()


def test_a_state_without_drawn_weights_has_zeros() -> None:
    """For who has others to load."""
    drawn, empty = (build_state(CONFIG, Mesh(), 37, CPU, draw=draw) for draw in (True, False))
    assert (drawn.drawn, empty.drawn) == (True, False)
    assert any(parameter.any() for parameter in drawn.model.parameters())
    assert not any(parameter.any() for parameter in empty.model.parameters())
    assert not any(bucket.master.any() for bucket in empty.buckets)


@pytest.mark.parametrize(
    ("curriculum", "steps"),
    [
        ("", (4, 10, 16)),  # 64 tokens a step
        (
            "[curriculum]\ntokens = [0, 256]\nseq_length = [8, 16]\nglobal_batch_size = [2, 4]",
            (16, 22, 28),
        ),  # 16, then 64
    ],
)
def test_a_learning_rate_in_tokens_is_that_in_steps(
    corpus: TinyCorpus, tmp_path: Path, curriculum: str, steps: tuple[int, int, int]
) -> None:
    path = write_config(corpus, tmp_path)
    path.write_text(path.read_text().replace("warmup_steps = 2\n", "") + curriculum)
    tokens = ["optim.warmup_tokens=256", "optim.decay_start_tokens=640", "optim.decay_tokens=1024"]
    warmup, start, end = steps
    same = [f"optim.warmup_steps={warmup}", f"optim.decay_start={start}", f"optim.decay_steps={end}"]
    of_tokens, of_steps = (learning_rate_of(load(path, options)) for options in (tokens, same))
    assert [of_tokens(step) for step in range(1, 40)] == [of_steps(step) for step in range(1, 40)]
    assert of_tokens(warmup) == of_tokens(start) == 0.01 > of_tokens(start + 1) > of_tokens(end) == pytest.approx(0.001)


@pytest.mark.parametrize("skipped", [Rollback(to=4, skip=2, passed=12), Rollback(to=4, skip=3)])
def test_tokens_that_a_rollback_passes_over_do_not_count_for_the_learning_rate(
    corpus: TinyCorpus, tmp_path: Path, skipped: Rollback
) -> None:
    """Twelve samples behind step 4, whose batches, of 6 or of 4 each, nobody has trained on; then come batches of 6."""
    phases = ["curriculum.tokens=[0, 448]", "curriculum.seq_length=[16, 16]", "curriculum.global_batch_size=[4, 6]"]
    phases += ["train.global_batch_size=6", "train.micro_batch_size=2"]
    path = write_config(corpus, tmp_path)
    path.write_text(path.read_text().replace("warmup_steps = 2\n", ""))
    tokens = ["optim.warmup_tokens=256", "optim.decay_start_tokens=640", "optim.decay_tokens=1024"]
    same = ["optim.warmup_steps=4", "optim.decay_start=8", "optim.decay_steps=12"]
    of_tokens, of_steps = (learning_rate_of(load(path, [*phases, *options]), [skipped]) for options in (tokens, same))
    assert [of_tokens(step) for step in range(1, 20)] == [of_steps(step) for step in range(1, 20)]


def test_weights_that_the_same_stages_have_share_one_axis_and_others_have_another() -> None:
    """The first and the last stage, and three of four."""
    made: list[tuple[int, ...]] = []

    def holders(stages: tuple[int, ...]) -> object:
        made.append(stages)
        return f"axis of {stages}"

    mesh: Any = SimpleNamespace(holders=holders)
    found: Any = state._axes_of({"embedding": (0, 3), "norms": (0, 1, 3), "factors": (0, 3)}, mesh)
    assert found == {"embedding": "axis of (0, 3)", "norms": "axis of (0, 1, 3)", "factors": "axis of (0, 3)"}
    assert made == [(0, 3), (0, 1, 3)], "each is made once, by all ranks in one order"
    assert state._axes_of({}, mesh) == {}
