"""What a user can get wrong: one clear message with the remedy, exit status 2, nothing lost or half-written."""

import ctypes
import json
import os
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from colonnade.data.writer import TokenFileWriter
from tests import tiny
from tests.commands import Answer, after_banner, forked, here
from tests.runs import Finished, assert_same, metrics, saved_steps, snapshot
from tests.tiny import TinyCorpus, write_config

Prepare = Callable[["Place"], list[object]]


@dataclass(frozen=True)
class Place:
    """Where a mistake is made: a corpus, a configuration, a finished run, all of which may be corrupted."""

    folder: Path
    corpus: TinyCorpus
    config: Path
    run: Path
    """A finished run that the configuration would go on with."""

    @property
    def newest(self) -> Path:
        return self.run / "checkpoints" / "step_00000006"

    def train(self, *overrides: str) -> list[object]:
        return ["train", self.config, *overrides]

    def fresh(self, *overrides: str) -> list[object]:
        """Of a run that has no folder yet."""
        return ["train", self.config, f"run.folder={self.folder / 'new'}", *overrides]

    def tokens(self, *documents: list[int], dtype: str = "<u2") -> str:
        """The override for a token file of these ids, without anything that tells of its tokenizer."""
        with TokenFileWriter(self.folder / "made", np.dtype(dtype)) as writer:
            for document in documents:
                writer.add_document(document)
        return f"data.train={self.folder / 'made'}"

    def file(self, name: str, content: bytes) -> Path:
        (self.folder / name).write_bytes(content)
        return self.folder / name


@pytest.fixture
def place(corpus: TinyCorpus, finished: Finished, tmp_path: Path) -> Place:
    shutil.copytree(corpus.folder, tmp_path / "corpus")
    shutil.copytree(finished.folder, tmp_path / "run")
    config = write_config(corpus, tmp_path)  # the paths of the finished run
    (tmp_path / "run" / "config.toml").write_text(
        (tmp_path / "run" / "config.toml").read_text().replace(str(finished.folder), str(tmp_path / "run"))
    )
    return Place(tmp_path, TinyCorpus(tmp_path / "corpus"), config, tmp_path / "run")


def corrupted(place: Place, ending: str, change: Callable[[bytes], bytes]) -> list[object]:
    path = Path(f"{place.corpus.prefix}{ending}")
    path.write_bytes(change(path.read_bytes()))
    return place.fresh(f"data.train={place.corpus.prefix}")


def damaged(place: Place, name: str, change: Callable[[bytes], bytes] | None) -> list[object]:
    path = place.newest / name
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    written = place.run / "config.toml"
    written.write_text(written.read_text().replace('damaged = "fall_back"', 'damaged = "refuse"'))
    return place.train("restarts.damaged=refuse")


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def newer(content: bytes) -> bytes:
    return json.dumps(json.loads(content) | {"version": 2}).encode()


def replaced(place: Place, name: str, content: bytes) -> list[object]:
    """A file of the run with another content."""
    (place.run / name).write_bytes(content)
    return place.train("train.steps=8")


def other_corpus(place: Place) -> TinyCorpus:
    return tiny.make(place.folder / "other", seed=5)


def in_the_way(place: Place, where: Path) -> list[object]:
    if where.is_dir():
        shutil.rmtree(where)
    where.unlink(missing_ok=True)
    where.mkdir() if where.suffix else where.write_text("mine")
    return place.train()


def header(code: int, version: int = 1) -> Callable[[bytes], bytes]:
    return lambda content: struct.pack("<9sQB", b"MMIDIDX\0\0", version, code) + content[18:]


MISTAKES: dict[str, tuple[Prepare, str]] = {
    # the configuration
    "unknown key": (lambda p: p.fresh("train.stepz=3"), "train.stepz is not a key: did you mean train.steps?"),
    "unknown section": (lambda p: p.fresh("trian.steps=3"), "[trian] is not a section. Did you mean [train]?"),
    "misplaced key": (lambda p: p.fresh("model.steps=3"), "steps belongs to [train]. Write it as train.steps."),
    "a GGUF file to begin from": (
        lambda p: p.fresh(f"train.init_from={p.file('x.gguf', b'GGUF')}"),
        "x.gguf' is a file, and a folder is asked for. Of a GGUF file `colonnade convert` makes a checkpoint.",
    ),
    "mistyped value": (lambda p: p.fresh('train.steps="3"'), "Write train.steps = 3, without quotes."),
    "no override": (lambda p: p.fresh("train.steps"), "is not of the form section.key=value"),
    "tp and heads": (lambda p: p.fresh("parallel.tp=4"), "does not divide model.num_heads = 2"),
    "tp and ffn": (lambda p: p.fresh("parallel.tp=2", "model.ffn_hidden_size=33"), "divide model.ffn_hidden_size = 33"),
    "global batch": (
        lambda p: p.fresh("train.global_batch_size=5"),
        "Use a micro_batch_size of 1 or 5, which",
    ),
    "stages": (
        lambda p: p.fresh("parallel.pp=5"),
        "parallel.pp = 5 stages, but 2 blocks, the embedding and the head are",
    ),
    "sequence": (
        lambda p: p.fresh("parallel.tp=2", "parallel.sequence_parallel=true", "model.seq_length=15"),
        "Use a seq_length of 14 or 16, or sequence_parallel = false.",
    ),
    "virtual stages": (
        lambda p: p.fresh(
            "parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2", "train.global_batch_size=6"
        ),
        "a step has 3 micro-batches",
    ),
    "offload": (lambda p: p.fresh("parallel.offload=true"), "there is no master copy"),
    "no file": (lambda p: ["train", p.folder / "x.toml"], "x.toml cannot be read: No such file or directory."),
    "a directory": (
        lambda p: ["train", p.folder],
        "cannot be read: Is a directory. Name a configuration file (.toml).",
    ),
    "no TOML": (lambda p: ["train", p.file("x.toml", b"[model\n")], "x.toml is not TOML"),
    "no text": (lambda p: ["train", p.file("x.toml", b"\xff\xfe")], "Save it as UTF-8."),
    "no GPU": (lambda p: p.fresh("train.device=cuda"), "Set train.device = 'cpu'"),
    # token files
    "missing": (lambda p: p.fresh("data.train=nowhere"), "there is no nowhere.bin and no nowhere.idx. Check the path"),
    "named .bin": (lambda p: p.fresh(f"data.train={p.corpus.prefix}.bin"), "is named without its ending"),
    "empty .bin": (lambda p: corrupted(p, ".bin", lambda b: b""), "tokens.bin is cut short: 0 bytes"),
    "empty .idx": (lambda p: corrupted(p, ".idx", lambda b: b""), "tokens.idx is empty"),
    "truncated .bin": (lambda p: corrupted(p, ".bin", lambda b: b[:-3]), "tokens.bin is cut short"),
    "longer .bin": (lambda p: corrupted(p, ".bin", lambda b: b + b"xx"), "is longer than its index says"),
    "truncated .idx": (lambda p: corrupted(p, ".idx", lambda b: b[:-8]), "tokens.idx is cut short"),
    "truncated header": (lambda p: corrupted(p, ".idx", lambda b: b[:20]), "its header alone has"),
    "foreign .idx": (lambda p: corrupted(p, ".idx", lambda b: b"PK\3\4" + b), "it begins with a zip archive"),
    "newer .idx": (lambda p: corrupted(p, ".idx", header(8, 2)), "has version 2 of Megatron's format"),
    "unknown dtype": (lambda p: corrupted(p, ".idx", header(99)), "has dtype code 99: not known"),
    "foreign sidecar": (lambda p: corrupted(p, ".json", lambda b: b"[1]"), "does not describe a token file"),
    "ids beyond": (lambda p: p.fresh(p.tokens(*[[1, 2, 3] * 40] * 10, [5, 999])), "document 10 has token id 999"),
    "negative ids": (lambda p: p.fresh(p.tokens([1, -2] * 400, dtype="<i4")), "token id -2"),
    "other tokenizer": (lambda p: p.fresh(f"data.tokenizer={other_corpus(p).tokenizer}"), "with another tokenizer"),
    "no tokenizer": (lambda p: p.fresh("data.tokenizer=nowhere"), "nowhere is no tokenizer"),
    "foreign tokenizer": (lambda p: p.fresh(f"data.tokenizer={p.file('t.json', b'{}')}"), "is no tokenizer.json"),
    "too few ids": (lambda p: p.fresh("model.vocab_size=100"), "Leave model.vocab_size out, or set it to 275 or more."),
    "too short": (lambda p: p.fresh(p.tokens(*[[1, 2]] * 6)), "one sample takes model.seq_length + 1 = 17"),
    "longer than it": (lambda p: p.fresh("model.seq_length=9999"), "one sample takes model.seq_length + 1 = 10,000"),
    "no validation": (lambda p: p.fresh(p.tokens([1, 2] * 99)), "leaves none for validation"),
    "no such part": (lambda p: p.fresh("data.validation=nowhere"), "there is no nowhere.bin"),
    # run folders
    "another run": (lambda p: p.train("model.dropout=0.2"), "\n  model.dropout: 0.1 -> 0.2\n"),
    "a longer schedule": (lambda p: p.train("optim.decay_steps=60"), "\n  optim.decay_steps: "),
    "a run in the way": (lambda p: p.train("checkpoint.resume=false"), "Set checkpoint.resume = true to go on from it"),
    "damaged config": (lambda p: replaced(p, "config.toml", b"[model"), f"{'/step_00000006/config.toml'} over it"),
    "a file": (lambda p: p.train(f"run.folder={p.file('f', b'')}"), "Choose another, or fix that."),
    "under a file": (lambda p: p.train(f"run.folder={p.file('f', b'')}/x"), "Choose another, or fix that."),
    "folder metrics": (lambda p: in_the_way(p, p.run / "metrics.jsonl"), "metrics.jsonl cannot be written"),
    "file checkpoints": (lambda p: in_the_way(p, p.run / "checkpoints"), "cannot be written"),
    # checkpoints
    "changed byte": (lambda p: damaged(p, "__0_0.distcp", flipped), "to go on from step 4."),
    "truncated": (lambda p: damaged(p, "__0_0.distcp", lambda b: b[:-1]), "to go on from step 4."),
    "lost file": (lambda p: damaged(p, "__0_0.distcp", None), "__0_0.distcp is missing. Delete"),
    "lost manifest": (lambda p: damaged(p, "manifest.json", None), "has no manifest.json"),
    "changed manifest": (lambda p: damaged(p, "manifest.json", lambda b: b[:-9]), "manifest.json is damaged"),
    "foreign": (lambda p: damaged(p, "manifest.json", lambda b: b"{}"), "is not a checkpoint of Colonnade"),
    "newer": (lambda p: damaged(p, "manifest.json", newer), "was written by another version. Install that version"),
    # using a model
    "generate: nowhere": (lambda p: ["generate", p.folder / "x", "--prompt", "a"], "is neither a checkpoint nor"),
    "generate: damaged": (
        lambda p: ["generate", damaged(p, "config.toml", flipped) and p.run, "--prompt", "a"],
        "damaged",
    ),
    "generate: lost file": (
        lambda p: ["generate", damaged(p, "tokenizer.json", None) and p.run, "--prompt", "a"],
        "missing",
    ),
    "generate: too long": (
        lambda p: ["generate", p.run, "--prompt", "a b " * 20],
        "reads at most 16 positions. Shorten",
    ),
    "generate: tp": (lambda p: ["generate", p.newest, "--prompt", "a", "--temperature", -1], "Use 0 for the likeliest"),
    "generate: device": (lambda p: ["generate", p.run, "--prompt", "a", "--device", "tpu"], "Use auto, cpu, cuda."),
    "evaluate: nowhere": (
        lambda p: ["evaluate", p.folder / "x", "perplexity", "--data", "x"],
        "is neither a checkpoint",
    ),
    "evaluate: no data": (lambda p: ["evaluate", p.run, "perplexity", "--data", "nowhere"], "nowhere does not exist"),
    "evaluate: task": (
        lambda p: ["evaluate", p.run, "cloze", "--data", "x"],
        "there is no task 'cloze'. Use perplexity, wikitext103, lambada, squad.",
    ),
    "evaluate: other": (
        lambda p: ["evaluate", p.run, "perplexity", "--data", other_corpus(p).prefix],
        "was made with another tokenizer",
    ),
    "evaluate: bad line": (
        lambda p: ["evaluate", p.run, "perplexity", "--data", p.file("x.jsonl", b'{"text": "a"}\nnot\n')],
        "line 2: not JSON",
    ),
    "evaluate: empty": (lambda p: ["evaluate", p.run, "perplexity", "--data", p.file("x.txt", b"")], "Give 2 tokens"),
    "evaluate: stride": (
        lambda p: ["evaluate", p.run, "perplexity", "--data", p.corpus.prefix, "--stride", 99],
        "stride = 99",
    ),
    # other commands
    "inspect: nowhere": (lambda p: ["data", "inspect", p.folder / "x", "--json"], "Check the path, or make the file"),
    "verify: tp": (lambda p: ["verify", p.config, "--layout", "tp=4"], "Use 1 or 2."),
    "verify: layout": (lambda p: ["verify", p.config, "--layout", "tp"], "Write sizes of tp, pp and dp"),
    "demo: a file": (lambda p: ["demo", "--folder", p.file("f", b"")], "Choose another --folder, or fix that."),
}


def check_message(answer: Answer, said: str) -> None:
    assert answer.status == 2, answer
    assert said in answer.err, answer.err
    assert answer.err.startswith("colonnade: ") and "Traceback" not in answer.err
    assert answer.err.count("colonnade: ") == 1 and answer.err.endswith("\n")


@pytest.mark.parametrize("name", MISTAKES)
def test_one_message_and_nothing_changed(place: Place, name: str) -> None:
    prepare, said = MISTAKES[name]
    arguments = prepare(place)
    before = snapshot(place.folder)
    answer = here(*arguments)
    check_message(answer, said)
    assert after_banner(answer.out) == ""
    assert snapshot(place.folder) == before, "nothing lost, nothing half-written"


@pytest.mark.parametrize(
    "name", ["foreign .idx", "another run", "changed byte", "generate: too long", "evaluate: no data"]
)
def test_two_ranks_give_one_message(place: Place, name: str) -> None:
    prepare, said = MISTAKES[name]
    command = prepare(place)
    check_message(forked(*command, *(["parallel.tp=2"] if command[0] == "train" else ["--tp", 2]), num_ranks=2), said)


@pytest.mark.parametrize(("asked", "started"), [(1, 2), (2, 1)])
def test_more_or_fewer_ranks_than_the_layout_has(place: Place, asked: int, started: int) -> None:
    def launched(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(started)}

    answer = forked(*place.fresh(f"parallel.dp={asked}"), num_ranks=started, first=launched)
    check_message(answer, f"(WORLD_SIZE = {started}), but parallel.tp × parallel.pp × parallel.dp = {asked}")
    assert not (place.folder / "new").exists()


@pytest.mark.slow
def test_ids_beyond_the_vocabulary_deep_in_the_data(place: Place) -> None:
    """Found when they are read, steps later; what has been saved stays."""
    override = place.tokens(*[[1, 2, 3] * 400] * 30, *[[1, 2, 999] * 400] * 10)
    answer = forked(*place.fresh(override, "train.steps=400", "checkpoint.every=1", "train.evaluate_every=0"))
    check_message(answer, "has token id 999 at its position")
    steps = len(metrics(place.folder / "new"))
    assert 0 < steps < 400 and saved_steps(place.folder / "new")[-1] == steps


def test_lines_that_are_no_documents_are_counted_and_left_out(place: Place) -> None:
    lines = b'{"text": "aeion"}\n\xff\xfe\nnot json\n{"nope": 1}\n{"text": 3}\n\n{"text": "rst"}\n'
    source, output = place.file("mixed.jsonl", lines), place.folder / "mixed"
    answer = forked(
        "data", "tokenize", source, "--output", output, "--tokenizer", place.corpus.tokenizer, "--workers", 1
    )
    assert answer.status == 0 and "left out: 4 unusable lines, listed in " in answer.out, answer
    rejected = [json.loads(line) for line in Path(f"{output}.rejected.jsonl").read_text().splitlines()]
    assert [line["line"] for line in rejected] == [2, 3, 4, 5]
    assert json.loads(forked("data", "inspect", output, "--json").out)["documents"] == 2


def test_a_line_of_the_metrics_that_is_no_text(place: Place) -> None:
    """A disk's fault, not the user's, and not worth a run: the line is left out."""
    path = place.run / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n")
    assert forked(*place.train()).status == 0
    assert [line["step"] for line in metrics(place.run)] == [1, 2, 3, 4, 5, 6]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, where one may be mounted."""
    folder, libc = tmp_path / "disk", ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=1m"):
        pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        libc.umount2(str(folder).encode(), 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dp", [1, 2])
def test_a_full_disk(place: Place, small_disk: Path, finished: Finished, dp: int) -> None:
    """Saves fail, the last whole checkpoint stays, and when there is room the run ends as if nothing had been."""
    run, ballast = small_disk / "run", small_disk / "ballast"
    arguments = place.train(f"run.folder={run}", f"parallel.dp={dp}", "checkpoint.retry_for=0")
    size = sum(-(-file.stat().st_size // 4096) * 4096 for file in finished.newest.iterdir())
    ballast.write_bytes(bytes((1 << 20) - int(2.5 * size) - 20_000))  # room for two checkpoints, not for a third
    answer = forked(*arguments, num_ranks=dp)
    check_message(answer, "The disk is full: ")
    assert "the last whole checkpoint, stays. Free some space" in answer.err
    assert saved_steps(run) == [2, 4] and not list((run / "checkpoints").glob(".*"))
    ballast.unlink()
    answer = forked(*arguments, num_ranks=dp)
    assert answer.status == 0 and after_banner(answer.out).startswith("Resumed from "), answer
    if dp == 1:
        assert_same(run, finished.folder)


def test_a_full_disk_for_the_metrics(place: Place, finished: Finished) -> None:
    """A limit on the size of files stands for it; it is above that of a checkpoint's files."""
    limit = max(file.stat().st_size for file in finished.newest.iterdir()) + 1000
    run = place.folder / "long"
    steps = ["train.steps=2000", "optim.decay_steps=6", "train.evaluate_every=3", "checkpoint.every=100"]
    steps.append("checkpoint.retry_for=0")
    arguments = place.train(f"run.folder={run}", *steps)

    def limited(rank: int) -> None:
        run.mkdir()
        (run / "metrics.jsonl").write_bytes(b"x" * (limit - 3000) + b"\n")
        from colonnade.train.monitor import Monitor

        Monitor.resume = lambda self, step: None  # type: ignore[method-assign]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    answer = forked(*arguments, first=limited)
    check_message(answer, f"{run}/metrics.jsonl cannot be written: File too large. Fix that (free some space")
    assert forked(*arguments, "train.steps=20").status == 0, "the torn line is no hindrance"
    assert [line["step"] for line in metrics(run)] == list(range(1, 21))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("what", ["run", "tokens", "checkpoint", "metrics"])
def test_permission_denied(place: Place, what: str) -> None:
    forbidden = {
        "run": (place.run, 0o555, "cannot be written: Permission denied"),
        "tokens": (Path(f"{place.corpus.prefix}.bin"), 0o000, "tokens.bin: Permission denied. Fix that"),
        "checkpoint": (place.newest / "__0_0.distcp", 0o000, "Permission denied"),
        "metrics": (place.run / "metrics.jsonl", 0o000, "cannot be written: Permission denied"),
    }
    path, mode, said = forbidden[what]
    before = snapshot(place.folder)
    path.chmod(mode)
    arguments = place.fresh(f"data.train={place.corpus.prefix}") if what == "tokens" else place.train()
    try:
        answer = forked(*arguments, first=without_privileges)
    finally:
        path.chmod(0o755)
    check_message(answer, said)
    assert snapshot(place.folder) == before


@pytest.mark.parametrize("said", ["Permission denied", "Not a directory"])
def test_a_folder_that_cannot_be_written_is_told_with_the_other_mistakes(place: Place, said: str) -> None:
    kept = place.folder / "kept"
    kept.write_text("mine") if said == "Not a directory" else kept.mkdir(0o555)
    arguments = place.train(f"run.folder={kept / 'new' / 'run'}", "data.train=nowhere")
    answer = forked(*arguments, first=without_privileges)
    assert answer.status == 2 and "2 problems" in answer.err and "there is no nowhere.bin" in answer.err, answer
    assert f"run.folder = '{kept / 'new' / 'run'}' cannot be written: {said} ({kept})" in answer.err


def test_the_folder_is_not_made_where_there_are_other_mistakes(place: Place) -> None:
    before = snapshot(place.folder)
    answer = forked(*place.train(f"run.folder={place.folder / 'new' / 'run'}", "data.train=nowhere"))
    assert answer.status == 2 and "1 problem\n" in answer.err and snapshot(place.folder) == before


def test_an_audit_needs_no_folder(place: Place) -> None:
    kept = place.folder / "kept"
    kept.mkdir(0o555)
    answer = forked(*place.train(f"run.folder={kept / 'run'}"), "--audit", first=without_privileges)
    assert answer.status == 0 and not (kept / "run").exists(), answer


def test_an_unreadable_configuration(place: Place) -> None:
    place.config.chmod(0o000)
    answer = forked(*place.train(), first=without_privileges)
    assert answer.status == 2 and f"{place.config}' is not readable" in answer.err and "Traceback" not in answer.err


def without_privileges(rank: int) -> None:
    """Root may read and write everything; a process without capabilities may not."""
    version = 0x20080522
    assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(version, 0), (ctypes.c_uint32 * 6)()) == 0


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_save_has_lost_nothing(place: Place) -> None:
    """The save of step 8 dies half-way; steps 4 and 6 are there as they were."""
    before = snapshot(place.run / "checkpoints")

    def dies(rank: int) -> None:
        from colonnade.checkpoint import save

        save._Writer.finish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]

    assert forked(*place.train("train.steps=8"), first=dies).status == -signal.SIGKILL
    after = snapshot(place.run / "checkpoints")
    assert {name: after[name] for name in before} == before and any(".partial" in name for name in after)
    assert forked(*place.train("train.steps=8")).status == 0
    assert saved_steps(place.run) == [6, 8] and not list((place.run / "checkpoints").glob(".*"))
