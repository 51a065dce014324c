"""Which files a checkpoint of Megatron-LM has: one for each tensor- and pipeline-parallel rank.

latest_checkpointed_iteration.txt            a number, or "release"
iter_0005000/mp_rank_00/model_optim_rng.pt         tp rank 0, without pipeline parallelism
iter_0005000/mp_rank_00_001/model_optim_rng.pt     tp rank 0, stage 1
mp_rank_00/model_optim_rng.pt                      older: straight in the folder
"""

import re
from pathlib import Path
from typing import NamedTuple

from colonnade.checkpoint.plan import names_in_words
from colonnade.checkpoint.schema import clip
from colonnade.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
FILES = ("model_optim_rng.pt", "model_rng.pt")
_RANK = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?")
_EXPERT = re.compile(r"mp_rank_\d+_\d+_\d+")
_ITERATION = re.compile(r"iter_(\d{7,})|release")
_MOST = 32  # characters of the tracker


class Ranks(NamedTuple):
    """The files of one checkpoint."""

    folder: Path
    iteration: int | None
    """That its name says; None: it says none."""
    files: tuple[tuple[Path, ...], ...]
    """By stage, and then by tensor-parallel rank."""

    @property
    def tp(self) -> int:
        return len(self.files[0])

    @property
    def pp(self) -> int:
        return len(self.files)


def is_megatron(path: Path) -> bool:
    """Whether a path looks like a checkpoint of Megatron-LM, or the folder of several."""
    return (path / TRACKER).exists() or any(path.glob("mp_rank_*"))


def find_ranks(path: Path) -> Ranks:
    """The files of the checkpoint that a path names. CheckpointError where some are missing."""
    folder = path if not (path / TRACKER).exists() or any(path.glob("mp_rank_*")) else path / _latest(path / TRACKER)
    named = _ITERATION.fullmatch(folder.absolute().name)
    found = _found(folder)
    tp, pp = (1 + max(rank[dim] for rank in found) for dim in (0, 1))
    missing = [_name(t, p, pp) for p in range(pp) for t in range(tp) if (t, p) not in found]
    if missing:
        raise CheckpointError(
            f"{folder} has ranks of tensor-parallel size {tp} and pipeline-parallel size {pp}, and lacks "
            f"{len(missing)} of their {tp * pp} folders: {names_in_words(missing)}. Copy all of them."
        )
    files = tuple(tuple(found[t, p] for t in range(tp)) for p in range(pp))
    return Ranks(folder, int(named[1]) if named and named[1] else None, files)


def _latest(tracker: Path) -> str:
    """The folder that the tracker names."""
    try:
        with tracker.open("rb") as file:
            text = file.read(_MOST).decode("ascii", "replace").strip()
    except OSError as error:
        raise CheckpointError(f"{tracker} cannot be read: {error.strerror}.") from None
    name = text if text == "release" else f"iter_{int(text):07d}" if re.fullmatch(r"\d{1,12}", text) else None
    if name is None:
        raise CheckpointError(
            f"{tracker} holds {clip(repr(text))}: no number of an iteration, and not release. Name the iter_… folder."
        )
    if not (tracker.parent / name).is_dir():
        raise CheckpointError(
            f"{tracker} says {text}, and there is no folder {name} beside it. Copy it, or name another iter_… folder."
        )
    return name


def _found(folder: Path) -> dict[tuple[int, int], Path]:
    """[tp rank, stage] -> file."""
    found: dict[tuple[int, int], Path] = {}
    forms = set()
    for each in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(each.name)
        if match is None:
            why = "experts of a mixture, and there are none here" if _EXPERT.fullmatch(each.name) else "no rank's name"
            raise CheckpointError(f"{each} is {why}. Known are mp_rank_XX and mp_rank_XX_YYY.")
        file = next((each / name for name in FILES if (each / name).is_file()), None)
        if file is None:
            raise CheckpointError(f"{each} has no {FILES[0]}. Copy the whole checkpoint.")
        forms.add(match[2] is None)
        found[int(match[1]), int(match[2] or 0)] = file
    if not found:
        distributed = (folder / "metadata.json").exists() or any(folder.glob("*.distcp"))
        remedy = (
            " It is in Megatron's torch_dist format: let Megatron write it once more with `--ckpt-convert-format torch`"
            " (and --ckpt-convert-save)."
            if distributed
            else " Name the folder that has them, or the one with the tracker file."
        )
        raise CheckpointError(f"{folder} has no mp_rank_XX folders.{remedy}")
    if len(forms) > 1:
        raise CheckpointError(f"{folder} has mp_rank_XX and mp_rank_XX_YYY: those of two checkpoints. Leave one's.")
    return found


def _name(tp_rank: int, stage: int, pp: int) -> str:
    return f"mp_rank_{tp_rank:02d}" if pp == 1 else f"mp_rank_{tp_rank:02d}_{stage:03d}"
