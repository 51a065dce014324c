"""What a run did, for people: one HTML page that needs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from colonnade.atomic import written
from colonnade.corpus.manifest import read_manifest
from colonnade.corpus.pictures import Bar, bars, curve, page, table
from colonnade.errors import DataError

NAME = "report.html"
_LANGUAGES = 20


def write_report(folder: Path) -> Path:
    """Writes report.html into a cleaned folder. Raises DataError where there is no manifest."""
    content = read_manifest(folder)
    try:
        text = report(content, title=f"Cleaned text in {folder}")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{folder}'s manifest does not say what a cleaning run writes ({type(error).__name__}: {error}): it is "
            "damaged, or of another program. Run the recipe again."
        ) from error
    with written(folder / NAME) as stream:
        stream.write(text.encode("utf-8", "replace"))
    return folder / NAME


def report(content: dict[str, Any], *, title: str) -> str:
    """The page of a manifest."""
    return page(
        title,
        [block for part in (_funnel, _reasons, _sizes, _duplicates, _samples, _provenance) for block in part(content)],
    )


def _funnel(content: dict[str, Any]) -> Iterator[str]:
    yield "<h2>From step to step</h2><p>Documents that each step let through, and (pale) what it dropped.</p>"
    rows = [Bar("lines and files", _total(content["steps"]["read"]), 0)]
    for step, counts in content["steps"].items():
        lost = sum(amount["documents"] for amount in counts["dropped"].values())
        share = f"(−{lost:,})" if lost else ""
        rows.append(Bar(step, counts["out"]["documents"], lost, share))
    yield bars(rows)
    parts = [
        (part, total["documents"], total["bytes"], total["tokens"], total["files"])
        for part, total in content["parts"].items()
    ]
    yield table(("part", "documents", "bytes of text", "tokens", "files"), parts)


def _reasons(content: dict[str, Any]) -> Iterator[str]:
    yield "<h2>What was dropped, and why</h2>"
    rows = [
        (step, reason, amount["documents"], amount["bytes"])
        for step, counts in content["steps"].items()
        for reason, amount in sorted(counts["dropped"].items(), key=lambda each: -each[1]["documents"])
    ]
    yield table(("step", "reason", "documents", "bytes of text"), rows) if rows else "<p>Nothing.</p>"
    if content["left_aside"]:
        yield "<p>Files of other kinds, which were not read:</p>"
        yield table(("ending", "files"), list(content["left_aside"].items()))
    changed = [(step, what, n) for step, counts in content["steps"].items() for what, n in counts["changed"].items()]
    if changed:
        yield "<h2>What was changed</h2>" + table(("step", "what", "documents"), changed)


def _sizes(content: dict[str, Any]) -> Iterator[str]:
    tokens = content["steps"].get("filter", {}).get("histograms", {}).get("tokens")
    if tokens:
        yield "<h2>Length</h2><p>Documents by tokens, before the short ones were dropped.</p>"
        sizes = sorted((int(size), count) for size, count in tokens.items())
        yield bars([Bar(f"{size:,} – {2 * size - 1:,}", count) for size, count in sizes])
    languages = content["steps"].get("language", {}).get("histograms", {}).get("language")
    if languages:
        yield "<h2>Languages</h2>"
        common = sorted(languages.items(), key=lambda each: (-each[1], each[0]))
        rest = sum(count for _, count in common[_LANGUAGES:])
        yield bars([Bar(*each) for each in common[:_LANGUAGES]] + ([Bar("others", rest)] if rest else []))


def _duplicates(content: dict[str, Any]) -> Iterator[str]:
    found = content.get("duplicates")
    if not found:
        return
    how = content["recipe"]["deduplicate"]
    yield (
        f"<h2>Near-duplicates</h2><p>{found['compared']:,} times two documents were compared shingle by shingle; "
        f"{found['similar']:,} documents have another one with a Jaccard similarity of {how['similarity']:g} or more. "
        "Groups by size:</p>"
    )
    yield bars([Bar(f"{size} documents", count, 0, "groups") for size, count in _by_size(found["sizes"])])
    points = {float(similarity): probability for similarity, probability in found["recall"].items()} | {0.0: 0.0}
    yield (
        f"<p>Probability that a pair is compared, by its similarity: {how['bands']:d} bands of {how['rows']:d} "
        "values.</p>" + curve(points, at=how["similarity"], label=f"{how['similarity']}")
    )
    groups = [f"<li><code>{escape(', '.join(group))}</code></li>" for group in found["groups"]]
    yield f"<details><summary>The first groups</summary><ul>{''.join(groups)}</ul></details>"


def _by_size(sizes: dict[str, int]) -> list[tuple[str, int]]:
    return [(size, sizes[size]) for size in sorted(sizes, key=int)]


def _samples(content: dict[str, Any]) -> Iterator[str]:
    yield "<h2>Samples of what was dropped</h2>"
    for step, counts in content["steps"].items():
        for reason, samples in counts["samples"].items():
            shown = "".join(map(_sample, samples))
            yield f"<details><summary>{escape(step)}: {escape(reason)} ({len(samples)})</summary>{shown}</details>"


def _sample(sample: dict[str, Any]) -> str:
    place = f"{sample['file']}, line {sample['line']:,}" if sample["line"] else sample["file"]
    detail = f" · {sample['detail']}" if "detail" in sample else ""
    text = f"<blockquote>{escape(sample['text'])}</blockquote>" if sample["text"] else ""
    return f"<p><code>{escape(place)}{escape(detail)}</code></p>{text}"


def _provenance(content: dict[str, Any]) -> Iterator[str]:
    yield "<h2>Provenance</h2>"
    rows = [
        (each["path"], each["documents"], each["rejected"], each["bytes"], each["sha256"]) for each in content["inputs"]
    ]
    yield (
        "<details><summary>Inputs</summary>"
        + table(("file", "documents", "rejected", "bytes", "SHA-256"), rows)
        + "</details>"
    )
    rows = [
        (each["path"], each["documents"], each["tokens"], each["size"], each["sha256"]) for each in content["outputs"]
    ]
    yield (
        "<details><summary>Outputs</summary>"
        + table(("file", "documents", "tokens", "bytes", "SHA-256"), rows)
        + "</details>"
    )
    yield (
        "<details><summary>Versions</summary>"
        + table(("package", "version"), list(content["versions"].items()))
        + "</details>"
    )
    recipe = escape(json.dumps(content["recipe"], indent=1, ensure_ascii=False))
    yield f"<details><summary>Recipe</summary><pre>{recipe}</pre></details>"


def _total(read: dict[str, Any]) -> int:
    kept, dropped = read["out"], read["dropped"].values()
    return sum(int(amount["documents"]) for amount in (kept, *dropped))
