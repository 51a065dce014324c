"""Documents out of files: every kind and compression, and every way in which a line can be none."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.corpus import documents as documents_module
from colonnade.corpus.documents import Rejected, chunks, expand, look_at, parse, read_documents
from colonnade.errors import DataError

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


def test_zstandard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl.zst"
    if importlib.util.find_spec("zstandard") is None:
        file.write_bytes(b"\x28\xb5\x2f\xfd")
        with pytest.raises(DataError, match="pip install zstandard"):
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
        assert everything(file) == texts
        assert sum(chunk.read_bytes for chunk in chunks([file])) == file.stat().st_size


BAD_LINES = {
    b'{"text": "caf\xe9"}': "not UTF-8 (byte 0xe9 at column 14)",
    b'{"text": "cut': "not JSON (Unterminated string starting at at column 10)",
    b"plain words": "not JSON (Expecting value at column 1)",
    b'["text"]': "a JSON array where an object with the key 'text' is expected",
    b"3": "a JSON number where",
    b'{"Text": "x", "id": 3}': "no key 'text'; its keys are 'Text', 'id'",
    b"{}": "no key 'text'; its keys are none",
    b'{"text": null}': "'text' is a JSON null, not a string",
    b'{"text": 3.5}': "'text' is a JSON number, not a string",
    b'{"text": true}': "'text' is a JSON boolean, not a string",
    b'{"text": ["a"]}': "'text' is a JSON array, not a string",
    b'{"text": "\\ud83d"}': "half of a surrogate pair",
    b'{"a":' + b"[" * 100_000: "nested too deeply",
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
    assert (found.line, found.reason) == (2, "not UTF-8 (byte 0xf6 at column 4); the whole file is left out")
    assert str(found) == f"{tmp_path / 'a.txt'}, line 2: {found.reason}"


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


def test_inputs_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").touch()
    (tmp_path / "bare").touch()
    for inputs, words in [
        ([tmp_path / "absent.txt"], "does not exist"),
        ([tmp_path / "a.pdf"], r"Known are .txt, .jsonl, .ndjson, also followed by .gz"),
        ([tmp_path / "bare"], "an ending that says nothing"),
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
    (folder / "bad.txt").write_bytes(b"\xff")
    os.mkfifo(folder / "fifo.jsonl")
    (folder / "broken.jsonl").symlink_to("nowhere")
    clean(recipes.make_recipe(folder, folder=tmp_path / "out"), progress=False)
    result = recipes.Result(tmp_path / "out", "")
    found = everything(*expand([folder]))
    assert [text.strip() for text in found if isinstance(text, str)] == [text.strip() for text in result.texts()]
    assert len(result.texts()) > 40_000
    files = [entry.file for entry in found if isinstance(entry, Rejected)]
    assert sorted(files) == sorted(entry["file"] for entry in result.dropped("read"))
    assert result.manifest["left_aside"] == look_at([folder]).left_aside == {"broken link": 1, "fifo": 1}
