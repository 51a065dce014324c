"""Tables of numbers as small pictures: a PNG with a palette, written by hand, since it is 40 lines. Pure.

Format: W3C, "Portable Network Graphics", second edition: a signature, then chunks of length, name, content and CRC.
"""

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

_ANCHORS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""From low to high: equal steps look equal, also to eyes that tell red from green badly (viridis)."""
COLOURS = 254
NOTHING = 255
"""The index of a cell without a number: transparent."""


def palette() -> list[tuple[int, int, int]]:
    """The colours of indices 0 to 253."""
    places = np.linspace(0, len(_ANCHORS) - 1, COLOURS)
    channels = [np.interp(places, range(len(_ANCHORS)), [anchor[c] for anchor in _ANCHORS]) for c in range(3)]
    return [(round(r), round(g), round(b)) for r, g, b in zip(*channels, strict=True)]


def indices(table: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    """Numbers between low and high as places in the palette."""
    span = high - low or 1.0
    shares = np.clip((np.nan_to_num(table, nan=low) - low) / span, 0, 1)
    return np.where(np.isfinite(table), np.round(shares * (COLOURS - 1)), NOTHING).astype(np.uint8)


def png(cells: NDArray[np.uint8]) -> str:
    """A data: URL of a picture with a pixel a cell; `cells` [rows, columns]."""
    rows, columns = cells.shape
    colours = b"".join(bytes(colour) for colour in palette())
    lines = b"".join(b"\0" + cells[row].tobytes() for row in range(rows))
    content = (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0))
        + _chunk(b"PLTE", colours + bytes(3 * (NOTHING + 1) - len(colours)))
        + _chunk(b"tRNS", b"\xff" * NOTHING + b"\0")
        + _chunk(b"IDAT", zlib.compress(lines, 9))
        + _chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
