"""What is settled before ranks start: all mistakes at once, one run in a folder, and what to do after a loss."""

import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from colonnade.config.check import Problem
from colonnade.config.load import TomlFile, load
from colonnade.config.schema import Config
from colonnade.data.indexed import HEADER, bin_path, idx_path
from colonnade.errors import ColonnadeError, ConfigError, DiskError, LayoutError, LockError
from colonnade.launch import launch
from colonnade.lock import locked
from colonnade.train import corpus as corpus_module
from colonnade.train import file_checks
from colonnade.train import start as begin
from colonnade.train.corpus import curriculum_of, open_corpus
from colonnade.train.rollback import Rollback
from colonnade.train.rollback import write as write_rollbacks
from colonnade.train.rollback_options import RollbackOptions
from colonnade.train.run_folder import CHANGES
from colonnade.train.same_run import occupy
from colonnade.train.side_by_side import Share
from colonnade.train.sweep import read_sweep
from tests.commands import after_banner, forked, here
from tests.commands import start as start_ranks
from tests.runs import Finished, metrics, saved_steps, snapshot
from tests.tiny import TinyCorpus
from tests.train.test_interrupt import LONG, await_steps

IN_USE = "is in use by `colonnade train`, process "


# --- mistakes in files ------------------------------------------------------------------------------------------------


def test_mistakes_in_files_are_told_with_the_others_at_once(config: Path) -> None:
    answer = here(
        *("train", config, "data.train=nowhere", "data.validation=neither", "data.tokenizer=none"),
        *("optim.learning_rate=-1", "train.device=cuda", "model.num_heads=3"),
    )
    assert answer.status == 2 and answer.out == ""
    assert answer.err.startswith(f"colonnade: {config}: 6 problems\n"), answer.err
    for said in ("no nowhere.bin", "no neither.bin", "none is no tokenizer", "optim.learning_rate", "0 CUDA GPUs"):
        assert said in answer.err
    assert "model.num_heads = 3 does not divide" in answer.err


def test_a_token_file_whose_index_contradicts_itself_is_told_before_ranks_start(
    config: Path, corpus: TinyCorpus, tmp_path: Path
) -> None:
    for path in (bin_path(corpus.prefix), idx_path(corpus.prefix)):
        shutil.copy(path, tmp_path / f"copy{path.suffix}")
    content = bytearray((tmp_path / "copy.idx").read_bytes())
    content[HEADER.size : HEADER.size + 8] = struct.pack("<ii", -5, 1)
    (tmp_path / "copy.idx").write_bytes(content)
    answer = here("train", config, f"data.train={tmp_path / 'copy'}", "--dry-run")
    assert answer.status == 2 and answer.out == ""
    assert f"{tmp_path / 'copy.idx'} is damaged: sequence 0 has -5 tokens from byte 0 on" in answer.err


def test_too_few_gpus_are_told_where_device_and_ranks_are_certain(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that has a mistake is told alone: without it, it is not known how many ranks there will be."""
    keys = ("train.device", "parallel.tp", "parallel.pp", "parallel.dp")
    monkeypatch.setattr(file_checks, "count_gpus", lambda: 1)
    settings = load(config, ["train.device=cuda", "parallel.dp=2"])
    (found,) = file_checks.problems_of_files(settings, ())
    assert "has 1 CUDA GPU for 2 local ranks" in found.message and set(found.keys) == set(keys)
    assert [file_checks.problems_of_files(settings, {key}) for key in keys] == [[]] * 4


def test_a_vocabulary_too_small_is_told_beside_missing_tokens(config: Path) -> None:
    answer = here("train", config, "data.train=nowhere", "model.vocab_size=100")
    assert answer.status == 2 and "2 problems" in answer.err
    assert "no nowhere.bin" in answer.err and "model.vocab_size = 100 is less than the 275 ids" in answer.err


@pytest.mark.parametrize("curriculum", [[], ["tokens=[0, 200]", "seq_length=[4, 16]", "global_batch_size=[2, 4]"]])
@pytest.mark.parametrize("epochs", [0.3, 1, 2.5])
def test_epochs_take_as_many_steps_as_use_them_up(config: Path, curriculum: list[str], epochs: float) -> None:
    """Also while sequences and batches grow."""
    config.write_text(config.read_text().replace("steps = 6\n", f"epochs = {epochs}\n"))
    keys = ["model.seq_length=16", "train.global_batch_size=4", "train.micro_batch_size=2"]
    settings = begin.load_for_run(config, [*keys, *(f"curriculum.{key}" for key in curriculum)])
    wanted = epochs * len(open_corpus(settings).datasets.train) * 16
    tokens = [curriculum_of(settings).steps(steps) * curriculum_of(settings).unit for steps in range(1000)]
    assert tokens[settings.train.steps - 1] < wanted <= tokens[settings.train.steps]


@pytest.mark.parametrize("blended", [False, True])
def test_epochs_of_data_that_end_leave_out_a_step_that_they_do_not_fill(
    config: Path, corpus: TinyCorpus, blended: bool
) -> None:
    """And more of them than there are is refused."""
    samples = len(open_corpus(load(config)).datasets.train)
    assert samples % 4
    text = config.read_text().replace("steps = 6\n", "epochs = 1\n")
    prefix = f'train = "{corpus.prefix}"'
    by_file = f'blend = {{"{corpus.prefix}" = 1}}\nblend_by = "epochs"'
    config.write_text(text.replace(prefix, by_file if blended else f'{prefix}\norder = "all_epochs"\nepochs = 1'))
    assert begin.load_for_run(config).train.steps == samples // 4
    with pytest.raises(ColonnadeError, match=rf"{samples} in all|samples are {samples}\."):
        open_corpus(begin.load_for_run(config, ["train.epochs=2"]))


def test_epochs_of_data_that_end_leave_out_a_group_of_pieces_that_they_do_not_fill(config: Path) -> None:
    """Of samples that are cut in four, whose pieces come in as many steps."""
    samples, seq_length = len(open_corpus(load(config)).datasets.train), load(config).model.seq_length
    keys = ['data.order="all_epochs"', "data.epochs=1", f"curriculum.seq_length=[{seq_length // 4}, {seq_length}]"]
    keys += ["curriculum.tokens=[0, 1_000_000]", "curriculum.global_batch_size=[8, 4]"]
    config.write_text(config.read_text().replace("steps = 6\n", "epochs = 1\n"))
    # Of 8 pieces a step reads the tokens of 2 samples: all would take so many steps.
    assert -(-samples // 2) > samples // 8 * 4 + 1
    assert begin.load_for_run(config, keys).train.steps == samples // 8 * 4


def test_a_part_of_an_epoch_is_a_step_at_least_and_what_cannot_be_opened_is_told_by_others(config: Path) -> None:
    text = config.read_text()
    config.write_text(text.replace("steps = 6\n", "epochs = 1e-9\n"))
    assert begin.load_for_run(config).train.steps == 1
    config.write_text(text.replace("steps = 6\n", "epochs = 1\n"))
    with pytest.raises(ConfigError, match=r"1 problem\n.*no nowhere\.bin"):
        begin.load_for_run(config, ["data.train=nowhere"])
    config.write_text(text.replace("steps = 6\n", "steps = 6\nepochs = 1\n"))
    assert begin.load_for_run(config).train.steps == 6


@pytest.mark.parametrize("rank", ["", "1"])
def test_a_run_by_epochs_does_not_start_where_only_these_need_the_data_to_be_open(
    config: Path, corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    """Files of a storage are not looked at otherwise; it may give them a moment later."""
    if rank:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(begin, "TURN_OF_RANK_0", 0.0)
    config.write_text(config.read_text().replace("steps = 6\n", "epochs = 1\n"))
    keys = ["data.train=memory://nobody/has/it", f"data.cache={tmp_path / 'cache'}"]
    with pytest.raises(ConfigError, match=r"1 problem\n.*memory://nobody/has/it"):
        begin.load_for_run(config, keys)


def test_data_that_the_disk_withholds_for_a_while_are_no_mistake_in_epochs(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that cannot open them is started again."""

    def withheld(settings: Config) -> None:
        raise DiskError("away")

    monkeypatch.setattr(corpus_module, "open_corpus", withheld)
    monkeypatch.setenv(launch.PIPE, "9")
    config.write_text(config.read_text().replace("steps = 6\n", "epochs = 1\n"))
    with pytest.raises(DiskError, match="away"):
        begin.load_for_run(config)


def test_epochs_are_planned_as_they_are_run(config: Path) -> None:
    config.write_text(config.read_text().replace("steps = 6\n", "epochs = 2\n"))
    planned = begin.load_for_plan(config, length=True)
    assert planned.train.steps == begin.load_for_run(config).train.steps > 1


@pytest.mark.parametrize(
    ("ranks", "one_rank", "limit", "supervised"),
    [(1, True, 3, True), (1, True, 0, False), (1, False, 3, False), (2, False, 3, True), (2, True, 0, True)],
)
def test_one_rank_is_watched_where_it_may_start_again(
    config: Path, ranks: int, one_rank: bool, limit: int, supervised: bool
) -> None:
    keys = (f"parallel.dp={ranks}", f"restarts.one_rank={str(one_rank).lower()}", f"restarts.limit={limit}")
    assert begin.is_supervised(load(config, keys)) == supervised


@pytest.mark.slow
def test_files_are_looked_at_before_ranks_start_and_without_torch(config: Path) -> None:
    program = f"""
import sys
from colonnade import cli
from colonnade.launch import launch
launch.run_on = lambda *_, **__: print("ranks were started") or launch.Ended(0, 0, None)
sys.argv = ["colonnade", "train", {str(config)!r}, "parallel.tp=2", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""
    for override, said in (
        ("model.seq_length=9999", "2 False\n"),
        ("train.log_every=3", "ranks were started\n0 False\n"),
    ):
        answer = subprocess.run(
            [sys.executable, "-c", program, override], capture_output=True, text=True, timeout=60, check=False
        )
        assert after_banner(answer.stdout) == said, answer


def test_of_files_some_of_which_lie_elsewhere_no_sample_is_cut_before_the_run(
    config: Path, corpus: TinyCorpus, tmp_path: Path
) -> None:
    """What is read of them would take its time, and nothing is asked of a storage yet."""
    whole = config.read_text()
    config.write_text(whole.replace(f'train = "{corpus.prefix}"\n', ""))
    blend = f'data.blend={{"memory://nobody/has/it" = 1, "{corpus.prefix}" = 1}}'
    found = begin.load_for_run(config, [blend, f"data.cache={tmp_path / 'cache'}"])
    assert list(found.data.blend or ()) == ["memory://nobody/has/it", str(corpus.prefix)]


@pytest.mark.parametrize("name", ["PIPE", "RANK"])
def test_a_rank_is_not_told_again(config: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "PIPE":
        monkeypatch.setenv(launch.PIPE, "9")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert begin.load_for_run(config, ["data.train=nowhere"]).data.train == "nowhere"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv(launch.PIPE, raising=False)
    with pytest.raises(ConfigError, match=r"no nowhere\.bin"):
        begin.load_for_run(config, ["data.train=nowhere"])


def test_a_folder_that_is_no_text_is_told(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.folder = 5 is a number"):
        begin.load_for_run(config, ["run.folder=5", "train.init_from=no folder"])


@pytest.mark.parametrize("load_it", [begin.load_for_run, begin.load_for_plan], ids=["run", "plan"])
def test_a_run_that_would_count_a_file_twice_is_refused(
    config: Path, corpus: TinyCorpus, load_it: Callable[..., Config]
) -> None:
    """By a plan too, which looks into no file."""
    config.write_text(config.read_text().replace(f'train = "{corpus.prefix}"\n', ""))
    with pytest.raises(ConfigError, match="which are one file"):
        load_it(config, [f'data.blend={{"{corpus.prefix}" = 1, "{corpus.folder}/./tokens" = 1}}'])


def test_more_checks_are_told_with_the_others(config: Path) -> None:
    def also(found: Config, uncertain: set[str]) -> list[Problem]:
        return [Problem("one more", ("train.steps",))]

    with pytest.raises(ConfigError, match=r"(?s)2 problems.*no nowhere\.bin.*one more"):
        begin.load_for_run(config, ["data.train=nowhere"], also=also)


# --- what a file leaves open ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "precision", "planned"),
    [
        (0, ["train.device=auto"], "fp32", "bf16"),
        (8, ["train.device=auto"], "bf16", "bf16"),
        (8, ["train.device=cpu"], "fp32", "fp32"),
        (0, ["train.device=cuda"], "bf16", "bf16"),
        (None, ["train.device=auto"], "fp32", "bf16"),
        (8, ["train.device=auto", "train.precision=fp64"], "fp64", "fp64"),
    ],
)
def test_precision_is_chosen_by_the_device(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int | None,
    overrides: list[str],
    precision: str,
    planned: str,
) -> None:
    """A plan, for which no GPU has to be there, is for GPUs unless train.device says otherwise."""
    monkeypatch.setattr(begin, "count_gpus", lambda: num_gpus)
    assert load(config, overrides, complete=begin.complete).train.precision == precision
    assert begin.load_for_plan(config, overrides).train.precision == planned
    said = ["train.precision is not set: bf16, as this run computes on GPUs."]
    assert begin.lines(config, overrides) == said * (precision == "bf16")


def test_a_run_keeps_its_precision_wherever_it_goes_on(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus = ["train.device=auto"]
    monkeypatch.setattr(begin, "count_gpus", lambda: 8)
    assert load(finished.config, on_gpus, complete=begin.complete).train.precision == "fp32"
    assert begin.load_for_plan(finished.config, on_gpus).train.precision == "fp32"
    assert begin.lines(finished.config, on_gpus) == []


def test_gpus_are_counted_when_what_their_driver_reads_is_there(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "set, so that it is put back")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    seen = list[str]()
    monkeypatch.setattr(begin, "count_gpus", lambda: seen.append(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]) or 0)
    begin.load_for_run(config, ["train.device=auto"])
    assert seen == ["32"]


OLD = '[model]\ndropout = 0.1\n[train]\nevaluate_every = 0\nprecision = "fp64"\n'


def test_a_run_goes_on_with_the_samples_that_it_began_with(config: Path, tmp_path: Path) -> None:
    """A folder of a version that had one way to make them."""
    config.write_text(config.read_text().replace("revision = 2\n", ""))
    assert here("train", config).status == 0
    written = tmp_path / "run" / "config.toml"
    assert load(written).data.revision == begin.load_for_run(config).data.revision == 2
    for each in (written, *(tmp_path / "run").glob("checkpoints/*/config.toml")):
        each.write_text(each.read_text().replace("revision = 2\n", ""))
    assert begin.load_for_run(config).data.revision == 1
    assert begin.lines(config) == [
        f"Kept from {tmp_path}/run/config.toml, as the defaults were when the run began: data.revision = 1."
    ]
    answer = here("train", config, "data.revision=2")
    assert answer.status == 2 and "data.revision: 1 -> 2" in answer.err


def test_a_run_that_has_lost_its_configuration_goes_on_as_its_checkpoints_say(config: Path, tmp_path: Path) -> None:
    """As where a user has copied these alone."""
    config.write_text(config.read_text().replace("revision = 2\n", ""))
    assert here("train", config).status == 0
    run = tmp_path / "run"
    newest = max(run.glob("checkpoints/step_*"))
    for each in (run / "config.toml", newest / "config.toml"):
        each.write_text(each.read_text().replace("revision = 2\n", ""))
    (run / "config.toml").unlink()
    assert begin.load_for_run(config).data.revision == 1
    assert begin.lines(config) == [
        f"Kept from {newest}/config.toml, as the defaults were when the run began: data.revision = 1."
    ]


def test_what_a_run_keeps_is_told_and_of_one_that_has_not_begun_nothing_is(config: Path, tmp_path: Path) -> None:
    """A folder in which nothing was trained belongs to nobody."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(OLD)
    (run / "metrics.jsonl").touch()
    config.write_text(config.read_text().replace("\ndropout = 0.1", "").replace("evaluate_every = 3\n", ""))
    fresh = load(config, complete=begin.complete)
    assert (fresh.model.dropout, fresh.train.evaluate_every, fresh.train.precision) == (0.0, None, "fp32")
    assert begin.lines(config) == []
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    kept = load(config, complete=begin.complete)
    assert (kept.model.dropout, kept.train.evaluate_every, kept.train.precision) == (0.1, 0, "fp64")
    (line,) = begin.lines(config)
    assert line.startswith(f"Kept from {run}/config.toml, as the defaults were when the run began: ")
    assert line.endswith("model.dropout = 0.1, train.evaluate_every = 0.")
    assert begin.lines(config, ["model.dropout=0.3", "train.evaluate_every=7"]) == []


def test_the_newest_of_several_checkpoints_is_named_after_a_loss(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a file system lists them."""
    for step in (100, 20, 3):
        (tmp_path / "run" / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    glob = Path.glob
    for backwards in (False, True):
        listed = partial(sorted, reverse=backwards)
        monkeypatch.setattr(Path, "glob", lambda self, pattern, listed=listed: listed(glob(self, pattern)))
        assert begin.how_to_go_on(load(config)).endswith("checkpoints/step_00000100.")


def test_folders_that_were_there_stay(config: Path, tmp_path: Path) -> None:
    """Also where they are empty: somebody has made them, perhaps as a link's end."""
    (tmp_path / "run").mkdir()
    with begin.owned(load(config)) as kept:
        assert len(kept) == 1 and os.fstat(kept[0]).st_ino == (tmp_path / "run" / "lock").stat().st_ino
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
def test_a_plan_is_of_what_train_would_run(config: Path) -> None:
    """bf16 weights and fp32 masters take more than fp32 weights alone."""
    device = [f"train.device={device}" for device in ("auto", "cpu")]
    plans = [json.loads(here("plan", config, each, "--json").out) for each in device]
    spelled_out = json.loads(here("plan", config, device[0], "train.precision=bf16", "--json").out)
    assert plans[0] == spelled_out != plans[1]


# --- one run in a folder ----------------------------------------------------------------------------------------------


def test_of_two_runs_that_are_started_together_one_trains(config: Path, tmp_path: Path) -> None:
    runs = [start_ranks("train", config, "train.steps=30", "optim.decay_steps=6") for _ in range(2)]
    first, second = sorted((run.answers()[0] for run in runs), key=lambda answer: answer.status)
    assert (first.status, first.err) == (0, "") and "Finished 30 steps" in first.out
    if second.status == 2:
        assert second.out == "" and second.err.startswith(f"colonnade: {tmp_path / 'run'} {IN_USE}")
    else:  # the first had ended before the second began
        assert second.status == 0 and "Resumed from" in second.out
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 31))


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 2])
def test_who_has_a_folder_is_said_and_a_dead_run_never_blocks(config: Path, tmp_path: Path, dp: int) -> None:
    ranks = start_ranks("train", config, *LONG, f"parallel.dp={dp}", num_ranks=dp)
    await_steps(tmp_path / "run", 2, lambda: True)
    seconds = here("train", config), forked("train", config, "parallel.dp=2", num_ranks=2)
    ranks.signal(signal.SIGKILL)
    ranks.answers()
    for second in seconds:
        assert second.status == 2 and second.out == "", second
        assert f"{tmp_path / 'run'} {IN_USE}{ranks.pids[0]} of user " in second.err and ", since 20" in second.err
        assert "stop it, or set another run.folder." in second.err and second.err.count("colonnade: ") == 1
    answer = forked("train", config, *LONG, "train.steps=6")
    assert answer.status == 0, answer
    assert not (tmp_path / "run" / "lock").exists()
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 7))


@pytest.mark.slow
def test_ranks_keep_the_folder_of_a_launcher_that_is_gone(config: Path, tmp_path: Path) -> None:
    """They may still be writing. The folder is free when the last of them has ended."""
    program = f"""
import subprocess, sys
from pathlib import Path
from colonnade.train import start
with start.owned(start.load(Path({str(config)!r}))) as keep:
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=keep).pid, flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    rank = int(process.stdout.readline())
    process.kill()
    process.wait()
    try:
        answer = here("train", config)
        assert answer.status == 2 and f"{IN_USE}{process.pid}" in answer.err, answer
    finally:
        os.kill(rank, signal.SIGKILL)
        process.stdout.close()
        process.stdin.close()
    end = time.monotonic() + 20
    while Path(f"/proc/{rank}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    with begin.owned(load(config)):
        pass
    assert not (tmp_path / "run" / "lock").exists()


def test_a_folder_of_which_nothing_came_goes_again(config: Path, tmp_path: Path) -> None:
    with begin.owned(load(config)):
        assert (tmp_path / "run" / "lock").exists()
    assert not (tmp_path / "run").exists()


def test_a_run_that_was_killed_before_its_first_save_begins_again(config: Path, tmp_path: Path) -> None:
    """All that it has left is the folder of its checkpoints, in which there is none."""
    occupy(load(config))
    answer = forked("train", config, "train.steps=2")
    assert answer.status == 0 and "Finished 2 steps" in answer.out, answer
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]


def test_steps_that_were_told_twice_are_told_once_after_a_resume(finished: Finished, tmp_path: Path) -> None:
    """As two runs at once would leave them; what was written last counts."""
    shutil.copytree(finished.folder, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], lines[1].replace('"loss": ', '"loss": 1'), *lines[2:]]))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
    answer = forked("train", finished.config, f"run.folder={tmp_path / 'run'}")
    assert answer.status == 0 and "step 4" in answer.out, answer
    told = metrics(tmp_path / "run")
    assert [line["step"] for line in told] == [1, 2, 3, 4, 5, 6]
    before = metrics(finished.folder)
    assert told[1]["loss"] == float(f"1{before[1]['loss']}") and told[2:] == before[2:]


# --- without a step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", [1, 2])
def test_a_dry_run_tells_all_and_writes_nothing(config: Path, finished: Finished, tmp_path: Path, dp: int) -> None:
    arguments = ("train", config, f"parallel.dp={dp}", "--dry-run")
    answer = forked(*arguments, num_ranks=dp)
    assert answer.status == 0 and answer.err == "", answer
    assert "  memory " in answer.out and "step 1/" not in answer.out
    assert answer.out.splitlines()[-1] == "Nothing was trained or saved. The run would begin with step 1."
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_a_run_that_goes_on_changes_nothing(finished: Finished, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    before = snapshot(run)
    command = ("train", finished.config, f"run.folder={run}", "--dry-run")
    for steps, said in (
        (9, f"go on from {run}/checkpoints/step_00000006 with step 7."),
        (6, f"do nothing: {run}/checkpoints/step_00000006 is at step 6 of train.steps = 6."),
    ):
        answer = forked(*command, f"train.steps={steps}")
        assert answer.status == 0 and answer.out.endswith(f"The run would {said}\n"), answer
    refused = forked(*command, "train.global_batch_size=8")
    assert refused.status == 2 and "train.global_batch_size: 4 -> 8" in refused.err, refused
    assert snapshot(run) == before


# --- returning to a checkpoint ----------------------------------------------------------------------------------------


def test_ranks_do_not_return_by_themselves(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that does it once is told, as it is written."""
    monkeypatch.setattr(launch, "is_rank", lambda: True)
    with pytest.raises(ConfigError) as told:
        begin.roll_back(load(config), 4, RollbackOptions(skip=2))
    assert f"`colonnade rollback {tmp_path / 'run'} 4 --skip 2`" in str(told.value)


def test_who_starts_a_run_returns_it(finished: Finished, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    said = begin.roll_back(load(finished.config, [f"run.folder={run}"]), 4, RollbackOptions())
    assert said.startswith(f"{run} returns to step 4, to ") and not (run / "checkpoints" / "step_00000006").exists()


def test_a_folder_is_returned_where_it_is_a_runs_and_nobodys(finished: Finished, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"is not the folder of a run: it has no checkpoints/\. Name one"):
        begin.roll_back_folder(tmp_path, 4, RollbackOptions())
    with pytest.raises(ConfigError, match=r"--rate-factor 0\.5 and --rate-steps 0 go together"):
        begin.roll_back_folder(run, 4, RollbackOptions(rate_factor=0.5))
    with locked(run, "colonnade train", instead=None), pytest.raises(LockError, match="is in use by"):
        begin.roll_back_folder(run, 4, RollbackOptions())
    said = begin.roll_back_folder(run, 4, RollbackOptions())
    assert said.startswith(f"{run} returns to step 4, to ")
    assert said.endswith(" The checkpoints of steps 6 are deleted.")


@pytest.mark.parametrize(("rank", "left"), [(0, [4]), (1, [4, 6])])
def test_a_rollback_in_which_ranks_were_killed_is_finished_when_their_supervisor_starts_them_again(
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    left: list[int],
) -> None:
    """By rank 0 alone, before it meets the others."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    write_rollbacks(run, [Rollback(to=4, id="it")])
    monkeypatch.setattr(launch, "has_supervisor", lambda: True)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings = load(finished.config, [f"run.folder={run}", "parallel.dp=2"])
    with begin.owned(settings, dry_run=True):
        assert saved_steps(run) == [4, 6] and capsys.readouterr().out == "", "which the supervisor tells"
    with begin.owned(settings) as kept:
        assert kept == () and saved_steps(run) == left


@pytest.mark.parametrize("is_supervised", [True, False])
def test_a_rollback_that_the_disk_keeps_from_being_finished_is_told(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_supervised: bool
) -> None:
    """Whoever finishes it: a run on a disk that comes back is started again."""

    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "step_00000006")

    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    write_rollbacks(run, [Rollback(to=4, id="it")])
    monkeypatch.setattr("colonnade.train.rollbacks.discard_after", refused)
    monkeypatch.setattr(launch, "has_supervisor", lambda: is_supervised)
    said = rf"^run\.folder = '{run}' cannot be written: Read-only file system \(step_00000006\)"
    with pytest.raises(DiskError, match=said), begin.owned(load(finished.config, [f"run.folder={run}"])):
        pytest.fail("checkpoints of two courses are there")


@pytest.mark.parametrize("is_supervised", [True, False])
def test_where_a_run_has_made_no_rollback_nothing_is_imported_for_one(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_supervised: bool
) -> None:
    """Torch would be, in each process that starts ranks."""
    (tmp_path / "run").mkdir()
    monkeypatch.setitem(sys.modules, "colonnade.train.rollbacks", None)
    monkeypatch.setattr(launch, "has_supervisor", lambda: is_supervised)
    with begin.owned(load(config)) as kept:
        assert len(kept) == (not is_supervised)


# --- who starts what --------------------------------------------------------------------------------------------------


def test_ranks_of_another_number_than_the_layouts_leave_no_folder(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LayoutError, match="The launcher started 2 ranks"), begin.owned(load(config)):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("limit", "dry_run", "watched"), [(3, False, True), (0, False, False), (3, True, False), (0, True, False)]
)
def test_ranks_that_are_not_started_again_are_started_once(
    config: Path, monkeypatch: pytest.MonkeyPatch, limit: int, dry_run: bool, watched: bool
) -> None:
    """A dry run has lost nothing."""
    told: list[str] = []

    def run_on(places: range, command: list[str], **how: object) -> launch.Ended:
        told.append("once")
        assert [*places] == [0, 1] and command[1:] == ["-m", "colonnade", "train", "c.toml"] and how["file"] == "text"
        return launch.Ended(7, signal.SIGTERM, None)

    class Restarts:
        def __init__(self, *given: object) -> None:
            told.append("watched")

        def run(self) -> int:
            return 7

    monkeypatch.setattr(launch, "run_on", run_on)
    monkeypatch.setattr(begin, "Restarts", Restarts)
    settings = load(config, ["parallel.dp=2", f"restarts.limit={limit}"])
    file = TomlFile(config, "text")
    heard = signal.signal(signal.SIGTERM, lambda *_: None), signal.getsignal(signal.SIGTERM)
    assert begin.supervise(settings, file, ["train", "c.toml"], (), (), dry_run=dry_run, last=False) == (
        7 if watched else 143
    )
    assert told == ["watched" if watched else "once"] and signal.getsignal(signal.SIGTERM) is heard[1]
    assert begin.supervise(settings, file, ["train", "c.toml"], (), (), dry_run=dry_run) == 7
    assert (signal.getsignal(signal.SIGTERM) is signal.SIG_IGN) is not watched


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_no_rank_has_heard_ends_a_sweep_by_the_status_of_its_run(
    config: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Not by itself: the sweep has yet to tell that it goes on. A run alone has ended well."""
    monkeypatch.setattr(launch, "run_on", lambda *_, **__: launch.Ended(0, 0, None, [number]))
    settings, file = load(config, ["parallel.dp=2", "restarts.limit=0"]), TomlFile(config, "text")
    signal.signal(number, lambda *_: pytest.fail("raised"))
    found = [begin.supervise(settings, file, [], (), (), last=last) for last in (False, True)]
    assert found == [128 + number, 0]


@pytest.mark.parametrize(
    ("share", "device", "ranks", "gpus", "given"),
    [
        (Share(0, 1), "auto", 1, None, []),
        (Share(0, 2), "auto", 1, [0], ["train.threads=4"]),
        (Share(1, 2), "auto", 2, [2, 3], ["train.threads=2"]),
        (Share(2, 3), "cpu", 1, None, ["train.threads=2"]),
    ],
)
def test_a_point_has_its_gpus_and_threads_and_what_its_storage_has(
    config: Path, monkeypatch: pytest.MonkeyPatch, share: Share, device: str, ranks: int, gpus: object, given: list[str]
) -> None:
    """Of eight GPUs and as many cores."""
    text = config.read_text().replace("threads = 1\n", "").replace('device = "cpu"', f'device = "{device}"')
    config.write_text(f"{text}\n[parallel]\ndp = {ranks}\n")
    seen: list[object] = []
    monkeypatch.delenv(launch.OPENMP, raising=False)
    monkeypatch.setattr(launch, "num_cores", lambda: 8)
    monkeypatch.setattr(begin, "count_gpus", lambda: 8)
    monkeypatch.setattr(file_checks, "count_gpus", lambda: 8)
    monkeypatch.setattr(launch, "hide_other_gpus", lambda places: seen.append([*places]))
    monkeypatch.setattr(begin, "fetch", lambda file, overrides, settings: seen.append("fetched"))

    def supervise(settings: Config, file: TomlFile, arguments: list[str], *more: object, last: bool) -> int:
        assert last == (share.of > 1), "others follow in the same process"
        seen.append(arguments)
        return 0

    monkeypatch.setattr(begin, "supervise", supervise)
    assert begin.run_point(config, share) == 0
    assert seen == [*([gpus] if gpus else []), "fetched", ["train", str(config), *given]]


def test_threads_that_are_set_are_those_of_a_point(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(begin, "supervise", lambda settings, file, arguments, *more, last: seen.extend(arguments) or 0)
    assert begin.run_point(config, Share(0, 2)) == 0 and seen == ["train", str(config)]


def test_a_point_is_checked_for_its_score_and_its_share(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(begin, "num_cores_to_run_on", lambda: 2)
    text = config.read_text()

    def check(lines: str) -> None:
        config.write_text(f"{text}\n[sweep]\ntrain.seed = [1, 2]\n{lines}\n")
        sweep = read_sweep(config, [])
        assert sweep is not None
        config.write_text(text)
        begin.check_point(config, sweep)

    for lines in ("", "at_once = 2", 'score = "perplexity"'):
        check(lines)
    with pytest.raises(ConfigError, match=r"sweep\.at_once = 3 runs would share 2 cores"):
        check("at_once = 3")
    with pytest.raises(ConfigError, match="accuracy"):
        check('score = "accuracy"')


def test_runs_on_cpus_share_cores_though_there_are_gpus(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one run at a time has what it asks for, or is told by itself that there are too few."""
    monkeypatch.setattr(begin, "num_cores_to_run_on", lambda: 4)
    monkeypatch.setattr(begin, "count_gpus", lambda: 1)
    on_gpus = load(config, ["train.device=cuda", "parallel.dp=2"])
    begin.check_shares(load(config, ["train.device=cpu", "parallel.dp=2"]), 4)
    begin.check_shares(on_gpus, 1)
    with pytest.raises(ConfigError, match=r"2 runs of 2 ranks need 4 GPUs, and this machine has 1\. Use 1 or less"):
        begin.check_shares(on_gpus, 2)


# --- after a loss -----------------------------------------------------------------------------------------------------


def test_what_to_do_after_a_loss(finished: Finished, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*given: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    settings = load(finished.config)
    assert begin.how_to_go_on(settings) == f"Run the same command again: it goes on from {finished.newest}."
    for every, said in (("4", "checkpoint.every = 4 steps had not passed"), ("0", "checkpoint.every = 0 saves at")):
        fresh = load(config, [f"checkpoint.every={every}"])
        assert said in begin.how_to_go_on(fresh) and "starts again from the beginning" in begin.how_to_go_on(fresh)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", lost)
        said = f"Run the same command again when {fresh.run.folder} can be read (Stale file handle)."
        assert begin.how_to_go_on(fresh) == said
    (run := Path(fresh.run.folder)).mkdir()
    (run / CHANGES).write_text('{"change": {"checkpoint.every": 7}}\n')
    (run / "metrics.jsonl").write_text('{"step": 3, "loss": 5.0}\n')
    assert "checkpoint.every = 7 steps had not passed" in begin.how_to_go_on(fresh)


def test_only_a_users_mistake_is_a_problem() -> None:
    """Another error is an error of the program, and shows where it was made."""

    def refuse() -> None:
        raise ConfigError("the file is none")

    def fail() -> None:
        raise RuntimeError("a bug")

    assert file_checks._problems(lambda: None, "data.train") == []
    (found,) = file_checks._problems(refuse, "data.train", "data.split")
    assert (found.message, tuple(found.keys)) == ("the file is none", ("data.train", "data.split"))
    with pytest.raises(RuntimeError, match="a bug"):
        file_checks._problems(fail, "data.train")
