"""Preference tuning: runs on any layout, beside TRL's formula on exported models, and what they refuse."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.data.indexed import TokenFile
from colonnade.errors import DataError
from colonnade.mesh.mesh import Mesh
from colonnade.train import reference
from colonnade.train.change import Change
from colonnade.train.corpus import Corpus, open_corpus
from colonnade.train.in_force import InForce
from tests.commands import Answer, forked, here
from tests.examples.chats import jsonl
from tests.examples.pairs import make, write_config
from tests.runs import assert_near, events, metrics
from tests.told import Told


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("pairs"))


def run(pairs: Path, folder: Path, *more: str, num_ranks: int = 1, head: str = "preferences") -> Answer:
    return forked("train", write_config(pairs, folder, head=head), *more, num_ranks=num_ranks)


@pytest.fixture(scope="module")
def tuned(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    answer = run(pairs, folder, "train.evaluate_at_start=true")
    assert answer.status == 0 and "with the weights of the reference, once" in answer.out, answer
    return folder / "run"


def trl(pairs: Path, run: Path, tmp_path: Path) -> dict[str, float]:
    """Of the validation pairs: `trl.DPOTrainer.dpo_loss` and its rewards, of the exported model beside the first."""
    answer = here("convert", run, tmp_path / "exported")
    assert answer.status == 0, answer
    models = [
        transformers.GPT2LMHeadModel.from_pretrained(path, dtype=torch.float64)
        for path in (tmp_path / "exported", pairs / "theirs")
    ]
    file, gains = TokenFile(pairs / "pairs"), []
    for number in range(32, 40):
        sequences = [torch.tensor(each.astype(np.int64)) for each in file.sequences(number)]
        for prompt, answer_ids in (sequences[:2], sequences[2:]):
            whole = torch.cat([prompt, answer_ids])
            with torch.no_grad():
                logps = [torch.log_softmax(model(whole[None]).logits[0, :-1], -1) for model in models]
            own, other = (each.gather(-1, whole[1:, None])[len(prompt) - 1 :].sum() for each in logps)
            gains.append(0.1 * (own - other))
    rewards = torch.stack(gains).view(-1, 2)
    margin = rewards[:, 0] - rewards[:, 1]
    return {
        "loss": float(-nn.functional.logsigmoid(margin).mean()),
        "reward_accuracy": float((margin > 0).double().mean()),
        "reward_margin": float(margin.mean()),
        "chosen_reward": float(rewards[:, 0].mean()),
        "rejected_reward": float(rewards[:, 1].mean()),
    }


@pytest.mark.slow
def test_an_evaluation_is_trls_on_the_exported_model(pairs: Path, tuned: Path, tmp_path: Path) -> None:
    expected = trl(pairs, tuned, tmp_path)
    last = metrics(tuned)[-1]
    assert {name: last[f"validation_{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert metrics(tuned)[0]["loss"] == pytest.approx(np.log(2), rel=1e-12), "the model is its own reference at first"
    first = next(event for event in events(tuned) if event["event"] == "evaluated")
    assert first["validation_loss"] == pytest.approx(np.log(2)) and first["validation_reward_margin"] == 0
    told = here("evaluate", tuned, "--part", "validation", "--json")
    assert told.status == 0 and json.loads(told.out)["loss"] == pytest.approx(last["validation_loss"], rel=1e-12), told
    written = here("generate", tuned, "--chat", "--prompt", "What?", "--max-new-tokens", "3")
    assert written.status == 0, written


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tp=2", "parallel.sequence_parallel=true"),
        pytest.param(("parallel.tp=2",), marks=pytest.mark.slow),
        pytest.param(("parallel.pp=2",), marks=pytest.mark.slow),
        pytest.param(("parallel.pp=2", "parallel.schedule=zero_bubble"), marks=pytest.mark.slow),
        pytest.param(("parallel.dp=2", "parallel.zero=1"), marks=pytest.mark.slow),
        pytest.param(("parallel.dp=2", "parallel.zero=3", "parallel.recompute=full"), marks=pytest.mark.slow),
    ],
    ids=lambda layout: " ".join(each.removeprefix("parallel.") for each in layout),
)
def test_preferences_are_learned_alike_on_every_layout(
    layout: tuple[str, ...], pairs: Path, tuned: Path, tmp_path: Path
) -> None:
    answer = run(pairs, tmp_path, *layout, num_ranks=2)
    assert answer.status == 0, answer
    assert_near(tmp_path / "run", tuned)
    ours, theirs = (np.load(folder / "reference.npz") for folder in (tmp_path / "run", tuned))
    for name in ("train.0", "validation.0"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-12)


def test_tokens_of_both_answers_are_counted(tuned: Path) -> None:
    assert [line["tokens"] for line in metrics(tuned)] == [step * 4 * 2 * 48 for step in (1, 2, 3, 4)]


@pytest.mark.slow
def test_a_run_goes_on_with_its_reference(pairs: Path, tuned: Path, tmp_path: Path) -> None:
    answer = run(pairs, tmp_path, "train.steps=2", "optim.decay_steps=4")
    assert answer.status == 0, answer
    stored = (tmp_path / "run" / "reference.npz").read_bytes()
    (tmp_path / "run" / "reference.npz").rename(tmp_path / "kept.npz")
    answer = run(pairs, tmp_path, "optim.decay_steps=4")
    assert answer.status == 2 and "reference.npz is gone" in answer.err, answer
    (tmp_path / "kept.npz").rename(tmp_path / "run" / "reference.npz")
    answer = run(pairs, tmp_path, "optim.decay_steps=4")
    assert answer.status == 0, answer
    assert_near(tmp_path / "run", tuned)
    assert (tmp_path / "run" / "reference.npz").read_bytes() == stored


@pytest.mark.parametrize(
    ("name", "began", "then"),
    [("train.evaluate_every", 0, 1), ("train.evaluate_every", 2, 0), ("train.global_batch_size", 4, 8)],
)
def test_behind_a_change_of_what_is_read_pairs_have_their_reference(
    name: str, began: int, then: int, tuned: Path, tmp_path: Path
) -> None:
    """Other batches, and evaluations that begin or end, have the data opened anew. Without the file that cannot be."""
    state = cast(Any, SimpleNamespace(step=2, samples=8, rollbacks=[]))
    state.changes = [Change(at=2, values={name: then}, was={name: began}, line="1", position=8)]

    def following(stored: Path) -> InForce:
        keys = (f"train.init_from={tuned}", f"preferences.reference={stored}", f"{name}={began}")
        config = load(tuned.parent / "config.toml", keys)
        return InForce(config, open_corpus(config), Mesh(), cast(Any, Told()))

    parts = reference._parts(following(tuned / "reference.npz").follow(state)[1])
    with np.load(tuned / "reference.npz") as known:
        assert {*parts} == {*known.files} - {"of"} and known["train.0"].all()
        for each, part in parts.items():
            np.testing.assert_array_equal(part.reference, known[each], strict=True)
    with pytest.raises(DataError, match="what the reference model thinks of the answers is not known"):
        following(tmp_path / "missing.npz").follow(state)


@pytest.mark.slow
@pytest.mark.parametrize(("began", "then"), [(0, 1), (2, 0)])
def test_evaluations_that_begin_or_end_in_mid_run_leave_what_is_learned_as_it_is(
    began: int, then: int, pairs: Path, tuned: Path, tmp_path: Path
) -> None:
    """Behind the change, and in a run that is started again behind it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "changes.jsonl").write_text(f'{{"change": {{"train.evaluate_every": {then}}}, "at": 2}}\n')
    for steps in (3, 4):
        more = (f"train.evaluate_every={began}", f"train.steps={steps}", "optim.decay_steps=4")
        answer = run(pairs, tmp_path, *more)
        assert answer.status == 0, answer
    numbers = ("step", "loss", "grad_norm")
    found, expected = (
        [[line[name] for name in numbers] for line in metrics(each)] for each in (tmp_path / "run", tuned)
    )
    assert found == expected
    evaluated = [line["step"] for line in metrics(tmp_path / "run") if "validation_loss" in line]
    assert evaluated == ([3, 4] if then else [2])


@pytest.mark.slow
def test_a_batch_that_changes_in_mid_run_is_learned_alike_on_every_layout(pairs: Path, tmp_path: Path) -> None:
    """Behind the change, and in a run that goes on behind it."""
    for folder, layouts in (("serial", [()]), ("several", [("parallel.dp=2",), ("parallel.pp=2",)])):
        (tmp_path / folder / "run").mkdir(parents=True)
        (tmp_path / folder / "run" / "changes.jsonl").write_text(
            '{"change": {"train.global_batch_size": 8}, "at": 2}\n'
        )
        for number, layout in enumerate(layouts, 1):
            steps = f"train.steps={3 if number < len(layouts) else 4}"
            answer = run(pairs, tmp_path / folder, *layout, steps, "optim.decay_steps=4", num_ranks=1 + bool(layout))
            assert answer.status == 0, answer
    assert [line["tokens"] for line in metrics(tmp_path / "serial" / "run")] == [384, 768, 1536, 2304]
    assert_near(tmp_path / "several" / "run", tmp_path / "serial" / "run", ended_with=(3,))


def test_a_dry_run_refuses_a_reference_as_the_run_would(pairs: Path, tuned: Path, tmp_path: Path) -> None:
    answer = run(
        pairs, tmp_path, f"preferences.reference={tuned / 'reference.npz'}", "train.precision=fp32", "--dry-run"
    )
    assert answer.status == 2 and "has log-probabilities of other precision than the run's" in answer.err, answer
    shutil.copytree(tuned, tmp_path / "run")
    more = ("train.steps=6", "optim.decay_steps=4", "--dry-run")
    answer = run(pairs, tmp_path, *more)
    assert answer.status == 0 and answer.out.endswith("step_00000004 with step 5.\n"), answer
    (tmp_path / "run" / "reference.npz").unlink()
    for layout, num_ranks in (("parallel.dp=1", 1), ("parallel.tp=2", 2)):
        answer = run(pairs, tmp_path, *more, layout, num_ranks=num_ranks)
        assert answer.status == 2 and "reference.npz is gone" in answer.err and "of step 4 cannot" in answer.err, answer


def test_a_dry_run_does_not_read_the_weights_of_a_reference_that_nothing_is_stored_of(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path, ranks: object) -> dict[str, str]:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr("colonnade.train.reference.content_together", read)
    answer = run(pairs, tmp_path, "--dry-run")
    assert answer.status == 0 and "The run would begin with step 1" in answer.out, answer


@pytest.mark.slow
def test_a_reference_of_others_is_refused(pairs: Path, tuned: Path, tmp_path: Path) -> None:
    named = f"preferences.reference={tuned / 'reference.npz'}"
    answer = run(pairs, tmp_path, named, "preferences.beta=0.5", "train.steps=1")
    assert answer.status == 0 and "once" not in answer.out, answer
    answer = run(pairs, tmp_path / "other", named, f"train.init_from={tuned}")
    assert answer.status == 2 and "log-probabilities of other weights than the run's" in answer.err, answer
    answer = run(pairs, tmp_path / "other", named, "model.seq_length=40", "train.init_from_resize=true")
    assert answer.status == 2 and "log-probabilities of other seq_length" in answer.err, answer
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 nothing")
    answer = run(pairs, tmp_path / "other", f"preferences.reference={tmp_path / 'bad.npz'}")
    assert answer.status == 2 and "has no log-probabilities of a reference model" in answer.err, answer


@pytest.mark.parametrize(
    ("more", "is_refused"),
    [
        ((), False),
        (("model.num_layers=1",), False),
        (("model.num_layers=3",), True),
        (("model.vocab_size=400", "train.init_from_resize=true"), True),
        (("model.seq_length=40", "train.init_from_resize=true"), False),
    ],
)
@pytest.mark.parametrize("other", ["train.seed=2", "model.init_std=0.2"])
def test_a_reference_of_weights_that_were_drawn_is_that_of_runs_that_draw_the_same(
    other: str, more: tuple[str, ...], is_refused: bool, pairs: Path, tmp_path: Path
) -> None:
    """Where the weights that it begins from have fewer layers, or rows."""

    def reads(*keys: str) -> tuple[Config, Corpus]:
        config = load(write_config(pairs, tmp_path), [f"preferences.reference={tmp_path / 'shared.npz'}", *more, *keys])
        return config, open_corpus(config)

    config, corpus = reads()
    thought = {name: np.zeros((len(part), 2)) for name, part in reference._parts(corpus).items()}
    reference._write(tmp_path / "shared.npz", reference._known(config, corpus, Mesh()), thought)
    assert reference.stored(config, corpus, Mesh(), step=0) is not None
    with pytest.raises(DataError, match="of other drawn weights than the run's") if is_refused else nullcontext():
        assert reference.stored(*reads(other), Mesh(), step=0) is not None


def test_a_start_with_a_reference_takes_the_pairs_in_the_order_of_one_without(
    pairs: Path, tuned: Path, tmp_path: Path
) -> None:
    answer = run(pairs, tmp_path, f"preferences.reference={tuned / 'reference.npz'}")
    assert answer.status == 0 and "once" not in answer.out, answer
    assert_near(tmp_path / "run", tuned)


def test_log_probabilities_that_are_no_numbers_are_refused(pairs: Path, tuned: Path, tmp_path: Path) -> None:
    with np.load(tuned / "reference.npz") as stored:
        arrays = dict(stored)
    arrays["train.0"][3, 1] = np.nan
    np.savez(tmp_path / "bad.npz", **arrays)
    answer = run(pairs, tmp_path, f"preferences.reference={tmp_path / 'bad.npz'}")
    assert answer.status == 2 and "has no log-probabilities of all 32 pairs of train.0" in answer.err, answer
    assert "Put the run's own file back" in answer.err and "Before a run's first step it can be removed" in answer.err


def test_log_probabilities_of_another_model_or_format_are_refused(pairs: Path, tuned: Path, tmp_path: Path) -> None:
    """Where the file says what it is of, which those of earlier versions do not."""
    named = f"preferences.reference={tuned / 'reference.npz'}"
    for other, what in (("model.window=8", "model"), ("train.precision=fp32", "precision")):
        answer = run(pairs, tmp_path, named, other)
        assert answer.status == 2 and f"has log-probabilities of other {what} than the run's" in answer.err, answer
    with np.load(tuned / "reference.npz") as stored:
        arrays = dict(stored)
    about = json.loads(str(arrays["of"]))
    del about["model"], about["precision"]
    np.savez(tmp_path / "older.npz", **{**arrays, "of": json.dumps(about)})
    answer = run(pairs, tmp_path, f"preferences.reference={tmp_path / 'older.npz'}", "train.steps=1")
    assert answer.status == 0 and "once" not in answer.out, answer


@pytest.mark.slow
def test_adapters_learn_preferences(pairs: Path, tmp_path: Path) -> None:
    answer = run(pairs, tmp_path, "lora.rank=4", "preferences.loss=ipo", "train.steps=2")
    assert answer.status == 0, answer
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(25.0), "(0 - 1 / (2 · 0.1))²"
    assert here("merge", tmp_path / "run", tmp_path / "merged").status == 0
    answers = [here("generate", each, "--prompt", "a", "--json") for each in (tmp_path / "run", tmp_path / "merged")]
    assert [answer.status for answer in answers] == [0, 0], answers
    told = here("evaluate", tmp_path / "merged", "--part", "validation")
    assert told.status == 2 and "was merged from a run on preferences, whose data are pairs of" in told.err, told


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("train.init_from=",), "train.init_from"),
        (("data.packing=whole",), "samples are pairs of answers"),
        (("preferences.loss=ipo", "preferences.label_smoothing=0.1"), "has no effect with preferences.loss"),
        (("model.seq_length=8",), "leave no room for an answer"),
        (("model.head=pretraining", "preferences.beta=0.5"), "[preferences] has no effect"),
        (("model.head=choice",), 'is for model.kind = "bert"'),
        (("preferences.reference=/",), "preferences.reference = '/' is a folder. Name a file"),
    ],
)
def test_what_cannot_be(overrides: tuple[str, ...], message: str, pairs: Path, tmp_path: Path) -> None:
    answer = run(pairs, tmp_path, *overrides)
    assert answer.status == 2 and message in answer.err and "Traceback" not in answer.err, answer


def test_text_holds_no_preferences(pairs: Path, tmp_path: Path) -> None:
    text = jsonl(tmp_path / "a.jsonl", *[{"text": "What is the capital of France? " * 20}] * 8)
    output = ("--output", tmp_path / "text", "--tokenizer", pairs / "tokenizer")
    assert here("data", "tokenize", text, *output).status == 0
    answer = run(pairs, tmp_path, f"data.train={tmp_path / 'text'}")
    assert answer.status == 2 and "holds text, and model.head" in answer.err, answer


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["parallel.tp=2", "parallel.pp=2"])
def test_what_is_sent_is_what_theory_says(layout: str, pairs: Path, tmp_path: Path) -> None:
    more = ("parallel.sequence_parallel=true",) if "tp" in layout else ()
    answer = run(pairs, tmp_path, layout, *more, "--audit", num_ranks=2)
    assert answer.status == 0, answer
    told = here("plan", tmp_path / "config.toml", f"train.init_from={pairs / 'base'}", "--json")
    assert told.status == 0, told
