"""The text of a test set: UTF-8, compressed or not, whole."""

import lzma
import zlib
from pathlib import Path

from colonnade.corpus.streams import COMPRESSIONS, Damaged, HashedFile, blocks
from colonnade.errors import DataError


def compression_of(path: Path) -> str:
    """The ending of a compressed file; "" of any other."""
    return path.suffix if path.suffix in COMPRESSIONS else ""


def text_of(path: Path) -> str:
    """The whole text, line ends as they are. DataError where it cannot be read."""
    compression = compression_of(path)
    try:
        with path.open("rb") as raw:
            return b"".join(blocks(HashedFile(raw), compression)).decode("utf-8-sig")  # some editors begin with a mark
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8 ({error.reason}). Copy it again, or convert it.") from None
    except (OSError, Damaged, zlib.error, lzma.LZMAError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{path} cannot be read: {reason}. Name a text or a .jsonl, compressed or not.") from None


def lines_of(path: Path) -> list[str]:
    """Lines, cut at line feeds alone."""
    return text_of(path).split("\n")
