"""Every kind of input, and every way in which a line can be no document: listed with its place, the rest kept."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import logging
import lzma
import math
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json as pa_json
import pyarrow.parquet as pq
import pytest
import zstandard

from colonnade.corpus.plan import line_starts
from colonnade.corpus.spool import Unspool, spool_path
from colonnade.data.overlap import overlap
from colonnade.errors import DataError
from tests.corpus.recipes import Result

Run = Callable[..., Result]


def test_bad_lines_are_listed_with_their_place_and_the_rest_is_kept(tmp_path: Path, run: Run) -> None:
    lines = [
        b'{"text": "first"}',
        b'{"text": "cut in the mid',
        b'{"text": "caf\xc3"}',
        b"",
        b'{"txt": "other key"}',
        b'{"text": 12}',
        b'["text"]',
        b'{"text": "alone \\ud83d here"}',
        b'{"text": "' + b"x" * 3000 + b'"}',
        b"[" * 2000 + b"]" * 900,
        b'{"text": "a raw \x00 byte"}',
        b'{"text": "   "}',
        b'{"n": ' + b"9" * 900 + b', "text": "large number"}',
        b'{"text": "\\ud83d\\ude00 a pair"}',
        b'{"text": "last"}',
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    result = run(tmp_path / "in.jsonl", read={"max_bytes": 2950})
    assert result.texts() == ["first", "large number", "\U0001f600 a pair", "last"]
    found = {entry["line"]: entry["reason"] for entry in result.dropped("read")}
    assert found == {
        2: "not JSON",
        3: "not UTF-8",
        5: "no key 'text'",
        6: "'text' is no text",
        7: "not a JSON object",
        8: "half a surrogate pair",
        9: "too long",
        10: "not JSON",
        11: "not JSON",
        12: "empty",
    }
    assert all(entry["file"] == str(tmp_path / "in.jsonl") for entry in result.dropped("read"))
    assert sum(result.reasons("read").values()) == 10
    assert result.ids()[0] == f"{tmp_path / 'in.jsonl'}:1"


def test_damage_may_be_replaced(tmp_path: Path, run: Run) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "caf\xc3!"}\n{"text": "\\ud83d alone"}\n')
    result = run(tmp_path / "in.jsonl", read={"damaged": "replace"})
    assert result.texts() == ["caf\ufffd!", "\ufffd alone"]


def test_other_encodings(tmp_path: Path, run: Run) -> None:
    (tmp_path / "in.txt").write_bytes("Установка системы".encode("koi8-r"))
    assert run(tmp_path / "in.txt", read={"encoding": "koi8-r"}).texts() == ["Установка системы"]


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_file_that_is_cut_short_gives_what_it_has(tmp_path: Path, run: Run, ending: str) -> None:
    whole = b"".join(b'{"text": "%d %s"}\n' % (number, os.urandom(40).hex().encode()) for number in range(5_000))
    packed = gzip.compress(whole) if ending == "gz" else zstandard.ZstdCompressor().compress(whole)
    (tmp_path / f"cut.jsonl.{ending}").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "whole.jsonl").write_text('{"text": "of another file"}\n')
    result = run(tmp_path / f"cut.jsonl.{ending}", tmp_path / "whole.jsonl")
    (entry,) = result.dropped("read")
    assert entry["reason"] == "file cut short" and "all lines before are read" in entry["detail"]
    assert entry["line"] == len(result.texts()) > 1_000
    assert result.texts()[-1] == "of another file"
    assert result.texts()[0].startswith("0 ")


def test_text_files_whole_or_by_line(tmp_path: Path, run: Run) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "in" / "b.txt").write_bytes(b"\xff\xfe broken")
    (tmp_path / "in" / "c.txt.gz").write_bytes(gzip.compress(b"cut" * 900)[:-9])
    (tmp_path / "in" / "ignored.bin").write_bytes(b"")
    whole = run(tmp_path / "in", folder="whole")
    assert whole.texts() == ["one\n\ntwo\n"]
    assert whole.manifest["left_aside"] == {".bin": 1}
    assert "left aside by ending: .bin 1" in whole.said
    assert {Path(entry["file"]).name: entry["reason"] for entry in whole.dropped("read")} == {
        "b.txt": "not UTF-8",
        "c.txt.gz": "file cut short",
    }
    (tmp_path / "in" / "a.txt").write_text("one\n\n  two\t\r\n")
    assert run(tmp_path / "in" / "a.txt", folder="lines", read={"text_as": "lines"}).texts() == ["one", "two"]


@pytest.mark.parametrize("text_as", ["file", "lines"])
def test_what_is_as_long_as_is_allowed_is_read(tmp_path: Path, run: Run, text_as: str) -> None:
    for size in (50, 51):
        (tmp_path / f"{size}.txt").write_text("x" * size)
    result = run(tmp_path / "50.txt", tmp_path / "51.txt", read={"max_bytes": 50, "text_as": text_as})
    assert result.texts() == ["x" * 50]
    (entry,) = result.dropped("read")
    assert (entry["reason"], entry["detail"]) == ("too long", "51 bytes, read.max_bytes = 50")


def test_bytes_that_are_not_in_another_encoding_are_told_by_its_name(
    tmp_path: Path, run: Run, write_lines: Any
) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "\x81"}\n' + json.dumps(dict.fromkeys("abcdefghijk")).encode())
    result = run(tmp_path / "in.jsonl", read={"encoding": "cp1252"})
    assert [(entry["reason"], entry["detail"]) for entry in result.dropped("read")] == [
        ("not CP1252", "byte 0x81 at column 11"),
        ("no key 'text'", "its keys are " + ", ".join(map(repr, "abcdefgh"))),
    ]


def test_zip_files_are_read_member_by_member(tmp_path: Path, run: Run) -> None:
    with zipfile.ZipFile(tmp_path / "in.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("b/lines.jsonl", '{"text": "three"}\nnot json\n{"text": "four"}\n')
        archive.writestr("a.txt", "one\ntwo\n")
        archive.writestr("picture.png", b"0" * 99)
        archive.writestr("c.jsonl.gz", gzip.compress(b'{"text": "five"}\n'))
        archive.writestr("empty.jsonl", "")
    result = run(tmp_path / "in.zip")
    assert result.texts() == ["one\ntwo\n", "three", "four", "five"]
    assert result.ids()[2] == f"{tmp_path}/in.zip/b/lines.jsonl:3"
    (entry,) = result.dropped("read")
    assert (entry["file"], entry["line"], entry["reason"]) == (f"{tmp_path}/in.zip/b/lines.jsonl", 2, "not JSON")
    with zipfile.ZipFile(tmp_path / "in.zip") as archive:
        expected = {
            f"{tmp_path}/in.zip/{name}": hashlib.sha256(archive.read(name)).hexdigest()
            for name in ("a.txt", "b/lines.jsonl", "c.jsonl.gz", "empty.jsonl")
        }
    assert result.manifest["left_aside"] == {".png": 1}
    inputs = result.manifest["inputs"]
    assert {each["path"]: each["sha256"] for each in inputs} == expected


def test_damaged_zip_files_are_told_and_the_rest_is_kept(tmp_path: Path, run: Run) -> None:
    (tmp_path / "in").mkdir()
    line = b'{"text": "%s"}\n' % os.urandom(3_000).hex().encode()
    for name, method in (
        ("good", zipfile.ZIP_BZIP2),
        ("cut", zipfile.ZIP_STORED),
        ("flipped", zipfile.ZIP_STORED),
        ("method", zipfile.ZIP_LZMA),
    ):
        with zipfile.ZipFile(tmp_path / "in" / f"{name}.zip", "w", method) as archive:
            archive.writestr("a.jsonl", line * 3)
    for name, change in (("cut", lambda data: data[:9_000]), ("flipped", lambda data: data.replace(b"}", b"]"))):
        path = tmp_path / "in" / f"{name}.zip"
        path.write_bytes(change(path.read_bytes()))
    result = run(tmp_path / "in")
    assert len(result.texts()) == 3
    found = {Path(entry["file"].partition(".zip")[0]).name: entry for entry in result.dropped("read")}
    assert {name: entry["reason"] for name, entry in found.items()} == dict.fromkeys(
        ("cut", "flipped", "method"), "file damaged"
    )
    assert "CRC" in found["flipped"]["detail"] and "deflate" in found["method"]["detail"]


def test_a_zip_file_without_documents_is_told(tmp_path: Path, run: Run) -> None:
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.writestr("picture.png", b"0")
    with pytest.raises(DataError, match=r"in\.zip has no documents"):
        run(tmp_path / "in.zip")


def test_a_zip_bomb_is_left(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colonnade.corpus.streams.BOMB_BYTES", 1 << 20)
    with zipfile.ZipFile(tmp_path / "in.zip", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("bomb.txt", bytes(64 << 20))
        archive.writestr("good.txt", "kept")
    result = run(tmp_path / "in.zip")
    assert result.texts() == ["kept"]
    assert "bomb" in result.dropped("read")[0]["detail"]


def test_what_is_long_in_a_zip_file_and_not_dense_is_no_bomb(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colonnade.corpus.streams.BOMB_BYTES", 1000)
    with zipfile.ZipFile(tmp_path / "in.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("long.txt", "word " * 400 + "end")
    assert run(tmp_path / "in.zip").texts() == ["word " * 400 + "end"]
    told = run(tmp_path / "in.zip", folder="less", read={"max_expansion": 10}).dropped("read")
    assert [entry["detail"] for entry in told] == ["expands more than 10-fold: a decompression bomb"]


@pytest.mark.parametrize(("count", "max_expansion", "kept"), [(8, 100, 0), (40, 100_000, 40)], ids=["less", "more"])
def test_how_far_a_file_may_expand_is_the_recipes(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, count: int, max_expansion: int, kept: int
) -> None:
    """Less than by default, and more."""
    monkeypatch.setattr("colonnade.corpus.streams.BOMB_BYTES", 1 << 16)
    line = b'{"text": "%s"}\n' % (b"x" * 100_000)
    (tmp_path / "in.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(line * count))
    result = run(tmp_path / "in.jsonl.zst", read={"max_expansion": max_expansion})
    assert len(result.texts()) == kept
    told = [] if kept else [f"expands more than {max_expansion:,}-fold: a decompression bomb"]
    assert [entry["detail"].partition(";")[0] for entry in result.dropped("read")] == told


def test_rows_behind_a_row_group_that_is_too_long_keep_their_numbers(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colonnade.corpus.formats._GROUP_BYTES", 1000)
    with pq.ParquetWriter(tmp_path / "in.parquet", pa.schema({"text": pa.string()})) as file:
        for texts in (["zero"], ["x" * 2000, "y"], ["one", None]):
            file.write_table(pa.table({"text": texts}, schema=pa.schema({"text": pa.string()})))
    result = run(tmp_path / "in.parquet")
    assert result.texts() == ["zero", "one"]
    assert [(entry["reason"], entry["line"]) for entry in result.dropped("read")] == [
        ("too long", 2),
        ("'text' is no text", 5),
    ]
    assert re.fullmatch(r"a row group of \d,\d{3} bytes, 2 rows", result.dropped("read")[0]["detail"])


def test_parquet_and_its_damage(tmp_path: Path, run: Run) -> None:
    table = pa.table({"text": ["one", None, "three"], "id": ["a", "b", "c"], "score": [1.0, 2.0, 3.0]})
    pq.write_table(table, tmp_path / "in.parquet")
    result = run(tmp_path / "in.parquet")
    assert [(row["id"], row["text"], row["metadata"]["score"]) for row in result.rows()] == [
        ("a", "one", 1.0),
        ("c", "three", 3.0),
    ]
    assert result.reasons("read") == {"'text' is no text": 1}
    (tmp_path / "bad.parquet").write_bytes((tmp_path / "in.parquet").read_bytes()[:-8])
    assert run(tmp_path / "bad.parquet", folder="bad").reasons("read") == {"file damaged": 1}


def test_a_value_that_python_cannot_hold_is_null(tmp_path: Path, run: Run) -> None:
    hour = 3_600_000_000
    columns = {
        "text": ["one", "two"],
        "year": pa.array([20_000 * 366 * 24 * hour, 0], pa.timestamp("us")),
        "zone": pa.array([0, None], pa.timestamp("us", tz="No/Where")),
        "day": pa.array([2**31 - 1, None], pa.date32()),
        "fields": pa.StructArray.from_arrays([pa.array([1, None]), pa.array([3, 4])], names=["x", "x"]),
        "sound": [1.5, None],
    }
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    first, second = run(tmp_path / "in.parquet").rows()
    nothing = dict.fromkeys(["year", "zone", "day", "fields", "sound"])
    assert (first["text"], first["metadata"]) == ("one", nothing | {"sound": 1.5})
    assert (second["text"], second["metadata"]) == ("two", nothing | {"year": "1970-01-01 00:00:00"})


def texts_of(*values: bytes | None) -> Any:
    """A column of texts that need not be UTF-8."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


def test_a_row_that_is_not_sound_is_told_by_its_number_in_the_file(tmp_path: Path, run: Run) -> None:
    """However many stand before it. Those beside it have theirs, too, in their ids."""
    texts = [b"text"] * 300
    texts[280] = b"caf\xe9"
    pq.write_table(pa.table({"text": texts_of(*texts)}), tmp_path / "in.parquet")
    result = run(tmp_path / "in.parquet")
    assert [entry["line"] for entry in result.dropped("read")] == [281]
    assert result.ids() == [f"{tmp_path}/in.parquet:{number}" for number in range(1, 301) if number != 281]


@pytest.mark.parametrize("damaged", ["reject", "replace"])
def test_a_text_of_a_parquet_file_that_is_not_utf8_costs_its_own_row_alone(
    tmp_path: Path, run: Run, damaged: str
) -> None:
    columns = {
        "text": texts_of(b"one", b"caf\xe9!", b"three", b"four", b"five"),
        "url": texts_of(None, None, b"http://x.org/\xff", None, None),
        "words": pa.ListArray.from_arrays([0, 0, 0, 0, 1, 2], texts_of(b"b\xe9", b"be")),
    }
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    result = run(tmp_path / "in.parquet", read={"damaged": damaged, "encoding": "koi8-r"})
    told = [(entry["line"], entry["reason"], entry["detail"]) for entry in result.dropped("read")]
    if damaged == "reject":
        assert result.texts() == ["one", "five"]
        assert told == [
            (2, "not UTF-8", "byte 0xe9 at column 4"),
            (3, "not UTF-8", "byte 0xff at column 14"),
            (4, "not UTF-8", "byte 0xe9 at column 2"),
        ]
    else:
        assert result.texts() == ["one", "caf\ufffd!", "three", "four", "five"] and not told
        assert result.rows()[2]["url"] == "http://x.org/\ufffd"
        assert [row["metadata"]["words"] for row in result.rows()] == [[], [], [], None, ["be"]]


def test_parquet_is_read_below_a_folder_whose_name_is_not_utf8(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "in" / os.fsdecode(b"caf\xe9")
    folder.mkdir(parents=True)
    with open(folder / "in.parquet", "wb") as file:
        pq.write_table(pa.table({"text": ["one"]}), file)
    assert run(folder.parent).texts() == ["one"]


def test_the_hash_of_an_input_is_that_of_all_of_it(tmp_path: Path, run: Run) -> None:
    """A Parquet file is read by another way, and one that is damaged at its beginning is not read on."""
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "in.parquet")
    (tmp_path / "in.jsonl.gz").write_bytes(b"foreign" * 500_000)
    inputs = run(tmp_path / "in.parquet", tmp_path / "in.jsonl.gz").manifest["inputs"]
    assert [(each["documents"], each["rejected"]) for each in inputs] == [(1, 0), (0, 1)]
    for each in inputs:
        assert each["sha256"] == hashlib.sha256(Path(each["path"]).read_bytes()).hexdigest()


def warc(*records: tuple[str, str, bytes]) -> bytes:
    parts = []
    for number, (kind, url, body) in enumerate(records):
        if kind == "response":
            body = b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n\r\n" + body
        head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nWARC-Record-ID: <urn:{number}>\r\n"
        head += f"Content-Type: application/http; msgtype={kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        parts.append(gzip.compress(head.encode() + body + b"\r\n\r\n"))
    return b"".join(parts)


def test_web_archives(tmp_path: Path, run: Run) -> None:
    sentence = "This page has a main text, which is long enough to be taken for one by the extractor. " * 5
    page = f"<html><head><title>x</title><script>var a=1;</script></head><body><p>{sentence}</p></body></html>"
    content = warc(
        ("conversion", "http://a.org/1", b"Plain text."),
        ("response", "http://a.org/2", page.encode()),
        ("request", "http://a.org/3", b"GET"),
    )
    (tmp_path / "in.warc.gz").write_bytes(content)
    rows = run(tmp_path / "in.warc.gz").rows()
    assert [row["url"] for row in rows] == ["http://a.org/1", "http://a.org/2"]
    assert rows[0]["text"] == "Plain text."
    assert "main text" in rows[1]["text"] and "var a" not in rows[1]["text"]
    (tmp_path / "cut.wet.gz").write_bytes(
        warc(*[("conversion", "http://b.org", os.urandom(900).hex().encode())] * 9)[:-400]
    )
    cut = run(tmp_path / "cut.wet.gz", folder="cut")
    assert len(cut.rows()) == 8 and cut.reasons("read") == {"file cut short": 1}


def record(kind: str, body: bytes, http: str | None = None, status: str = "200 OK") -> bytes:
    """A WARC record, not compressed. `http`: the type that a server has said, "" for none."""
    if http is not None:
        body = (
            f"HTTP/1.0 {status}\r\n".encode() + (f"Content-Type: {http}\r\n".encode() if http else b"") + b"\r\n" + body
        )
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://a.org\r\nWARC-Record-ID: <urn:1>\r\n"
    head += f"WARC-Date: 2024-01-02T03:04:05Z\r\nContent-Type: application/http; msgtype={kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body + b"\r\n\r\n"


def test_records_that_are_no_documents_are_listed_with_their_number(tmp_path: Path, run: Run) -> None:
    (tmp_path / "in.warc").write_bytes(
        record("response", b"plain words", "text/plain")
        + record("request", b"GET", "")
        + record("response", b"<p>words</p>", "")
        + record("response", b"<html><body></body></html>", "text/html; charset=utf-8")
        + record("conversion", b"caf\xe9")
        + record("conversion", b"x" * 51)
        + record("conversion", b"y" * 50)
    )
    result = run(tmp_path / "in.warc", read={"max_bytes": 50})
    assert result.texts() == ["y" * 50]
    assert (result.rows()[0]["url"], result.rows()[0]["id"]) == ("http://a.org", "<urn:1>")
    assert result.rows()[0]["metadata"] == {"date": "2024-01-02T03:04:05Z"}
    assert [(entry["line"], entry["reason"], entry["detail"]) for entry in result.dropped("read")] == [
        (1, "not a page", "a response of type text/plain"),
        (3, "not a page", "a response of type unknown"),
        (4, "no main text", "trafilatura finds none in the page"),
        (5, "not UTF-8", "byte 0xe9 at column 4"),
        (6, "too long", "a record of more than read.max_bytes = 50 bytes"),
    ]


def test_records_of_any_size_that_are_not_kept_are_read_to_their_end(tmp_path: Path, run: Run) -> None:
    """They are whole, and what is behind them is read."""
    large = b"x" * (5 << 19)
    (tmp_path / "in.warc").write_bytes(
        record("request", large) + record("conversion", large) + record("conversion", b"words")
    )
    result = run(tmp_path / "in.warc", read={"max_bytes": 50})
    assert result.texts() == ["words"]
    assert [(entry["line"], entry["reason"]) for entry in result.dropped("read")] == [(2, "too long")]


def test_keys_of_a_record_are_those_that_the_recipe_names(tmp_path: Path, run: Run) -> None:
    (tmp_path / "in.warc").write_bytes(record("conversion", b"one") + record("resource", b"a picture"))
    names = {"key": "body", "id_key": "number", "url_key": "address"}
    (row,) = run(tmp_path / "in.warc", read=names).rows()
    assert (row["text"], row["id"], row["url"]) == ("one", "<urn:1>", "http://a.org")
    assert row["metadata"] == {"date": "2024-01-02T03:04:05Z"}


def test_damage_between_records_is_told_with_the_number_of_the_next(tmp_path: Path, run: Run) -> None:
    whole = record("conversion", b"one") + record("conversion", b"two")
    (tmp_path / "foreign.warc").write_bytes(whole + b"no record at all\r\n\r\n")
    (tmp_path / "cut.warc").write_bytes(whole + record("conversion", b"three and more")[:-10])
    (tmp_path / "cut.warc.gz").write_bytes(gzip.compress(whole) + gzip.compress(record("conversion", b"x" * 99))[:-30])
    told = {}
    for name in ("foreign.warc", "cut.warc", "cut.warc.gz"):
        result = run(tmp_path / name, folder=f"of {name}")
        assert result.texts() == ["one", "two"], name
        (entry,) = result.dropped("read")
        told[name] = (entry["line"], entry["reason"])
        assert name != "cut.warc" or entry["detail"] == "a record of 8 bytes instead of 14"
    assert told == {
        "foreign.warc": (3, "file damaged"),
        "cut.warc": (3, "file cut short"),
        "cut.warc.gz": (3, "file cut short"),
    }


def gone_off(whole: bytes, at: int, tmp_path: Path, run: Run) -> tuple[list[str], list[tuple[int, str, str]]]:
    """What comes of a .warc that is cut: texts, and what is listed."""
    (tmp_path / "cut.warc").write_bytes(whole[:at])
    result = run(tmp_path / "cut.warc", folder=f"at {at}")
    told = [(entry["line"], entry["reason"], entry["detail"]) for entry in result.dropped("read")]
    return result.texts(), told


@pytest.mark.parametrize("coding", ["", "Transfer-Encoding: chunked", "Content-Encoding: gzip"])
def test_half_a_page_at_the_end_of_a_cut_archive_is_no_document(tmp_path: Path, run: Run, coding: str) -> None:
    paragraph = "This page has a main text, which is long enough to be taken for one by the extractor."
    page = "".join(f"<p>{number}. {paragraph}</p>" for number in range(9))
    body = f"<html><body>{page}</body></html>".encode()
    sent = {
        "": body,
        "Transfer-Encoding: chunked": b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n"
        % (300, body[:300], len(body) - 300, body[300:]),
        "Content-Encoding: gzip": gzip.compress(body),
    }[coding]
    one = record("response", sent, f"text/html\r\n{coding}" if coding else "text/html")
    whole, block = one + one, one.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n\r\n")
    (text,), told = gone_off(whole, len(one), tmp_path, run)
    assert "8. This page" in text and not told
    assert gone_off(whole, 2 * len(one) - 4, tmp_path, run) == ([text, text], []), "the record is whole"
    block_at = 2 * len(one) - 4 - len(block)
    for kept in (0, 10, len(block) - len(sent) // 3, len(block) - 1):
        detail = f"a record of {kept} bytes instead of {len(block)}"
        assert gone_off(whole, block_at + kept, tmp_path, run) == ([text], [(2, "file cut short", detail)])


def test_an_archive_that_is_cut_within_a_records_header_is_told(tmp_path: Path, run: Run) -> None:
    kept, next_one = record("conversion", b"one"), record("response", b"<p>two</p>", "text/html")
    no_length = (2, "file damaged", "a record without Content-Length; all records before are read")
    for line in (b"WARC-Type", b"WARC-Target-URI", b"WARC-Date", b"Content-Length"):
        at = len(kept) + next_one.index(line)
        assert gone_off(kept + next_one, at, tmp_path, run) == (["one"], [no_length]), line


def test_an_archive_that_is_cut_within_what_is_no_document_is_told(tmp_path: Path, run: Run) -> None:
    kept, next_one = record("conversion", b"one"), record("request", b"GET", "")
    told = [(2, "file cut short", "a record of 21 bytes instead of 22")]
    assert gone_off(kept + next_one, len(kept + next_one) - 5, tmp_path, run) == (["one"], told)


def test_what_a_server_answers_in_place_of_a_page_is_listed_with_its_status(tmp_path: Path, run: Run) -> None:
    paragraph = "This page has a main text, which is long enough to be taken for one by the extractor. " * 5
    page = f"<html><body><p>{paragraph}</p></body></html>".encode()
    answers = ("200 OK", "404 Not Found", "503", "301 Moved Permanently", "200", "")
    pages = (record("response", page, "text/html", status=answer) for answer in answers)
    (tmp_path / "in.warc").write_bytes(b"".join(pages))
    result = run(tmp_path / "in.warc")
    assert len(result.texts()) == 2
    assert [(entry["line"], entry["reason"], entry["detail"]) for entry in result.dropped("read")] == [
        (2, "not a page", "status 404"),
        (3, "not a page", "status 503"),
        (4, "not a page", "status 301"),
        (6, "not a page", "status unknown"),
    ]


@pytest.mark.parametrize("kind", ["Text/HTML; charset=utf-8", "application/xhtml+xml"])
def test_a_page_is_html_in_all_its_types_and_a_type_may_have_capitals(kind: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / "in.warc").write_bytes(record("response", b"<html><body></body></html>", kind))
    assert run(tmp_path / "in.warc").reasons("read") == {"no main text": 1}


def test_damage_in_records_may_be_replaced_too(tmp_path: Path, run: Run) -> None:
    (tmp_path / "in.warc").write_bytes(record("conversion", b"caf\xe9"))
    assert run(tmp_path / "in.warc", read={"damaged": "replace"}).texts() == ["caf\ufffd"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_an_empty_compressed_file_is_told_as_empty(tmp_path: Path, run: Run, ending: str) -> None:
    (tmp_path / f"in.jsonl{ending}").write_bytes(b"")
    result = run(tmp_path / f"in.jsonl{ending}")
    assert [(entry["line"], entry["reason"]) for entry in result.dropped("read")] == [(1, "file empty")]


def test_a_sound_file_that_needs_too_much_memory_is_not_told_as_damaged(tmp_path: Path, run: Run) -> None:
    """As `zstd --long=28` writes it."""
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "in.jsonl.zst").write_bytes(packer.compress(b'{"text": "a"}\n') + packer.flush())
    (entry,) = run(tmp_path / "in.jsonl.zst").dropped("read")
    assert entry["reason"] == "file needs too much memory" and "more than 128 MiB for what it" in entry["detail"]
    assert "`zstd -d --long=31`" in entry["detail"]


def test_a_source_is_named_by_what_the_recipe_names(tmp_path: Path, run: Run) -> None:
    """A folder gives its name to all files in it, a file its own, without endings."""
    (tmp_path / "news" / "2024").mkdir(parents=True)
    for name in ("news/a.jsonl", "news/2024/b.jsonl", "books.v2.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    result = run(tmp_path / "news", tmp_path / "books.v2.jsonl")
    assert {row["text"]: row["source"] for row in result.rows()} == {
        "news/a.jsonl": "news",
        "news/2024/b.jsonl": "news",
        "books.v2.jsonl": "books",
    }


def test_a_byte_order_mark_stands_at_the_beginning_of_a_file_alone(tmp_path: Path, run: Run) -> None:
    """Elsewhere it is a character like others, in a later piece of a file too."""
    mark, line = b"\xef\xbb\xbf", b'{"text": "%s"}\n' % (b"x" * 40)
    (tmp_path / "in.jsonl").write_bytes(mark + line + mark + line + mark + line)
    for number, size in enumerate((10_000, 50)):
        result = run(tmp_path / "in.jsonl", folder=f"out{number}", run={"piece_bytes": size})
        assert len(result.manifest["inputs"]) == (1 if number == 0 else 3)
        assert result.texts() == ["x" * 40] and result.reasons("read") == {"not JSON": 2}
    (tmp_path / "in.txt").write_bytes(mark + mark + b"words")
    assert run(tmp_path / "in.txt", folder="text").texts() == ["\ufeffwords"]


def test_what_libraries_log_stays_off_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def talking(body: bytes) -> str:
        logging.getLogger("courlan.clean").warning("a page of its own kind")
        return body.decode()

    with monkeypatch.context() as patch:
        patch.setattr("trafilatura.extract", talking)
        patch.setattr(logging.getLogger(), "handlers", [])  # pytest's
        (tmp_path / "in.warc.gz").write_bytes(
            warc(("response", "http://a.org/1", b"a page of eight words for this test"))
        )
        found = overlap([tmp_path / "in.warc.gz"], _exam(tmp_path))
    assert found.documents == 1 and capfd.readouterr().err == ""


def _exam(tmp_path: Path) -> Path:
    (tmp_path / "exam.jsonl").write_text('{"text": "one two three four five six seven eight"}\n')
    return tmp_path / "exam.jsonl"


def test_large_files_of_lines_are_cut_between_lines(tmp_path: Path, run: Run) -> None:
    lines = [json.dumps({"text": f"document {number} " + "x" * (number % 50)}) for number in range(200)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    whole = run(tmp_path / "in.jsonl", folder="whole")
    cut = run(tmp_path / "in.jsonl", folder="cut", run={"piece_bytes": 500})
    assert cut.texts() == whole.texts() and len(cut.texts()) == 200
    starts = [each["start"] for each in cut.manifest["inputs"]]
    assert len(starts) > 10 and starts == sorted(starts), "the tenth piece is listed before the eleventh"
    path = tmp_path / "in.jsonl"
    assert len(set(cut.ids())) == 200 and {f"{path}:1", f"{path}:{starts[1]}+1", f"{path}:{starts[1]}+2"} < {*cut.ids()}
    assert sum(each["bytes"] for each in cut.manifest["inputs"]) == path.stat().st_size


def test_a_bad_line_in_a_later_piece_is_told_with_where_the_piece_begins(tmp_path: Path, run: Run) -> None:
    lines = [json.dumps({"text": f"document {number} " + "x" * 60}) for number in range(30)]
    (tmp_path / "in.jsonl").write_text("\n".join(["{", *lines, "["]))
    result = run(tmp_path / "in.jsonl", run={"piece_bytes": 500})
    first, last = sorted(result.dropped("read"), key=lambda entry: entry.get("offset", 0))
    assert "offset" not in first and first["line"] == 1
    starts = [each["start"] for each in result.manifest["inputs"]]
    assert last["offset"] == max(starts) > 500


def test_line_starts_are_line_starts(tmp_path: Path) -> None:
    data = b"ab\ncdef\n\n\nlong line here\nx"
    (tmp_path / "f").write_bytes(data)
    starts = line_starts(tmp_path / "f", range(1, len(data)))
    assert starts == [place for place in range(1, len(data)) if data[place - 1 : place] == b"\n"]


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (b'{"text": "one"}\n{"text": "two"}\n', "16 bytes when the run was planned, 32 now"),
        (b'{"text": "1ne"}\n', "16 bytes when the run was planned, 16 now"),
    ],
    ids=["longer", "as long"],
)
def test_a_file_that_changes_while_it_is_read_is_told(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, now: bytes, said: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "one"}\n')
    from colonnade.corpus import read

    before: Any = read.rows

    def growing(*arguments: Any) -> Any:
        path.write_bytes(now)
        os.utime(path, ns=(1, 1))
        return before(*arguments)

    monkeypatch.setattr(read, "rows", growing)
    result = run(path)
    (entry,) = result.dropped("read")
    assert entry["reason"] == "file changed while it was read" and said in entry["detail"]


def test_ids_urls_titles_and_other_keys_come_through(run: Run, write_lines: Any) -> None:
    row = {"text": "t", "id": 7, "url": "http://x.org", "title": "T", "more": {"deep": [1]}, "odd": "\u00e9"}
    result = run(write_lines("news.jsonl", [row]))
    (kept,) = result.rows()
    assert kept["id"] == "7" and kept["url"] == "http://x.org" and kept["title"] == "T" and kept["source"] == "news"
    assert kept["metadata"] == {"more": {"deep": [1]}, "odd": "\u00e9"}


def test_one_key_may_be_the_id_and_the_url(run: Run, write_lines: Any) -> None:
    """As in C4, whose rows have no id."""
    path = write_lines("in.jsonl", [{"text": "t", "url": "http://x.org", "timestamp": "2019"}])
    assert run(path, read={"id_key": "url", "title_key": "url"}).rows() == [
        {
            "text": "t",
            "id": "http://x.org",
            "source": "in",
            "url": "http://x.org",
            "title": "http://x.org",
            "metadata": {"timestamp": "2019"},
        }
    ]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_other_keys_are_written_so_that_everyone_reads_them(tmp_path: Path, run: Run, kind: str, form: str) -> None:
    """JSON has no NaN and no half of a surrogate pair; Python's parser takes both."""
    path, deep = tmp_path / f"in.{kind}", {"n": [1.5, math.inf], "t": [{"n": -math.inf}]}
    expected: dict[str, Any] = {"score": None, "deep": {"n": [1.5, None], "t": [{"n": None}]}, "none": None, "more": 2}
    if kind == "parquet":
        pq.write_table(
            pa.table({"text": ["t"], "score": [math.nan], "deep": [deep], "none": [None], "more": [2]}), path
        )
    else:
        row = {
            "text": "t",
            "score": math.nan,
            "deep": deep,
            "none": None,
            "more": 2,
            "a\ud83d": ["b\ude00", "\U0001f600"],
        }
        path.write_text(json.dumps(row))
        expected["a\ufffd"] = ["b\ufffd", "\U0001f600"]
    folder = run(path, write={"format": form, "compression": "none"}, deduplicate={}).folder / "train"
    if form == "parquet":
        (stored,) = pq.read_table(folder / "00000.parquet")["metadata"].to_pylist()
        assert json.loads(stored, parse_constant=pytest.fail) == expected
    else:
        assert pa_json.read_json(folder / "00000.jsonl")["metadata"].to_pylist() == [expected]


def test_bytes_in_other_columns_are_written_as_base64(tmp_path: Path, run: Run) -> None:
    columns = {"text": ["t"], "hash": [b"\x00\xff"], "pictures": [[{"bytes": b"png", "path": "a.png"}]]}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    (row,) = run(tmp_path / "in.parquet").rows()
    assert row["metadata"] == {"hash": "AP8=", "pictures": [{"bytes": "cG5n", "path": "a.png"}]}


def test_pairs_of_a_parquet_map_are_written_so_that_everyone_reads_them(tmp_path: Path, run: Run) -> None:
    columns = {
        "text": ["t"],
        "scores": pa.array([[("a", math.nan), ("b", 0.5)]], pa.map_(pa.string(), pa.float64())),
        "hashes": pa.array([[("a", b"\x00\xff")]], pa.map_(pa.string(), pa.binary())),
    }
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    (row,) = run(tmp_path / "in.parquet").rows()
    assert row["metadata"] == {"scores": [["a", None], ["b", 0.5]], "hashes": [["a", "AP8="]]}


def test_a_row_that_is_nested_too_deeply_is_listed(tmp_path: Path, run: Run) -> None:
    rows = [f'{{"text": "{depth}", "more": {"[" * depth}{"]" * depth}}}' for depth in (200, 990, 1)]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    result = run(tmp_path / "in.jsonl")
    assert result.texts() == ["200", "1"]
    assert [(entry["line"], entry["reason"], entry["detail"]) for entry in result.dropped("read")] == [
        (2, "not JSON", "nested too deeply")
    ]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_documents_of_a_file_whose_name_is_not_utf8_are_written_so_that_everyone_reads_them(
    tmp_path: Path, run: Run, form: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / os.fsdecode(b"caf\xe9.jsonl")).write_text('{"text": "t"}\n')
    folder = run(tmp_path / "in", write={"format": form, "compression": "none"}, deduplicate={}).folder / "train"
    table = pa_json.read_json(folder / "00000.jsonl") if form == "jsonl" else pq.read_table(folder / "00000.parquet")
    assert table["id"].to_pylist() == [f"{tmp_path}/in/caf\ufffd.jsonl:1"]


def test_an_id_url_or_title_that_json_does_not_have_is_none(tmp_path: Path, run: Run) -> None:
    """Such ids would be one, and all documents with it in one part."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a", "id": NaN, "url": NaN}\n{"text": "b", "id": -Infinity, "title": NaN}\n')
    assert run(path).rows() == [
        {"text": "a", "id": f"{path}:1", "source": "in"},
        {"text": "b", "id": f"{path}:2", "source": "in"},
    ]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_numbers_that_json_has_not_become_null_in_documents_that_an_earlier_version_has_stored(
    tmp_path: Path, run: Run, write_lines: Any, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    path = write_lines("in.jsonl", [{"text": "t", "score": 0.5, "deep": {"n": [1.5, 2.5, 3.5]}}])
    steps: dict[str, Any] = {"write": {"format": form, "compression": "none"}, "deduplicate": {}}

    def stops(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Unspool, "run", stops)
        run(path, **steps)
    stored = spool_path(tmp_path / "clean", 0)
    line = zstandard.ZstdDecompressor().stream_reader(stored.read_bytes()).read().decode()
    for now, before in (("0.5", "NaN"), ("2.5", "-Infinity"), ("3.5", "Infinity")):
        line = line.replace(now, before)
    stored.write_bytes(zstandard.ZstdCompressor().compress(line.encode()))
    folder = run(path, **steps).folder / "train"
    expected = {"score": None, "deep": {"n": [1.5, None, None]}}
    if form == "parquet":
        (kept,) = pq.read_table(folder / "00000.parquet")["metadata"].to_pylist()
        assert json.loads(kept, parse_constant=pytest.fail) == expected
    else:
        assert pa_json.read_json(folder / "00000.jsonl")["metadata"].to_pylist() == [expected]


def test_ids_urls_and_titles_of_bytes_are_the_text_that_they_hold(tmp_path: Path, run: Run) -> None:
    """And Base64 where they hold none, as in other columns."""
    columns = {"text": ["a", "b"], "id": [b"seven", b"\x00\xff"], "url": [b"http://x.org", None], "title": [None, b""]}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    assert run(tmp_path / "in.parquet").rows() == [
        {"text": "a", "id": "seven", "source": "in", "url": "http://x.org"},
        {"text": "b", "id": "AP8=", "source": "in"},
    ]


def test_an_id_of_zero_is_one_and_an_empty_one_is_none(run: Run, write_lines: Any) -> None:
    path = write_lines("in.jsonl", [{"text": "t", "id": value} for value in (0, "", None)])
    assert run(path).ids() == ["0", f"{path}:2", f"{path}:3"]
    half = write_lines("half.jsonl", [{"text": "t", "id": "a\ud83d"}])
    assert run(half, folder="half").ids() == ["a\ufffd"], "which can be written"


MEASURE = """
import resource, sys
from pathlib import Path
from colonnade.data.cleaning import clean
from colonnade.corpus.load import build
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
content = {"run": {"workers": 1}, "read": {"paths": sys.argv[1:2]}, "write": {"folder": sys.argv[2]}}
print(clean(build(content), progress=False))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".jsonl", ".txt.zst"])
def test_a_gigabyte_in_a_line_takes_little_memory(tmp_path: Path, ending: str) -> None:
    """A line of 1 GB between two documents; packed with zstd it is a bomb, too."""
    path = tmp_path / f"giant{ending}"
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": zstandard.open}
    with openers.get(path.suffix, open)(path, "wb") as stream:
        stream.write(b'{"text": "first"}\n{"text": "')
        for _ in range(1 << 10):
            stream.write(b"x" * (1 << 20))
        stream.write(b'"}\n{"text": "last"}\n')
    command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 150_000, "kB"
    result = Result(tmp_path / "out", "")
    bomb = path.suffix in (".zst", ".bz2", ".xz")
    if "jsonl" in ending:
        assert result.texts() == (["first"] if bomb else ["first", "last"])
        assert set(result.reasons("read")) == ({"file damaged"} if bomb else {"too long"})
