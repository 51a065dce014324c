"""`verify`: layouts that are the serial run are told so; a broken one is caught, with the number that differs first."""

import json
import math
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade import cli
from colonnade.config.load import load
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.launch import launch
from colonnade.mesh.mesh import Mesh
from colonnade.train.corpus import Corpus, open_corpus
from colonnade.train.state import build_state
from colonnade.verify import trace as verify_trace
from colonnade.verify import verify as verification
from colonnade.verify.compare import Number
from colonnade.verify.trace import SeenGradients, file_of
from tests.commands import colonnade, here, start
from tests.parity.runs import CPU, SERIAL, Case, configured
from tests.tasks import examples, questions

Verdicts = Callable[..., dict[str, Any]]
Broken = Callable[[int], None]
KEYS = {"layout", "num_ranks", "max_relative_difference", "furthest", "first_difference", "ok"}
KEYS |= {"max_ratio_to_bound", "nearest_to_bound"}


def sound(rank: int) -> None:
    """Breaks nothing."""


@pytest.fixture
def verdict(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verdicts:
    """`verify --json` on forked ranks; `broken(rank)` is called in those of a layout that is not serial."""

    def run(
        *arguments: str, broken: Broken = sound, status: int = 0, steps: int = 2, file: Path = config
    ) -> dict[str, Any]:
        def run_ranks(num_ranks: int, command: list[str]) -> int:
            first = broken if num_ranks > 1 else sound
            answers = start(*command[3:], num_ranks=num_ranks, first=first).answers()
            return max(abs(answer.status) for answer in answers)

        monkeypatch.setattr(launch, "run_ranks", run_ranks)
        words = ["colonnade", "verify", str(file), *arguments, "--json", "--steps", str(steps)]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert (ended.value.code or 0) == status, said.err
        output = json.loads(said.out)
        assert isinstance(output, dict)
        return output

    return run


# --- layouts that are the serial run ----------------------------------------------------------------------------------


def test_layouts_that_are_the_serial_run(verdict: Verdicts) -> None:
    layouts = ["tp=2,sequence_parallel=true,recompute=full", "pp=2,dp=2,zero=3,micro_batch_size=1"]
    told = verdict("--layout", layouts[0], "--layout", layouts[1])
    assert [each["layout"] for each in told["layouts"]] == layouts
    assert (told["steps"], told["precision"], told["shrunk"], told["left_out"]) == (2, "fp64", {}, [])


@pytest.fixture(params=["head.classifier.bias", "head.spans.bias"])
def of_a_choice(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A run that chooses among texts or places, and the bias that all of them have in common."""
    if request.param == "head.spans.bias":
        return questions.write_config(questions.write_questions(tmp_path / "text"), tmp_path / "own"), request.param
    text = examples.write_examples(tmp_path / "text", ["race"])
    return examples.write_config(text, "race", tmp_path / "own"), request.param


@pytest.mark.one_in(2)
def test_a_gradient_of_rounding_alone_is_no_difference(of_a_choice: tuple[Path, str], verdict: Verdicts) -> None:
    file, _ = of_a_choice
    told = verdict("--layout", "tp=2", "--layout", "micro_batch_size=1", file=file)
    assert [each["ok"] for each in told["layouts"]] == [True, True], told


@pytest.mark.one_in(2)
def test_a_gradient_that_should_be_rounding_alone_and_is_more_is_found(
    of_a_choice: tuple[Path, str], verdict: Verdicts
) -> None:
    """A millionth of what AdamW divides by: it moves the weight by a millionth of its learning rate."""
    file, name = of_a_choice
    broken = partial(added_on_rank_1, name, 1e-12)
    (told,) = verdict("--layout", "tp=2", broken=broken, status=1, steps=1, file=file)["layouts"]
    assert told["first_difference"].startswith(f"gradient of {name} in step 1 by "), told


@pytest.mark.slow
@pytest.mark.parametrize("keys", [["lora.rank=2", "lora.dropout=0.2"], ['parts.frozen=["embedding*","*blocks.0.*"]']])
def test_layouts_of_a_run_that_trains_some_parts(keys: list[str], verdict: Verdicts) -> None:
    told = verdict(*keys, "--layout", "tp=2", "--layout", "pp=2,dp=2,zero=3")
    assert all(layout["ok"] and layout["max_relative_difference"] < 1e-12 for layout in told["layouts"])
    for each in told["layouts"]:
        assert each.keys() == KEYS
        assert each["ok"] is True and each["first_difference"] is None
        assert 0 <= each["max_relative_difference"] <= 1e-10


@pytest.mark.slow
def test_bf16_within_its_rounding(verdict: Verdicts) -> None:
    told = verdict("--layout", "dp=2,zero=2,offload=true", "--precision", "bf16", steps=1)
    (each,) = told["layouts"]
    assert each["ok"] is True and each["max_relative_difference"] > 1e-3, "of another size than in fp64"
    assert told["precision"] == "bf16"


@pytest.mark.slow
def test_a_shrunk_model(verdict: Verdicts) -> None:
    told = verdict("model.hidden_size=64", "model.num_layers=8", "--layout", "pp=3", "--shrink", steps=1)
    assert told["shrunk"] == {"num_layers": [8, 2], "hidden_size": [64, 16]}
    assert told["layouts"][0]["ok"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "more"),
    [
        ("bf16", ()),
        ("fp16", ("model.tie_embeddings=false", "optim.name=lamb", "model.norm_position=post")),
    ],
)
def test_no_false_alarm_in_formats_of_fewer_bits(verdict: Verdicts, precision: str, more: tuple[str, ...]) -> None:
    layouts = ["tp=2,micro_batch_size=1", "pp=2,schedule=zero_bubble", "dp=2,zero=3", "tp=2,pp=2,dp=2,zero=1"]
    named = [word for layout in layouts for word in ("--layout", layout)]
    told = verdict(*more, "train.global_batch_size=8", *named, "--precision", precision, steps=3)
    assert all(each["ok"] for each in told["layouts"]), told


@pytest.mark.slow
def test_the_default_set(verdict: Verdicts) -> None:
    told = verdict(steps=1)
    assert len(told["layouts"]) == 11 and all(each["ok"] for each in told["layouts"]), told
    assert {each["num_ranks"] for each in told["layouts"]} == {1, 2, 8}


# --- layouts that are broken ------------------------------------------------------------------------------------------


def no_sum_over_dp(rank: int) -> None:
    from colonnade.data_parallel import buckets

    buckets.all_reduce_ = lambda x, axis: buckets.Pending(None)


def another_seed_on_rank_1(rank: int) -> None:
    from colonnade.tasks import gpt

    masks = gpt.Masks
    gpt.Masks = lambda seed, samples: masks(seed + rank, samples)  # type: ignore[assignment, misc]


def no_sum_of_replicated_weights(rank: int) -> None:
    from colonnade.data_parallel.zero import Ownership

    Ownership._sum_replicated = lambda self: None  # type: ignore[method-assign]


def one_wrong_gradient_on_rank_1(rank: int) -> None:
    added_on_rank_1("blocks.0.mlp.up.weight", 0.5, rank, element=3)


def added_on_rank_1(weight: str, difference: float, rank: int, *, element: int = 0) -> None:
    """To an element of this rank's part of a gradient."""
    from colonnade.data_parallel.buckets import Bucket

    finish = Bucket.finish_reduction

    def wrong(self: Bucket) -> None:
        finish(self)
        for param in self.ranges:
            if rank == 1 and f"{self.name}.{param.placement.name}" == weight:
                self.reduced[param.start + element] += difference

    Bucket.finish_reduction = wrong  # type: ignore[method-assign]


def nothing_published(rank: int) -> None:
    from colonnade.data_parallel.buckets import Bucket

    Bucket.publish = lambda self, *, copied=False: None  # type: ignore[method-assign]


def a_weight_that_is_not_kept(rank: int) -> None:
    from colonnade.data_parallel.buckets import Bucket

    ranges = Bucket.local_ranges
    Bucket.local_ranges = lambda self: (  # type: ignore[method-assign]
        local for local in ranges(self) if rank == 0 or local.name != "blocks.1.mlp.down.weight"
    )


def wrong_initial_weights(rank: int) -> None:
    from colonnade.train import state

    initialize = state.initialize_
    state.initialize_ = lambda model, tp, seed, device: initialize(model, tp, seed + 1, device)


def no_number_in_the_norm(rank: int) -> None:
    from colonnade.verify import trace as verify_trace

    step = verify_trace.train_step
    verify_trace.train_step = lambda *args: replace(step(*args), grad_norm=float("nan"))


def it_dies(rank: int) -> None:
    from colonnade.verify import trace as verify_trace

    def die(*args: object) -> None:
        raise RuntimeError("on purpose")

    verify_trace.train_step = die  # type: ignore[assignment]


BROKEN: dict[str, tuple[str, Broken, str, str]] = {
    "sum over dp": ("dp=2", no_sum_over_dp, "gradient of head.norm.bias in step 1 by ", ""),
    "masks": ("tp=2", another_seed_on_rank_1, "loss of step 1 by ", ""),
    "replicated": (
        "tp=2,sequence_parallel=true",
        no_sum_of_replicated_weights,
        "gradient of head.norm.bias in step 1 by ",
        "",
    ),
    "one gradient": (
        "tp=2",
        one_wrong_gradient_on_rank_1,
        "gradient of blocks.0.mlp.up.weight in step 1 by ",
        " at [32, 3] on rank 1 [pp0 dp0 tp1]",
    ),
    "publishing": ("dp=2,zero=1", nothing_published, "loss of step 2 by ", ""),
    "coverage": (
        "dp=2,zero=3",
        a_weight_that_is_not_kept,
        "weight blocks.1.mlp.down.weight before step 1: ",
        " of its elements are on no rank",
    ),
    "initial weights": ("pp=2", wrong_initial_weights, "weight embedding.tokens.weight before step 1 by ", ""),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_layout_is_found_and_named(verdict: Verdicts, name: str) -> None:
    layout, broken, begins, ends = BROKEN[name]
    (told,) = verdict("--layout", layout, broken=broken, status=1)["layouts"]
    first = told["first_difference"]
    assert told["ok"] is False and first.startswith(begins) and first.endswith(ends), first


@pytest.mark.slow
def test_parameters_that_are_not_renewed_after_the_last_step(verdict: Verdicts) -> None:
    (told,) = verdict("--layout", "dp=2,zero=2", broken=nothing_published, status=1, steps=1)["layouts"]
    assert told["first_difference"].startswith("parameter embedding.tokens.weight after step 1 by ")


@pytest.mark.slow
def test_a_broken_layout_is_found_in_bf16_too(verdict: Verdicts) -> None:
    (told,) = verdict("--layout", "dp=2", "--precision", "bf16", broken=no_sum_over_dp, status=1, steps=1)["layouts"]
    assert told["first_difference"].startswith("gradient of head.norm.bias in step 1 by ")


@pytest.mark.slow
def test_no_number_is_a_difference_and_valid_json(verdict: Verdicts) -> None:
    (told,) = verdict("--layout", "tp=2", broken=no_number_in_the_norm, status=1, steps=1)["layouts"]
    assert told["ok"] is False and told["max_relative_difference"] is None
    assert told["first_difference"].startswith("gradient norm of step 1 by inf")


def test_a_layout_whose_ranks_die_is_not_equal(verdict: Verdicts) -> None:
    (told,) = verdict("--layout", "tp=2", broken=it_dies, status=1, steps=1)["layouts"]
    assert told["ok"] is False and told["max_relative_difference"] is None
    assert told["first_difference"].startswith("its ranks failed with exit status ")


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(config: Path, *layouts: str, overrides: tuple[str, ...] = (), **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        verification.verify(config, overrides, layouts, steps=1, **options)
    return str(error.value)


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("started ranks"))


@pytest.mark.usefixtures("no_ranks")
def test_what_cannot_be_is_refused_before_anything_runs(config: Path) -> None:
    assert "does not divide" in refused(config, "tp=2", "tp=3")
    assert "is no layout" in refused(config, "foo")
    assert "did you mean zero?" in refused(config, "zer=1")
    assert "Use fp32, bf16, fp16, fp64, configured." in refused(config, "tp=2", precision="fp8")


@pytest.mark.usefixtures("no_ranks")
def test_of_the_files_own_layout_nothing_matters_where_others_are_named(config: Path) -> None:
    own = ("parallel.dp=7",)
    assert "× parallel.dp = 2 × 7" in refused(config, overrides=own)
    said = refused(config, "tp=3", overrides=own)
    assert "parallel.tp = 3 does not divide" in said and "parallel.dp" not in said
    assert "parallel.dq is not a key" in refused(config, "tp=2", overrides=("parallel.dq=2",))


@pytest.mark.usefixtures("no_ranks")
def test_a_user_reads_one_message_and_status_2(config: Path) -> None:
    answer = here("verify", config, "--layout", "tp=4", "--json")
    assert answer.status == 2 and answer.out == ""
    assert answer.err.startswith("colonnade: --layout tp=4 at --precision fp64: 1 problem\n")


@pytest.mark.usefixtures("no_ranks")
def test_gpus_are_one_a_rank(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = refused(config, "tp=2,dp=2", overrides=("train.device=cuda",))
    assert "this machine has 2 GPUs for up to 4 ranks" in said and "Set train.device=cpu" in said


@pytest.mark.parametrize(
    ("device", "layouts", "place"),
    [("auto", ["tp=2,dp=2"], "cpu"), ("auto", ["tp=2"], "cuda"), ("cpu", ["tp=2"], "cpu"), ("cuda", [], "cuda")],
)
def test_all_runs_are_on_one_device(
    config: Path, device: str, layouts: list[str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    base = load(config, [f"train.device={device}"])
    plan = verification.make_plan(base, layouts, shrink=False, precision="fp64", steps=1)
    assert {each.config.train.device for each in plan.variants} == {plan.base.train.device} == {place}
    assert all(each.config.parallel.num_ranks <= 2 for each in plan.variants) or place == "cpu"
    if not layouts:
        assert [each.reason for each in plan.left_out] == [
            "8 ranks: each needs a GPU, and this machine has 2: train.device=cpu compares it without."
        ]


def test_a_model_is_shrunk_for_the_layouts_that_are_named_and_runs_as_long_as_is_asked(config: Path) -> None:
    base = load(config, ["model.num_layers=8"])
    plan = verification.make_plan(base, ["pp=6", "tp=2"], shrink=True, precision="fp64", steps=1_000)
    assert plan.shrunk["num_layers"] == [8, 4], "six stages, of which the embedding and the head fill two"
    for each in (plan.base, *(variant.config for variant in plan.variants)):
        assert (each.model.num_layers, each.train.steps) == (4, 1_000)


def test_configured_is_the_files_precision(config: Path) -> None:
    base = load(config, ["train.precision=bf16"])
    for precision, expected in (("configured", "bf16"), ("fp64", "fp64"), ("fp32", "fp32")):
        plan = verification.make_plan(base, ["tp=2"], shrink=False, precision=precision, steps=1)
        assert plan.precision == plan.variants[0].config.train.precision == expected


def test_a_serial_run_that_fails_is_no_verdict(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that somebody has asked to end: then nothing more is run."""
    for status in (2, 128 + signal.SIGKILL, 128 + signal.SIGSEGV):
        monkeypatch.setattr(launch, "run_ranks", lambda *_, status=status: status)
        with pytest.raises(ColonnadeError, match=rf"the serial run in fp64 failed \(exit status {status}\)"):
            verification.verify(config, [], ["tp=2"], steps=1)
    for status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        monkeypatch.setattr(launch, "run_ranks", lambda *_, status=status: status)
        with pytest.raises(SystemExit) as ended:
            verification.verify(config, [], ["tp=2"], steps=1)
        assert ended.value.code == status


@pytest.mark.slow
def test_fp16_is_compared_at_a_loss_scale_that_skips_no_step(
    config: Path, verdict: Verdicts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "HIGHEST_LOSS_SCALE", 2.0**23)
    said: list[str] = []
    monkeypatch.setattr(verification, "_say", said.append)
    told = verdict("train.loss_scale=1e30", "--precision", "fp16", "--layout", "tp=2", steps=1)
    assert told["layouts"][0]["ok"] is True
    assert [line for line in said if "a step overflowed" in line]


def test_fp16_is_compared_at_a_loss_scale_that_suits_every_step(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of runs that tell nothing but whether a step overflowed: the second, at any scale above 16."""

    def run_ranks(num_ranks: int, command: list[str]) -> int:
        train, output = load(Path(command[4])).train, Path(command[6])
        late = float(train.precision == "fp16" and train.loss_scale > 16)
        told = [(*Number("overflow", "", step), (), (), torch.tensor(x)) for step, x in ((1, 0.0), (2, late))]
        output.mkdir(exist_ok=True)
        for rank in range(num_ranks):
            torch.save(told, file_of(output, rank))
        return 0

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    said: list[str] = []
    monkeypatch.setattr(verification, "_say", said.append)
    keys = ["train.loss_scale=256", "train.init_from=s3://user:key@there/weights"]
    assert verification.verify(config, keys, ["tp=2"], steps=2, precision="fp16")
    assert said[0].startswith("weights are drawn: train.init_from = 's3://") and "key" not in said[0]
    (again,) = (line for line in said if "a step overflowed" in line)
    assert again.endswith("train.loss_scale=16")
    with pytest.raises(ColonnadeError, match=r"lowest loss scale, train\.min_loss_scale = 32: .* Use --precision bf16"):
        verification.verify(config, [*keys, "train.min_loss_scale=32"], ["tp=2"], steps=2, precision="fp16")
    out = capsys.readouterr().out
    assert "train.init_from = 's3://" in out and "key" not in out


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_serial_run_that_is_not_finite_is_nothing_to_hold_layouts_against(
    config: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    def run_ranks(num_ranks: int, command: list[str]) -> int:
        Path(command[6]).mkdir(exist_ok=True)
        told = [(*Number("weight", "head.norm.bias", 2), (2,), (0,), torch.tensor([1.0, value]))]
        torch.save(told, file_of(Path(command[6]), 0))
        return 0

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    with pytest.raises(ColonnadeError, match=r"has a weight head\.norm\.bias after step 2 that is no finite number"):
        verification.verify(config, [], ["tp=2"], steps=2)


def test_each_step_has_the_next_samples_and_one_that_is_skipped_has_no_norm(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same samples again a wrong position would not show in any layout."""
    base, positions = load(config), list[int]()
    batches, step = Corpus.batches, verify_trace.train_step

    def told(self: Corpus, position: int, **more: Any) -> Any:
        positions.append(position)
        return batches(self, position, **more)

    def last_skipped(*arguments: Any) -> Any:
        return replace(step(*arguments), skipped=len(positions) == 3)

    monkeypatch.setattr(Corpus, "batches", told)
    monkeypatch.setattr(verify_trace, "train_step", last_skipped)
    found = [shard.number for shard in verify_trace._run(base, open_corpus(base), Mesh(), CPU, 3)]
    assert positions == [step * base.train.global_batch_size for step in range(3)]
    assert [number.step for number in found if number.what == "gradient norm"] == [1, 2]
    assert [number.step for number in found if number.what == "overflow"] == [1, 2, 3]
    gradients = [number.name for number in found if number.what == "gradient" and number.step == 1]
    assert gradients[0].startswith("head.") and gradients[-1].startswith("embedding."), (
        "as a backward pass comes to them"
    )


def test_gradients_are_compared_without_the_loss_scale() -> None:
    """Beside those in fp64, which have none: a distance that it alone makes would let everything pass."""
    state = build_state(configured(Case(precision="fp16"), SERIAL), Mesh(), 37, CPU)
    flats = [torch.full_like(bucket.optimizer_gradients, 96.0) for bucket in state.trained]
    taken = list(SeenGradients(state.optimizer, state.trained, flats).taken(1, loss_scale=32.0))
    assert taken and all(bool((shard.values == 3.0).all()) for shard in taken)


# --- in processes of its own ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command(config: Path, tmp_path: Path) -> None:
    """One JSON object on standard output, progress on the other stream, and nothing written."""
    answer = colonnade("verify", config, "--layout", "tp=2", "--steps", 1, "--json")
    (told,) = json.loads(answer.out)["layouts"]
    assert answer.status == 0 and answer.out.count("\n") == 1
    assert told["layout"] == "tp=2" and told["ok"] is True
    assert [line.partition(" ")[0] for line in answer.err.splitlines()] == ["verify:"] * 4
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_mutated_copy_of_the_program(config: Path, tmp_path: Path) -> None:
    """Its residual stream leaves out the sum over tp where partial sums leave a pair of layers."""
    source = Path(verification.__file__).parents[1]
    shutil.copytree(source, tmp_path / "copy" / "colonnade", ignore=shutil.ignore_patterns("__pycache__"))
    parallel = tmp_path / "copy/colonnade/tensor_parallel/parallel.py"
    mutated = parallel.read_text().replace("reduce_from(y, self.tp)", "y")
    assert mutated != parallel.read_text()
    parallel.write_text(mutated)
    answer = colonnade("verify", config, "--layout", "tp=2", "--steps", 1, PYTHONPATH=str(tmp_path / "copy"))
    assert answer.status == 1, answer
    assert "DIFFERS, first in the loss of step 1 by " in answer.out
