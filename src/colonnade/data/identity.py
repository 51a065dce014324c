"""Which data a token file holds: enough to tell that it is the same file, or not, wherever it lies.

    counts    tokens, documents, sequences, dtype      of the header and the sizes of both files
    index     SHA-256 of the .idx                      all of it, or blocks where it is long
    blocks    a digest each of some 16 KiB of .bin     the first, the last, and evenly spread between them

What a run reads for it is bounded, however much data it has: 4,097 blocks (64 MiB) of tokens, but at least 5 blocks a
file and at most 65, and 1 GiB of indices. A file at a URL shows its first and last block only: each costs a request.

What it finds for sure: another number of tokens, documents or sentences; another place of a document (where the whole
index is read); a stretch of other tokens that is longer than a 64th of the file (with 65 blocks). What it can miss:
other tokens between the blocks, in documents of the same lengths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from colonnade.data.indexed import TokenFile, idx_path
from colonnade.data.sidecar import read_sidecar, sidecar_path
from colonnade.errors import DataError
from colonnade.storage import is_remote

BLOCK = 1 << 14  # bytes of .bin that are hashed together
MOST_PARTS, FEWEST_PARTS = 64, 4  # of a file; there is a block where each begins, and one at the end
BLOCKS_IN_ALL = 4096
INDICES_IN_ALL = 1 << 30  # bytes
_DIGITS = 16  # hexadecimal, of a block's digest: 64 bits


@dataclass(frozen=True)
class DataIdentity:
    """What a token file is known by."""

    tokens: int
    documents: int
    sequences: int
    dtype: str
    index_bytes: int
    """Bytes of the .idx that were hashed: all of them, or some."""
    index_sha256: str
    blocks: tuple[str, ...]
    """Digests of blocks at 0/n, 1/n, … n/n of the file, n a power of two."""

    def to_json(self) -> dict[str, Any]:
        """As it stands in a checkpoint's manifest."""
        return asdict(self) | {"blocks": " ".join(self.blocks)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> DataIdentity:
        """The inverse of `to_json`."""
        return cls(**{**fields, "blocks": tuple(fields["blocks"].split())})

    def __str__(self) -> str:
        """One line that differs where identities do."""
        blocks = hashlib.sha256(" ".join(self.blocks).encode()).hexdigest()
        return (
            f"{self.tokens:,} tokens in {self.documents:,} documents and {self.sequences:,} sequences of {self.dtype} "
            f"(index {self.index_sha256[:12]}, {len(self.blocks)} blocks {blocks[:12]})"
        )


def identify(file: TokenFile, *, num_files: int = 1) -> DataIdentity:
    """The identity of a token file, one of `num_files` of a run.

    DataError if the index, read as a whole, is not the one that its sidecar was written with, or contradicts itself.
    """
    index = idx_path(file.local_prefix)
    num_bytes, digest = _hash_index(index, INDICES_IN_ALL // num_files)
    sidecar = read_sidecar(file)
    written = None if sidecar is None else sidecar.index_sha256
    is_whole = num_bytes == index.stat().st_size
    if written is not None and is_whole and digest != written:
        raise DataError(
            f"{idx_path(file.prefix)} is damaged, or not the one that {sidecar_path(file.prefix)} was written with: "
            f"its SHA-256 is {digest[:12]}…, not {written[:12]}…. Documents would begin in other places. Copy all "
            "three files again from one source, or tokenize again."
        )
    if is_whole:
        file.check_index()
    parts = 1 if is_remote(file.prefix) else parts_of_each(num_files)
    return DataIdentity(
        file.num_tokens,
        file.num_documents,
        file.num_sequences,
        str(file.dtype),
        num_bytes,
        digest,
        tuple(_block(file, part, parts) for part in range(parts + 1)),
    )


def parts_of_each(num_files: int) -> int:
    """Into how many parts each of so many files is cut by its blocks: a power of two."""
    share = BLOCKS_IN_ALL // num_files
    return min(MOST_PARTS, max(FEWEST_PARTS, 1 << (share.bit_length() - 1) if share else 0))


def differences(before: DataIdentity, now: DataIdentity) -> list[str]:
    """What differs, in words; empty where they are the same as far as both were looked at."""
    counts = [
        f"{getattr(before, name):,} {what}, now {getattr(now, name):,}"
        for name, what in (("tokens", "tokens"), ("documents", "documents"), ("sequences", "sequences"))
        if getattr(before, name) != getattr(now, name)
    ]
    if before.dtype != now.dtype:
        counts.append(f"{before.dtype}, now {now.dtype}")
    if counts:
        return counts
    found = []
    if before.index_bytes == now.index_bytes and before.index_sha256 != now.index_sha256:
        found.append("its documents have other lengths (another .idx)")
    blocks, others = shared_blocks(before.blocks, now.blocks)
    places = [place for place, (one, other) in enumerate(zip(blocks, others, strict=True)) if one != other]
    if places:
        size = now.tokens // max(1, len(blocks) - 1)
        found.append(
            f"other tokens in {len(places)} of {len(blocks)} blocks that were compared, the first at token "
            f"{places[0] * size:,} or near it"
        )
    return found


def shared_blocks(one: Sequence[str], other: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The blocks of two identities that lie at the same places: all of the shorter list, some of the longer."""
    parts = min(len(one), len(other)) - 1
    return tuple(each[:: (len(each) - 1) // parts] for each in (one, other)) if parts > 0 else ((), ())  # type: ignore[return-value]


def _block(file: TokenFile, part: int, parts: int) -> str:
    """The digest of the block where part `part` of `parts` begins; part `parts` is the end."""
    count = min(BLOCK // file.dtype.itemsize, file.num_tokens)
    start = (file.num_tokens - count) * part // parts
    return hashlib.sha256(file.read(start, count).tobytes()).hexdigest()[:_DIGITS]


def _hash_index(path: Path, limit: int) -> tuple[int, str]:
    """(bytes, SHA-256) of a .idx: of all of it, or of its header and evenly spread blocks that make up `limit`."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        if size <= max(limit, 4 * BLOCK):
            while block := stream.read(1 << 22):
                digest.update(block)
            return size, digest.hexdigest()
        count = max(2, limit // (4 * BLOCK))
        for number in range(count):
            stream.seek((size - 4 * BLOCK) * number // (count - 1))
            digest.update(stream.read(4 * BLOCK))
    return count * 4 * BLOCK, digest.hexdigest()
