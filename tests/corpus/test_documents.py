"""Documents out of files: every kind and compression, and every way in which a line can be none."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import json
import lzma
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.corpus import documents as documents_module
from colonnade.corpus.documents import Rejected, chunks, expand, look_at, parse, read_documents
from colonnade.corpus.plan import keep_plan
from colonnade.corpus.recipe import ReadStep
from colonnade.corpus.streams import Damaged, HashedFile
from colonnade.data.overlap import overlap
from colonnade.errors import DataError
from tests.corpus.recipes import Result
from tests.disks import FailingDisk

LINES = b'{"text": "one"}\n\n{"text": "two \\u00e9", "id": 2}\r\n{"text": "three"}'
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def everything(*paths: Path, key: str = "text") -> list[str | Rejected]:
    return [found for chunk in chunks(list(paths)) for found in parse(chunk, key)]


@pytest.mark.parametrize("ending", COMPRESS)
def test_lines_and_texts_compressed_or_not(tmp_path: Path, ending: str) -> None:
    lines, text = tmp_path / f"a.jsonl{ending}", tmp_path / f"b.txt{ending}"
    lines.write_bytes(COMPRESS[ending](LINES))
    text.write_bytes(COMPRESS[ending]("all of\n\nit is one: é".encode()))
    assert everything(lines, text) == ["one", "two é", "three", "all of\n\nit is one: é"]


@pytest.mark.parametrize("ending", COMPRESS)
def test_all_bytes_of_a_file_are_counted_as_read(tmp_path: Path, ending: str) -> None:
    """For the share that is done: of texts too, and as they are stored."""
    for name, content in (("a.jsonl", LINES * 9), ("b.txt", b"all of it"), ("empty.txt", b"")):
        path = tmp_path / f"{name}{ending}"
        path.write_bytes(COMPRESS[ending](content))
        assert sum(chunk.read_bytes for chunk in chunks([path])) == path.stat().st_size


def test_zstandard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl.zst"
    if importlib.util.find_spec("zstandard") is None:
        file.write_bytes(b"\x28\xb5\x2f\xfd")
        with pytest.raises(DataError, match=r"pip install 'colonnade\[zstd\]'`, or decompress"):
            everything(file)
        return
    zstandard = importlib.import_module("zstandard")
    compress = zstandard.ZstdCompressor().compress
    file.write_bytes(compress(LINES + b"\n") + compress(b'{"text": "second frame"}'))
    assert everything(file) == ["one", "two é", "three", "second frame"]


def test_concatenated_gzip_is_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(LINES + b"\n") + gzip.compress(b'{"text": "four"}\n'))
    assert everything(file) == ["one", "two é", "three", "four"]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=8), st.integers(1, 40))
def test_lines_are_whole_wherever_reading_stops(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block: int
) -> None:
    file = tmp_path_factory.mktemp("lines") / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "_CHUNK", block)
        patch.setattr("colonnade.corpus.streams._BLOCK", block)
        assert everything(file) == ["" if text.isspace() else text for text in texts]
        assert sum(chunk.read_bytes for chunk in chunks([file])) == file.stat().st_size


BAD_LINES = {
    b'{"text": "caf\xe9"}': "not UTF-8: byte 0xe9 at column 14",
    b'{"text": "cut': "not JSON: Unterminated string starting at at column 10",
    b"plain words": "not JSON: Expecting value at column 1",
    b'["text"]': "not a JSON object: it is an array",
    b"3": "not a JSON object: it is a number",
    b'{"Text": "x", "id": 3}': "no key 'text': its keys are 'Text', 'id'",
    b"{}": "no key 'text': its keys are none",
    b'{"text": null}': "'text' is no text: it is null",
    b'{"text": 3.5}': "'text' is no text: it is a number",
    b'{"text": true}': "'text' is no text: it is a truth value",
    b'{"text": ["a"]}': "'text' is no text: it is an array",
    b'{"text": "\\ud83d"}': "half a surrogate pair",
    b'{"a":' + b"[" * 100_000: "not JSON: nested too deeply",
}


def test_a_bad_line_is_named_and_the_rest_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    good = b'{"text": "good"}'
    file.write_bytes(b"\n".join([good, *BAD_LINES, good]))
    found = everything(file)
    assert (found[0], found[-1]) == ("good", "good")
    for line, (rejected, reason) in enumerate(zip(found[1:-1], BAD_LINES.values(), strict=True), 2):
        assert isinstance(rejected, Rejected)
        assert (rejected.file, rejected.line) == (str(file), line)
        assert reason in rejected.reason
    assert list(read_documents([file])) == ["good", "good"]


def test_lines_are_counted_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "_CHUNK", 50)
    monkeypatch.setattr("colonnade.corpus.streams._BLOCK", 50)
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"".join(b'{"text": "good"}\n' if line != 70 else b"bad\n" for line in range(1, 101)))
    rejected = [found for found in everything(file) if isinstance(found, Rejected)]
    assert [one.line for one in rejected] == [70]


def test_a_text_that_is_not_utf8_is_left_out_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("gut\nschön".encode("latin-1"))
    (found,) = everything(tmp_path / "a.txt")
    assert isinstance(found, Rejected)
    assert (found.line, found.reason) == (2, "not UTF-8: byte 0xf6 at column 4; it is one document, and left out")
    assert str(found) == f"{tmp_path / 'a.txt'}, line 2: {found.reason}"


def test_the_place_of_a_byte_in_a_text_is_told_by_its_own_line(tmp_path: Path) -> None:
    """Whatever stands behind it."""
    for before, line, column in ((b"", 1, 1), (b"one\ntw", 2, 3), (b"\n\n", 3, 1)):
        (tmp_path / "a.txt").write_bytes(before + b"\xf6 more\nand the rest\n")
        (found,) = everything(tmp_path / "a.txt")
        assert isinstance(found, Rejected) and found.line == line
        assert found.reason.startswith(f"not UTF-8: byte 0xf6 at column {column};")


def test_no_document_is_too_long_for_tokenizing(tmp_path: Path) -> None:
    """What cleaning rejects unless it is told otherwise."""
    text = "x" * (ReadStep(paths=["in"]).max_bytes + 1)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}))
    found = everything(tmp_path / "a.txt", tmp_path / "b.jsonl")
    assert [isinstance(each, str) and len(each) for each in found] == [len(text)] * 2


def test_lines_of_white_space_are_no_lines(tmp_path: Path) -> None:
    """Nor is the end of a file."""
    (tmp_path / "a.jsonl").write_bytes(b'  \n\t\r\n{"text": "one"} \n \n\n')
    assert everything(tmp_path / "a.jsonl") == ["one"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwords")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "words"}\n')
    assert everything(tmp_path / "a.txt", tmp_path / "a.jsonl") == ["words", "words"]


def test_another_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"content": "words", "text": "no"}\n')
    assert everything(tmp_path / "a.jsonl", key="content") == ["words"]


def test_folders_stand_for_their_documents(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl.gz", "sub/c.ndjson", "notes.md", "sub/picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [str(path.relative_to(tmp_path)) for path in expand([tmp_path])]
    assert names == ["a.jsonl.gz", "b.txt", "sub/c.ndjson"]
    for name in ("bare", "sub/Makefile", "sub/other.md"):
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "sub" / "pipe.jsonl")
    found = look_at([tmp_path])
    assert len(found.files) == 3 and found.left_aside == {".md": 2, ".png": 1, "fifo": 1, "none": 2}
    assert list(found.left_aside) == [".md", ".png", "fifo", "none"]
    several = [tmp_path / "b.txt", tmp_path / "sub", tmp_path / "a.jsonl.gz"]
    assert [path.name for path in expand(several)] == ["b.txt", "c.ndjson", "a.jsonl.gz"]


def test_what_would_be_read_twice_is_refused(tmp_path: Path) -> None:
    """As for cleaning: by itself, within a folder, through a link."""
    (tmp_path / "in").mkdir()
    file, link = tmp_path / "in" / "a.jsonl", tmp_path / "b.jsonl"
    file.touch()
    link.symlink_to(file)
    below = tmp_path / "in" / "deep" / "er" / "c.jsonl"
    below.parent.mkdir(parents=True)
    (tmp_path / "elsewhere.jsonl").touch()
    below.symlink_to(tmp_path / "elsewhere.jsonl")
    for inputs, said in [
        ([file, file], f"{file} twice"),
        ([tmp_path / "in", file], f"{file} and {tmp_path / 'in'}, which has it"),
        ([tmp_path / "in", below], f"{below} and {tmp_path / 'in'}, which has it"),
        ([file, link], f"{file} and {link}, which are the same"),
    ]:
        with pytest.raises(DataError, match=rf"^the inputs name {re.escape(said)}: it would be read twice\. Name"):
            look_at(inputs)


def test_all_parts_of_a_cleaning_run_are_not_read_as_one(tmp_path: Path) -> None:
    for name in ("train/00000.jsonl", "test/00000.jsonl", "state/00000.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    for content in ("no JSON", "[]", '{"colonnade": "another"}'):
        (tmp_path / "manifest.json").write_text(content)
        assert len(expand([tmp_path])) == 3
    (tmp_path / "manifest.json").write_text('{"colonnade": "data clean", "parts": {"test": {}, "train": {}}}')
    with pytest.raises(DataError, match=rf"Name one of its parts: {tmp_path / 'test'}, {tmp_path / 'train'}\.$"):
        look_at([tmp_path])
    assert expand([tmp_path / "train"]) == [tmp_path / "train" / "00000.jsonl"]


def test_a_cleaning_run_is_not_read_as_one_wherever_it_stands_and_however_far_it_is(
    tmp_path: Path, run: Callable[..., Result]
) -> None:
    """Neither by tokenizing nor by cleaning and comparing."""
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n')
    folder = run(tmp_path / "a.jsonl", folder="all/web").folder
    exam, name = tmp_path / "exam.jsonl", re.escape(str(folder))
    exam.write_text('{"text": "one two three"}\n')

    def refused(place: Path, said: str) -> None:
        for read in (
            lambda: look_at([place]),
            lambda: run(place, folder="again"),
            lambda: overlap([place], exam, ngram=3),
        ):
            with pytest.raises(DataError, match=said):
                read()

    refused(folder, rf"^{name} is the write\.folder of .* Name one of its parts: {name}/train\.$")
    above = rf"^{name[:-4]} has files of {name}, the write\.folder of .*"
    refused(folder.parent, rf"{above} Name one of its parts: {name}/train\.$")
    (folder / "manifest.json").unlink()
    unfinished = r"has not finished: start it again, and name one of its parts then\.$"
    refused(folder, rf"^{name} is the write\.folder of .* The run {unfinished}")
    refused(folder.parent, rf"{above} The run {unfinished}")
    refused(folder / "state", rf"^{name}/state has files of {name}, the write\.folder of .* The run {unfinished}")
    assert run(folder / "train", folder="again").texts() == ["one two three"]
    assert overlap([folder / "train"], exam, ngram=3).share == 1.0


def test_files_that_have_the_names_of_a_cleaning_runs_make_no_run(tmp_path: Path, run: Callable[..., Result]) -> None:
    """Of another program's, odd ones, and what is no file."""
    folder = tmp_path / "in"
    for name in ("state", "other/state", "piped", "deep"):
        (folder / name).mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"text": "one two three"}\n')
    (folder / "state" / "run.json").write_text('{"run": 7}')
    (folder / "other" / "state" / "run.json").write_text("[" * 100_000)
    os.mkfifo(folder / "piped" / "manifest.json")
    (folder / "deep" / "manifest.json").write_text("[" * 100_000)
    assert run(folder).texts() == ["one two three"]
    assert look_at([folder]).left_aside == {".json": 3, "fifo": 1}


def test_what_a_cleaning_run_that_kept_nothing_has_dropped_is_not_read(
    tmp_path: Path, run: Callable[..., Result]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"other": "words"}\n')
    folder = run(tmp_path / "a.jsonl").folder
    assert list((folder / "dropped").rglob("*.jsonl.gz"))
    for _ in range(2):
        with pytest.raises(DataError, match=r"Name one of its parts: it kept no document, and has none\.$"):
            look_at([folder])
        shutil.rmtree(folder / "state", ignore_errors=True)  # which a user may do


def test_inputs_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").touch()
    cleaned = ("a.parquet", "a.zip", "a.warc.gz", "a.wet")
    for name in ("bare", *cleaned):
        (tmp_path / name).touch()
    for inputs, words in [
        ([tmp_path / "absent.txt"], "does not exist"),
        ([tmp_path / "a.pdf"], r"Known are .jsonl, .ndjson, .txt, also followed by .gz"),
        ([tmp_path / "bare"], "an ending that says nothing"),
        *(([tmp_path / name], r"of a kind that `colonnade data clean` reads: clean it, and name") for name in cleaned),
        ([tmp_path], "a folder without documents"),
        ([], "no input is named"),
    ]:
        with pytest.raises(DataError, match=words):
            expand(inputs)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
def test_a_damaged_or_cut_file_gives_what_it_has_and_is_told(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"a.jsonl{ending}"
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(20_000))
    whole = COMPRESS[ending](lines)
    for content, why in (
        (whole[: len(whole) // 2], "cut short"),
        (LINES, "damaged"),
        (whole[:60] + b"\0" * 60 + whole[120:], "damaged"),
        (b"", "empty"),
    ):
        file.write_bytes(content)
        *texts, last = everything(file)
        assert isinstance(last, Rejected) and why in last.reason and last.line == len(texts) + 1
        assert texts == [str(number) for number in range(len(texts))]


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_foreign_bytes_behind_the_end_cost_no_document(tmp_path: Path, ending: str, kind: str) -> None:
    """Also where the last line has no end: it is whole."""
    file = tmp_path / f"a.{kind}{ending}"
    file.write_bytes(COMPRESS[ending](LINES) + b"rubbish" * 20)
    *texts, last = everything(file)
    assert texts == (["one", "two é", "three"] if kind == "jsonl" else [LINES.decode()])
    assert isinstance(last, Rejected) and "foreign bytes stand behind its end" in last.reason
    assert last.line == (5 if kind == "jsonl" else 1), "behind the last line, which has no end; a text is one"


def test_what_cannot_be_read_is_told_once_and_what_the_system_did_not_give_again(tmp_path: Path) -> None:
    """To who goes on behind it: content that is damaged stays so, and a file may be there another time."""
    damaged, gone, good = tmp_path / "damaged.jsonl.gz", tmp_path / "gone.jsonl", tmp_path / "good.jsonl"
    damaged.write_bytes(gzip.compress(LINES)[:-9])
    good.write_bytes(LINES)
    for path, told in ((damaged, []), (gone, ["file cannot be read: No such file or directory"])):
        paths = [path, good]
        (last,) = chunks([path])
        assert last.damage and last.end == (0, 1)
        (*again, rest) = chunks(paths, last.end)
        assert [(chunk.damage, chunk.data, chunk.end) for chunk in again] == [(each, b"", (0, 1)) for each in told]
        assert (rest.path, rest.end) == (good, (1, 1))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_of_which_the_system_gives_no_more_is_one_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refusing(*_: object) -> Iterator[bytes]:
        yield b'{"text": "one"}\n{"te'
        raise Damaged("cannot be read: Input/output error", refused=True)

    monkeypatch.setattr(documents_module, "blocks", refusing)
    (tmp_path / name).touch()
    (chunk,) = chunks([tmp_path / name])
    assert chunk.refused and chunk.damage.startswith("file cannot be read: Input/output error; ")
    assert chunk.data == (b"" if name == "a.txt" else b'{"text": "one"}\n'), "whole lines, and no half of a text"


def why(entry: dict[str, str]) -> str:
    """A reason and its detail, as they are said in one."""
    return ": ".join(entry[key] for key in ("reason", "detail") if key in entry)


@pytest.mark.slow
def test_tokenizing_and_cleaning_read_the_same_documents(tmp_path: Path) -> None:
    """Of files that are whole, cut, flipped, padded, empty, foreign, and of folders with what is no file."""
    clean, recipes = (
        importlib.import_module("colonnade.data.cleaning").clean,
        importlib.import_module("tests.corpus.recipes"),
    )
    folder = tmp_path / "in"
    folder.mkdir()
    for name, pack in COMPRESS.items():
        lines = b"".join(b'{"text": "%s %d"}\n' % (name.encode(), number) for number in range(3_000)) + LINES
        packed = pack(lines)
        for case, content in {
            "whole": packed,
            "cut": packed[: len(packed) * 2 // 3],
            "garbage": packed + b"garbage",
            "zeros": packed + bytes(64),
            "twice": packed + packed,
            "empty": b"",
            "flipped": packed[:200] + bytes([packed[200] ^ 0x55]) + packed[201:],
        }.items():
            (folder / f"{case}.jsonl{name}").write_bytes(content)
        (folder / f"text.txt{name}").write_bytes(pack(b"\xef\xbb\xbfa text") + (b"garbage" if name else b""))
    (folder / "bad.txt").write_bytes(b"line\n\xff")
    (folder / "bad.jsonl").write_bytes(b"\n".join([*BAD_LINES, LINES, b'{"text": " "}', b'{"text": "last"}']))
    os.mkfifo(folder / "fifo.jsonl")
    (folder / "broken.jsonl").symlink_to("nowhere")
    clean(recipes.make_recipe(folder, folder=tmp_path / "out"), progress=False)
    result = recipes.Result(tmp_path / "out", "")
    found = everything(*expand([folder]))
    assert [text for text in found if text and isinstance(text, str)] == result.texts()
    assert len(result.texts()) > 40_000
    listed = [(entry["file"], entry["line"], why(entry)) for entry in result.dropped("read")]
    assert found.count("") == sum(reason == "empty" for *_, reason in listed) == 1
    assert [(entry.file, entry.line, entry.reason) for entry in found if isinstance(entry, Rejected)] == [
        entry for entry in listed if entry[2] != "empty"
    ]
    assert result.manifest["left_aside"] == look_at([folder]).left_aside == {"broken link": 1, "fifo": 1}


IN_SMALL_BLOCKS: dict[str, Callable[[bytes], bytes]] = {
    ".bz2": lambda data: bz2.compress(data, 1),
    ".xz": lambda data: lzma.compress(data, preset=0),
}
"""So that half of a small file has some of them."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ending", COMPRESS)
def test_a_file_that_the_disk_does_not_give_is_told_and_the_rest_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Result], ending: str
) -> None:
    """In tokenizing and in cleaning alike: what was read of it stays, and the other files are read."""
    bad, good = tmp_path / f"bad.jsonl{ending}", tmp_path / "good.jsonl"
    lines = b"".join(b'{"text": "%s"}\n' % os.urandom(40).hex().encode() for _ in range(8_000))
    bad.write_bytes(IN_SMALL_BLOCKS.get(ending, COMPRESS[ending])(lines))
    good.write_bytes(b'{"text": "good"}\n')
    monkeypatch.setattr("colonnade.corpus.streams._BLOCK", 1 << 16)
    inner = HashedFile.__init__

    def init(self: HashedFile, raw: IO[bytes], *arguments: Any, **more: Any) -> None:
        inner(self, cast(IO[bytes], FailingDisk(raw)) if raw.name == str(bad) else raw, *arguments, **more)

    monkeypatch.setattr(HashedFile, "__init__", init)
    *texts, told, last = everything(bad, good)
    assert isinstance(told, Rejected) and last == "good" and 0 < len(texts) < 8_000
    assert told.reason == "file cannot be read: Input/output error; all lines before are read"
    result = run(bad, good)
    assert result.texts() == [*texts, "good"]
    (entry,) = result.dropped("read")
    assert (entry["file"], entry["line"], why(entry)) == (told.file, told.line, told.reason)
    assert [file["sha256"] is None for file in result.manifest["inputs"]] == [True, False]


def test_a_file_that_is_gone_is_told_and_the_rest_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    """As one is that may not be read."""
    gone, good = tmp_path / "gone.jsonl", tmp_path / "good.jsonl"
    for path in (gone, good):
        path.write_bytes(b'{"text": "good"}\n')
    monkeypatch.setattr(
        "colonnade.corpus.run.keep_plan", lambda plan, recipe: (keep_plan(plan, recipe), gone.unlink())[0]
    )
    result = run(gone, good)
    told, last = everything(gone, good)
    assert last == "good" and result.texts() == ["good"]
    (entry,) = result.dropped("read")
    assert isinstance(told, Rejected) and told.reason == "file cannot be read: No such file or directory"
    assert (entry["file"], entry["line"], why(entry)) == (told.file, told.line, told.reason)
