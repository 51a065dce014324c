"""Signatures on disk: what was put in comes out, of any document of any task, with little held at a time."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from colonnade.corpus import signatures
from colonnade.corpus.minhash import Bands
from colonnade.corpus.signatures import (
    ENTRY,
    OWN,
    BandFile,
    SignatureIndex,
    SignatureWriter,
    Source,
    copy_signatures,
    signature_path,
)
from colonnade.errors import DataError

BANDS = Bands(4, 2)
SETS = [np.arange(first, first + size, dtype=np.uint64) << np.uint64(40) for first, size in ((0, 5), (7, 1), (9, 300))]
IDS = ["a", "b é\n", "c" * 50]


def stored(folder: Path, task: int) -> Source:
    writer = SignatureWriter(folder, task, BANDS)
    for number, (identity, shingles) in enumerate(zip(IDS, SETS, strict=True)):
        writer.add(identity, 100 * task + number, shingles)
    writer.close()
    return Source(OWN + task, folder, task)


def check(index: SignatureIndex, source: Source, numbers: list[int]) -> None:
    for place, number in enumerate(numbers):
        document = (source.place << 32) + place
        assert np.array_equal(index.shingles(document), SETS[number])
        assert index.num_shingles(document) == len(SETS[number]) and index.identity(document) == IDS[number]


def test_what_was_stored_of_each_document_comes_back(tmp_path: Path) -> None:
    sources = [stored(tmp_path, task) for task in (0, 3)]
    with SignatureIndex(sources) as index:
        for source in sources:
            check(index, source, [0, 1, 2])
            assert [index.length((source.place << 32) + n) for n in range(3)] == [
                100 * source.task + n for n in range(3)
            ]


def test_little_is_held_and_few_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "_CACHE_BYTES", 100)
    monkeypatch.setattr(signatures, "_OPEN_FILES", 3)
    sources = [stored(tmp_path, task) for task in range(4)]
    before = len(os.listdir("/dev/fd"))
    with SignatureIndex(sources) as index:
        for _ in range(2):
            for source in sources:
                check(index, source, [0, 1, 2])
                assert len(index._files) <= 3 and index._set_bytes == sum(kept.nbytes for kept in index._sets.values())
                assert len(index._sets) == 1 or index._set_bytes <= 100
        assert len(os.listdir("/dev/fd")) <= before + 3
    assert len(os.listdir("/dev/fd")) == before


def test_some_documents_are_copied_under_new_numbers(tmp_path: Path) -> None:
    source = stored(tmp_path, 3)
    copy_signatures(source, tmp_path / "copy", [0, 2], BANDS)
    copy = Source(7, tmp_path / "copy", 3)
    with SignatureIndex([copy]) as index:
        check(index, copy, [0, 2])
        assert [index.length((7 << 32) + n) for n in range(2)] == [300, 302]
    old, new = (np.fromfile(each.path("bands"), ENTRY) for each in (source, copy))
    kept = old[old["document"] != 1]
    assert np.array_equal(new["band"], kept["band"]) and np.array_equal(new["document"], kept["document"] // 2)
    assert (np.diff(new["band"].astype(object)) >= 0).all(), "sorted, for who reads a part of them"


def test_what_is_abandoned_leaves_nothing(tmp_path: Path) -> None:
    writer = SignatureWriter(tmp_path, 0, BANDS)
    writer.add("a", 1, SETS[2])
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["shingles", "offsets", "ids"])
def test_files_that_are_cut_or_gone_are_told(tmp_path: Path, name: str) -> None:
    source = stored(tmp_path, 0)
    path = signature_path(tmp_path, 0, name)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    last = (OWN << 32) + 2

    def read(index: SignatureIndex) -> None:
        index.shingles(last), index.identity(last)

    with SignatureIndex([source]) as index, pytest.raises(DataError, match=rf"{name} ends at byte {size - 1:,}: "):
        read(index)
    path.unlink()
    with SignatureIndex([source]) as index, pytest.raises(DataError, match=rf"{name} is missing: .*duplicates would"):
        read(index)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_each_entry_is_in_one_part(tmp_path: Path, num_parts: int) -> None:
    """Also those that stand at the edges of parts, and the least and the largest number."""
    edges = [(1 << 64) * part // num_parts for part in range(num_parts)]
    bands = sorted({0, (1 << 64) - 1, *edges, *(edge - 1 for edge in edges[1:])})
    np.array([(band, number) for number, band in enumerate(bands)], ENTRY).tofile(tmp_path / "x.bands")
    base = (OWN + 5) << 32
    file = BandFile(tmp_path / "x.bands", ENTRY, base)
    parts = [file.entries(part, num_parts) for part in range(num_parts)]
    assert [band for found in parts for band in found["band"].tolist()] == bands, "in order"
    for found in parts:
        assert int(found["band"][-1]) - int(found["band"][0]) <= (1 << 64) // num_parts, "parts are equal"
    documents = np.concatenate([found["document"] for found in parts])
    assert documents.tolist() == [base + number for number in range(len(bands))]


def test_entries_are_read_whole_however_little_one_read_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives at most 2 GiB at a time. A file that has become shorter is told."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, start: pread(file, min(size, 8), start))
    np.array([(band, band) for band in range(100)], ENTRY).tofile(tmp_path / "x.bands")
    file = BandFile(tmp_path / "x.bands", ENTRY, 0)
    assert file.entries(0, 1)["document"].tolist() == list(range(100))
    monkeypatch.setattr(os, "fstat", lambda _: SimpleNamespace(st_size=102 * ENTRY.itemsize))
    with pytest.raises(DataError, match=r"x\.bands ends behind entry 100, where 102 are wanted"):
        file.entries(0, 1)
