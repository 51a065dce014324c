"""`colonnade train --audit`: the table, and what it says when the program and theory disagree."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from colonnade.config.load import load
from colonnade.errors import ConfigError
from colonnade.kernels.choice import AS_THEY_ARE, WIDENED
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.planner.memory import Memory
from colonnade.planner.predict import predict
from colonnade.planner.traffic import Flow, totals
from colonnade.train.corpus import open_corpus
from colonnade.train.products import Decision
from colonnade.verify import audit
from tests import tiny
from tests.commands import forked
from tests.tiny import TinyCorpus

FLOWS = [
    Flow("tp", "all_reduce", "forward", 4, 4096),
    Flow("tp", "all_reduce", "backward", 4, 4096),
    Flow("dp", "all_reduce", "gradients", 2, 1_000_000),
]


def test_reasons_stand_below_their_sum_and_a_difference_is_marked() -> None:
    seen = {("all_reduce", "tp"): (8, 8192), ("all_reduce", "dp"): (3, 1_500_000), ("broadcast", "pp"): (1, 8)}
    rows = [line.split() for line in audit.table("rank 0", FLOWS, seen).splitlines()]
    assert rows == [
        ["rank", "0", "ledger", "theory"],
        ["dp", "all_reduce", "3", "1,500,000", "B", "≠", "2", "1,000,000", "B", "gradients"],
        ["pp", "broadcast", "1", "8", "B", "≠", "0", "0", "B"],
        ["tp", "all_reduce", "8", "8,192", "B", "8", "8,192", "B"],
        ["4", "4,096", "B", "forward"],
        ["4", "4,096", "B", "backward"],
    ]


def test_what_theory_wants_and_nobody_sent_is_shown() -> None:
    assert "≠" in audit.table("rank 0", FLOWS[2:], {})
    assert audit.table("rank 0", [], {}) == "rank 0: nothing is sent."


def test_what_is_sent_and_theory_does_not_know_is_shown() -> None:
    (line,) = audit.table("rank 0", [], {("broadcast", "pp"): (3, 4000)}).splitlines()[1:]
    assert line.split() == ["pp", "broadcast", "3", "4,000", "B", "≠", "0", "0", "B"]


def test_of_ranks_that_send_what_theory_says_the_first_of_each_stage_is_shown(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "train.micro_batch_size=1"]
    base, layout, shown = load(config, keys), Layout(tp=2, pp=2, dp=2), list[int]()

    def gathered(text: str, world: object) -> list[str]:
        shown.extend([rank] * bool(text))
        return [text]

    monkeypatch.setattr(audit, "open_together", lambda *_: SimpleNamespace(vocab_size=275))
    monkeypatch.setattr(audit, "settle", lambda *_: SimpleNamespace(products=None))
    monkeypatch.setattr(audit, "course_of", lambda *_: None)
    monkeypatch.setattr(audit, "one_step", lambda *_: ([], {}, "its memory"))
    monkeypatch.setattr(audit, "gather_texts", gathered)
    monkeypatch.setattr(audit, "all_reduce", lambda x, *_: x)
    for rank in range(layout.num_ranks):
        joined = nullcontext((paper_mesh(layout, rank), torch.device("cpu")))
        monkeypatch.setattr(audit, "joined", lambda *_, joined=joined, **__: joined)
        assert audit.audit(base)
    first, *others = (paper_mesh(layout, rank) for rank in shown)
    assert (first.pp.rank, first.dp.rank, first.tp.rank) == (0, 0, 0)
    assert [(mesh.pp.rank, mesh.dp.rank, mesh.tp.rank) for mesh in others] == [(1, 0, 0)]
    assert capsys.readouterr().out.count("its memory") == 1, "rank 0 prints"


def test_the_memory_that_a_step_takes_stands_beside_what_was_predicted_for_its_stage(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict(*_: object, stage: int, **__: object) -> Memory:
        return Memory(parameters=(1 + stage) * 10**12, gradients=0, optimizer=0, buffers=0, activations=0)

    monkeypatch.setattr(audit, "predict", predict)
    for rank in (0, 1):
        mesh, base = paper_mesh(Layout(pp=2), rank), load(config, ["parallel.pp=2"])
        _, _, memory = audit.one_step(base, mesh, torch.device("cpu"), open_corpus(base))
        name, predicted, measured = memory.splitlines()[1].split()
        assert (name, predicted) == ("parameters", f"{1 + rank},000,000.000") and 0 < float(measured) < 1


def test_the_step_is_computed_by_the_kernels_that_a_run_would_choose(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, predicted, counted = load(config, ["train.precision=bf16"]), [], []
    for kernels in (WIDENED, AS_THEY_ARE):
        decision = Decision("bf16", kernels, "measured")
        monkeypatch.setattr(audit, "settle", lambda *_, decision=decision: decision)
        assert audit.audit(base)
        whole = predict(base, 275, stage=0, device=torch.device("cpu"), products=decision.products).total
        (*_, told, found) = re.search(r"together, at most.*", capsys.readouterr().out)[0].split()
        assert told == f"{whole / 1e6:,.3f}"
        predicted.append(told)
        counted.append(found)
    assert predicted[0] != predicted[1] and counted[0] != counted[1], "whatever this processor would choose by itself"


@pytest.mark.parametrize("rank", [0, 1])
def test_of_a_difference_rank_0_gives_account_and_the_others_end_well(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    layout = nullcontext((paper_mesh(Layout(tp=2), rank), torch.device("cpu")))
    monkeypatch.setattr(audit, "joined", lambda *_, **__: layout)
    monkeypatch.setattr(audit, "open_together", lambda *_: SimpleNamespace(vocab_size=275))
    monkeypatch.setattr(audit, "settle", lambda *_: SimpleNamespace(products=None))
    monkeypatch.setattr(audit, "course_of", lambda *_: None)
    monkeypatch.setattr(audit, "one_step", lambda *_: (FLOWS, {}, "its memory"))
    monkeypatch.setattr(audit, "gather_texts", lambda text, world: [text])
    monkeypatch.setattr(audit, "all_reduce", lambda x, *_: x)
    assert audit.audit(load(config, ["parallel.tp=2"])) is (rank > 0)
    assert ("The ledger and theory differ" in capsys.readouterr().out) is (rank == 0)


def test_data_have_to_last_for_a_run_that_begins_and_not_for_all_of_one_that_goes_on(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose batch may have been made smaller."""
    long = load(config, ["data.order=all_epochs", "data.epochs=1", "train.steps=1000"])
    alone = nullcontext((Mesh(), torch.device("cpu")))
    monkeypatch.setattr(audit, "joined", lambda *_, **__: alone)
    monkeypatch.setattr(audit, "one_step", lambda *_: ([], {}, "its memory"))
    with pytest.raises(ConfigError, match=r"Up to train\.steps = 1,000 the run takes 4,000 samples, but data\.epochs"):
        audit.audit(long)
    (tmp_path / "run" / "checkpoints" / "step_00000002").mkdir(parents=True)
    assert audit.audit(long)


def test_the_step_is_a_measured_one_of_the_whole_sequence(config: Path) -> None:
    """However seldom thermometers measure, and however short the first sequences of the run are."""
    grown = ["curriculum.tokens=[0,100]", "curriculum.seq_length=[4,16]", "curriculum.global_batch_size=[4,4]"]
    told = []
    for more in (["thermometers.every=1"], ["thermometers.every=50", *grown]):
        mesh, base = paper_mesh(Layout(tp=2), 0), load(config, ["parallel.tp=2", *more])
        flows, seen, memory = audit.one_step(base, mesh, torch.device("cpu"), open_corpus(base))
        assert totals(flows) == seen and ("all_reduce", "world") in seen
        told.append((flows, memory))
    assert told[0] == told[1]


def test_of_a_step_that_is_skipped_theory_expects_no_new_weights(config: Path) -> None:
    """Its gradients overflow fp16: no weights are gathered, and no norms of LAMB's are summed."""
    keys = ["parallel.dp=2", "parallel.zero=1", "train.precision=fp16", "optim.name=lamb"]
    kinds = []
    for scale in (1.0, 2.0**40):
        mesh, base = paper_mesh(Layout(dp=2), 0), load(config, [*keys, f"train.loss_scale={scale}"])
        flows, seen, _ = audit.one_step(base, mesh, torch.device("cpu"), open_corpus(base))
        assert totals(flows) == seen
        assert not any(flow.what.startswith("thermometers") for flow in flows), "the run has none"
        kinds.append({operation for operation, _ in seen})
    assert kinds[0] - kinds[1] == {"all_gather"}


@pytest.mark.slow
def test_one_step_on_two_stages(corpus: TinyCorpus, tmp_path: Path) -> None:
    """One table a stage; the run's folder is not touched."""
    layout = ["parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=true"]
    answer = forked("train", tiny.write_config(corpus, tmp_path), *layout, "--audit", num_ranks=4)
    assert answer.status == 0, answer
    assert answer.out.startswith("One step on pp2 dp1 tp2: ")
    assert "rank 0 [pp0 dp0 tp0] " in answer.out and "rank 2 [pp1 dp0 tp0] " in answer.out
    assert "rank 1 [" not in answer.out and "≠" not in answer.out
    assert answer.out.count("master weights and moments") == 2, "the memory of both stages"
    assert "gradients of replicated weights" in answer.out and "residual stream, each micro-batch" in answer.out
    assert answer.out.endswith("On every rank the ledger is what theory says.\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_step_is_a_measured_one_however_seldom_thermometers_measure(config: Path) -> None:
    seldom, mesh = load(config, ["parallel.tp=2", "thermometers.every=50"]), paper_mesh(Layout(tp=2), 0)
    flows, seen, _ = audit.one_step(seldom, mesh, torch.device("cpu"), open_corpus(seldom))
    assert totals(flows) == seen and ("all_reduce", "world") in seen
    assert any(flow.what.startswith("thermometers") for flow in flows)


@pytest.mark.slow
def test_a_curriculum_is_audited_in_its_last_stage(corpus: TinyCorpus, tmp_path: Path) -> None:
    stages = ["curriculum.tokens=[0, 100]", "curriculum.seq_length=[4, 16]", "curriculum.global_batch_size=[4, 4]"]
    config = tiny.write_config(corpus, tmp_path)
    plain = forked("train", config, "parallel.tp=2", "--audit", num_ranks=2)
    grown = forked("train", config, "parallel.tp=2", "--audit", *stages, num_ranks=2)
    assert grown.status == 0 and "≠" not in grown.out
    assert grown.out == plain.out


def test_a_difference_on_one_rank_is_shown_and_is_exit_status_1(corpus: TinyCorpus, tmp_path: Path) -> None:
    def forget_one_flow(rank: int) -> None:
        if rank == 1:
            real = audit.traffic
            audit.traffic = lambda step: real(step)[1:]  # this process ends with the command

    config = tiny.write_config(corpus, tmp_path)
    answer = forked("train", config, "parallel.tp=2", "--audit", num_ranks=2, first=forget_one_flow)
    assert answer.status == 1
    assert "rank 1 [pp0 dp0 tp1]" in answer.out and "≠" in answer.out
    assert answer.out.splitlines()[-1].startswith("The ledger and theory differ (≠): ")


@pytest.mark.slow
def test_one_rank_sends_nothing(corpus: TinyCorpus, tmp_path: Path) -> None:
    answer = forked("train", tiny.write_config(corpus, tmp_path), "--audit")
    assert answer.status == 0 and "rank 0 [pp0 dp0 tp0]: nothing is sent." in answer.out
