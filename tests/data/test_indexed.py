"""Megatron's .bin/.idx: its own files read back, ours byte-equal, broken ones refused, huge ones opened at once."""

from __future__ import annotations

import errno
import json
import lzma
import mmap
import os
import pickle
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data import indexed
from colonnade.data.identity import identify
from colonnade.data.indexed import DTYPES, HEADER, MAGIC, TokenFile, bin_path, code_of, idx_path, smallest_dtype
from colonnade.data.inspect import inspect
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.writer import TokenFileWriter, merge
from colonnade.errors import DataError

MEGATRON = "meg-gpt2-openwebtext_text_document"
Write = Callable[..., str]


def test_megatrons_own_files_decode_to_the_known_text(megatron: Path) -> None:
    file = TokenFile(megatron / MEGATRON)
    tokenizer = Tokenizer.load(megatron / "gpt2-tiny")
    with lzma.open(megatron / "openwebtext_1000.decoded.jsonl.xz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    assert (file.num_documents, file.num_tokens, file.dtype) == (1_000, 1_361_845, np.dtype("uint16"))
    assert len(texts) == 1_000
    for document, text in enumerate(texts):
        tokens = file.document(document)
        assert tokens[-1] == tokenizer.end_of_document == 4_999
        assert tokenizer.decode(tokens.tolist()) == text


def test_megatrons_own_files_written_again_are_byte_equal(megatron: Path, tmp_path: Path) -> None:
    file = TokenFile(megatron / MEGATRON)
    with TokenFileWriter(tmp_path / "again", file.dtype) as writer:
        for document in range(file.num_documents):
            writer.add_document(file.document(document))
    for path in (bin_path, idx_path):
        assert path(tmp_path / "again").read_bytes() == path(megatron / MEGATRON).read_bytes()


@given(
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.lists(st.integers(0, 100), max_size=6), min_size=1, max_size=8).filter(any),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, dtype: np.dtype[np.integer], documents: list[list[int]]
) -> None:
    prefix = tmp_path_factory.mktemp("tokens") / "file"
    with TokenFileWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    file = TokenFile(prefix)
    assert (file.dtype, file.num_documents) == (dtype, len(documents))
    assert [file.document(index).tolist() for index in range(len(documents))] == documents
    assert file.read(0, file.num_tokens).tolist() == [token for document in documents for token in document]
    for token in range(file.num_tokens):
        found = file.document_at(token)
        assert file.document_start(found) <= token < file.document_start(found + 1)


def test_the_bytes_of_a_small_file(tmp_path: Path) -> None:
    """Spelled out from Megatron's reader: two documents, the second of two sentences."""
    with TokenFileWriter(tmp_path / "two", np.dtype("<i4")) as writer:
        writer.add_document([7, 8, 9])
        writer.add_document([1, 2, 3, 4], lengths=[1, 3])
    assert bin_path(tmp_path / "two").read_bytes() == struct.pack("<7i", 7, 8, 9, 1, 2, 3, 4)
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 3)
    expected += struct.pack("<3i", 3, 1, 3) + struct.pack("<3q", 0, 12, 16) + struct.pack("<3q", 0, 1, 3)
    assert idx_path(tmp_path / "two").read_bytes() == expected
    assert TokenFile(tmp_path / "two").document(1).tolist() == [1, 2, 3, 4]


def test_dtypes() -> None:
    assert smallest_dtype(50_257) == smallest_dtype(65_535) == np.dtype("uint16")
    assert smallest_dtype(65_536) == smallest_dtype(250_680) == np.dtype("int32")
    assert [code_of(np.dtype(name)) for name in ("uint8", "int8", "int16", "int32", "int64", "uint16")] == [
        1,
        2,
        3,
        4,
        5,
        8,
    ]
    with pytest.raises(DataError, match="float32 is not a token type"):
        code_of(np.dtype("float32"))  # type: ignore[arg-type]


def test_all_that_begin_in_a_range_are_found_however_many_they_are(tmp_path: Path) -> None:
    """100 documents of two sentences of three tokens."""
    with TokenFileWriter(tmp_path / "many", np.dtype("<u2")) as writer:
        for _ in range(100):
            writer.add_document(np.arange(6), lengths=[3, 3])
    file = TokenFile(tmp_path / "many")
    for start, stop in ((0, 600), (1, 600), (200, 580), (597, 600), (598, 600)):
        assert file.sequence_starts(start, stop).tolist() == [at for at in range(0, 600, 3) if start <= at < stop]
        assert file.document_starts(start, stop).tolist() == [at for at in range(0, 600, 6) if start <= at < stop]


def test_it_travels_to_other_processes_as_a_name(write_tokens: Write) -> None:
    file = TokenFile(write_tokens(5, 5))
    pickled = pickle.dumps(file)
    assert len(pickled) < 300
    assert pickle.loads(pickled).document(1).tolist() == [5, 6, 7, 8, 9]


def sparse_corpus(prefix: Path, *, documents: int, tokens_each: int) -> None:
    """A token file of which only header and index exist; its tokens are a hole of zeros."""
    with bin_path(prefix).open("wb") as stream:
        os.truncate(stream.fileno(), documents * tokens_each * 2)
    with idx_path(prefix).open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        stream.write(np.full(documents, tokens_each, "<i4").data)
        stream.write((np.arange(documents, dtype="<i8") * (tokens_each * 2)).data)
        stream.write(np.arange(documents + 1, dtype="<i8").data)


def test_100_billion_tokens_open_in_under_a_second(tmp_path: Path) -> None:
    prefix = tmp_path / "huge"
    sparse_corpus(prefix, documents=100_000, tokens_each=1_000_000)
    started = time.perf_counter()
    file = TokenFile(prefix)
    middle = file.document_start(50_000)
    token = int(file.read(99_999_999_999, 1)[0])
    seconds = time.perf_counter() - started
    assert (file.num_tokens, middle, token) == (100_000_000_000, 50_000_000_000, 0)
    assert file.document_at(99_999_999_999) == 99_999
    assert seconds < 1


# Bad input


def refused(prefix: str | Path, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        TokenFile(prefix)
    for word in words:
        assert word in str(caught.value), caught.value


def test_missing(tmp_path: Path, write_tokens: Write) -> None:
    refused(tmp_path / "no", "no.bin", "no.idx", "Check the path, or make the file with `colonnade data tokenize")
    refused("no", "there is no no.bin and no no.idx. Check the path, which begins at the current folder, or make")
    prefix = write_tokens(5)
    refused(f"{prefix}.bin", f"write {prefix}.")
    bin_path(prefix).unlink()
    refused(prefix, f"there is no {prefix}.bin.")


def test_empty(write_tokens: Write) -> None:
    prefix = write_tokens(5)
    bin_path(prefix).write_bytes(b"")
    refused(prefix, "cut short: 0 bytes", "asks for 10")
    idx_path(prefix).write_bytes(b"")
    refused(prefix, "is empty")
    idx_path(prefix).write_bytes(HEADER.pack(MAGIC, 1, 8, 0, 1))
    refused(prefix, "holds no documents")
    idx_path(prefix).write_bytes(HEADER.pack(MAGIC, 1, 8, 1, 1))
    refused(prefix, "holds no documents: 1 sequences, 1 boundaries")
    idx_path(prefix).write_bytes(HEADER.pack(MAGIC, 1, 8, 1, 2) + struct.pack("<iqqq", 0, 0, 0, 1))
    refused(prefix, "holds no tokens")


@pytest.mark.parametrize("cut", [3, 9, 20, 33, 34, 40, 60, -1])
def test_a_truncated_index(write_tokens: Write, cut: int) -> None:
    prefix = write_tokens(5, 6, 7)
    whole = idx_path(prefix).read_bytes()
    idx_path(prefix).write_bytes(whole[:cut])
    refused(prefix, "is cut short", "tokenize again")


@pytest.mark.parametrize("size", [1, 9, 11, 37])
def test_tokens_that_are_not_as_long_as_the_index_says(write_tokens: Write, size: int) -> None:
    prefix = write_tokens(5, 6, 7)
    bin_path(prefix).write_bytes(b"\0" * size)
    refused(prefix, "longer than its index says" if size > 36 else "cut short", "asks for 36")


def test_an_index_with_bytes_too_many(write_tokens: Write) -> None:
    prefix = write_tokens(5)
    idx_path(prefix).write_bytes(idx_path(prefix).read_bytes() + b"\0")
    refused(prefix, "bytes too many")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"TNTIDX\0\0" + b"\1" * 40, "fairseq's older index"),
        (b"\x1f\x8b" + b"\1" * 40, "gzip data"),
        (b"\xfd7zXZ\0" + b"\1" * 40, "xz data"),
        (b"PK\x03\x04" + b"\1" * 40, "a zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b'{"text": "some"}\n' * 4, '{"text": "some"}'),
    ],
)
def test_a_foreign_index_is_named(write_tokens: Write, content: bytes, found: str) -> None:
    prefix = write_tokens(5)
    idx_path(prefix).write_bytes(content)
    refused(prefix, "no token index of Megatron's format", found)


def test_other_versions_and_dtypes(write_tokens: Write) -> None:
    prefix = write_tokens(5)
    rest = idx_path(prefix).read_bytes()[HEADER.size :]
    for header, words in [
        (HEADER.pack(MAGIC, 2, 8, 1, 2), "version 2"),
        (HEADER.pack(MAGIC, 1, 7, 1, 2), "code 7: floating-point numbers"),
        (HEADER.pack(MAGIC, 1, 6, 1, 2), "code 6: floating-point numbers"),
        (HEADER.pack(MAGIC, 1, 99, 1, 2), "code 99: not known"),
    ]:
        idx_path(prefix).write_bytes(header + rest)
        refused(prefix, words)


def test_documents_that_do_not_fit_the_sequences(write_tokens: Write) -> None:
    prefix = write_tokens(5, 6)
    whole = bytearray(idx_path(prefix).read_bytes())
    idx_path(prefix).write_bytes(whole[:-8] + struct.pack("<q", 7))
    refused(prefix, "is damaged", "from sequence 0 to 7")
    idx_path(prefix).write_bytes(whole[:-16] + struct.pack("<qq", -3, 2))
    with pytest.raises(DataError, match="document 1 begins at sequence -3"):
        TokenFile(prefix).document(0)


def test_a_wild_offset_inside(write_tokens: Write) -> None:
    prefix = write_tokens(5, 6, 7)
    whole = bytearray(idx_path(prefix).read_bytes())
    where = HEADER.size + 4 * 3 + 8
    whole[where : where + 8] = struct.pack("<q", 10**15)
    idx_path(prefix).write_bytes(bytes(whole))
    with pytest.raises(DataError, match="document 1 begins at token"):
        TokenFile(prefix).document(1)


def test_megatrons_reader_reads_our_files(write_tokens: Write) -> None:
    """Their files are read here by the tests above."""
    reader = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    prefix = write_tokens(5, 1, 9, 300)
    theirs, ours = reader.IndexedDataset(prefix), TokenFile(prefix)
    assert len(theirs) == ours.num_documents == 4
    assert theirs.document_indices.tolist() == ours.boundaries.tolist()
    for document in range(4):
        assert theirs[document].tolist() == ours.document(document).tolist()


def damaged(prefix: str, at: int, value: int, *, size: int = 8) -> TokenFile:
    """A file whose index has another number at a byte."""
    content = bytearray(idx_path(prefix).read_bytes())
    content[at : at + size] = value.to_bytes(size, "little", signed=True)
    idx_path(prefix).write_bytes(content)
    return TokenFile(prefix)


@pytest.mark.parametrize("value", [-8, 1 << 40, 0])
@pytest.mark.parametrize("part", ["offsets", "boundaries"])
def test_a_damaged_middle_is_refused_where_it_is_read(write_tokens: Write, part: str, value: int) -> None:
    """Negative, beyond the end, or falling: IndexError before, or the tokens of other documents."""
    n = 5
    prefix = write_tokens(*[4] * n)
    start = HEADER.size + (4 * n if part == "offsets" else 12 * n)
    file = damaged(prefix, start + 8 * 2, value)
    for read in (file.document_starts, *((file.sequence_starts,) if part == "offsets" else ())):
        with pytest.raises(DataError, match=r"is damaged: (document|sequence) [23] begins at"):
            read(0, file.num_tokens)


def test_a_sequence_of_a_document_may_be_empty(tmp_path: Path) -> None:
    """Wherever it stands: as an example without a label has one."""
    for lengths in ([0, 2, 0, 1, 0], [0, 3], [3, 0], [3]):
        with TokenFileWriter(tmp_path / "x", np.dtype("<u2")) as writer:
            writer.add_document([7])
            writer.add_document([1, 2, 3], lengths=lengths)
        assert [len(each) for each in TokenFile(tmp_path / "x").sequences(1)] == lengths


def test_a_place_where_several_begin_comes_once(write_tokens: Write) -> None:
    """Documents and sentences without a token begin where the next one does."""
    file = TokenFile(write_tokens(3, 0, 0, 4, 0, 2))
    assert file.document_starts(0, 9).tolist() == file.sequence_starts(0, 9).tolist() == [0, 3, 7]


def test_a_sequence_that_ends_behind_the_file_is_refused(write_tokens: Write) -> None:
    file = damaged(write_tokens(3, 4, 5), HEADER.size, 13, size=4)
    assert file.sequence_ends(np.array([1, 2])).tolist() == [7, 12]
    with pytest.raises(DataError, match="a sequence ends at token 13, of 3 sequences and 12 tokens"):
        file.sequence_ends(np.array([0, 2]))


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        ("lengths", [4, 9, -1, 4, 4], "sequence 2 has -1 tokens from byte 16 on, and those before it end at byte 26"),
        ("lengths", [4, 4, 9, -1, 4], "sequence 3 has -1 tokens from byte 24 on, and those before it end at byte 34"),
        ("lengths", [4, 3, 5, 4, 4], "sequence 2 has 5 tokens from byte 16 on, and those before it end at byte 14"),
        ("offsets", [0, 8, 24, 16, 32], "sequence 2 has 4 tokens from byte 24 on, and those before it end at byte 16"),
        ("offsets", [2, 8, 16, 24, 32], "sequence 0 has 4 tokens from byte 2 on, and those before it end at byte 0"),
        ("boundaries", [0, 2, 1, 3, 4, 5], "document 2 begins at 1, of 5 sequences"),
        ("boundaries", [0, 1, 2, 9, 4, 5], "document 3 begins at 9, of 5 sequences"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused_where_all_of_it_is_used(
    write_tokens: Write, monkeypatch: pytest.MonkeyPatch, part: str, values: list[int], said: str, chunk: int
) -> None:
    monkeypatch.setattr(indexed, "_CHUNK", chunk)
    prefix = write_tokens(*[4] * 5)
    TokenFile(prefix).check_index()
    content = bytearray(idx_path(prefix).read_bytes())
    at = HEADER.size + {"lengths": 0, "offsets": 4 * 5, "boundaries": 12 * 5}[part]
    numbers = np.array(values, "<i4" if part == "lengths" else "<i8").tobytes()
    content[at : at + len(numbers)] = numbers
    idx_path(prefix).write_bytes(content)
    for use in (lambda: TokenFile(prefix).check_index(), lambda: identify(TokenFile(prefix)), lambda: inspect(prefix)):
        with pytest.raises(DataError, match=f"is damaged: {re.escape(said)}"):
            use()
    with pytest.raises(DataError, match=f"is damaged: {re.escape(said)}"):
        merge([prefix], f"{prefix}-merged")
    assert not idx_path(f"{prefix}-merged").exists()


def test_a_length_below_zero_is_refused_though_all_places_follow_from_it(write_tokens: Write) -> None:
    prefix = write_tokens(*[4] * 5)
    content = bytearray(idx_path(prefix).read_bytes())
    lengths, offsets = np.array([4, 4, -1, 9, 4], "<i4"), np.array([0, 8, 16, 14, 32], "<i8")
    content[HEADER.size : HEADER.size + 60] = lengths.tobytes() + offsets.tobytes()
    idx_path(prefix).write_bytes(content)
    with pytest.raises(DataError, match="sequence 2 has -1 tokens from byte 16 on, and those before it end at byte 16"):
        TokenFile(prefix).check_index()


@pytest.mark.parametrize("refused", [bin_path, idx_path])
def test_a_file_system_that_maps_no_files_is_named_as_such(
    write_tokens: Write, monkeypatch: pytest.MonkeyPatch, refused: Callable[[str], Path]
) -> None:
    """It will not do so later either: nobody has to start the run again and again."""
    prefix = write_tokens(2, 1)
    maps = mmap.mmap

    def no_file(file: int, *words: Any, **more: Any) -> Any:
        if os.path.samestat(os.fstat(file), refused(prefix).stat()):
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return maps(file, *words, **more)

    monkeypatch.setattr(mmap, "mmap", no_file)
    with pytest.raises(DataError) as told:
        TokenFile(prefix)
    assert str(told.value) == (
        f"{refused(prefix)} lies on a file system that maps no files into memory, as they are read here. Copy "
        "tokens.bin and tokens.idx to another, and name them there."
    )


def test_the_size_of_a_file_is_told_in_bytes(write_tokens: Write) -> None:
    file = TokenFile(write_tokens(5, 6, dtype="<i4"))
    assert file.num_bytes == bin_path(file.prefix).stat().st_size == 44


def test_a_document_that_ends_before_it_begins_is_refused_where_it_is_read(write_tokens: Write) -> None:
    file = damaged(write_tokens(*[4] * 5), HEADER.size + 12 * 5 + 8 * 2, 4)
    with pytest.raises(DataError, match="is damaged: document 2 runs from token 16 to 12"):
        file.document(2)


def test_a_last_document_beyond_the_end_is_refused(write_tokens: Write) -> None:
    """No other stands behind it, that would begin before it."""
    file = damaged(write_tokens(*[4] * 5), HEADER.size + 12 * 5 + 8 * 4, 1 << 40)
    with pytest.raises(DataError, match="is damaged: document 4 begins at"):
        file.document_starts(0, file.num_tokens)


@pytest.mark.parametrize("length", [3, -4])
def test_lengths_that_are_not_those_of_the_document_are_refused_where_it_is_read(
    write_tokens: Write, length: int
) -> None:
    file = damaged(write_tokens(4, 4, 4), HEADER.size + 4, length, size=4)
    assert [each.tolist() for each in file.sequences(0)] == [file.document(0).tolist()]
    with pytest.raises(DataError, match="is damaged: document 1 has other sequences than tokens"):
        file.sequences(1)
