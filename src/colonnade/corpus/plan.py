"""What a run reads, cut into tasks, and whether a folder's earlier run is the same run."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from colonnade.atomic import written
from colonnade.corpus.archives import members
from colonnade.corpus.differences import TOKENIZERS, differences, parts_in_order
from colonnade.corpus.duplicates import INDEX_METADATA, PARTIAL, index_metadata, index_part, read_index_metadata
from colonnade.corpus.folders import RUN_FILE, entries, inputs_in
from colonnade.corpus.formats import KINDS_IN_WORDS, InputSplit, kind_of
from colonnade.corpus.load import files_of, is_within, source_of
from colonnade.corpus.recipe import Recipe
from colonnade.corpus.streams import Damaged
from colonnade.corpus.tasks import store_tasks
from colonnade.errors import DataError

_CUTTABLE = ("lines",)
_STREAMED = ("lines", "text", "warc")


@dataclass(frozen=True)
class Plan:
    """All that decides a run's result."""

    tasks: tuple[tuple[InputSplit, ...], ...]
    index: tuple[str, ...]
    """Parts of deduplicate.index that are read: what earlier runs kept."""
    identity: str
    """A hash of the recipe, the inputs and the files that the recipe names."""
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of tokenizers that what lies beside their files makes others, by the recipe's names."""
    left_aside: Mapping[str, int] = field(default_factory=dict)
    """How many files have endings that say nothing about documents, by ending: in input folders and zip files."""


def make_plan(recipe: Recipe, other_than_alone: Callable[[str], str | None] = lambda tokenizer: None) -> Plan:
    """Looks at the inputs and shares them out. `other_than_alone`: as `stages.Tokenizing` has it."""
    splits = [split for path in recipe.read.paths for split in splits_of(path, recipe.run.piece_bytes)]
    tasks = tuple(tuple(task) for task in shared_out(splits, recipe.run.piece_bytes))
    tokenizers = {path: sha256 for path in tokenizers_of(recipe) if (sha256 := other_than_alone(path)) is not None}
    metadata = json.dumps(_metadata(recipe, tasks, tokenizers), sort_keys=True)
    identity = hashlib.sha256(metadata.encode()).hexdigest()
    return Plan(tasks, _index_parts(recipe, identity), identity, tokenizers, left_aside(recipe.read.paths))


def shared_out(splits: Sequence[InputSplit], size: int) -> list[list[InputSplit]]:
    """Input splits in their order, in tasks of about `size` bytes."""
    tasks: list[list[InputSplit]] = []
    room = 0
    for split in splits:
        if room < split.num_bytes or not tasks:
            tasks.append([])
            room = size
        tasks[-1].append(split)
        room -= split.num_bytes
    return tasks


def keep_plan(plan: Plan, recipe: Recipe) -> Plan:
    """The plan of the run that the folder holds, if it is this one; else this plan, which is stored.

    Raises DataError where the folder holds another run."""
    path = run_file(Path(recipe.write.folder))
    metadata = json.loads(json.dumps(_metadata(recipe, plan.tasks, plan.tokenizers)))
    if not path.exists():
        store_tasks(Path(recipe.write.folder), plan.tasks)
        content = {"identity": plan.identity, "index": plan.index, "facts": metadata}
        with written(path) as stream:
            stream.write(json.dumps(content, indent=1).encode())
        return plan
    stored: dict[str, Any] = json.loads(path.read_bytes())
    if stored["identity"] != plan.identity or parts_in_order(stored["facts"]) != parts_in_order(metadata):
        raise DataError(
            f"{recipe.write.folder} holds another run: {'; '.join(differences(stored['facts'], metadata))}. "
            "Undo that to go on with it, or set write.folder to a new "
            f"folder{_and_index(plan, recipe, stored['identity'])}."
        )
    return replace(plan, index=tuple(stored["index"]))


def _and_index(plan: Plan, recipe: Recipe, identity: str) -> str:
    """What else a new run needs where the index has what another one kept."""
    if identity == plan.identity or recipe.deduplicate is None or recipe.deduplicate.index is None:
        return ""
    part = index_part(recipe.deduplicate.index, identity)
    if not part.exists():
        return ""
    return (
        f" and deduplicate.index to a new one: {recipe.deduplicate.index} has what the other run kept, and all of that "
        "would be dropped as near-duplicates (to use this index still, for the other runs in it, remove "
        f"{part} when no run that has begun reads it)"
    )


def run_file(folder: Path) -> Path:
    """Where a write.folder says which run it holds."""
    return folder / RUN_FILE


def splits_of(path: str, piece_bytes: int) -> list[InputSplit]:
    """A file, or all files of known kinds in a folder, by name; large files of lines are cut between lines."""
    known = [file for file in _files(path) if kind_of(file) is not None]
    splits = [split for file in known for split in _cut(file, source_of(path), piece_bytes)]
    if not splits:
        raise DataError(f"{path} has no documents that are known by their ending ({KINDS_IN_WORDS}).")
    return splits


def left_aside(paths: Sequence[str]) -> dict[str, int]:
    """How many files are not read, by ending: of no known kind, or in a zip file and not to be streamed; and how many
    fifos, broken links and the like there are, by what they are."""
    found: Counter[str] = Counter()
    for path in paths:
        if Path(path).is_dir():
            found.update(entry.aside for entry in entries(Path(path)) if entry.aside)
    for file in (file for path in paths for file in _files(path)):
        kind = kind_of(file)
        if kind is None:
            found[file.suffix] += 1
        elif kind[0] == "zip":
            found.update(_left_in(file))
    return {ending or "none": count for ending, count in sorted(found.items())}


def _files(path: str) -> list[Path]:
    """A file, or all files in a folder, by name."""
    place = Path(path)
    return [place] if place.is_file() else [entry.path for entry in inputs_in(place) if not entry.aside]


def _cut(file: Path, source: str, piece_bytes: int) -> list[InputSplit]:
    status = file.stat()
    whole = InputSplit(str(file), source, status.st_size, status.st_mtime_ns)
    kind = kind_of(file)
    if kind is not None and kind[0] == "zip":
        return _members(file, whole)
    if kind is None or kind[0] not in _CUTTABLE or kind[1] or status.st_size <= piece_bytes:
        return [whole]
    cuts = line_starts(file, range(piece_bytes, status.st_size, piece_bytes))
    edges = [0, *cuts, status.st_size]
    return [replace(whole, start=start, stop=stop) for start, stop in pairwise(edges)]


def _members(file: Path, whole: InputSplit) -> list[InputSplit]:
    """The documents' files within a zip file; the file itself where it cannot be opened, for the run to say so."""
    inside = _inside(file)
    if inside is None:
        return [whole]
    return [replace(whole, stop=size, member=name) for name, size in dict(inside).items() if _is_streamed(name)]


def _left_in(file: Path) -> Iterator[str]:
    """Each file within a zip file that is not read, by its ending, or by what has become of it."""
    names = Counter(name for name, _ in _inside(file) or ())
    for name, count in names.items():
        yield from ["replaced in a zip file"] * (count - 1)
        if not _is_streamed(name):
            yield Path(name).suffix


def _inside(file: Path) -> list[tuple[str, int]] | None:
    """(name, bytes) of the files within a zip file; None where it cannot be opened."""
    try:
        return members(file)
    except Damaged:
        return None


def _is_streamed(name: str) -> bool:
    kind = kind_of(Path(name))
    return kind is not None and kind[0] in _STREAMED


def line_starts(file: Path, wanted: Sequence[int]) -> list[int]:
    """The first line starts at or behind the wanted places, each once, the file's end left out."""
    starts: list[int] = []
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        for place in wanted:
            if starts and starts[-1] >= place:
                continue
            stream.seek(place - 1)
            while (block := stream.readline(1 << 20)) and not block.endswith(b"\n"):
                pass
            if stream.tell() < size:
                starts.append(stream.tell())
    return starts


def _metadata(recipe: Recipe, tasks: Sequence[Sequence[InputSplit]], tokenizers: Mapping[str, str]) -> dict[str, Any]:
    content = recipe.model_dump(mode="json", exclude_none=True)
    content["run"] = {key: value for key, value in content["run"].items() if key in ("piece_bytes", "tokenizer")}
    content["write"].pop("folder")
    inputs = [asdict(split) for task in tasks for split in task]
    found = {
        "recipe": content,
        "inputs": inputs,
        "named files": {path: _stamp(path, recipe) for path in _named(recipe)},
    }
    return {**found, TOKENIZERS: tokenizers} if tokenizers else found


def tokenizers_of(recipe: Recipe) -> list[str]:
    """The tokenizers that a recipe names, each once."""
    found = {recipe.run.tokenizer, recipe.tokenize.tokenizer if recipe.tokenize else None}
    return sorted(path for path in found if path)


def _named(recipe: Recipe) -> list[str]:
    found = tokenizers_of(recipe)
    if recipe.filter:
        found += [*recipe.filter.remove_urls, *recipe.filter.remove_ids.values()]
    if recipe.decontaminate:
        found += [*recipe.decontaminate.tests.values(), *recipe.decontaminate.titles]
    return sorted({path for path in found if path})


def _stamp(path: str, recipe: Recipe) -> list[list[Any]]:
    """Of all files of a name; of a folder that the run writes in, all but what is below where it writes."""
    written_to = [recipe.write.folder, recipe.deduplicate.index if recipe.deduplicate else None]
    own = [place for place in written_to if place and is_within(place, path) and not is_within(path, place)]
    found = [file for file in files_of(path) if not any(is_within(str(file), place) for place in own)]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in found]


def _index_parts(recipe: Recipe, identity: str) -> tuple[str, ...]:
    if recipe.deduplicate is None or recipe.deduplicate.index is None:
        return ()
    folder = Path(recipe.deduplicate.index)
    found = sorted(path.parent for path in folder.glob(f"*/{INDEX_METADATA}") if path.parent.suffix != PARTIAL)
    for part in found:
        metadata, own = read_index_metadata(part), index_metadata(recipe.deduplicate)
        if {key: metadata.get(key) for key in own} != own:
            raise DataError(
                f"deduplicate.index = {folder} was made with {metadata} and this recipe has {own}: their signatures "
                "cannot be compared. Set the same values, or another index."
            )
    return tuple(part.name for part in found if part.name != identity[:16])
