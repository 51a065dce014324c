"""Documents to a token file: the right tokens whatever the workers, and nothing lost or half-written."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pytest
from rich.console import Console

from colonnade.corpus.documents import Rejected, chunks
from colonnade.corpus.streams import HashedFile
from colonnade.data import bundle, tokenize
from colonnade.data.indexed import TokenFile, bin_path, idx_path
from colonnade.data.inspect import inspect
from colonnade.data.segments import Encoded, Segment, SegmentFolder
from colonnade.data.sidecar import read_sidecar, sidecar_path
from colonnade.data.tokenize import TokenizeReport, rejected_path, tokenize_files
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.data.train_tokenizer import train_tokenizer
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import DataError, LockError
from tests.commands import here
from tests.disks import FailingDisk, room_for


def jsonl(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_every_document_is_there_with_its_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["One.", "Two: é — 👀", "", "three <|endoftext|> three"]
    sources = [jsonl(tmp_path / name, *texts) for name in ("a.jsonl", "b.jsonl")]
    report = tokenize_files(sources, tmp_path / "out" / "a", tokenizer, progress=False)
    file = TokenFile(tmp_path / "out" / "a")
    kept = [text for text in texts if text] * 2
    assert [tokenizer.decode(file.document(index).tolist()) for index in range(file.num_documents)] == kept
    assert all(file.document(index)[-1] == tokenizer.end_of_document for index in range(6))
    assert (report.documents, report.empty, report.rejected, report.dtype) == (6, 2, 0, "uint16")
    assert report.tokens == file.num_tokens
    assert report.text_bytes == len("".join(kept).encode())
    assert files(tmp_path / "out") == {"a.bin", "a.idx", "a.json"}


def test_without_ends(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenize_files([jsonl(tmp_path / "a.jsonl", "One.")], tmp_path / "a", tokenizer, append_end=False, progress=False)
    file = TokenFile(tmp_path / "a")
    assert file.document(0).tolist() == tokenizer.encode("One.")
    sidecar = read_sidecar(file)
    assert sidecar is not None
    assert sidecar.end_of_document is None


def test_the_same_bytes_from_any_number_of_workers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "b.txt").write_text("a text\n\nof its own\n")
    inputs = [bundle.books(), tmp_path / "b.txt"]
    for workers in (1, 2):
        report = tokenize_files(inputs, tmp_path / f"{workers}", tokenizer, workers=workers, progress=False)
        assert report.documents == 38
    for path in (bin_path, idx_path, sidecar_path):
        assert path(tmp_path / "1").read_bytes() == path(tmp_path / "2").read_bytes()


def test_the_sidecar_and_inspect(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = jsonl(tmp_path / "a.jsonl", "One.", "Two.")
    tokenize_files([source], tmp_path / "a", tokenizer, progress=False)
    found = inspect(tmp_path / "a")
    assert json.loads(json.dumps(found)) == found
    assert found == {
        "prefix": str(tmp_path / "a"),
        "documents": 2,
        "sequences": 2,
        "tokens": TokenFile(tmp_path / "a").num_tokens,
        "dtype": "uint16",
        "bytes": bin_path(tmp_path / "a").stat().st_size,
        "index_bytes": idx_path(tmp_path / "a").stat().st_size,
        "files": [str(tmp_path / "a.bin"), str(tmp_path / "a.idx")],
        "mean_document_length": found["tokens"] / 2,
        "vocab_size": 600,
        "end_of_document": 599,
        "tokenizer_sha256": tokenizer.sha256,
        "text_bytes": 8,
        "bytes_per_token": 8 / found["tokens"],
        "examples": None,
        "labels": None,
        "sources": [str(source)],
    }
    sidecar_path(tmp_path / "a").unlink()
    assert inspect(tmp_path / "a")["vocab_size"] is None


def test_a_document_of_several_sentences_is_one(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "a", np.dtype(np.uint16)) as writer:
        writer.add_document(range(6), lengths=[1, 2, 3])
        writer.add_document(range(3), lengths=[2, 1])
    found = inspect(tmp_path / "a")
    assert (found["documents"], found["sequences"], found["tokens"]) == (2, 5, 9)
    assert found["mean_document_length"] == 4.5


def test_bad_lines_are_counted_listed_and_the_rest_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n{"text": "caf\xe9"}\nnot json\n' + b"{}\n" * 20 + b'{"text": "also good"}\n')
    report = tokenize_files([file], tmp_path / "a", tokenizer, progress=False)
    assert (report.documents, report.rejected, len(report.examples)) == (2, 22, 10)
    listed = [json.loads(line) for line in rejected_path(tmp_path / "a").read_text().splitlines()]
    assert [one["line"] for one in listed] == list(range(2, 24))
    assert listed[1] == {"file": str(file), "line": 3, "reason": "not JSON: Expecting value at column 1"}
    summary = report.summary()
    assert "left out: 22 unusable lines, listed in " in summary
    assert f"{file}, line 2: not UTF-8" in summary
    tokenize_files([jsonl(file, "all good")], tmp_path / "a", tokenizer, overwrite=True, progress=False)
    assert not rejected_path(tmp_path / "a").exists()


def test_inputs_need_no_names_in_utf8(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "One."}\nnot json\n')
    report = tokenize_files([folder / "a.jsonl"], tmp_path / "a", tokenizer, progress=False)
    assert (report.documents, report.rejected) == (1, 1)
    report.summary().encode()
    sidecar = read_sidecar(TokenFile(tmp_path / "a"))
    assert sidecar is not None and sidecar.sources == (str(tmp_path / "caf?" / "a.jsonl"),)


def test_large_vocabularies_take_int32(tmp_path: Path, tokenizer: Tokenizer) -> None:
    content = json.loads(tokenizer.to_json())
    end = content["added_tokens"][0]
    content["added_tokens"] = [{**end, "id": 70_000}]
    content["model"]["vocab"].pop("<|endoftext|>", None)
    content["model"]["vocab"]["<|endoftext|>"] = 70_000
    large = Tokenizer.from_json(json.dumps(content))
    assert (large.vocab_size, large.end_of_document) == (70_001, 70_000)
    tokenize_files([jsonl(tmp_path / "a.jsonl", "One.")], tmp_path / "a", large, progress=False)
    file = TokenFile(tmp_path / "a")
    assert (file.dtype, file.document(0)[-1]) == (np.dtype("int32"), 70_000)


def test_the_list_of_rejected_lines_is_on_the_disk_before_the_token_file_has_its_name(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power then would have a file that says nothing of what it lacks."""
    fsync, replace, synced, named = os.fsync, os.replace, dict[int, int](), list[str]()

    def note(descriptor: int) -> None:
        fsync(descriptor)
        about = os.fstat(descriptor)
        synced[about.st_ino] = about.st_size

    def name(source: Path, target: Path) -> None:
        if str(target).endswith(("a.bin", "a.idx")):
            (listed,) = tmp_path.glob("a.rejected.jsonl.*")
            assert synced.get(listed.stat().st_ino) == listed.stat().st_size > 0
            named.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", name)
    (tmp_path / "lines.jsonl").write_text('{"text": "good"}\nnot json\n')
    tokenize_files([tmp_path / "lines.jsonl"], tmp_path / "a", tokenizer, progress=False)
    assert sorted(named) == ["a.bin", "a.idx"] and rejected_path(tmp_path / "a").exists()


def test_the_list_of_rejected_lines_replaces_no_input(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = jsonl(tmp_path / "a.rejected.jsonl", "One.", "Two.")
    before = path.read_bytes()
    for inputs in ([path], [tmp_path]):
        with pytest.raises(DataError, match=r"writes .*a\.rejected\.jsonl, which is read here"):
            tokenize_files(inputs, tmp_path / "a", tokenizer, overwrite=True, progress=False)
    assert files(tmp_path) == {path.name} and path.read_bytes() == before


def test_nothing_to_tokenize(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n{"text": ""}\n')
    with pytest.raises(DataError, match=r"1 line rejected, 1 empty document. The first: .*line 1: no key 'text'"):
        tokenize_files([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer, progress=False)
    (tmp_path / "b.txt").touch()
    with pytest.raises(DataError, match="0 lines rejected, 1 empty document"):
        tokenize_files([tmp_path / "b.txt"], tmp_path / "out", tokenizer, progress=False)
    assert files(tmp_path) == {"a.jsonl", "b.txt"}


def test_what_exists_is_kept_unless_it_is_said(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = jsonl(tmp_path / "a.jsonl", "One.")
    tokenize_files([source], tmp_path / "a", tokenizer, progress=False)
    before = bin_path(tmp_path / "a").read_bytes()
    with pytest.raises(DataError, match=r"exist already\. Choose another output, or pass --overwrite"):
        tokenize_files([jsonl(source, "Two.")], tmp_path / "a", tokenizer, progress=False)
    assert bin_path(tmp_path / "a").read_bytes() == before
    tokenize_files([source], tmp_path / "a", tokenizer, overwrite=True, progress=False)
    for path in (bin_path, idx_path, sidecar_path):
        path(tmp_path / "b").write_bytes(b"mine")
        with pytest.raises(DataError, match=r"exists? already\. Choose another output, or pass --overwrite"):
            tokenize_files([source], tmp_path / "b", tokenizer, progress=False)
        assert path(tmp_path / "b").read_bytes() == b"mine"
        path(tmp_path / "b").unlink()
    assert bin_path(tmp_path / "a").read_bytes() != before


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_cut_input_gives_what_it_has_and_the_cut_is_told(tmp_path: Path, tokenizer: Tokenizer, workers: int) -> None:
    whole = gzip.compress(b"".join(b'{"text": "%d good"}\n{"bad\n' % number for number in range(100_000)))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) * 3 // 4])
    report = tokenize_files([tmp_path / "a.jsonl.gz"], tmp_path / "a", tokenizer, workers=workers, progress=False)
    assert 50_000 < report.documents < 90_000
    last = json.loads(rejected_path(tmp_path / "a").read_text().splitlines()[-1])
    assert "cut short" in last["reason"] and last["line"] in (2 * report.documents, 2 * report.documents + 1)
    assert report.rejected - report.documents in (0, 1)


def test_what_is_no_file_is_left_aside_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    source = jsonl(folder / "deep" / "a.jsonl", "One.")
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "gone.jsonl").symlink_to(folder / "nowhere")
    (folder / "around").symlink_to(folder)
    (folder / "link.jsonl").symlink_to(source)
    (folder / "notes.md").touch()
    report = tokenize_files([folder], tmp_path / "a", tokenizer, progress=False)
    assert report.documents == 2
    assert report.left_aside == {".md": 1, "broken link": 1, "fifo": 1, "link to a folder": 1}
    assert "left aside by ending: .md 1, broken link 1, fifo 1, link to a folder 1" in report.summary()
    with pytest.raises(DataError, match="is neither a file nor a folder"):
        tokenize_files([folder / "pipe.jsonl"], tmp_path / "b", tokenizer, progress=False)


KILLED = (
    "import sys; import colonnade.data.tokenize as t; t.SEGMENT_BYTES = 1 << 20; from colonnade.cli import main;"
    "sys.argv[1:] = ['data', 'tokenize', *sys.argv[1:]]; main()"
)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_was(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL to the main process alone: its workers end too, what is done stays done, the bytes are the same."""
    story = "".join(f"The {number * 7919 % 1_000}th thing was said {number} times.\n" for number in range(1_000))
    source = jsonl(tmp_path / "a.jsonl", *(f"{number} {story}" for number in range(400)))
    tokenizer.save(tmp_path / "tokenizer.json")
    arguments = [source, "--output", tmp_path / "out" / "a", "--tokenizer", tmp_path / "tokenizer.json", "--workers", 2]
    store, whole = tmp_path / "out" / "a.unfinished", tmp_path / "whole"
    process = subprocess.Popen([sys.executable, "-c", KILLED, *map(str, arguments)], stderr=subprocess.DEVNULL)
    found: list[Path] = []
    while process.poll() is None and len(found) < 3:
        time.sleep(0.005)
        with suppress(FileNotFoundError):  # the folder of another run is removed, and made again
            found = list(store.glob("*.segment"))
    with pytest.raises(LockError, match=r"is in use by `colonnade data tokenize --output .*`, process \d+ of user "):
        tokenize_files([source], tmp_path / "out" / "a", tokenizer, overwrite=True, progress=False)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    left = [
        f"out/a.bin.{process.pid}-0123abcd.partial",
        "out/a.idx.1-0123abcd.partial",
        "out/a.unfinished/000009.segment.1-0123abcd.partial",
    ]
    for name in left:
        (tmp_path / name).write_bytes(b"left by a killed run")
    done = {path: path.stat().st_mtime_ns for path in store.glob("*.segment")}
    seen: list[int] = []
    monkeypatch.setattr(
        "colonnade.data.tokenize._encode", lambda *given, before=tokenize._encode: (seen.append(1), before(*given))[1]
    )
    report = tokenize_files([source], tmp_path / "out" / "a", tokenizer, workers=1, progress=False)
    for pid in children:
        assert not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text()
    assert len(done) >= 3 and report.resumed >= len(done) * 15 and report.documents == 400
    assert f"went on behind the {report.resumed} documents" in report.summary()
    num_resumed = len(seen)
    assert files(tmp_path / "out") == {"a.bin", "a.idx", "a.json"}
    tokenize_files([source], whole, tokenizer, workers=1, progress=False)
    assert 0 < num_resumed < len(seen) - num_resumed - 2, "what was done is not done again"
    for path in (bin_path, idx_path, sidecar_path):
        assert path(tmp_path / "out" / "a").read_bytes() == path(whole).read_bytes()


def test_what_was_left_out_of_stored_segments_is_counted_too(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "SEGMENT_BYTES", 1)
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "One."}\n{"text": ""}\nno JSON\n')
    report = tokenize_files([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "out", tokenizer, progress=False)
    assert (report.documents, report.empty, report.rejected, report.text_bytes) == (2, 2, 2, 8)
    assert [Path(each.file).name for each in report.examples] == ["a.jsonl", "b.jsonl"]
    assert len(rejected_path(tmp_path / "out").read_text().splitlines()) == 2


@pytest.mark.parametrize("sentences", [True, False])
def test_a_file_says_whether_its_sentences_are_apart(tmp_path: Path, tokenizer: Tokenizer, sentences: bool) -> None:
    tokenize_files(
        [jsonl(tmp_path / "a.jsonl", "One.")], tmp_path / "a", tokenizer, sentences=sentences, progress=False
    )
    found = read_sidecar(TokenFile(tmp_path / "a"))
    assert found is not None and found.sentences is sentences


def test_another_process_is_started_for_four_megabytes_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "num_cores", lambda: 8)
    sizes = (0, 1, (4 << 20) - 1, 4 << 20, (8 << 20) - 1, 8 << 20, 1 << 30)
    assert [tokenize._num_workers(None, size) for size in sizes] == [1, 1, 1, 1, 1, 2, 8]
    assert tokenize._num_workers(3, 1) == 3


def test_whatever_the_result_depends_on_makes_it_another_run(tmp_path: Path, tokenizer: Tokenizer) -> None:
    one, other = jsonl(tmp_path / "a.jsonl", "One."), jsonl(tmp_path / "b.jsonl", "Two.")
    making = tokenize._Making(str(tmp_path / "a"), [one, other], tokenizer, "text", 5, False)
    same = replace(making, prefix=str(tmp_path / "elsewhere")).identity()
    assert same == making.identity()
    others = [
        replace(making, paths=[other, one]),
        replace(making, paths=[one]),
        replace(making, tokenizer=train_bpe(["other words"] * 9, 300)),
        replace(making, key="content"),
        replace(making, end=None),
        replace(making, end=6),
        replace(making, sentences=True),
    ]
    assert len({same, *(each.identity() for each in others)}) == 1 + len(others)
    os.utime(one, ns=(1, 1))
    assert making.identity() != same, "its content may be another"


@pytest.mark.parametrize("change", ["input", "tokenizer", "option"])
def test_what_was_done_of_another_run_is_not_taken(tmp_path: Path, tokenizer: Tokenizer, change: str) -> None:
    source = jsonl(tmp_path / "a.jsonl", "One.", "Two.")
    store = SegmentFolder(tmp_path / "a.unfinished")
    making = tokenize._Making(str(tmp_path / "a"), [source], tokenizer, "text", tokenizer.end_of_document, False)
    store.open(making.identity())
    segment = Segment()
    segment.add(making.encoder()()(next(chunks([jsonl(tmp_path / "b.jsonl", "Foreign.")]))))
    store.store(segment)
    assert [header.documents for header in store.open(making.identity())] == [1]
    if change == "input":
        jsonl(source, "One.", "Two!")
    if change == "tokenizer":
        tokenizer = train_bpe(["other words"] * 9, 300)
    report = tokenize_files([source], tmp_path / "a", tokenizer, append_end=change != "option", progress=False)
    assert (report.documents, report.resumed) == (2, 0)


def test_a_full_disk_later_on_keeps_what_is_done(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "SEGMENT_BYTES", 1)
    (tmp_path / "in").mkdir()
    source, before, calls = [jsonl(tmp_path / "in" / f"{name}.jsonl", name) for name in "abc"], os.fsync, list[int]()

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:  # the run's identity, a segment, and then
            raise OSError(errno.ENOSPC, "No space left on device")
        before(descriptor)

    with monkeypatch.context() as patch, pytest.raises(DataError, match="start the same command again: it goes on"):
        patch.setattr("os.fsync", full)
        tokenize_files(source, tmp_path / "a", tokenizer, progress=False)
    report = tokenize_files(source, tmp_path / "a", tokenizer, progress=False)
    assert (report.documents, report.resumed) == (3, 1) and files(tmp_path) == {"in", "a.bin", "a.idx", "a.json"}


Interrupt = Callable[..., list[Path]]


@pytest.fixture
def interrupt(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    """Ctrl-C, while the second of three files is encoded; gives the files."""
    monkeypatch.setattr(tokenize, "SEGMENT_BYTES", 1)
    (tmp_path / "in").mkdir()
    source, before = [jsonl(tmp_path / "in" / f"{name}.jsonl", name) for name in "abc"], tokenize._encode

    def interrupted(*given: Any) -> Encoded:
        if given[-1].path == source[1]:
            raise KeyboardInterrupt
        return before(*given)

    def begin(output: Path, *, overwrite: bool = False) -> list[Path]:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(tokenize, "_encode", interrupted)
            tokenize_files(source, output, tokenizer, overwrite=overwrite, progress=False)
        return source

    return begin


def test_a_run_that_is_interrupted_keeps_what_is_done(
    tmp_path: Path, tokenizer: Tokenizer, interrupt: Interrupt
) -> None:
    report = tokenize_files(interrupt(tmp_path / "a"), tmp_path / "a", tokenizer, progress=False)
    assert (report.documents, report.resumed) == (3, 1) and files(tmp_path) == {"in", "a.bin", "a.idx", "a.json"}


def test_a_run_that_was_to_replace_a_file_does_so_after_an_interrupt_only_if_it_is_said_again(
    tmp_path: Path, tokenizer: Tokenizer, interrupt: Interrupt
) -> None:
    tokenize_files([jsonl(tmp_path / "older.jsonl", "Older.")], tmp_path / "a", tokenizer, progress=False)
    older = bin_path(tmp_path / "a").read_bytes()
    source = interrupt(tmp_path / "a", overwrite=True)
    with pytest.raises(DataError, match=r"exist already\. Choose another output, or pass --overwrite"):
        tokenize_files(source, tmp_path / "a", tokenizer, progress=False)
    assert bin_path(tmp_path / "a").read_bytes() == older
    report = tokenize_files(source, tmp_path / "a", tokenizer, overwrite=True, progress=False)
    assert (report.documents, report.resumed) == (3, 1)


def test_a_prefix_that_differs_behind_a_dot_alone_leaves_alone_what_is_done_of_another(
    tmp_path: Path, tokenizer: Tokenizer, interrupt: Interrupt
) -> None:
    source = interrupt(tmp_path / "corpus.train")
    tokenize_files(source[2:], tmp_path / "corpus.valid", tokenizer, progress=False)
    report = tokenize_files(source, tmp_path / "corpus.train", tokenizer, progress=False)
    assert (report.documents, report.resumed) == (3, 1)


@pytest.mark.parametrize("last", [".bin", ".json", ".idx"])
def test_a_run_that_is_killed_while_it_names_its_files_goes_on(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    monkeypatch.setattr(tokenize, "SEGMENT_BYTES", 1)
    source, rename = [jsonl(tmp_path / "in.jsonl", "One.", "Two.")], Path.replace

    def killed(path: Path, target: Path) -> Path:
        if target == tmp_path / f"a{last}":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        tokenize_files(source, tmp_path / "a", tokenizer, progress=False)
    report = tokenize_files(source, tmp_path / "a", tokenizer, progress=False)
    assert (report.documents, report.resumed) == (2, 2)
    assert files(tmp_path) == {"in.jsonl", "a.bin", "a.idx", "a.json"}
    assert read_sidecar(TokenFile(tmp_path / "a")) is not None


def not_opened(patch: pytest.MonkeyPatch, refused: Path) -> None:
    before = Path.open

    def opened(path: Path, *given: Any, **more: Any) -> Any:
        if path == refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return before(path, *given, **more)

    patch.setattr(Path, "open", opened)


def half_read(patch: pytest.MonkeyPatch, refused: Path) -> None:
    before = HashedFile.__init__

    def init(file: HashedFile, raw: IO[bytes], *given: Any, **more: Any) -> None:
        before(file, cast(IO[bytes], FailingDisk(raw)) if raw.name == str(refused) else raw, *given, **more)

    patch.setattr(HashedFile, "__init__", init)


Refuse = Callable[[pytest.MonkeyPatch, Path], None]


class Stopped:
    """Three files of 20 documents in as many chunks; a run over them is interrupted at one of the last file's."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokenizer, self.output, self._patch = tokenizer, folder / "out" / "a", monkeypatch
        monkeypatch.setattr(tokenize, "SEGMENT_BYTES", 1)
        monkeypatch.setattr("colonnade.corpus.documents._CHUNK", 16)
        monkeypatch.setattr("colonnade.corpus.streams._BLOCK", 16)
        self.texts = {name: [f"{name} was said as number {number}" for number in range(20)] for name in "abc"}
        self.files = {name: jsonl(folder / f"{name}.jsonl", *texts) for name, texts in self.texts.items()}

    def interrupt(self, patch: pytest.MonkeyPatch, at: str) -> None:
        before = tokenize._encode

        def interrupted(*given: Any) -> Encoded:
            if at.encode() in given[-1].data:
                raise KeyboardInterrupt
            return before(*given)

        with patch.context() as further, pytest.raises(KeyboardInterrupt):
            further.setattr(tokenize, "_encode", interrupted)
            self.run()

    def run(self) -> TokenizeReport:
        return tokenize_files(self.files.values(), self.output, self.tokenizer, workers=1, progress=False)

    def documents(self) -> list[str]:
        file = TokenFile(self.output)
        return [self.tokenizer.decode(file.document(number).tolist()) for number in range(file.num_documents)]


@pytest.mark.parametrize("refuse", [not_opened, half_read])
def test_a_file_that_could_not_be_read_is_asked_again_where_a_run_goes_on(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    """What came behind it is made anew: the file has other documents now, and each of them is there once."""
    stopped = Stopped(tmp_path, tokenizer, monkeypatch)
    with monkeypatch.context() as patch:
        refuse(patch, stopped.files["b"])
        stopped.interrupt(patch, "c was said as number 17")
    report = stopped.run()
    assert stopped.documents() == [text for texts in stopped.texts.values() for text in texts]
    assert (report.documents, report.rejected) == (60, 0) and report.resumed >= 20
    assert files(stopped.output.parent) == {"a.bin", "a.idx", "a.json"}


@pytest.mark.parametrize("refuse", [not_opened, half_read])
@pytest.mark.parametrize("refused", ["b", "c"])
def test_a_file_that_cannot_be_read_any_more_costs_no_document_of_others(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, refuse: Refuse, refused: str
) -> None:
    """Where a run goes on: what was done of that file stays, and what is not given of it is listed."""
    stopped = Stopped(tmp_path, tokenizer, monkeypatch)
    stopped.interrupt(monkeypatch, "c was said as number 17")
    with monkeypatch.context() as patch:
        refuse(patch, stopped.files[refused])
        report = stopped.run()
    texts = {**stopped.texts, "c": stopped.texts["c"][:17] if refused == "c" else stopped.texts["c"]}
    assert stopped.documents() == [text for each in texts.values() for text in each]
    assert report.rejected == len(report.examples) == (refused == "c")
    assert all("cannot be read" in each.reason for each in report.examples)


def test_a_full_disk_leaves_nothing(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    source = jsonl(tmp_path / "a.jsonl", "One.")
    with pytest.raises(DataError, match=r"cannot be written: .*No space left on device.* Free some space"):
        tokenize_files([source], tmp_path / "a", tokenizer, progress=False)
    assert files(tmp_path) == {"a.jsonl"}


@pytest.mark.parametrize("bad", [120, 3_000])
def test_a_list_of_lines_for_which_there_is_no_room_leaves_nothing(
    tmp_path: Path, tokenizer: Tokenizer, bad: int
) -> None:
    """Also where only its last lines, which are written at the end, do not fit."""
    source = tmp_path / "a.jsonl"
    source.write_text("{}\n" * bad + '{"text": "One."}\n')
    refused = r"a cannot be written: .*File too large: '.*a\.rejected\.jsonl'\. Nothing is left of it\."
    with room_for(9_000), pytest.raises(DataError, match=refused):
        tokenize_files([source], tmp_path / "a", tokenizer, workers=1, progress=False)
    assert files(tmp_path) == {"a.jsonl"}


def test_a_tokenizer_without_an_end_of_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    content = json.loads(tokenizer.to_json())
    content["added_tokens"].clear()
    content["model"]["vocab"].pop("<|endoftext|>", None)
    endless = Tokenizer.from_json(json.dumps(content))
    with pytest.raises(DataError, match="no end-of-document token"):
        tokenize_files([jsonl(tmp_path / "a.jsonl", "One.")], tmp_path / "a", endless, progress=False)


def test_no_workers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="workers = 0"):
        tokenize_files([jsonl(tmp_path / "a.jsonl", "One.")], tmp_path / "a", tokenizer, workers=0, progress=False)


def test_the_progress_bar_goes_to_standard_error(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize_files([jsonl(tmp_path / "a.jsonl", "One.")], tmp_path / "a", tokenizer)
    assert capsys.readouterr() == ("", ""), "where that is no terminal, it is a file"
    monkeypatch.setattr(Console, "is_terminal", True)
    for progress in (False, True):
        tokenize_files([tmp_path / "a.jsonl"], tmp_path / f"{progress}", tokenizer, progress=progress)
        said = capsys.readouterr()
        assert said.out == "" and ("1 document ·" in said.err) == progress


def test_what_was_made_is_told_in_lines() -> None:
    report = TokenizeReport(
        prefix="out/a",
        documents=2_000,
        tokens=50_000,
        dtype="uint16",
        text_bytes=200_000,
        empty=0,
        rejected=0,
        examples=(),
        seconds=4.0,
        left_aside={},
    )
    first = (
        "2,000 documents, 0.2 MB of text -> 50,000 tokens (uint16, 4.00 bytes each) in out/a.bin and .idx; 4.0 s, "
        "500 documents/s, 50.0 kB/s"
    )
    assert report.summary() == first
    example = Rejected("in.jsonl", 7, "not JSON")
    whole = replace(
        report, empty=1, rejected=3, examples=(example,), resumed=1_500, left_aside={".md": 1_200, "fifo": 1}
    )
    assert whole.summary().splitlines() == [
        first,
        "it went on behind the 1,500 documents that the run before had done",
        "files of other kinds, left aside by ending: .md 1,200, fifo 1",
        "left out: 1 document without text",
        "left out: 3 unusable lines, listed in out/a.rejected.jsonl; the first:",
        "  in.jsonl, line 7: not JSON",
    ]


@pytest.mark.slow
def test_training_a_tokenizer_on_files(tmp_path: Path) -> None:
    made = train_tokenizer([bundle.books()], tmp_path / "made" / "tokenizer.json", 400, progress=False)
    assert made.tokenizer.vocab_size == 400 and (made.documents, made.rejected) == (37, 0)
    assert made.summary("x") == "x: 400 tokens."
    assert Tokenizer.load(tmp_path / "made").sha256 == made.tokenizer.sha256
    with pytest.raises(DataError, match="exists"):
        train_tokenizer([bundle.books()], tmp_path / "made" / "tokenizer.json", 400, progress=False)
    with pytest.raises(
        DataError, match=r"(?s)Check --key \(it is 'body'\).* 37 unusable documents; .*line 1: no key 'body'"
    ):
        train_tokenizer([bundle.books()], tmp_path / "none.json", 400, key="body", progress=False)
    assert not (tmp_path / "none.json").exists()


def test_outputs_and_sizes_that_no_tokenizer_can_have_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("good words, " * 50)
    (tmp_path / "folder").mkdir()
    for output, size, said in (
        (tmp_path / "folder", 300, f"{tmp_path / 'folder'} is a folder. Name a file."),
        (text, 300, f"--output {text}: what is written is .json. Use a name that ends so."),
        (text / "below.json", 300, f"{text} is no folder"),
        (tmp_path / "made.json", 100_000_000_000, "there is room for 10,000,000 tokens at most"),
    ):
        options = ("--output", output, "--vocab-size", size, "--overwrite")
        answer = here("data", "train-tokenizer", text, *options)
        assert answer.status == 2 and said in answer.err and "Traceback" not in answer.err, answer
    assert files(tmp_path) == {"text.txt", "folder"} and text.read_text() == "good words, " * 50


def test_files_that_a_tokenizer_is_not_trained_on_are_named(tmp_path: Path) -> None:
    """Those that are not UTF-8, and those that are damaged; with only such files, the files are to blame, not --key."""
    (tmp_path / "good.txt").write_text("good words, " * 50)
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"words " * 1_000)[:-20])
    made = train_tokenizer([tmp_path], tmp_path / "made" / "tokenizer.json", 300, progress=False)
    said = made.summary("made")
    assert made.rejected == 2 and "left out: 2 unusable documents; the first:" in said
    assert (
        f"{tmp_path / 'latin.txt'}, line 1: not UTF-8" in said
        and f"{tmp_path / 'cut.txt.gz'}, line 1: file cut short" in said
    )
    (tmp_path / "good.txt").unlink()
    answer = here("data", "train-tokenizer", tmp_path, "--output", tmp_path / "none.json")
    assert answer.status == 2 and "--key" not in answer.err
    assert "no document of the inputs can be used" in answer.err and "latin.txt, line 1: not UTF-8" in answer.err
