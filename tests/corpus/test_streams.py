"""Reading what is damaged: all that is there comes out, memory stays bounded, and the damage is told."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from colonnade.corpus.streams import BlockStream, Damaged, HashedFile, Line, blocks, lines

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
COMPRESSED = sorted(PACK.keys() - {""})
TEXT = b"".join(b"%d a line of text, number %d\n" % (number * 7919, number) for number in range(20_000))


def unpacked(data: bytes, compression: str, **more: int) -> bytes:
    return b"".join(blocks(HashedFile(io.BytesIO(data)), compression, **more))


def until_damage(content: Iterator[bytes]) -> tuple[bytes, str]:
    parts = []
    try:
        parts += [*_kept(content, parts)]
    except Damaged as error:
        return b"".join(parts), str(error)
    return b"".join(parts), ""


def _kept(content: Iterator[bytes], parts: list[bytes]) -> Iterator[bytes]:
    for block in content:
        parts.append(block)
    yield from ()


@pytest.mark.parametrize("compression", sorted(PACK))
@pytest.mark.parametrize("data", [b"x", TEXT], ids=["short", "long"])
def test_whole_files_come_out_whole(compression: str, data: bytes) -> None:
    assert unpacked(PACK[compression](data), compression) == data


@pytest.mark.parametrize("compression", COMPRESSED)
def test_several_streams_in_one_file(compression: str) -> None:
    assert unpacked(PACK[compression](b"one\n") + PACK[compression](b"two\n"), compression) == b"one\ntwo\n"


@pytest.mark.parametrize("compression", [".gz", ".xz"])
@pytest.mark.parametrize("behind", [b"", b"two"], ids=["at the end", "between streams"])
def test_gzip_and_xz_may_be_padded_with_zeros(compression: str, behind: bytes) -> None:
    more = PACK[compression](behind) if behind else b""
    assert unpacked(PACK[compression](b"one") + bytes(100_000) + more, compression) == b"one" + behind


@pytest.mark.parametrize("compression", COMPRESSED)
def test_what_is_before_a_cut_comes_out_and_the_cut_is_told(compression: str) -> None:
    packed = PACK[compression](random.Random(0).randbytes(300_000) + TEXT)
    for share in (0.5, 0.9):
        got, why = until_damage(blocks(HashedFile(io.BytesIO(packed[: int(len(packed) * share)])), compression))
        assert "cut short" in why
        assert (random.Random(0).randbytes(300_000) + TEXT).startswith(got)
    assert compression == ".bz2" or len(got) > 100_000
    assert until_damage(blocks(HashedFile(io.BytesIO(packed[:-1])), compression))[1]


@pytest.mark.parametrize("compression", COMPRESSED)
def test_a_cut_in_a_later_stream_is_told(compression: str) -> None:
    packed = PACK[compression](b"whole\n") + PACK[compression](TEXT)[:-20]
    got, why = until_damage(blocks(HashedFile(io.BytesIO(packed)), compression))
    assert got.startswith(b"whole\n") and "cut short" in why


@pytest.mark.parametrize("compression", COMPRESSED)
def test_a_flipped_bit_and_foreign_bytes_are_told(compression: str) -> None:
    packed = bytearray(PACK[compression](TEXT))
    packed[len(packed) // 2] ^= 0x10
    assert until_damage(blocks(HashedFile(io.BytesIO(bytes(packed))), compression))[1]
    assert "damaged" in until_damage(blocks(HashedFile(io.BytesIO(b"no such format at all")), compression))[1]
    got, why = until_damage(blocks(HashedFile(io.BytesIO(PACK[compression](b"ok") + b"rubbish" * 9)), compression))
    assert got == b"ok" and why


@pytest.mark.parametrize("compression", COMPRESSED)
@pytest.mark.parametrize("behind", [b"\n", b"\r\n", b"abc"], ids=["one", "two", "three"])
def test_a_few_foreign_bytes_are_told_from_a_stream_that_is_cut_short(compression: str, behind: bytes) -> None:
    packed = PACK[compression](b"whole")
    with pytest.raises(Damaged, match=r"^foreign bytes stand behind its end$") as caught:
        unpacked(packed + behind, compression)
    assert caught.value.ended
    for kept in (1, 2, 5):
        with pytest.raises(Damaged, match=r"^cut short") as caught:
            unpacked(packed + packed[:kept], compression)
        assert not caught.value.ended


@pytest.mark.parametrize("compression", [".gz", ".xz"])
def test_damage_within_a_later_stream_is_no_foreign_end(compression: str) -> None:
    """Something of it was given: the file is not whole before it."""
    later = bytearray(PACK[compression](random.Random(1).randbytes(300_000)))
    later[200_000:200_040] = bytes(40)
    with pytest.raises(Damaged) as caught:
        unpacked(PACK[compression](b"whole\n") + bytes(later), compression)
    assert not caught.value.ended and "foreign" not in str(caught.value)


@pytest.mark.parametrize("compression", COMPRESSED)
def test_an_empty_compressed_file_is_told(compression: str) -> None:
    assert until_damage(blocks(HashedFile(io.BytesIO(b"")), compression)) == (b"", "empty")


@pytest.mark.parametrize("compression", COMPRESSED)
def test_no_block_is_large_however_strongly_it_expands(compression: str) -> None:
    sizes = [len(block) for block in blocks(HashedFile(io.BytesIO(PACK[compression](bytes(64 << 20)))), compression)]
    assert sum(sizes) == 64 << 20
    assert max(sizes) <= 48 << 20


def with_a_large_window(data: bytes, compression: str) -> bytes:
    """As large as `data`, at least: a decoder has to hold so much of what it gave."""
    if compression == ".xz":
        return lzma.compress(data, preset=6)
    parameters = zstandard.ZstdCompressionParameters(window_log=22)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # without the size of the content
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("compression", [".xz", ".zst"])
def test_no_file_makes_its_decoder_take_more_memory_than_is_allowed(
    compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = with_a_large_window(TEXT, compression)
    assert unpacked(packed, compression) == TEXT
    monkeypatch.setattr("colonnade.corpus.streams._WINDOW", 1 << 20)
    got, why = until_damage(blocks(HashedFile(io.BytesIO(packed)), compression))
    assert got == b"" and why.startswith("needs too much memory: more than 1 MiB for what it repeats. Decompress it")
    behind = (lzma.compress(b"x" * 9, preset=0) if compression == ".xz" else PACK[compression](b"x" * 9)) + packed
    assert until_damage(blocks(HashedFile(io.BytesIO(behind)), compression)) == (b"x" * 9, why), "and no foreign bytes"


def test_a_bomb_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colonnade.corpus.streams.BOMB_BYTES", 1 << 20)
    packed = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    got, why = until_damage(blocks(HashedFile(io.BytesIO(packed)), ".zst", max_expansion=1_000))
    assert "bomb" in why and len(got) < 100 << 20
    assert unpacked(gzip.compress(TEXT * 9), ".gz", max_expansion=20) == TEXT * 9, "long, and not dense"


@pytest.mark.parametrize("compression", COMPRESSED)
def test_a_bomb_is_known_by_all_that_it_gave(compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little that is at a time."""
    monkeypatch.setattr("colonnade.corpus.streams.BOMB_BYTES", 6 << 20)
    packed = PACK[compression](bytes(24 << 20))
    got, why = until_damage(blocks(HashedFile(io.BytesIO(packed)), compression, max_expansion=100))
    assert "expands more than 100-fold: a decompression bomb" in why and len(got) < 20 << 20
    assert compression in (".gz", ".zst") or len(got) >= 4 << 20, "what was given before stays"


@pytest.mark.parametrize("compression", COMPRESSED)
def test_a_bomb_of_many_small_streams_is_one(compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte of the file counts once, however many streams it was fed beside."""
    monkeypatch.setattr("colonnade.corpus.streams.BOMB_BYTES", 2 << 20)
    one = PACK[compression](bytes(10_000))
    assert 10_000 / len(one) > 60
    got, why = until_damage(blocks(HashedFile(io.BytesIO(one * 900)), compression, max_expansion=50))
    assert "a decompression bomb" in why and len(got) < 9_000_000


@given(st.lists(st.binary(max_size=40)), st.integers(1, 50))
def test_lines_are_those_of_split(parts: list[bytes], max_bytes: int) -> None:
    whole = b"".join(parts)
    expected = whole.split(b"\n")
    expected = expected if expected[-1] else expected[:-1]
    got = list(lines(iter(parts), max_bytes=max_bytes))
    assert [line.number for line in got] == list(range(1, len(expected) + 1))
    assert [line.size for line in got] == [len(line) for line in expected]
    assert [line.data for line in got] == [line if len(line) <= max_bytes else None for line in expected]


def test_a_giant_line_is_not_held() -> None:
    content = (bytes(1 << 18) for _ in range(200))
    tracemalloc.start()
    assert list(lines(content, max_bytes=1 << 20)) == [Line(1, None, 50 << 20)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 20


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 200))
def test_a_hashed_file_reads_its_range(data: bytes, one: int, other: int) -> None:
    start, stop = sorted((min(one, len(data)), min(other, len(data))))
    file = HashedFile(io.BytesIO(data), start, stop)
    got = b""
    while part := file.read(7):
        got += part
    assert got == data[start:stop] and file.num_bytes == stop - start


@given(st.lists(st.binary(max_size=30)), st.integers(1, 50))
def test_blocks_as_a_file(parts: list[bytes], size: int) -> None:
    stream = io.BufferedReader(BlockStream(iter(parts)), 16)
    got = b""
    while part := stream.read(size):
        got += part
    assert got == b"".join(parts)
