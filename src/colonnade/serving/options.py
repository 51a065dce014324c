"""The options of `generate` and `evaluate`, held against each other and the disk before torch is imported: all at once.

What only the checkpoint's content can tell is left to `trained.py`.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from colonnade.config.check_layout import units_in_words
from colonnade.config.describe import all_keys
from colonnade.config.load import loads
from colonnade.config.model import ModelConfig
from colonnade.config.numbers import divisors
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.examples.conversations import Conversation
from colonnade.generation.prompts import read_conversations, read_prompts
from colonnade.huggingface.cache import not_the_snapshot
from colonnade.launch import launch
from colonnade.storage import as_given, not_here
from colonnade.train.best import best_checkpoint
from colonnade.train.sweep import sweep_instead

DEVICES = ("auto", "cpu", "cuda")


def check_options(
    checkpoint: Path,
    *,
    tp: int,
    pp: int,
    device: str,
    precision: str | None,
    best: bool = False,
    more: Iterable[str] = (),
) -> None:
    """ConfigError with everything that is wrong with how a checkpoint is to be used, and with what `more` tells.

    What the launcher has shown, its ranks do not show.
    """
    if launch.has_supervisor():
        return
    problems = [*_checkpoint(checkpoint, tp, pp), *_best(checkpoint, best), *device_problems(device, precision), *more]
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError("\n".join([f"{len(problems)} problems", *(f"  - {problem}" for problem in problems)]))


def chosen(checkpoint: Path, best: bool) -> Path:
    """What to open: the best checkpoint of a run where `best` asks for it, which is shown; else what was named."""
    if not best:
        return checkpoint
    found, lowest = best_checkpoint(checkpoint)
    if launch.rank_and_size()[0] == 0:
        print(f"{found}: {lowest}, the lowest of its run's checkpoints.", file=sys.stderr, flush=True)
    return found


def device_problems(device: str, precision: str | None) -> Iterator[str]:
    """What is wrong with --device and --precision."""
    if device not in DEVICES:
        yield f"--device {device!r}: there is no such device. Use {', '.join(DEVICES)}."
    known = [str(choice) for choice in all_keys()["train.precision"].choices]
    if precision is not None and precision not in known:
        yield f"--precision {precision!r}: there is no such precision. Use {', '.join(known)}."


def layout_problems(checkpoint: Path, model: ModelConfig, tp: int, pp: int) -> Iterator[str]:
    """What is wrong with --tp and --pp for a model."""
    units = model.num_units
    if pp > units:
        yield (
            f"--pp {pp} stages, but {units_in_words(model)} of {checkpoint} are {units} units: each stage needs one. "
            f"Use at most {units}."
        )
    m = model.key_value_heads
    whole = divisors(math.gcd(model.num_heads, model.ffn))
    possible = [size for size in whole if m == model.num_heads or m % size == 0 or size % m == 0]
    if tp not in whole:
        yield (
            f"--tp {tp} does not divide the heads and the MLP of {checkpoint} evenly: each tensor-parallel rank needs "
            f"whole heads, and as many columns as the others. Use {', '.join(map(str, possible))}."
        )
    elif tp not in possible:
        yield (
            f"--tp {tp} goes neither with nor into the {m} heads of keys and values of {checkpoint}: each rank needs "
            f"whole ones, or one of which others have copies. Use {', '.join(map(str, possible))}."
        )


def all_prompts(given: Sequence[str] | None, file: Path | None) -> list[str]:
    """Those of --prompt, and then those of the file of --prompts."""
    return [*(given or []), *([] if file is None else read_prompts(file))]


def all_conversations(given: Sequence[str] | None, file: Path | None, messages: Path | None) -> list[Conversation]:
    """A question for each prompt, and then the conversations of the file of --messages."""
    asked = [Conversation([{"role": "user", "content": prompt}]) for prompt in all_prompts(given, file)]
    return [*asked, *([] if messages is None else read_conversations(messages))]


def prompt_problems(
    given: Sequence[str] | None,
    file: Path | None,
    messages: Path | None = None,
    *,
    chat: bool = False,
    control_tokens: bool = False,
) -> Iterator[str]:
    """What is wrong with --prompt, --prompts and --messages, --chat and --control-tokens."""
    if control_tokens and (chat or messages is not None):
        yield (
            f"--control-tokens beside {'--chat' if chat else '--messages'}: where control tokens stand in a "
            "conversation the chat template alone says. Leave one of them out."
        )
    try:
        if not all_conversations(given, file, messages):
            yield "neither --prompt nor --prompts is given: there is no text to go on from. Use --prompt TEXT."
    except DataError as error:
        yield str(error)


def _best(path: Path, best: bool) -> Iterator[str]:
    """Why there is no best checkpoint, where there is something."""
    if best and path.exists():
        try:
            best_checkpoint(path)
        except CheckpointError as error:
            yield str(error)


def no_checkpoint(path: Path) -> str:
    """What to say where a path leads to no checkpoint."""
    missing = "" if path.exists() else ": there is no such folder"
    return sweep_instead(path, as_given(path)) or (
        f"{as_given(path)} is neither a checkpoint nor the folder of a run that has one{missing}.{not_here(path)}"
        f"{not_the_snapshot(path)} Name a folder like RUN/checkpoints/step_00000100, or RUN itself for its newest."
    )


def _checkpoint(path: Path, tp: int, pp: int) -> Iterator[str]:
    """Whether there is a checkpoint at all, and if its configuration can be read, whether the layout suits it."""
    if not path.exists():
        yield no_checkpoint(path)
        return
    folders = [path, *sorted(path.glob("step_*")), *sorted(path.glob("checkpoints/step_*"))]
    found = [folder for folder in folders if (folder / "manifest.json").is_file()]
    if found and (tp, pp) != (1, 1):
        try:
            model = loads((found[-1] / "config.toml").read_text(encoding="utf-8"), source="config.toml").model
        except (ConfigError, OSError, ValueError):
            return  # the checkpoint is damaged or foreign, and whoever opens it says how
        yield from layout_problems(found[-1], model, tp, pp)
