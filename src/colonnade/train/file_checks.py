"""What is wrong with the files that a configuration names, and with the devices that it wants, before ranks start."""

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from colonnade.architecture.parts import trained_architecture
from colonnade.architecture.sites import check_sites
from colonnade.config.check import Problem, check_beginning
from colonnade.config.schema import Config
from colonnade.errors import ColonnadeError, mistake
from colonnade.launch import launch
from colonnade.launch.devices import choose_device, count_gpus
from colonnade.storage import not_here
from colonnade.train import run_folder
from colonnade.train.score_names import score_problems

INDEX_BYTES = 64 << 20  # .idx files up to this size are opened whole: millions of documents in tenths of a second
CUTS = (
    "data.",
    "model.kind",
    "model.head",
    "model.seq_length",
    "train.steps",
    "train.global_batch_size",
    "train.evaluate",
    "curriculum.",
    "run.folder",
)


def problems_of_files(config: Config, uncertain: Collection[str]) -> list[Problem]:
    """What is wrong with tokenizer, token files and GPUs, as far as keys that are not `uncertain` tell."""
    return [
        *_data_problems(config, uncertain),
        *_device_problems(config, uncertain),
        *_weights_problems(config, uncertain),
        *_reference_problems(config, uncertain),
        *_store_problems(config, uncertain),
        *_parts_problems(config, uncertain),
    ]


def problems_of_the_folder(config: Config, uncertain: Collection[str]) -> list[Problem]:
    """Whether the run's folder can be written, or made where it is not there; nothing is made."""
    if "run.folder" in uncertain:
        return []
    error = _refusal(Path(config.run.folder))
    return [] if error is None else [Problem(str(run_folder.unwritable(config, error)), ("run.folder",))]


def _refusal(folder: Path) -> OSError | None:
    """Why a folder cannot be written, or made."""
    folder = folder.absolute()
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return None
    refused = errno.EROFS if there.is_dir() and os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES
    number = refused if there.is_dir() else errno.ENOTDIR
    return OSError(number, os.strerror(number), str(there))


def problems_of_a_beginning(config: Config, uncertain: Collection[str]) -> list[Problem]:
    """What a run may not begin with. One that has begun goes on with it."""
    has_begun = "run.folder" not in uncertain and run_folder.was_trained(Path(config.run.folder))
    return [] if has_begun else [*check_beginning(config, uncertain), *_blend_problems(config, uncertain)]


def problems_of_a_score(score: str, config: Config, uncertain: Collection[str]) -> list[Problem]:
    """Whether a sweep's score is none that the run will have: by its name, and of one file of a blend, because
    data.split leaves no sample of it, where that is seen in a moment.
    """
    wrong, data = score_problems(score, config, uncertain), config.data
    name = score.partition("/")[2]
    if wrong or not name or not data.blend or any(key.startswith(CUTS) for key in uncertain):
        return wrong
    from colonnade.train.corpus import open_corpus

    with suppress(ColonnadeError, OSError):  # told by `_data_problems`
        if _is_quick(data.blend, data.packing):
            corpus = open_corpus(config)
            validation = corpus.datasets.validation
            there = {part.file.prefix for part in (() if validation is None else validation.parts)}
            missing = [prefix for prefix, called in corpus.set_names.items() if called == name and prefix not in there]
            wrong = [Problem(_without_sample(score, data.split, prefix), ("data.split",)) for prefix in missing]
    return wrong


def _without_sample(score: str, split: str, prefix: str) -> str:
    return (
        f'sweep.score = "{score}", and data.split = "{split}" leaves no document of {prefix}, or too little text, for '
        "a validation sample. Give validation a larger share, or name another score."
    )


def _blend_problems(config: Config, uncertain: Collection[str]) -> Iterator[Problem]:
    """Files of a blend that are one, however their paths are written."""
    if "data.blend" in uncertain or not config.data.blend:
        return  # without an import of numpy
    from colonnade.data.indexed import idx_path
    from colonnade.storage import is_remote

    first: dict[str, str] = {}
    for name in config.data.blend:
        same = name if is_remote(name) else first.setdefault(os.path.realpath(idx_path(name)), name)
        if same != name:
            yield Problem(
                f"data.blend has {same!r} and {name!r}, which are one file: it would be counted as two. Name it once, "
                "with the sum of both numbers.",
                ("data.blend",),
            )


def _device_problems(config: Config, uncertain: Collection[str]) -> Iterator[Problem]:
    keys = ("train.device", "parallel.tp", "parallel.pp", "parallel.dp")
    if launch.is_rank() or set(keys) & set(uncertain):
        return  # how many ranks share this machine is for `launch.connect` to see
    gpus = None if config.train.device == "cpu" else count_gpus()
    if gpus is not None:
        yield from _problems(lambda: choose_device(config.train.device, gpus, config.parallel.num_ranks), *keys)


def _data_problems(config: Config, uncertain: Collection[str]) -> Iterator[Problem]:
    """The tokenizer, each token file, and if these are sound and not too large for a moment, the samples to be cut."""
    data = config.data
    if not (data.train or data.blend) or {"data.train", "data.blend", "data.tokenizer"} & set(uncertain):
        return
    from colonnade.data.tokenizer import Tokenizer
    from colonnade.train.corpus import vocab_size_of

    opened: list[Tokenizer] = []
    found = (
        []
        if data.tokenizer is None
        else _problems(lambda: opened.append(Tokenizer.load(data.tokenizer or "")), "data.tokenizer")
    )
    files = dict.fromkeys(name for name in (*(data.blend or {}), data.train, data.validation, data.test) if name)
    for name in files:
        found += _problems(partial(_open_header, name, data.cache), "data.train")
    if opened or not found:
        tokenizer = opened[0] if opened else None
        found += _problems(lambda: vocab_size_of(config, tokenizer), "model.vocab_size")
    if not found and not any(key.startswith(CUTS) for key in uncertain) and _is_quick(files, data.packing):
        found += _problems(partial(_open_whole, config), "data.train")
    yield from found


def _weights_problems(config: Config, uncertain: Collection[str]) -> Iterator[Problem]:
    """Whether there are weights to begin from, where a run begins, and a teacher; what they are takes torch to see."""
    for key, source in (
        ("train.init_from", config.train.init_from),
        ("distillation.teacher", config.distillation.teacher),
    ):
        if source is None or {key, "run.folder"} & set(uncertain) or Path(source).is_dir():
            continue
        if key == "distillation.teacher" or not run_folder.was_trained(Path(config.run.folder)):
            wrong = (
                "is a file, and a folder is asked for. Of a GGUF file `colonnade convert` makes a checkpoint."
                if Path(source).is_file()
                else f"does not exist: there is no such folder.{not_here(source)}"
            )
            yield Problem(
                f"{key} = {source!r} {wrong} Name a checkpoint, the folder of a run, or a folder of Hugging Face "
                "on this machine (`hf download` fetches one).",
                (key,),
            )


def _reference_problems(config: Config, uncertain: Collection[str]) -> Iterator[Problem]:
    """Whether the reference's answers can be in the file that is named: all pairs are read before it is written."""
    key, named = "preferences.reference", config.preferences.reference
    if named is not None and key not in uncertain and Path(named).is_dir():
        yield Problem(f"{key} = {named!r} is a folder. Name a file, as reference.npz is one in a run's folder.", (key,))


def _store_problems(config: Config, uncertain: Collection[str]) -> Iterator[Problem]:
    """Whether what a teacher says can be stored where that is named. What is there may be all that is asked for."""
    key, named = "distillation.store", config.distillation.store
    if named is None or key in uncertain or Path(named).is_dir():
        return
    error = _refusal(Path(named))
    if error is not None:
        yield Problem(
            f"{key} = {named!r} cannot be made: {error.strerror} ({error.filename}). Name another folder, or fix that.",
            (key,),
        )


def _parts_problems(config: Config, uncertain: Collection[str]) -> Iterator[Problem]:
    """Patterns that match no weight, sites that the model lacks; how large the vocabulary is does not matter."""
    if any(key.startswith(("model.", "parts.", "lora.")) for key in uncertain):
        return
    stated = partial(trained_architecture, config, config.model.vocab_size or 1)
    wrong = [*_problems(stated, "parts.frozen")]
    if not wrong and "thermometers.sites" not in uncertain:
        check = partial(check_sites, config.model, stated(), config.thermometers.sites)
        wrong += _problems(check, "thermometers.sites")
    yield from wrong


def _open_header(name: str, cache: str | None) -> None:
    from colonnade.data.remote import open_token_file
    from colonnade.storage import is_remote

    if not is_remote(name):  # a word with a server would take its time
        open_token_file(name, cache)


def _open_whole(config: Config) -> None:
    from colonnade.train.corpus import open_corpus

    lasts = not run_folder.was_asked_to_change(Path(config.run.folder))  # else by its changes: `course_of` sees
    for file in open_corpus(config, lasts=lasts).files.values():
        file.check_index()


def _is_quick(files: Iterable[str], packing: str) -> bool:
    """Whether all there is to open are indices on local disks that are not long."""
    from colonnade.data.indexed import idx_path
    from colonnade.storage import is_remote

    names = list(files)
    local = packing == "stream" and not any(is_remote(name) for name in names)
    return local and sum(idx_path(name).stat().st_size for name in names) < INDEX_BYTES


def _problems(look: Callable[[], object], *keys: str) -> list[Problem]:
    """What a look at a file brings up."""
    try:
        look()
    except Exception as error:
        message = mistake(error)
        if message is None:
            raise
        return [Problem(message, keys)]
    return []
