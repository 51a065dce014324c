"""The tensors of a folder, found without reading them, and read one at a time.

Files that may come from strangers: names of an index stay in the folder, what is opened is a plain file (or a link to
one: the hub's own cache is made of links), headers are checked by `safetensors`, and of pickles only tensors are let
through (`pickled.py`).
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
from colonnade.huggingface.pickled import Extent, load_pickled

WHOLE = "model.safetensors"
INDEX = f"{WHOLE}.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = f"{PICKLED}.index.json"
MOST_BYTES = 1 << 26  # of a JSON file
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODES = {dtype: code for code, dtype in DTYPES.items()}
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
    place: Extent | None = None
    """In a file of `torch.save`."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.kind]

    def read(self) -> Tensor:
        """Its numbers, in memory of their own."""
        if self.place is not None:
            return self.place.read()
        with opened(self.file) as file:
            found: Tensor = file.get_tensor(self.name)
            return found.clone()


def tensors_in(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's weights by its name. CheckpointError for what cannot be read."""
    found: dict[str, Stored] = {}
    for path in weight_files(folder):
        for stored in tensors_of_file(path):
            if stored.name in found:
                raise CheckpointError(
                    f"{path} and {found[stored.name].file.name} both have a tensor {clip(stored.name)}: which one is "
                    f"the model's is unknown. Leave the files of one model in {folder}, or its {INDEX}."
                )
            found[stored.name] = stored
    _check_index(folder, found)
    return found


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the model: one, those of an index, or all that look like it; safetensors before others.
    What is hidden are attributes, of macOS.
    """
    for whole, index in ((WHOLE, INDEX), (PICKLED, PICKLED_INDEX)):
        if (folder / whole).exists():
            return [folder / whole]
        if (folder / index).exists():
            return _of_index(folder / index)
        found = sorted(folder.glob("model-*.safetensors")) or sorted(folder.glob("[!.]*.safetensors"))
        if found:
            return found
    raise CheckpointError(
        f"{folder} has no weights: there is no {WHOLE}, no {INDEX}, no other *.safetensors and no {PICKLED} in it. "
        f"Fetch or save the model as safetensors (`save_pretrained` of transformers does)."
    )


def _of_index(index: Path) -> list[Path]:
    names = sorted(set(_weight_map(index).values()))
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {len(missing)} of the {len(names)} files that its {index.name} names: "
            f"{names_in_words(missing)}. {AGAIN}"
        )
    return [index.parent / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index)
    written = content.get("weight_map")
    if not isinstance(written, dict) or not written or not all(isinstance(name, str) for name in written.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files. {AGAIN}")
    outside = [name for name in written.values() if Path(name).name != name or name in ("", ".", "..")]
    if outside:
        raise CheckpointError(
            f"{index} names {clip(repr(outside[0]))}, which is no file in its own folder: only those are "
            f"opened. Get the folder again from where it came from."
        )
    return written


def _check_index(folder: Path, found: Mapping[str, Stored]) -> None:
    """A tensor lies where the index says, if there is one that counts."""
    index = folder / (PICKLED_INDEX if any(_is_pickled(stored.file) for stored in found.values()) else INDEX)
    if index.with_name(index.name.removesuffix(".index.json")).exists() or not index.exists():
        return
    named = _weight_map(index)
    wrong = {name for name, file in named.items() if name not in found or found[name].file.name != file}
    if wrong:
        raise CheckpointError(
            f"{index} names {counted(len(wrong), 'tensor')} in files that do not have them: "
            f"{names_in_words(map(clip, wrong))}. Its files belong to different models. {AGAIN}"
        )


def _is_pickled(path: Path) -> bool:
    return path.suffix == ".bin"


def tensors_of_file(path: Path) -> Iterator[Stored]:
    """Every tensor of one file. CheckpointError for one that is damaged, or has more than tensors."""
    if _is_pickled(path):
        for name, x in load_pickled(path).items():
            yield Stored(path, name, x.shape, CODES.get(x.dtype, str(x.dtype)), x)
        return
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
