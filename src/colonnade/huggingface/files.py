"""The tensors of a folder, found without reading them, and read one at a time.

Files that may come from strangers: names of an index stay in the folder, what is opened is a plain file (or a link to
one: the hub's own cache is made of links), headers are checked by `safetensors`, and nothing is unpickled.
"""

import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from colonnade.checkpoint.plan import names_in_words
from colonnade.checkpoint.schema import clip, parse
from colonnade.config.numbers import counted
from colonnade.errors import CheckpointError

WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"
MOST_BYTES = 1 << 26  # of a JSON file
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
AGAIN = "Fetch the folder again (`hf download` goes on where it stopped)."


@dataclass(frozen=True)
class Stored:
    """One tensor of a folder."""

    file: Path
    name: str
    """In the file."""
    shape: tuple[int, ...]
    kind: str
    """Its number format, as safetensors calls it. Only those of `DTYPES` can be read."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.kind]

    def read(self) -> Tensor:
        """Its numbers, in memory of their own."""
        with opened(self.file) as file:
            found: Tensor = file.get_tensor(self.name)
            return found.clone()


def tensors_in(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's weights by its name. CheckpointError for what cannot be read."""
    found: dict[str, Stored] = {}
    for path in _files(folder):
        for stored in _in_file(path):
            if stored.name in found:
                raise CheckpointError(
                    f"{path} and {found[stored.name].file.name} both have a tensor {clip(stored.name)}: which one is "
                    f"the model's is unknown. Leave the files of one model in {folder}, or its {INDEX}."
                )
            found[stored.name] = stored
    _check_index(folder, found)
    return found


def _files(folder: Path) -> list[Path]:
    """The files that hold the model: model.safetensors, those of the index, or all that look like it."""
    if (folder / WHOLE).exists():
        return [folder / WHOLE]
    if (folder / INDEX).exists():
        names = sorted(set(_weight_map(folder).values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of the {len(names)} files that its {INDEX} names: "
                f"{names_in_words(missing)}. {AGAIN}"
            )
        return [folder / name for name in names]
    found = sorted(folder.glob("model-*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickled = sorted(path.name for ending in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(ending))
    has = f" It has {names_in_words(pickled)}, which may run code when read." if pickled else ""
    raise CheckpointError(
        f"{folder} has no weights: there is no {WHOLE}, no {INDEX} and no other *.safetensors in it.{has} Fetch or "
        f"save the model as safetensors (`save_pretrained` of transformers does)."
    )


def _weight_map(folder: Path) -> dict[str, str]:
    content = read_json(folder / INDEX)
    written = content.get("weight_map")
    if not isinstance(written, dict) or not written or not all(isinstance(name, str) for name in written.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map from tensors to files. {AGAIN}")
    outside = [name for name in written.values() if Path(name).name != name or name in ("", ".", "..")]
    if outside:
        raise CheckpointError(
            f"{folder / INDEX} names {clip(repr(outside[0]))}, which is no file in its own folder: only those are "
            f"opened. Get the folder again from where it came from."
        )
    return written


def _check_index(folder: Path, found: Mapping[str, Stored]) -> None:
    """A tensor lies where the index says, if there is one that counts."""
    if (folder / WHOLE).exists() or not (folder / INDEX).exists():
        return
    named = _weight_map(folder)
    wrong = {name for name, file in named.items() if name not in found or found[name].file.name != file}
    if wrong:
        raise CheckpointError(
            f"{folder / INDEX} names {counted(len(wrong), 'tensor')} in files that do not have them: "
            f"{names_in_words(map(clip, wrong))}. Its files belong to different models. {AGAIN}"
        )


def _in_file(path: Path) -> Iterator[Stored]:
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118  it is no dict
            part = file.get_slice(name)
            yield Stored(path, name, tuple(part.get_shape()), str(part.get_dtype()))


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. CheckpointError if it is damaged, within the block too."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is no plain file. {AGAIN}")
        with safe_open(str(path), framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return CheckpointError(f"{path} cannot be read as safetensors: {clip(why)}. It is damaged or cut off. {AGAIN}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. CheckpointError if it is none."""
    try:
        if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{path} is no plain file of at most {MOST_BYTES:,} bytes. {AGAIN}")
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {clip(str(error))}. {AGAIN}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no JSON object. {AGAIN}")
    return content
