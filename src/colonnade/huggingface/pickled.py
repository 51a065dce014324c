"""State dicts that `torch.save` has written (pytorch_model.bin), read as data.

Of what a pickle can say only tensors in a dict are let through (`weights_only`), and no code runs. Numbers stay in the
file until they are asked for.
"""

import pickle
import stat
from pathlib import Path

import torch
from torch import Tensor

from colonnade.checkpoint.schema import clip
from colonnade.errors import CheckpointError


def load_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, as views of it. CheckpointError for anything but a dict of plain tensors."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is no plain file. Fetch the folder again.")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError, LookupError, OSError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as a state dict of tensors alone: {clip(why)} It is damaged, older than torch 1.6, "
            f"or holds something else, which is not run. Get the model as safetensors."
        ) from None
    size = path.stat().st_size
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise CheckpointError(
            f"{path} is no state dict: it holds a {type(found).__name__}. Get the model as safetensors."
        )
    odd = [key for key, x in found.items() if not _is_plain(x, size)]
    if odd:
        raise CheckpointError(
            f"{path} has {clip(repr(odd[0]))}, which is no plain tensor that lies in the file. Get the model as "
            f"safetensors."
        )
    return dict(found)


def _is_plain(x: object, size: int) -> bool:
    """A strided tensor, no larger than its file: one number repeated is none."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_quantized and x.nbytes <= size
