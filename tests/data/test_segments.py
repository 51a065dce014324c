"""Segments of a token file that is being made: what they hold, and which of them a later run goes on behind."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from colonnade.corpus.documents import BEGIN, Rejected
from colonnade.data.indexed import TokenFile, bin_path, idx_path
from colonnade.data.segments import Encoded, Segment, SegmentFolder, append, header_of
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import DataError


def encoded(number: int, *, refused: bool = False) -> Encoded:
    """Of one document of two sequences with a token each."""
    rejected = (Rejected("a.jsonl", number, "not JSON"),)
    return Encoded(
        b"\1\0\2\0", b"\1\0\0\0" * 2, b"\2\0\0\0", 10 + number, 20 + number, number, rejected, BEGIN, refused
    )


def segment(number: int, *, refused: bool = False) -> Segment:
    made = Segment()
    made.add(encoded(number, refused=refused))
    return made


def test_a_segment_says_what_all_of_its_chunks_hold(tmp_path: Path) -> None:
    made = segment(1, refused=True)
    made.add(encoded(2))
    made.store(tmp_path / "x")
    found = header_of(tmp_path / "x")
    assert (found.documents, found.num_sequences, found.token_bytes) == (2, 4, 8)
    assert (found.text_bytes, found.read_bytes, found.empty) == (23, 43, 3)
    assert found.refused, "a file in it was not given, whatever came behind"
    assert [each.line for each in found.rejected] == [1, 2] and found == made.header


def test_segments_come_in_the_order_in_which_they_were_stored(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path / "a.unfinished")
    folder.open("this run")
    for number in range(12):
        folder.store(segment(number))
    assert [header.empty for header in folder.open("this run")] == list(range(12))
    assert folder.open("another run") == [] == folder.paths()


def test_a_million_segments_and_more_are_in_their_order(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path)
    numbers = [2, 100_001, 999_999, 1_000_000]
    for number in numbers:
        segment(number).store(tmp_path / f"{number:06d}.segment")
    assert [header_of(path).empty for path in folder.paths()] == numbers


def test_a_run_goes_on_before_the_first_file_that_was_not_given(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path / "a.unfinished")
    folder.open("this run")
    for number in range(4):
        folder.store(segment(number, refused=number == 1))
    assert [header.empty for header in folder.open("this run")] == [0]
    assert len(folder.paths()) == 1, "what comes behind is made again"


def test_other_files_in_the_folder_are_no_segments_and_parts_of_one_are_removed(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path / "a.unfinished")
    folder.open("this run")
    names = ("000000.segment.1-0123abcd.partial", "mine.segment", "000000 of mine.segment")
    part, *others = (tmp_path / "a.unfinished" / name for name in names)
    for path in (part, *others):
        path.write_bytes(b"left by a killed run" if path == part else b"mine")
    assert folder.open("this run") == [] and not part.exists()
    assert [path.read_bytes() for path in others] == [b"mine"] * 2
    folder.store(segment(0))
    assert folder.open("another run") == [] == folder.paths()
    folder.remove()
    assert sorted(path.name for path in (tmp_path / "a.unfinished").iterdir()) == sorted(names[1:]), "they keep it"


def test_a_segment_of_other_sequences_than_its_documents_have_makes_no_token_file(tmp_path: Path) -> None:
    made, stored = tmp_path / "made", tmp_path / "0.segment"
    for content, sound in ((b"\2\0\0\0", True), (b"\3\0\0\0", False)):
        segment(1).store(stored)
        stored.write_bytes(stored.read_bytes()[:-8] + content + b"\1\0\2\0")
        with (
            nullcontext() if sound else pytest.raises(DataError, match="2 sequences came for an index of 2 in 3"),
            TokenFileWriter(made, np.dtype("<u2")) as writer,
        ):
            assert [header.documents for header in append([stored], writer)] == [1]
        if sound:
            assert [each.tolist() for each in TokenFile(made).sequences(0)] == [[1], [2]]
            for path in (bin_path(made), idx_path(made)):
                path.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["0.segment"]
