"""Checkpoints, configurations, token files and tokenizers that are damaged or forged: refused in words, or right."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from colonnade.checkpoint.manifest import verify
from colonnade.checkpoint.names import MANIFEST
from colonnade.config.load import loads
from colonnade.data.indexed import TokenFile
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ColonnadeError
from colonnade.mesh.mesh import Mesh
from colonnade.serving import trained
from tests.checkpoint import forging
from tests.drills.runs import Place
from tests.runs import whole_tensors

WRITTEN = Path(__file__).parents[1] / "checkpoint" / "written"
ODD = (0, 1, -1, 2**31, 2**63, 10**30, 0.5, True, None, "", "..", "/etc/passwd", [], {}, [[]], "\0", "NaN")


def checkpoint_drill(place: Place, *, seed: int, tries: int) -> dict[str, Any]:
    """A checkpoint changed in one of many ways, and read: by a model in use, byte for byte, and tensor by tensor."""
    draws, counts = Random(f"checkpoint {seed}"), {"refused": 0, "right": 0}
    layout = draws.choice(["serial", "tp2", "pp2_dp2_zero2"])
    good = WRITTEN / layout / "step_00000003"
    expected, problems = whole_tensors(good), list[str]()
    for number in range(tries):
        path = place.folder / "damaged" / good.name
        shutil.rmtree(path.parent, ignore_errors=True)
        shutil.copytree(good, path)
        name = draws.choice(sorted(WAYS))
        forged = WAYS[name](path, draws)
        wrong = _read(path, None if forged else expected, counts)
        problems += [f"{name}, try {number}: {line}" for line in wrong]
    return {"tries": tries, **counts, "problems": problems}


def _read(path: Path, expected: dict[str, torch.Tensor] | None, counts: dict[str, int]) -> list[str]:
    """What is wrong with the answers that a changed checkpoint gets; a forged one may say other numbers."""
    problems, refused = [], 0
    readers: list[Callable[[], object]] = [
        lambda: verify(path),
        lambda: trained.open_trained(path, Mesh(), torch.device("cpu")),
        lambda: whole_tensors(path),
    ]
    for number, reader in enumerate(readers):
        try:
            found = reader()
        except ColonnadeError:
            refused += 1
            continue
        except BaseException as error:  # noqa: BLE001  whatever it is, that is what the drill looks for
            problems.append(f"reader {number} raises {type(error).__name__}: {str(error)[:200]}")
            continue
        if number == 2 and expected is not None and isinstance(found, dict) and not _equal(found, expected):
            problems.append("it is read, and its numbers are others")
    counts["refused" if refused else "right"] += 1
    return problems


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(x, expected[name]) for name, x in found.items())


def _some(path: Path, draws: Random) -> Path:
    return path / draws.choice(sorted(os.listdir(path)))


def _bytes(path: Path, draws: Random, change: Callable[[bytearray], object]) -> bool:
    file = _some(path, draws)
    content = bytearray(file.read_bytes())
    change(content)
    file.write_bytes(content)
    return False


def _replaced(path: Path, draws: Random, make: Callable[[Path], object]) -> bool:
    file = _some(path, draws)
    file.rename(path.parent / "aside")
    make(file)
    return False


def _exchanged(path: Path, draws: Random) -> bool:
    one, other = _some(path, draws), _some(path, draws)
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)
    return False


def _forged(path: Path, draws: Random) -> bool:
    """A value of the manifest is another, and its hash is right again."""
    content = forging.content_of(path)
    at: Any = content
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        if not keys:
            return False
        key = draws.choice(list(keys))
        if not isinstance(at[key], dict | list) or draws.random() < 0.2:
            break
        at = at[key]
    if draws.random() < 0.2:
        del at[key]
    else:
        at[key] = draws.choice([*ODD, draws.randrange(10**6)])
    forging.write(path, content)
    return True


def _forged_archive(path: Path, draws: Random) -> bool:
    """Bytes of a tensor file are others, and its hash is right again: lengths and offsets may lie."""
    file = draws.choice(sorted(path.glob("*.distcp")))
    pieces = [p for t in forging.content_of(path)["tensors"].values() for p in t["pieces"] if p[2] == file.name]
    content = bytearray(file.read_bytes())
    for _ in range(draws.randint(1, 4)):
        *_, start, length = draws.choice(pieces)
        at = start + length - draws.randint(1, min(400, length))
        content[at : at + 4] = draws.randbytes(4)[: len(content) - at]
    file.write_bytes(content)
    forging.list_again(path, file.name)
    return True


def _changed_text(path: Path, draws: Random, name: str) -> bool:
    """A text of the checkpoint is changed, and listed with its new hash."""
    (path / name).write_bytes(_mutated((path / name).read_bytes(), draws))
    forging.list_again(path, name)
    return True


def _zeros(content: bytearray, start: int) -> None:
    content[start:] = bytes(len(content) - start)


def _anything(file: Path, draws: Random) -> bool:
    file.write_bytes(_mutated(file.read_bytes(), draws))
    return False


def _renamed(path: Path, draws: Random) -> bool:
    file = _some(path, draws)
    file.rename(path / draws.choice([file.name.upper() + "x", ".hidden", "step_1"]))
    return False


WAYS: dict[str, Callable[[Path, Random], bool]] = {
    "a bit": lambda p, d: _bytes(p, d, lambda c: c.__setitem__(d.randrange(len(c)), d.randrange(256))),
    "zeros to the end": lambda p, d: _bytes(p, d, lambda c: _zeros(c, d.randrange(len(c)))),
    "cut short": lambda p, d: _bytes(p, d, lambda c: c.__delitem__(slice(d.randrange(len(c)), None))),
    "longer": lambda p, d: _bytes(p, d, lambda c: c.extend(d.randbytes(d.randint(1, 999)))),
    "empty": lambda p, d: _bytes(p, d, lambda c: c.clear()),
    "a byte less": lambda p, d: _bytes(p, d, lambda c: c.__delitem__(d.randrange(len(c)))),
    "lost": lambda p, d: bool(_some(p, d).unlink()),
    "renamed": _renamed,
    "exchanged": _exchanged,
    "a folder": lambda p, d: _replaced(p, d, lambda file: file.mkdir()),
    "a link": lambda p, d: _replaced(p, d, lambda file: file.symlink_to(p.parent / "aside")),
    "a dangling link": lambda p, d: _replaced(p, d, lambda file: file.symlink_to("nowhere")),
    "a link to itself": lambda p, d: _replaced(p, d, lambda file: file.symlink_to(file.name)),
    "a FIFO": lambda p, d: _replaced(p, d, lambda file: os.mkfifo(file)),
    "a forged manifest": _forged,
    "a forged archive": _forged_archive,
    "another configuration": lambda p, d: _changed_text(p, d, "config.toml"),
    "another tokenizer": lambda p, d: _changed_text(p, d, "tokenizer.json"),
    "a manifest of anything": lambda p, d: _anything(p / MANIFEST, d),
}  # fmt: skip
"""Each changes the checkpoint in a folder, and tells whether what it says may be other numbers now."""


SIGNS = (b"[", b"]", b"{", b"}", b'"', b"=", b"-", b"9" * 30, b"9" * 5000, b"\n", b"\0", b"\xff", b"nan")


def _mutated(content: bytes, draws: Random) -> bytes:
    """A text with a few bytes, or pieces that mean something, removed, doubled or put in."""
    text = bytearray(content)
    for _ in range(draws.randint(1, 5)):
        at = draws.randrange(len(text) + 1)
        kind = draws.randrange(4)
        if kind == 0:
            del text[at : at + draws.choice([1, 1, 10, 1000])]
        elif kind == 1:
            text[at:at] = text[at : at + draws.choice([1, 10, 100])]
        elif kind == 2:
            text[at:at] = draws.choice(SIGNS)
        else:
            text[at : at + 1] = draws.randbytes(1)
    return bytes(text)


def file_drill(place: Place, *, seed: int, tries: int) -> dict[str, Any]:
    """Configurations, token files and tokenizers with changed bytes."""
    draws, counts, problems = Random(f"files {seed}"), {"refused": 0, "read": 0}, list[str]()
    config = (WRITTEN / "serial/step_00000003/config.toml").read_bytes()
    tokenizer = (WRITTEN / "serial/step_00000003/tokenizer.json").read_bytes()
    readers: list[Callable[[], object]] = [
        lambda: loads(_mutated(config, draws).decode()),
        lambda: _token_file(place, draws),
        lambda: _tokenizer(_mutated(tokenizer, draws)),
    ]
    for number in range(tries):
        try:
            readers[number % len(readers)]()
            counts["read"] += 1
        except (ColonnadeError, UnicodeDecodeError):  # what is no text at all is met where files are read
            counts["refused"] += 1
        except BaseException as error:  # noqa: BLE001  whatever it is, that is what the drill looks for
            problems.append(f"reader {number % len(readers)} raises {type(error).__name__}: {str(error)[:200]}")
    return {"tries": tries, **counts, "problems": problems}


def _token_file(place: Place, draws: Random) -> None:
    """Every document of a token file of which one of the three files is changed."""
    prefix = place.folder / "tokens" / "changed"
    prefix.parent.mkdir(exist_ok=True)
    changed = draws.choice([".bin", ".idx", ".idx", ".json"])
    for ending in (".bin", ".idx", ".json"):
        content = Path(f"{place.corpus.prefix}{ending}").read_bytes()
        Path(f"{prefix}{ending}").write_bytes(_mutated(content, draws) if ending == changed else content)
    file = TokenFile(prefix)
    for document in range(file.num_documents):
        file.document_start(document)
    file.read(0, min(file.num_tokens, 10_000))


def _tokenizer(content: bytes) -> None:
    tokenizer = Tokenizer.from_json(content.decode())
    json.dumps([tokenizer.vocab_size, tokenizer.end_of_document])
    tokenizer.decode(tokenizer.encode("the whale and the ship")[:100])
