"""Thermometers of one rank against what hooks see, and what a run leaves of them. All layouts: tests/parity."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.architecture.parts import trained_architecture
from colonnade.architecture.sites import parts, sites
from colonnade.config.thermometers import ALL_SITES, SiteName, ThermometersConfig
from colonnade.kernels import attention
from colonnade.mesh.mesh import Mesh
from colonnade.report.heat import heats
from colonnade.train import loop
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import StepResult, train_step
from colonnade.train.thermometers import Activations, Part, Reading
from tests import tiny
from tests.commands import here
from tests.parity.compare import compare
from tests.parity.runs import CPU, SERIAL, Case, Way, configured, microbatches
from tests.tiny import TinyCorpus

CASE = Case(drop=0.0, num_layers=2)


def stepped(case: Case, state: TrainState, number: int = 0) -> StepResult:
    way = replace(SERIAL, micro_batch_size=4)
    return train_step(state, microbatches(case, way, number, Mesh()), Mesh(), configured(case, way).train)


def built(case: Case, every: int = 1, sites: tuple[SiteName, ...] = ALL_SITES) -> TrainState:
    thermometers = ThermometersConfig(every=every, sites=sites)
    config = configured(case, SERIAL).model_copy(update={"thermometers": thermometers})
    return build_state(config, Mesh(), case.vocab_size, CPU)


def of(tensors: list[Tensor]) -> Activations:
    x = torch.cat([each.detach().flatten() for each in tensors])
    low, high, rms = x.min().item(), x.max().item(), x.square().mean().sqrt().item()
    return Activations(low, high, rms, (x == 0).double().mean().item(), 0.0, 0.0)


def test_activations_are_what_hooks_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of outputs of modules; the hidden layer of an MLP is what its second layer reads, and logits are torch's."""
    state, seen = built(CASE), dict[tuple[str, str], list[Tensor]]()

    def keep(unit: str, site: str, x: Tensor) -> None:
        seen.setdefault((unit, site), []).append(x)

    model: Any = state.model
    model.embedding.register_forward_hook(lambda _, __, out: keep("embedding", "embedding", out))
    model.head.norm.register_forward_hook(lambda _, __, out: keep("head", "final_norm", out))
    for layer, block in model.blocks.items():
        unit = f"blocks.{layer}"
        block.register_forward_hook(lambda _, __, out, unit=unit: keep(unit, "residual_stream", out))
        block.attention.register_forward_hook(lambda _, __, out, unit=unit: keep(unit, "attention_output", out))
        block.mlp.down.register_forward_hook(lambda _, read, __, unit=unit: keep(unit, "mlp_hidden", read[0]))
    fused, calls = attention._fused, iter(["blocks.0", "blocks.1"] * 2)

    def logits(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        every = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        keep(next(calls), "attention_logits", every[..., torch.ones(every.shape[-2:]).tril().bool()])
        return fused(q, k, v, is_causal=is_causal)

    monkeypatch.setattr(attention, "_fused", logits)
    reading = stepped(CASE, state).reading
    assert reading is not None and {site for site, _ in reading.activations} == seen.keys()
    for site, found in reading.activations:
        assert found == pytest.approx(of(seen[site]), rel=1e-12), site


def test_the_root_mean_square_is_that_of_finite_numbers() -> None:
    state = built(CASE)
    seen: list[Tensor] = []
    model: Any = state.model
    model.embedding.register_forward_hook(lambda _, __, out: seen.append(out.detach()))
    (tables,) = (bucket for bucket in state.buckets if bucket.name == "embedding")
    for local in tables.local_ranges():
        tables.parameters[local.at.start] = tables.master[local.at.start] = math.inf  # of one row, one feature
    reading = stepped(CASE, state).reading
    assert reading is not None
    found, x = dict(reading.activations)["embedding", "embedding"], torch.cat([each.flatten() for each in seen])
    finite = x[x.isfinite()]
    assert 0 < found.non_finite == pytest.approx(1 - len(finite) / len(x))
    assert found.rms == pytest.approx(finite.square().mean().sqrt().item(), rel=1e-12)


def test_gradients_and_updates() -> None:
    """Before clipping; the change of weights over what they were."""
    state = built(CASE)
    before = {bucket.name: bucket.master.clone() for bucket in state.buckets}
    result = stepped(CASE, state)
    assert result.reading is not None
    found = dict(result.reading.parts)
    assert list(found) == [bucket.name for bucket in state.buckets]
    assert math.sqrt(sum((part.gradient_norm or 0) ** 2 for part in found.values())) == pytest.approx(result.grad_norm)
    for bucket in state.buckets:
        change = (bucket.master - before[bucket.name]).norm() / before[bucket.name].norm()
        assert found[bucket.name].update == pytest.approx(change.item(), rel=1e-12)
        clipped = 0.05 / result.grad_norm  # what is left in the buffers
        most = bucket.reduced.abs().max().item() / clipped
        assert found[bucket.name].gradient_maximum == pytest.approx(most, rel=1e-10)


def test_a_loss_scale_is_in_no_gradient_that_is_told() -> None:
    case = replace(CASE, precision="fp16", loss_scale=1024.0)
    result = stepped(case, built(case))
    assert result.reading is not None and not result.skipped
    found = dict(result.reading.parts)
    assert math.sqrt(sum((part.gradient_norm or 0) ** 2 for part in found.values())) == pytest.approx(result.grad_norm)
    unscaled = replace(case, loss_scale=1.0)
    again = stepped(unscaled, built(unscaled)).reading
    assert again is not None
    for name, part in again.parts:
        assert found[name].gradient_norm == pytest.approx(part.gradient_norm, rel=0.02)
        assert found[name].gradient_maximum == pytest.approx(part.gradient_maximum, rel=0.05)


def test_an_overflow_has_no_norm_and_no_update() -> None:
    case = Case(precision="fp16", loss_scale=2.0**40)
    result = stepped(case, built(case))
    assert result.skipped and result.reading is not None
    assert all(part.update is None for _, part in result.reading.parts)
    assert any(part.gradient_norm is None for _, part in result.reading.parts)
    assert json.loads(json.dumps(result.reading.to_json(), allow_nan=False))["step"] == 1


def test_only_every_so_many_steps_are_measured_and_none_by_default() -> None:
    state = built(CASE, every=2)
    assert [stepped(CASE, state, number).reading is not None for number in range(4)] == [False, True, False, True]
    assert stepped(CASE, built(CASE, every=0)).reading is None


@pytest.mark.parametrize("block", ["gpt", "bert", "labels", "choice", "spans", "preferences", "t5", "neox"])
def test_every_site_that_is_listed_is_read(block: Any) -> None:
    """And no other."""
    case = Case(block=block)
    stepped_once = stepped(case, built(case)).reading
    assert stepped_once is not None
    assert all(found.rms is not None for _, found in stepped_once.activations)
    stated = trained_architecture(configured(case, SERIAL), case.vocab_size)
    assert tuple(site for site, _ in stepped_once.activations) == sites(case.model, stated)
    assert tuple(part for part, _ in stepped_once.parts) == parts(stated)


CHOICES: list[tuple[SiteName, ...]] = [
    ("residual_stream", "attention_logits"),
    ("gradients",),
    ("updates", "mlp_hidden"),
    ("embedding", "final_norm"),
]


@pytest.mark.parametrize("chosen", CHOICES, ids=",".join)
def test_what_is_chosen_is_as_when_all_is_measured(chosen: tuple[SiteName, ...]) -> None:
    """And what is not is not there: not computed, not written, not drawn."""
    every, some = (stepped(CASE, built(CASE, sites=sites)).reading for sites in (ALL_SITES, chosen))
    assert every is not None and some is not None
    activations = {site: found for site, found in every.activations if site[1] in chosen}
    assert dict(some.activations) == activations and (activations or chosen == ("gradients",))
    told, whole = some.to_json(), every.to_json()
    for name in ("gradients", "updates"):
        assert told[name] == (whole[name] if name in chosen else {})
    assert whole["gradients"] and whole["updates"]
    names = {f"largest_{site}" for site in chosen if site not in ("gradients", "updates")}
    assert some.summary().keys() == names | ({"non_finite", "near_limit"} if names else set()) | (
        {"largest_update"} if "updates" in chosen else set()
    )
    assert some.summary().items() <= every.summary().items() or "non_finite" in some.summary()
    assert json.loads(json.dumps(told, allow_nan=False)) == told and heats([told, {**told, "step": 2}])


def test_logits_are_computed_again_only_where_they_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **more: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("colonnade.model.attention.visible_logits", refused)
    assert stepped(CASE, built(CASE, sites=("attention_output",))).reading is not None
    with pytest.raises(AssertionError):
        stepped(CASE, built(CASE, sites=("attention_logits",)))


def test_every_name_is_a_site_of_some_model() -> None:
    there = {"gradients", "updates"}
    for block in ("gpt", "t5"):
        case = Case(block=block)
        stated = trained_architecture(configured(case, SERIAL), case.vocab_size)
        there |= {site.removeprefix("cross_") for _, site in sites(case.model, stated)}
    assert there == set(ALL_SITES)


def test_names_that_nothing_has_are_refused(config: Path) -> None:
    for value, told in {
        '["residual"]': 'thermometers.sites has "residual" in it, where a list of "embedding", "attention_logits", '
        '"attention_output", "mlp_hidden", "residual_stream", "final_norm", "gradients" or "updates" is expected. Did '
        'you mean "residual_stream"?',
        "[]": "thermometers.sites = [] leaves nothing to measure.",
        '["final_norm"]\nmodel.norm_position=post': "thermometers.sites has final_norm, and this model has no such "
        "site. Leave it out; there are embedding, attention_logits, attention_output, mlp_hidden, residual_stream, ",
        '["attention_logits"]\ndivergence.growth=4.0': "divergence.growth = 4 watches attention_logits and "
        "residual_stream, and thermometers.sites leaves out residual_stream. Put it in, or",
    }.items():
        answer = here("train", config, "thermometers.every=1", *f"thermometers.sites={value}".split("\n"))
        assert answer.status == 2 and told in " ".join(answer.err.split()), answer.err


def test_what_is_not_finite_is_the_largest() -> None:
    def reading(found: Activations) -> Reading:
        return Reading(3, ((("blocks.0", "residual_stream"), found),), ())

    assert reading(Activations(-7.0, 3.0, 1.0, 0.0, 0.0, 0.0)).summary()["largest_residual_stream"] == 7.0
    assert reading(Activations(-0.25, 0.125, 0.1, 0.0, 0.0, 0.0)).summary()["largest_residual_stream"] == 0.25
    assert reading(Activations(-7.0, 3.0, 1.0, 0.0, 0.1, 0.0)).summary()["largest_residual_stream"] == math.inf


def test_norms_and_extremes_of_gradients_and_updates_have_their_names() -> None:
    parts = (("embedding", Part(3.0, 0.5, 0.01)), ("blocks.0", Part(None, None, None)), ("head", Part(2.0, 0.7, 0.03)))
    found = Reading(3, (), parts)
    assert found.to_json() == {
        "step": 3,
        "activations": {},
        "gradients": {
            "embedding": {"norm": 3.0, "maximum": 0.5},
            "blocks.0": {"norm": None, "maximum": None},
            "head": {"norm": 2.0, "maximum": 0.7},
        },
        "updates": {"embedding": 0.01, "blocks.0": None, "head": 0.03},
    }
    assert found.summary() == {"largest_update": 0.03}
    assert Reading(3, (), parts[1:2]).summary() == {}, "of a step that was skipped"


def test_a_summary_has_the_largest_of_all_units() -> None:
    def reading(*largest: float) -> Reading:
        units = [
            ((f"blocks.{n}", "mlp_hidden"), Activations(-1.0, x, 1.0, 0.0, 0.0, x / 10)) for n, x in enumerate(largest)
        ]
        return Reading(3, tuple(units), ())

    for order in ((2.0, 5.0, 3.0), (5.0, 2.0, 3.0), (2.0, 3.0, 5.0)):
        assert reading(*order).summary() == {"largest_mlp_hidden": 5.0, "non_finite": 0.0, "near_limit": 0.5}


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "thermometers.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_writes_them_and_cuts_them_off_when_it_goes_on(corpus: TinyCorpus, tmp_path: Path) -> None:
    options = ["thermometers.every=2", "train.evaluate_every=0"]
    config = tiny.config(corpus, tmp_path, *options)
    tiny_main(config)
    written = lines(tmp_path / "run")
    assert [line["step"] for line in written] == [2, 4, 6]
    assert set(written[0]) == {"step", "activations", "gradients", "updates"}
    logits = written[0]["activations"]["blocks.0"]["attention_logits"]
    assert set(logits) == {"minimum", "maximum", "rms", "zeros", "non_finite", "near_limit"}
    (tmp_path / "run" / "checkpoints" / "step_00000006").rename(tmp_path / "aside")
    tiny_main(tiny.config(corpus, tmp_path, *options))
    assert lines(tmp_path / "run") == written


def tiny_main(config: Any) -> None:
    loop.main(config, banner=lambda *_: loop.Banner("", {}))


def test_ranks_count_every_number_once() -> None:
    """Weights that tp or dp ranks have alike, and extremes of cut tensors: on four ranks as on one."""
    job = (Case(), Way(tp=2, dp=2, micro_batch_size=2))
    (outcome,) = compare([job], {}, time_limit=60.0)
    assert outcome.worst("thermometers").size <= 1e-10, outcome.worst("thermometers")
