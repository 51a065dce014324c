"""Students of a BERT taught by its labels' logits and by its hidden states: on any layout those of one rank."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from colonnade.config.load import load
from colonnade.errors import CheckpointError, ConfigError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.model.bert import BertInputs
from colonnade.model.bert_labels import LabelInputs
from colonnade.model.matching import HiddenTargets, added_losses, matched
from colonnade.serving.trained import Trained, open_trained
from colonnade.tasks.labels import LabelBatch, Labels
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.train.corpus import open_corpus
from colonnade.train.hidden_states import Listening, Matching, Pair, matching_of
from colonnade.train.init_from import origin_at
from colonnade.train.teacher import _check_labels, check_teacher, teacher_model
from tests.commands import forked, here
from tests.distributed import run_on_ranks
from tests.runs import assert_near, metrics, tensors
from tests.slow import first_fast
from tests.tasks.examples import write_config, write_examples
from tests.tasks.test_labels import AT_END

SMALL = ("model.hidden_size=12", "model.num_layers=3", "model.num_heads=6", "model.ffn_hidden_size=24")
STATES = ("distillation.student_layers=[0, 2]", "distillation.teacher_layers=[2, 1]", "distillation.hidden_weight=0.7")
WIDER = (*STATES, "distillation.teacher_hidden_size=24")
LAYOUTS = [
    ("parallel.tp=2", "parallel.sequence_parallel=true"),
    ("parallel.pp=2", "train.micro_batch_size=1"),
    ("parallel.tp=2",),
    ("parallel.pp=3", "train.micro_batch_size=1"),
    (
        *("parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2", "train.micro_batch_size=1"),
        "parallel.recompute=full",
    ),
    ("parallel.pp=2", "parallel.schedule=zero_bubble", "train.micro_batch_size=1"),
    ("parallel.dp=2", "parallel.zero=3", "parallel.recompute=full"),
    ("parallel.dp=2", "parallel.zero=1"),
    ("parallel.pp=2", "parallel.dp=2", "parallel.zero=2", "train.micro_batch_size=1"),
    ("parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true"),
]


def ranks_of(layout: tuple[str, ...]) -> int:
    total = 1
    for each in layout:
        key, _, value = each.partition("=")
        total *= int(value) if key in ("parallel.tp", "parallel.pp", "parallel.dp") else 1
    return total


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="module")
def teacher(examples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fine_tuned(examples, "mnli", tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def teacher_of_choices(examples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fine_tuned(examples, "race", tmp_path_factory.mktemp("choices"))


def fine_tuned(examples: Path, task: str, folder: Path) -> Path:
    """A wider and deeper model, with dropout."""
    wide = ("model.hidden_size=24", "model.num_heads=6", "model.num_layers=4", "train.evaluate_every=0")
    answer = forked("train", write_config(examples, task, folder), *wide, AT_END)
    assert answer.status == 0, answer
    return folder / "run"


def taught(examples: Path, folder: Path, teacher: Path, *more: str, task: str = "mnli", num_ranks: int = 1) -> Path:
    path = write_config(examples, task, folder)
    answer = forked("train", path, *SMALL, AT_END, f"distillation.teacher={teacher}", *more, num_ranks=num_ranks)
    assert answer.status == 0, answer
    return folder / "run"


@pytest.fixture(scope="module")
def serial(examples: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(examples, tmp_path_factory.mktemp("serial"), teacher, *WIDER)


@pytest.mark.slow
@pytest.mark.parametrize(("layout",), first_fast([(each,) for each in LAYOUTS], 2), ids=str)
def test_every_layout_is_the_serial_run(
    layout: tuple[str, ...], examples: Path, teacher: Path, serial: Path, tmp_path: Path
) -> None:
    run = taught(examples, tmp_path, teacher, *WIDER, *layout, num_ranks=ranks_of(layout))
    assert_near(run, serial)
    assert any("to_teacher" in name for name in tensors(run)), "maps are weights of the student"


def test_the_loss_that_is_told_is_without_the_loss_scale(
    examples: Path, teacher: Path, serial: Path, tmp_path: Path
) -> None:
    """fp16 multiplies losses by 65,536, those of hidden states too."""
    half = taught(examples, tmp_path, teacher, *WIDER, "train.precision=fp16", "train.steps=1")
    assert metrics(half)[0]["loss_scale"] > 1
    assert metrics(half)[0]["loss"] == pytest.approx(metrics(serial)[0]["loss"], rel=5e-3)


@pytest.mark.slow
def test_choices_too(examples: Path, teacher_of_choices: Path, tmp_path: Path) -> None:
    teacher = teacher_of_choices
    alone = taught(examples, tmp_path / "serial", teacher, *WIDER, task="race")
    for number, layout in enumerate(LAYOUTS[:2]):
        run = taught(examples, tmp_path / str(number), teacher, *WIDER, *layout, task="race", num_ranks=2)
        assert_near(run, alone, without_effect=["head.classifier.bias"])


def states_of(model: Trained, inputs: LabelInputs) -> list[Tensor]:
    """What every unit but the head hands on, and the logits."""
    found, carry = list[Tensor](), tuple[Tensor, ...]()
    with torch.no_grad():
        for unit in list(model.model.units())[:-1]:
            carry = model.model.run(unit, carry, inputs)
            found.append(carry[0])
        return [*found, model.model.head.predict(carry[0])]  # type: ignore[operator,union-attr]


@pytest.mark.slow
def test_the_first_loss_is_torchs(examples: Path, teacher: Path, tmp_path: Path) -> None:
    """Labels, teacher and hidden states by torch's own functions, of models as they are saved: two micro-batches of
    texts of other lengths are one batch.
    """
    begun = ("train.steps=1", "optim.learning_rate=1e-30", "optim.min_learning_rate=0.0", "optim.weight_decay=0.0")
    still = ("model.dropout=0.0", "model.attention_dropout=0.0")
    run = taught(
        *(examples, tmp_path, teacher, *WIDER, *begun, *still),
        *("distillation.alpha=0.3", "distillation.temperature=3.0"),
    )
    config = load(tmp_path / "config.toml", [*SMALL, *begun])
    data = open_corpus(config)
    batch = data.load(data.training, range(4))
    assert isinstance(batch, LabelBatch)
    student, teacher = (open_trained(path, Mesh(), torch.device("cpu"), "fp64") for path in newest(run, teacher))
    inputs = Labels().inputs(batch, None, None)
    mine, said = states_of(student, inputs), states_of(teacher, inputs)
    hard = nn.functional.cross_entropy(mine[-1], batch.targets.long())
    soft = nn.functional.kl_div((mine[-1] / 3).log_softmax(-1), (said[-1] / 3).softmax(-1), reduction="batchmean")
    maps = tensors(run)
    errors = [
        nn.functional.mse_loss(
            (mine[1 + a] @ maps[f"blocks.{a}.to_teacher.weight"].t())[batch.real], said[1 + b][batch.real]
        )
        for a, b in ((0, 2), (2, 1))
    ]
    expected = 0.7 * hard + 0.3 * 9 * soft + 0.7 * (errors[0] + errors[1]) / 2
    assert metrics(run)[0]["loss"] == pytest.approx(float(expected), rel=1e-10)
    assert len({int(length) for length in batch.real.sum(0)}) > 1, "padding counts for nothing"


def newest(run: Path, teacher: Path) -> tuple[Path, Path]:
    return run / "checkpoints" / "step_00000001", teacher / "checkpoints" / "step_00000004"


@pytest.mark.slow
def test_a_student_of_its_teachers_width_has_no_maps(examples: Path, teacher: Path, tmp_path: Path) -> None:
    wide = ("model.hidden_size=24", "distillation.alpha=0.0", "train.steps=2", "optim.decay_steps=4")
    run = taught(examples, tmp_path / "one", teacher, *STATES, *wide)
    assert not any("to_teacher" in name for name in tensors(run))
    layout = ("parallel.pp=2", "train.micro_batch_size=1")
    assert_near(taught(examples, tmp_path / "two", teacher, *STATES, *wide, *layout, num_ranks=2), run)


@pytest.mark.slow
def test_a_student_with_maps_is_a_model_like_others(examples: Path, serial: Path, tmp_path: Path) -> None:
    """It is predicted with, converted without its maps, and begun from."""
    answer = forked("predict", serial, examples / "mnli.jsonl", "--format", "mnli")
    assert answer.status == 0 and "accuracy" in answer.err, answer
    answer = forked("convert", serial, tmp_path / "published")
    assert answer.status == 0, answer
    again = forked("predict", serial, examples / "mnli.jsonl", "--format", "mnli", "--json")
    answer = forked("convert", tmp_path / "published", tmp_path / "back")
    assert answer.status == 0, answer
    back = forked(
        "predict", tmp_path / "back", examples / "mnli.jsonl", "--format", "mnli", "--precision", "fp64", "--json"
    )
    assert back.status == 0 and back.out == again.out, (back, again)
    path = write_config(examples, "mnli", tmp_path / "on")
    answer = forked("train", path, *SMALL, f"train.init_from={serial}")
    assert answer.status == 0 and "to_teacher" in answer.out, answer


@pytest.mark.parametrize("names", [("b", "c", "a"), ("a", "b", "other"), ("a", "b", "c"), ()])
def test_a_teachers_labels_have_to_mean_the_same_by_their_numbers(names: tuple[str, ...]) -> None:
    """In another order too they are others; where it says no names, nobody knows better."""
    model: Any = SimpleNamespace(num_labels=3)
    config: Any = SimpleNamespace(model=model)
    origin: Any = SimpleNamespace(labels=names)
    corpus: Any = SimpleNamespace(labels=("a", "b", "c"))
    checked = partial(_check_labels, "it", origin, model, config, corpus)
    if names in ((), ("a", "b", "c")):
        checked()
        return
    with pytest.raises(ConfigError, match="a label's number has to mean the same to both"):
        checked()


@pytest.mark.slow
def test_teachers_that_do_not_fit(examples: Path, teacher: Path, teacher_of_choices: Path, tmp_path: Path) -> None:
    def refused(teacher: Path, *more: str, task: str = "mnli") -> str:
        answer = forked(
            "train", write_config(examples, task, tmp_path), *SMALL, f"distillation.teacher={teacher}", *more
        )
        assert answer.status == 2 and "Traceback" not in answer.err, answer
        return answer.err

    assert "has hidden states of 24 features, and distillation.teacher_hidden_size is unset" in refused(
        teacher, *STATES
    )
    assert "teacher_layers = [2, 7], and distillation.teacher" in refused(
        teacher, *WIDER, "distillation.teacher_layers=[2, 7]"
    )
    assert "tells 3 labels (entailment, neutral, contradiction) apart, and the student 2 labels" in refused(
        teacher, task="qqp"
    )
    assert 'is a bert with head "choice", and the student a bert with head "classification"' in refused(
        teacher_of_choices
    )


def test_a_layer_behind_the_teachers_last_is_refused(examples: Path, teacher: Path, tmp_path: Path) -> None:
    def check(layer: int) -> None:
        more = [*WIDER, f"distillation.teacher_layers=[{layer}, 1]", f"distillation.teacher={teacher}"]
        config = load(write_config(examples, "mnli", tmp_path), [*SMALL, *more])
        check_teacher(origin_at(teacher), teacher_model(teacher), config, open_corpus(config))

    check(3)
    with pytest.raises(ConfigError, match=r"teacher_layers = \[4, 1\], and .* has the layers 0 … 3\. Use these"):
        check(4)


def test_a_teacher_that_cannot_be_cut_as_the_run_is_refused(examples: Path, teacher: Path, tmp_path: Path) -> None:
    """Its six heads are no whole number for each of four ranks, as the student's twelve are."""

    def check(tp: int) -> None:
        more = ["model.num_heads=12", f"parallel.tp={tp}", f"distillation.teacher={teacher}"]
        config = load(write_config(examples, "mnli", tmp_path), [*SMALL, *WIDER, *more])
        check_teacher(origin_at(teacher), teacher_model(teacher), config, open_corpus(config))

    check(2)
    with pytest.raises(CheckpointError, match=r"cannot be cut as the run is:\n  parallel\.tp = 4 does not divide"):
        check(4)


@pytest.mark.slow
def test_verify_compares_taught_runs(examples: Path, teacher: Path, tmp_path: Path) -> None:
    path = write_config(examples, "mnli", tmp_path)
    path.write_text(
        path.read_text()
        + f'[distillation]\nteacher = "{teacher}"\nstudent_layers = [0]\nteacher_layers = [3]\n'
        + "teacher_hidden_size = 24\n"
    )
    answer = here("verify", path, "--layout", "pp=2", "--shrink")
    assert answer.status == 0, answer


@pytest.mark.parametrize("pairs", [1, 3])
def test_the_loss_of_hidden_states_is_a_mean_over_pairs_and_tokens(pairs: int) -> None:
    """Of two micro-batches with 3 tokens together, times the weight."""
    units = tuple(Pair(f"blocks.{number}", f"blocks.{2 * number}", 0, 0) for number in range(pairs))
    matching = Matching(units, 0.5, 4, torch.float64)
    tokens = torch.zeros(2, 1, dtype=torch.int64)
    inputs = [BertInputs(tokens, real=torch.tensor(each)) for each in ([[True], [False]], [[True], [True]])]
    states = [{pair.teacher: torch.zeros(2, 1, 4) for pair in units} for _ in inputs]
    weights = [each.hidden.weights for each in matching.targets(states, inputs, 2.0, Mesh()) if each.hidden]
    assert torch.cat(weights)[:, 0].tolist() == pytest.approx([each / (3 * pairs) for each in (1, 0, 1, 1)])


def test_padding_alone_has_no_loss_of_hidden_states() -> None:
    matching = Matching((Pair("blocks.0", "blocks.1", 0, 0),), 0.5, 4, torch.float64)
    inputs = BertInputs(torch.zeros(2, 1, dtype=torch.int64), real=torch.zeros(2, 1, dtype=torch.bool))
    (found,) = matching.targets([{"blocks.1": torch.zeros(2, 1, 4)}], [inputs], 2.0, Mesh())
    assert found.hidden is not None and found.hidden.weights.tolist() == [[0.0], [0.0]]


def test_the_losss_gradient_is_the_whole_of_it() -> None:
    """Of the operator alone: a stream behind two losses, against autograd of their sum."""
    generator = torch.Generator().manual_seed(1)
    x, t, u = (torch.randn(5, 3, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    weights = torch.rand(5, 3, dtype=torch.float64, generator=generator)
    targets = HiddenTargets({"a": t, "b": u}, weights)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    y = matched(mine * 2, "a", targets, None, Parallel(Mesh().tp))
    (matched(y**2, "b", targets, None, Parallel(Mesh().tp)) ** 3).sum().backward()
    first, second = (((each - to) ** 2).mean(-1) * weights for each, to in ((theirs * 2, t), ((theirs * 2) ** 2, u)))
    (first.sum() + second.sum() + ((theirs * 2) ** 6).sum()).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-13, atol=0.0)
    assert float(targets.losses["a"]) == pytest.approx(float(first.detach().sum()), rel=1e-13)
    assert matched(x, "c", replace(targets), None, Parallel(Mesh().tp)) is x


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_loss_of_hidden_states_is_one_number_on_all_ranks_of_tp(sequence_parallel: bool) -> None:
    """That of one rank: whether each has all of the stream or a part of the sequence."""
    x, t = (torch.randn(4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    weights = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(4, 2)

    def told(rank: int, num_ranks: int) -> float:
        tp = build_mesh(Layout(tp=num_ranks), rank).tp
        mine = x.chunk(num_ranks)[rank] if sequence_parallel else x
        targets = HiddenTargets({"a": t}, weights)
        matched(mine, "a", targets, None, Parallel(tp, sequence_parallel))
        return float(added_losses([targets, None], x))

    expected = float((((x - t) ** 2).mean(-1) * weights).sum())
    assert run_on_ranks(told, 2) == pytest.approx([expected] * 2, rel=1e-13)


def test_layers_are_paired_with_the_stages_that_have_them() -> None:
    """Chunks of an interleaved student go round the stages."""

    def unit(name: str, layer: int | None = None) -> Any:
        return SimpleNamespace(name=name, layer=layer)

    def blocks(*layers: int) -> list[Any]:
        return [unit(f"blocks.{layer}", layer) for layer in layers]

    student = [[unit("embedding"), *blocks(0)], blocks(1), blocks(2), [*blocks(3), unit("head")]]
    teacher = [[unit("embedding"), *blocks(0, 1)], [*blocks(2, 3), unit("head")]]
    chosen: Any = SimpleNamespace(student_layers=(1, 2), teacher_layers=(0, 3), hidden_weight=0.25)
    given: Any = {"student": student, "teacher": teacher, "stages": 2, "width": 24, "dtype": torch.float32}
    found = matching_of(chosen, **given)
    assert found is not None and (found.weight, found.width, found.dtype) == (0.25, 24, torch.float32)
    assert found.pairs == (Pair("blocks.1", "blocks.0", 1, 0), Pair("blocks.2", "blocks.3", 0, 1))
    chosen.student_layers = ()
    assert matching_of(chosen, **given) is None


def targets_of(rank: int, layout: Layout, kept: tuple[str, ...]) -> list[tuple[dict[str, float], list[list[float]]]]:
    """What a rank's two micro-batches are compared with, by the first feature, and how much each token counts. A
    teacher's block hands on its number and, in front of it, the micro-batch's.
    """
    mesh, last = build_mesh(layout, rank), layout.pp - 1
    pairs = (Pair("blocks.1", "blocks.2", 0, last), Pair("blocks.3", "blocks.1", last, 0), Pair("b", "blocks.1", 0, 0))
    real = [torch.tensor([[True, mesh.data.rank == 0]]), torch.tensor([[True, False]])]
    inputs: Any = [BertInputs(torch.zeros(1, 2, dtype=torch.int64), real=each) for each in real]
    numbers = ({name: 10.0 * n + int(name[-1]) for name in kept} for n in range(len(inputs)))
    states = [{name: torch.full((1, 2, 5), x, dtype=torch.float64) for name, x in each.items()} for each in numbers]
    found = Matching(pairs, 0.5, 5, torch.float64).targets(states, inputs, 12.0, mesh)
    hidden = [cast(HiddenTargets, cast(BertInputs, each).hidden) for each in found]
    assert all(x.shape == (1, 2, 5) and x.dtype == torch.float64 for each in hidden for x in each.states.values())
    return [({n: float(x[0, 0, 0]) for n, x in each.states.items()}, each.weights.tolist()) for each in hidden]


def test_each_stage_gets_the_states_that_its_own_blocks_are_compared_with() -> None:
    """Of every micro-batch, whichever stage of the teacher has them. Three tokens are real, of three pairs."""
    kept = (("blocks.1",), ("blocks.2",))
    found = run_on_ranks(lambda rank, _: targets_of(rank, Layout(pp=2), kept[rank]), 2)
    for states, rank in (({"blocks.1": 2.0, "b": 1.0}, 0), ({"blocks.3": 1.0}, 1)):
        assert [each for each, _ in found[rank]] == [{name: 10.0 * n + x for name, x in states.items()} for n in (0, 1)]
        assert [weights for _, weights in found[rank]] == [[[2 / 3, 2 / 3]], [[2 / 3, 0.0]]]


def test_tokens_of_all_copies_share_the_loss_of_hidden_states() -> None:
    """Three are real on the first rank, and two on the other."""
    found = run_on_ranks(lambda rank, _: targets_of(rank, Layout(dp=2), ("blocks.1", "blocks.2")), 2)
    assert [[weights for _, weights in each] for each in found] == [
        [[[0.4, 0.4]], [[0.4, 0.0]]],
        [[[0.4, 0.0]], [[0.4, 0.0]]],
    ]


def test_a_teacher_is_listened_to_at_some_units_once_a_micro_batch() -> None:
    model: Any = SimpleNamespace(run=lambda unit, carry, inputs: carry + 1, residual=lambda carry: carry * 10)
    listening, inputs = Listening(model, frozenset({"blocks.1"})), cast(Any, None)
    carry: Any = 0
    for unit in ("blocks.0", "blocks.1", "blocks.2"):
        carry = listening.run(unit, carry, inputs)
    assert carry == 3 and [listening.taken(), listening.taken()] == [{"blocks.1": 20}, {}]
