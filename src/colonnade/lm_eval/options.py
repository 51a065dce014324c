"""What `--model_args` says of our model, checked before anything is read. Imports neither torch nor lm_eval."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from colonnade.errors import ConfigError
from colonnade.serving.options import check_options

NOBODY_S = "cuda:0"
"""The harness' `--device` where nobody gives one, on a machine without a GPU too."""
BATCH_SIZE = 32
"""[sequences] That are read at once where `--batch_size` says nothing, or auto."""
_LEAST = {"tp": 1, "pp": 1, "dp": 1, "threads": 0, "max_length": 1, "max_gen_toks": 1, "prefix_token_id": 0}


@dataclass(frozen=True)
class ModelArguments:
    """Those of `--model_args`, with `--batch_size` and `--device`."""

    checkpoint: Path
    tp: int = 1
    pp: int = 1
    dp: int = 1
    precision: str | None = None
    threads: int = 0
    """Of a rank on CPUs. 0: as in training (`train.threads`)."""
    base: Path | None = None
    """Of adapters: where their base lies now."""
    best: bool = False
    max_length: int | None = None
    """[tokens] That are read at most; longer contexts lose their beginning. None: the model's seq_length."""
    max_gen_toks: int = 256
    """[tokens] That a text gets where its task does not say."""
    prefix_token_id: int | None = None
    """What a text begins behind. None: the tokenizer's end of document."""
    batch_size: int = BATCH_SIZE
    device: str = "auto"

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def command_line(self, checkpoint: Path) -> list[str]:
        """For `colonnade rank-of-answers`."""
        layout = [word for axis in ("tp", "pp", "dp") for word in (f"--{axis}", str(getattr(self, axis)))]
        precision = [] if self.precision is None else ["--precision", self.precision]
        base = [] if self.base is None else ["--base", str(self.base)]
        return [str(checkpoint), *layout, "--device", self.device, "--threads", str(self.threads), *precision, *base]


def read_arguments(options: Mapping[str, Any]) -> ModelArguments:
    """The options, by name. ConfigError for what is unknown, missing, or goes with no checkpoint there."""
    given: dict[str, Any] = {
        name: value for name, value in options.items() if value is not None and name != "max_batch_size"
    }
    known = [field.name for field in fields(ModelArguments)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(f"--model_args: there is no {', '.join(unknown)}. Use {', '.join(known)}.")
    if "checkpoint" not in given:
        raise ConfigError(
            "--model_args names no checkpoint. Give checkpoint=FOLDER: a checkpoint, or a run's folder for its newest."
        )
    problems = list(_problems(given))
    if problems:
        raise ConfigError("\n".join(problems))
    paths: dict[str, Any] = {name: Path(str(given[name])) for name in ("checkpoint", "base") if name in given}
    batch_size = given.get("batch_size", "auto")
    at_once = BATCH_SIZE if str(batch_size).startswith("auto") else int(batch_size)
    said = str(given.get("device", NOBODY_S))
    device = "auto" if said == NOBODY_S else said.partition(":")[0]
    found = ModelArguments(**(given | paths | {"batch_size": at_once, "device": device}))
    check_options(
        found.checkpoint, tp=found.tp, pp=found.pp, device=found.device, precision=found.precision, best=found.best
    )
    return found


def _problems(given: Mapping[str, Any]) -> Iterator[str]:
    for name, least in _LEAST.items():
        value = given.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            yield f"--model_args: {name} = {value!r} is no number of {least} or more."
    if not isinstance(given.get("best", False), bool):
        yield f"--model_args: best = {given['best']!r} is neither True nor False."
    size = str(given.get("batch_size", "auto"))
    if not size.startswith("auto") and not (size.isdecimal() and int(size) > 0):
        yield f"--batch_size {size} is no number of sequences. Use 1 or more, or auto ({BATCH_SIZE})."
