"""The command line as a user meets it: in a process of its own."""

import atexit
import io
import os
import runpy
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from colonnade import __version__, cli, one_rank
from colonnade.config.describe import all_keys
from colonnade.config.load import TomlFile, load
from colonnade.config.schema import Config
from colonnade.launch import launch, process
from colonnade.launch.supervisor import UNFINISHED, Ended
from colonnade.train import loop
from colonnade.train import start as begin
from tests.commands import here

ROOT = Path(__file__).parents[1]

BAD = """\
[model]
num_layer = 2
[train]
num_layers = "2"
"""


def colonnade(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "colonnade", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_a_signal_to_save_ends_no_command_that_is_still_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[object]()
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    commands = ModuleType("colonnade.cli")
    vars(commands)["__getattr__"] = lambda name: told.append(signal.getsignal(signal.SIGUSR1)) or list
    monkeypatch.setitem(sys.modules, "colonnade.cli", commands)
    monkeypatch.delattr("colonnade.cli")
    try:
        runpy.run_module("colonnade", run_name="__main__")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told and set(told) == {signal.SIG_IGN}
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"colonnade": "colonnade.__main__:main"}


def test_a_bad_configuration_is_one_message_and_status_2(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(BAD)
    answer = colonnade("train", str(path))
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith(f"colonnade: {path}: 8 problems\n")
    assert "did you mean model.num_layers?" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.slow
def test_a_bad_configuration_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(BAD)
    program = f"""
import sys
from colonnade import cli
sys.argv = ["colonnade", "train", {str(path)!r}]
try:
    cli.main()
except SystemExit as error:
    assert error.code == 2
print(sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "numpy", "rich", "tokenizers"}}))
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert answer.stdout == "[]\n", answer.stderr


@pytest.mark.slow
def test_a_rank_imports_no_compiler_before_it_predicts_and_nothing_that_cleans() -> None:
    """Each is a sixth or less of a start, and most ranks predict nothing."""
    program = """
import sys
from colonnade.planner import banner, comparison, memory_limit, stand_in
from colonnade.train import loop
slow = ("torch._dynamo", "torch._inductor", "colonnade.corpus.recipe")
print([name for name in slow if name in sys.modules])
stand_in.StandIn("cpu")
print("torch._dynamo" in sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert answer.stdout == "[]\nTrue\n", answer.stderr


def test_the_help_of_train_lists_every_key() -> None:
    answer = colonnade("train", "--help")
    assert answer.returncode == 0
    for name in all_keys():
        assert f"\n  {name.rpartition('.')[2]} " in answer.stdout, name


@pytest.mark.parametrize(("columns", "most"), [(60, 58), (100, 98), (200, 98)])
def test_keys_are_told_within_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, most: int) -> None:
    """And no wider than one reads."""
    monkeypatch.setenv("COLUMNS", str(columns))
    _, _, keys = here("train", "--help").out.partition("Keys of a configuration, with their defaults:")
    widths = list(map(len, keys.splitlines()))
    assert max(widths) <= most < max(widths) + 8


def test_the_version_and_the_name() -> None:
    answer = colonnade("--version")
    assert (answer.returncode, answer.stdout) == (0, f"colonnade {__version__}\n")
    assert colonnade("generate").stderr.startswith("Usage: colonnade generate ")


@pytest.mark.parametrize("group", [(), ("data",)])
def test_one_line_tells_what_a_command_does(group: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    told = here(*group, "--help").out
    assert "Usage: colonnade" in told and "..." not in told.split("Commands:")[1]


@pytest.mark.slow
def test_an_unknown_command_and_no_command() -> None:
    unknown = colonnade("tran")
    assert unknown.returncode == 2
    assert "Did you mean 'train'?" in unknown.stderr
    assert "Traceback" not in unknown.stderr
    assert "train" in colonnade("--help").stdout


@pytest.mark.parametrize("status", [0, 2, 130])
def test_started_alone_it_starts_the_ranks_and_takes_their_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    started: list[tuple[int, list[str]]] = []

    def run_on(places: Sequence[int], command: list[str], **more: object) -> Ended:
        started.append((len(places), command))
        return Ended(status, asked=signal.SIGINT if status == 130 else 0, cause=None)

    monkeypatch.setattr(launch, "is_rank", lambda: False)
    monkeypatch.setattr(launch, "run_on", run_on)
    monkeypatch.setattr(begin, "problems_of_files", lambda *_: [])  # of an example there is no data
    monkeypatch.chdir(tmp_path)
    config, override = str(ROOT / "examples" / "books.toml"), "train.steps=50"
    monkeypatch.setattr(sys, "argv", ["colonnade", "train", config, override])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == status
    assert started == [
        (load(Path(config)).parallel.num_ranks, [sys.executable, "-m", "colonnade", "train", config, override])
    ]


def test_first_lines_are_not_held_back_until_the_ranks_have_ended(
    monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    """As lines are where the output goes to a file or a pipe."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    cli.say_first_lines(load(config, ["parallel.tp=2"]), ["what the run keeps"])
    first, second = written.getvalue().decode().splitlines()
    assert first.endswith(" on 2 ranks.") and second == "what the run keeps"


def test_the_ranks_that_it_starts_know_that_the_run_is_dry(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    """Or what of it is timed; and of a dry run alone nothing is noted."""
    started: list[list[str]] = []
    noted: list[object] = []

    def run_on(places: Sequence[int], command: list[str], **more: object) -> Ended:
        started.append(command)
        return Ended(0, asked=0, cause=None)

    monkeypatch.setattr(launch, "run_on", run_on)
    monkeypatch.setattr(begin, "note_fewer_ranks", noted.append)
    words = ["train", str(config), "parallel.tp=2"]
    for more, notes in ((["--dry-run"], 0), ([], 1), (["--profile", "1:2"], 2)):
        assert here(*words, *more).status == 0
        assert started.pop() == [sys.executable, "-m", "colonnade", *words, *more] and len(noted) == notes


def test_ranks_that_audit_read_the_configuration_that_this_process_has_read(
    monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    """Whatever becomes of the file before they have come so far."""
    started: list[tuple[object, ...]] = []

    def run_ranks(num_ranks: int, command: list[str], *, file: str | None, **_: object) -> int:
        started.append((num_ranks, command[3:], file))
        return 7

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    assert here("train", config, "parallel.tp=2", "--audit").status == 7
    assert started == [(2, ["train", str(config), "parallel.tp=2", "--audit"], config.read_text())]


def test_a_folder_that_cannot_be_written_is_refused_but_for_an_audit(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    """A dry run tells everything that the run would be refused for."""
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: 7)
    (tmp_path / "file").touch()
    words = ("train", config, "parallel.tp=2", f"run.folder={tmp_path}/file/run")
    for more in ((), ("--dry-run",)):
        answer = here(*words, *more)
        assert answer.status == 2 and f"{tmp_path}/file" in answer.err, answer
    assert here(*words, "--audit").status == 7


def test_fine_tuning_without_a_sweep_is_one_run(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    """Also of a pipe, which is read once."""
    trained = list[tuple[Config, list[str]]]()

    def run(settings: Config, file: TomlFile, arguments: list[str], *_: object, **more: object) -> int:
        assert file == TomlFile(path, config.read_text())
        trained.append((settings, arguments))
        return 7

    monkeypatch.setattr(begin, "supervise", run)
    words, (reading, writing) = ["parallel.dp=2", "train.steps=3"], os.pipe()
    with open(writing, "w") as stream:
        stream.write(config.read_text())
    with open(reading):
        for path in (config, Path(f"/dev/fd/{reading}")):
            answer = here("finetune", path, *words)
            assert answer.status == 7, answer
            assert trained[-1] == (load(config, words), ["train", str(path), *words])


@pytest.mark.parametrize(("is_rank", "num_ranks"), [(True, 4), (False, 1)])
def test_a_rank_and_a_run_of_one_rank_start_nothing(
    monkeypatch: pytest.MonkeyPatch, is_rank: bool, num_ranks: int
) -> None:
    monkeypatch.setattr(launch, "is_rank", lambda: is_rank)
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("started ranks"))
    cli.run_on_ranks(num_ranks, ["train", "x.toml"])


@pytest.mark.parametrize(
    ("end", "is_deaf"),
    [(None, True), (SystemExit(UNFINISHED), True), (ValueError(), False), (KeyboardInterrupt(), False)],
    ids=["finished", "to go on", "failed", "a second Ctrl-C"],
)
def test_a_rank_that_has_ended_well_hears_no_signal_while_the_interpreter_ends(
    end: BaseException | None, is_deaf: bool, monkeypatch: pytest.MonkeyPatch, config: Path
) -> None:
    """It is the last that is called there: a second Ctrl-C ends what trackers do before."""
    settings, called_last_first = load(config), list[object]()

    def main(*_: object, **__: object) -> None:
        atexit.register(main)
        if end is not None:
            raise end

    monkeypatch.setattr(atexit, "register", called_last_first.append)
    monkeypatch.setattr(atexit, "unregister", called_last_first.remove)
    monkeypatch.setattr(loop, "main", main)
    with nullcontext() if end is None else pytest.raises(type(end)):
        one_rank.train(settings, dry_run=False, profile=range(0), again=None)
    assert called_last_first == [*[process.hear_no_more] * is_deaf, main]


def test_who_is_to_hear_no_more_hears_nothing() -> None:
    process.hear_no_more()
    assert {signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)} == {signal.SIG_IGN}


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(begin, "is_supervised", interrupted)
    monkeypatch.setattr(begin, "problems_of_files", lambda *_: [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["colonnade", "train", str(ROOT / "examples" / "books.toml")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130


def test_ctrl_c_is_heard_in_whatever_runs_here_however_it_was_started() -> None:
    """A script without job control starts processes in the background that ignore SIGINT."""
    program = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from colonnade import cli
sys.argv = ["colonnade", "--version"]
try:
    cli.main()
except SystemExit:
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert answer.stdout.endswith("\nTrue\n"), answer


def test_no_command_ends_as_its_output_lacks_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii"))
    monkeypatch.setattr(cli, "main", lambda: print("2 × café"))
    before = signal.getsignal(signal.SIGUSR1)
    try:
        runpy.run_module("colonnade", run_name="__main__")
    finally:
        signal.signal(signal.SIGUSR1, before)
    sys.stdout.flush()
    assert out.getvalue() == rb"2 \xd7 caf\xe9" + b"\n"


def test_every_command_ends_beside_threads_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that writes a checkpoint, while the interpreter ends, would abort the process."""
    ended: list[object] = []
    monkeypatch.setattr(process, "end_beside_threads", ended.append)
    here("--version")
    here("frobnicate")
    assert ended == [0, 2]
