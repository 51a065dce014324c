"""What a token file is known by: found where it is the same, and every kind of change told."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data import identity
from colonnade.data.identity import DataIdentity, differences, identify, parts_of_each, shared_blocks
from colonnade.data.indexed import HEADER, TokenFile
from colonnade.data.remote import open_token_file
from colonnade.data.sidecar import Sidecar
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import DataError
from tests.data.sidecars import write_sidecar

LENGTH = 1_000_003  # tokens, 2 bytes each: 122 blocks


def written(prefix: Path, tokens: np.ndarray, *, documents: int = 10) -> TokenFile:  # type: ignore[type-arg]
    with TokenFileWriter(prefix, np.dtype("<u2")) as writer:
        for part in np.array_split(tokens, documents):
            writer.add_document(part)
    return TokenFile(prefix)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(1).integers(0, 60_000, LENGTH).astype("<u2")


@pytest.fixture(scope="module")
def before(tokens: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> DataIdentity:  # type: ignore[type-arg]
    return identify(written(tmp_path_factory.mktemp("before") / "x", tokens))


def test_the_same_content_elsewhere(tokens: np.ndarray, before: DataIdentity, tmp_path: Path) -> None:  # type: ignore[type-arg]
    now = identify(written(tmp_path / "y", tokens))
    assert now == before and differences(before, now) == [] and len(now.blocks) == 65
    assert DataIdentity.from_json(now.to_json()) == now
    assert str(now).startswith("1,000,003 tokens in 10 documents and 10 sequences of uint16 (index ")


def test_its_line_differs_where_anything_does(before: DataIdentity) -> None:
    """Ranks compare the lines."""
    others = [
        *(replace(before, **{name: getattr(before, name) + 1}) for name in ("tokens", "documents", "sequences")),
        replace(before, dtype="int32"),
        replace(before, index_sha256="0" * 64),
        *(replace(before, blocks=(*before.blocks[:n], "0" * 16, *before.blocks[n + 1 :])) for n in (0, 1, 64)),
        replace(before, blocks=before.blocks[::2]),
    ]
    assert len({str(each) for each in [before, *others]}) == 1 + len(others)


@pytest.mark.parametrize("place", [0, 5, LENGTH // 2, LENGTH - 1])
def test_a_stretch_of_a_64th_is_always_found(
    tokens: np.ndarray,  # type: ignore[type-arg]
    before: DataIdentity,
    tmp_path: Path,
    place: int,
) -> None:
    size = LENGTH // 64 + 1
    start = min(place, LENGTH - size)
    changed = tokens.copy()
    changed[start : start + size] ^= 1
    (found,) = differences(before, identify(written(tmp_path / "y", changed)))
    told = re.fullmatch(
        r"other tokens in \d of 65 blocks that were compared, the first at token ([\d,]+) or near it", found
    )
    assert told is not None
    assert start - identity.BLOCK // 2 <= int(told[1].replace(",", "")) < start + size, "it is where it is said to be"


def test_what_it_can_miss(tokens: np.ndarray, before: DataIdentity, tmp_path: Path) -> None:  # type: ignore[type-arg]
    """As the documentation says: other tokens between the blocks."""
    changed = tokens.copy()
    changed[12_000] ^= 1
    assert identify(written(tmp_path / "y", changed)) == before


def test_other_counts_and_other_lengths(tokens: np.ndarray, before: DataIdentity, tmp_path: Path) -> None:  # type: ignore[type-arg]
    found = differences(before, identify(written(tmp_path / "a", tokens[:-1])))
    assert found == ["1,000,003 tokens, now 1,000,002"]
    found = differences(before, identify(written(tmp_path / "b", tokens, documents=11)))
    assert found == ["10 documents, now 11", "10 sequences, now 11"]
    with TokenFileWriter(tmp_path / "c", np.dtype("<u2")) as writer:
        for part in np.array_split(tokens, 10)[::-1]:
            writer.add_document(part)
    assert differences(before, replace(before, sequences=20)) == ["10 sequences, now 20"]
    assert differences(before, replace(before, dtype="int32")) == ["uint16, now int32"]
    in_part = replace(before, index_bytes=before.index_bytes - 1, index_sha256="0" * 64)
    assert differences(before, in_part) == [], "they were looked at differently, and tell no difference"
    assert any("other lengths" in line for line in differences(before, identify(TokenFile(tmp_path / "c"))))


@pytest.mark.slow
def test_a_long_index_is_read_in_part(tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[type-arg]
    file = written(tmp_path / "x", tokens, documents=100_000)
    whole = identify(file)
    sidecar = Sidecar("0" * 64, 60_000, None, 100_000, LENGTH, LENGTH, ("a",))
    write_sidecar(tmp_path / "x", replace(sidecar, index_sha256=whole.index_sha256))
    assert identify(file) == whole, "the sidecar knows the hash of all of it"
    monkeypatch.setattr(identity, "INDICES_IN_ALL", 1 << 20)
    part = identify(file)
    assert whole.index_bytes == Path(f"{tmp_path}/x.idx").stat().st_size > part.index_bytes == 1 << 20
    assert differences(whole, part) == [], "they were looked at differently, and tell no difference"
    assert identify(file) == part
    assert identify(file, num_files=2).index_bytes == 1 << 19, "what is read of all indices is bounded"
    monkeypatch.setattr(identity, "INDICES_IN_ALL", whole.index_bytes)
    assert identify(file) == whole and identify(file, num_files=2) != whole


def test_of_indices_that_are_too_long_each_is_read_in_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is held against no sum of all of it."""
    file, checked = written(tmp_path / "x", np.arange(1_000), documents=1_000), list[TokenFile]()
    monkeypatch.setattr(TokenFile, "check_index", lambda self: checked.append(self))
    monkeypatch.setattr(identity, "BLOCK", 256)
    whole = identify(file)
    assert checked == [file] and whole.index_bytes == Path(f"{tmp_path}/x.idx").stat().st_size
    write_sidecar(
        tmp_path / "x", Sidecar("0" * 64, 60_000, None, 1_000, 1_000, 0, ("a",), index_sha256=whole.index_sha256)
    )
    monkeypatch.setattr(identity, "INDICES_IN_ALL", 8_192)
    assert [identify(file, num_files=number).index_bytes for number in (1, 2)] == [8_192, 4_096]
    assert checked == [file] and differences(whole, identify(file)) == []


def test_of_a_long_index_both_ends_are_read_and_what_is_evenly_spread_between(tmp_path: Path) -> None:
    """Where the last documents begin stands at its end."""
    path, content = tmp_path / "x.idx", bytearray(np.random.default_rng(0).bytes(1_000_001))
    block, limit = 4 * identity.BLOCK, 5 * 4 * identity.BLOCK

    def hashed() -> tuple[int, str]:
        path.write_bytes(content)
        return identity._hash_index(path, limit)

    before, seen = hashed(), []
    assert before[0] == limit
    for place in [*range(0, len(content), block // 4), len(content) - 1]:
        content[place] ^= 1
        seen.append(hashed() != before)
        content[place] ^= 1
    assert seen[0] and seen[-1] and limit / len(content) == pytest.approx(sum(seen) / len(seen), abs=0.1)
    assert seen == seen[::-1] or abs(sum(seen[: len(seen) // 2]) - sum(seen[len(seen) // 2 :])) <= 4


@pytest.mark.parametrize("num_files", [1, 16_384, 20_000, 1_000_000])
def test_a_short_index_among_very_many_files_is_read_whole(
    tokens: np.ndarray,  # type: ignore[type-arg]
    tmp_path: Path,
    num_files: int,
) -> None:
    """Its share of what is read of all indices is less than one block of those that are read in part."""
    file = written(tmp_path / "x", tokens, documents=3_000)
    index = Path(f"{tmp_path}/x.idx").read_bytes()
    assert 1 << 15 < len(index) < 4 * identity.BLOCK
    found = identify(file, num_files=num_files)
    assert (found.index_bytes, found.index_sha256) == (len(index), hashlib.sha256(index).hexdigest())


@given(st.integers(1, 10**6))
def test_what_is_read_is_bounded(num_files: int) -> None:
    parts = parts_of_each(num_files)
    assert parts & (parts - 1) == 0 and 4 <= parts <= 64
    assert parts == 4 or parts * num_files <= 4096
    assert parts == 64 or 2 * parts * num_files > 4096, "and no less is looked at than may be"


@pytest.mark.parametrize("num_files", [1, 64, 65, 1000, 5000])
def test_few_blocks_are_some_of_many(before: DataIdentity, tokens: np.ndarray, tmp_path: Path, num_files: int) -> None:  # type: ignore[type-arg]
    one, other = shared_blocks(before.blocks, identify(written(tmp_path / "y", tokens), num_files=num_files).blocks)
    assert one == other and len(one) == parts_of_each(num_files) + 1


def test_a_url_asks_for_two_blocks(before: DataIdentity, tokens: np.ndarray, tmp_path: Path) -> None:  # type: ignore[type-arg]
    written(tmp_path / "y", tokens)
    now = identify(open_token_file(f"file://{tmp_path}/y", cache=str(tmp_path / "cache")))
    assert len(now.blocks) == 2 and differences(before, now) == []


def test_other_tokens_at_the_end_of_a_url_are_found(before: DataIdentity, tokens: np.ndarray, tmp_path: Path) -> None:  # type: ignore[type-arg]
    """Whether both were files at URLs, or one of them lay on a local disk."""
    changed = tokens.copy()
    changed[-1] ^= 1
    for name, content in (("x", tokens), ("y", changed)):
        written(tmp_path / name, content)
    remote, now = (identify(open_token_file(f"file://{tmp_path}/{name}", cache=str(tmp_path / "c"))) for name in "xy")
    told = ["other tokens in 1 of 2 blocks that were compared, the first at token 1,000,003 or near it"]
    assert differences(remote, now) == differences(before, now) == told
    assert differences(remote, identify(TokenFile(tmp_path / "y"))) == told


def test_the_first_of_several_other_blocks_is_told(before: DataIdentity) -> None:
    blocks = [("0" * 16 if place in (2, 30) else block) for place, block in enumerate(before.blocks)]
    (found,) = differences(before, replace(before, blocks=tuple(blocks)))
    assert "in 2 of 65 blocks" in found and f"the first at token {LENGTH // 64 * 2:,} or near it" in found


def test_a_file_of_less_than_a_block(tmp_path: Path) -> None:
    assert len(set(identify(written(tmp_path / "x", np.arange(20, dtype="<u2"))).blocks)) == 1


def test_an_index_that_is_not_the_sidecars(tokens: np.ndarray, tmp_path: Path) -> None:  # type: ignore[type-arg]
    """Damage that still is an index: a document ends one token earlier, the next begins there."""
    with TokenFileWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        for part in np.array_split(tokens[:1000], 10):
            writer.add_document(part)
        writer.close(Sidecar("0" * 64, 60_000, None, 10, 1000, 5000, ("a",)))
    identify(TokenFile(tmp_path / "x"))
    content = bytearray((tmp_path / "x.idx").read_bytes())
    offset = HEADER.size + 4 * 10 + 8 * 3
    content[offset] ^= 2
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(DataError, match=r"x.idx is damaged, or not the one that .*x.json was written with"):
        identify(TokenFile(tmp_path / "x"))
