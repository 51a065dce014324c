"""What a run did, for programs: counts of every step, reasons, hashes of inputs and outputs, versions, the recipe."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from colonnade.atomic import written
from colonnade.corpus.duplicates import publish
from colonnade.corpus.folders import COMMAND, MANIFEST
from colonnade.corpus.minhash import recall
from colonnade.corpus.plan import Plan, run_file
from colonnade.corpus.recipe import DeduplicateStep, Recipe
from colonnade.corpus.step import Setting
from colonnade.corpus.tally import Tally, merged, read_tallies
from colonnade.errors import DataError, hidden

STEPS = ("read", "repair", "language", "filter", "deduplicate", "decontaminate", "write")
_PACKAGES = ("colonnade", "datatrove", "ftfy", "numpy", "tokenizers", "zstandard", "pyarrow", "warcio", "trafilatura")
_IDENTIFIERS = {"cld2": "pycld2", "lingua": "lingua-language-detector"}
_SAMPLES = 12
_SCRATCH = ("spool", "signatures", "drops.bin", "progress")


class WriteManifest(PipelineStep):
    """Adds up what all tasks have counted."""

    type, name = "colonnade", "account"

    def __init__(self, recipe: Recipe, plan: Plan, setting: Setting) -> None:
        self.recipe, self.setting = recipe, setting
        self.num_tasks, self.plan = len(plan.tasks), replace(plan, tasks=())
        super().__init__()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Writes manifest.json; gives nothing."""
        content = manifest(self.recipe, self.plan, self.setting.folder)
        with written(self.setting.folder / MANIFEST) as stream:
            stream.write((json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
        if self.recipe.deduplicate and self.recipe.deduplicate.index:
            publish(self.recipe.deduplicate, self.plan.identity, self.num_tasks)
        for name in _SCRATCH:
            place = self.setting.folder / "state" / name
            if place.is_file():
                place.unlink()
            else:
                shutil.rmtree(place, ignore_errors=True)
        yield from ()


def manifest(recipe: Recipe, plan: Plan, folder: Path) -> dict[str, Any]:
    """The content of manifest.json. It has no times in it: the same run gives the same bytes."""
    tallies = {step: [tally for _, tally in read_tallies(folder, step)] for step in STEPS}
    totals = {step: merged(found, samples=_SAMPLES) for step, found in tallies.items() if found}
    outputs = entries(totals["write"])
    return {
        "colonnade": COMMAND,
        "identity": plan.identity,
        "versions": versions(recipe),
        "recipe": hidden(recipe.model_dump(mode="json", exclude_none=True)),
        "inputs": entries(totals["read"]),
        "left_aside": dict(plan.left_aside),
        "steps": {
            step: {key: value for key, value in total.as_json().items() if key != "facts"}
            for step, total in totals.items()
        },
        "facts": {
            step: total.metadata for step, total in totals.items() if step not in ("read", "write") and total.metadata
        },
        "outputs": outputs,
        "parts": parts(outputs),
        **({"duplicates": duplicates(recipe.deduplicate, folder)} if recipe.deduplicate else {}),
    }


def duplicates(how: DeduplicateStep, folder: Path) -> dict[str, Any]:
    """Groups by size and some of them, the work of comparing, and the share of duplicates that the bands find."""
    found: dict[str, Any] = json.loads((folder / "state" / "groups.json").read_bytes())
    for path in sorted((folder / "state" / "pairs").glob("*.json")):
        for key, value in json.loads(path.read_bytes()).items():
            found[key] = found.get(key, 0) + value
    found["recall"] = {
        f"{similarity / 20:.2f}": round(recall(similarity / 20, how.bands, how.rows), 6) for similarity in range(1, 21)
    }
    return found


def entries(total: Tally) -> list[dict[str, Any]]:
    """One entry for each split that was read, or for each file that was written, in the order of tasks."""
    in_order = sorted(total.metadata.items(), key=lambda found: int(found[0]))
    return [entry for _, of_task in in_order for entry in of_task]


def parts(outputs: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Documents, bytes of text and tokens of each part; `uncounted` where not all of its tokens are counted."""
    found: dict[str, dict[str, int]] = {}
    for entry in outputs:
        total = found.setdefault(entry["part"], {"files": 0, "documents": 0, "bytes": 0, "tokens": 0})
        total["files"] += 1
        for key in ("documents", "bytes", "tokens"):
            total[key] += entry[key]
        if "uncounted" in entry:
            total["uncounted"] = total.get("uncounted", 0) + entry["uncounted"]
    return dict(sorted(found.items()))


def versions(recipe: Recipe) -> dict[str, str]:
    """Of Python and of every library that had a hand in it."""
    names = list(_PACKAGES)
    if recipe.language:
        names.append(_IDENTIFIERS.get(recipe.language.library, recipe.language.library))
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run that is done. Raises DataError where there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        unfinished = run_file(folder).exists()
        advice = "Its run has not finished: start it again." if unfinished else "Name the write.folder of a run."
        raise DataError(f"{folder} has no {MANIFEST}. {advice}")
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        if content["colonnade"] != COMMAND:
            raise KeyError("colonnade")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no manifest of `colonnade data clean` ({error}). Name another folder.") from error
    return content
