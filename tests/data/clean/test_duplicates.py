"""Near-duplicates: planted at known similarity, across sources, tasks and runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data.clean.components import PAIR, components, decided
from colonnade.data.clean.duplicates import Groups
from colonnade.data.clean.minhash import jaccard
from colonnade.data.clean.signatures import ENTRY, GATHERED, OWN, BandFile, Source, gather, sorted_entries
from colonnade.data.clean.words import WordHashes, shingles_of
from colonnade.errors import DataError
from tests.data.clean.recipes import Result, words

Run = Callable[..., Result]


def planted(seed: int, shared: int, length: int = 300) -> tuple[str, str]:
    """Two texts that begin alike for `shared` words."""
    base = words(length, seed)
    return " ".join(base), " ".join(base[:shared] + words(length - shared, seed + 10_000))


def exact(first: str, second: str) -> float:
    hashes = WordHashes()
    return jaccard(shingles_of(first, 5, hashes), shingles_of(second, 5, hashes))


def test_pairs_above_the_similarity_go_and_pairs_below_stay(run: Run, write_lines: Any) -> None:
    """Sixty pairs from 0.4 to 1: exactly those that are similar enough lose one."""
    pairs = [planted(seed, 170 + 2 * seed) for seed in range(60)]
    rows = [
        {"text": text, "id": f"{number}{'ab'[side]}"}
        for number, pair in enumerate(pairs)
        for side, text in enumerate(pair)
    ]
    random.Random(0).shuffle(rows)
    similar = {number for number, pair in enumerate(pairs) if exact(*pair) >= 0.7}
    assert 10 < len(similar) < 50
    result = run(write_lines("in.jsonl", rows), deduplicate={}, run={"piece_bytes": 40_000})
    assert len(result.manifest["inputs"]) > 3
    assert {int(entry["id"][:-1]) for entry in result.dropped("deduplicate")} == similar
    assert result.reasons("deduplicate") == {"near-duplicate": len(similar)}
    assert len(result.ids()) == 120 - len(similar)


@pytest.mark.parametrize(("rule", "kept"), [("longest", "long"), ("first", "first")])
def test_which_one_is_kept(run: Run, write_lines: Any, rule: str, kept: str) -> None:
    base = words(200, 1)
    documents = {"first": base, "long": [*base, "and", "more", "words"], "third": base[1:], "other": words(200, 2)}
    rows = [{"id": name, "text": " ".join(text)} for name, text in documents.items()]
    result = run(write_lines("in.jsonl", rows), deduplicate={"keep": rule})
    assert result.ids() == [name for name in documents if name in (kept, "other")]
    assert all(entry["detail"] == f"of {kept}" for entry in result.dropped("deduplicate"))
    assert result.manifest["duplicates"]["sizes"] == {"3": 1}


@pytest.mark.parametrize("rule", ["longest", "first"])
def test_of_equal_documents_the_first_is_kept(run: Run, write_lines: Any, rule: str) -> None:
    text = " ".join(words(100, 9))
    rows = [{"id": name, "text": text} for name in ("b", "c", "a")]
    assert run(write_lines("in.jsonl", rows), deduplicate={"keep": rule}).ids() == ["b"]


def test_groups_are_transitive(run: Run, write_lines: Any) -> None:
    """a ~ b and b ~ c, but a and c are less alike than 0.7: one group."""
    stream = words(400, 3)
    texts = [" ".join(stream[start : start + 300]) for start in (0, 40, 80)]
    assert exact(texts[0], texts[1]) >= 0.7 > exact(texts[0], texts[2])
    assert len(run(write_lines("in.jsonl", texts), deduplicate={}).texts()) == 1


def test_across_sources_and_case_and_signs(run: Run, write_lines: Any) -> None:
    text = " ".join(words(50, 4))
    one, other = write_lines("one.jsonl", [text]), write_lines("other.jsonl.gz", [text.upper().replace(" ", ", ")])
    assert len(run(one, other, deduplicate={}).texts()) == 1


def test_short_and_wordless_documents(run: Run, write_lines: Any) -> None:
    result = run(write_lines("in.jsonl", ["a b", "a b!", "b a", "--", "==", "--"]), deduplicate={})
    assert sorted(result.texts()) == ["--", "==", "a b!", "b a"]


def test_an_earlier_runs_documents_are_known(tmp_path: Path, run: Run, write_lines: Any) -> None:
    old, new = " ".join(words(100, 5)), " ".join(words(100, 6))
    how = {"index": str(tmp_path / "index")}
    first = run(write_lines("a.jsonl", [old]), folder="one", deduplicate=how)
    assert len(first.texts()) == 1
    longer = old + " and something at its end"
    second = run(write_lines("b.jsonl", [longer, new]), folder="two", deduplicate=how)
    assert second.texts() == [new]
    assert second.reasons("deduplicate") == {"near-duplicate of what an earlier run kept": 1}
    assert second.dropped("deduplicate")[0]["detail"] == f"of {tmp_path / 'a.jsonl'}:1"
    third = run(write_lines("c.jsonl", [new, longer, "quite another text of its own"]), folder="three", deduplicate=how)
    assert third.texts() == ["quite another text of its own"]
    with pytest.raises(DataError, match="cannot be compared"):
        run(write_lines("d.jsonl", [new]), folder="four", deduplicate={**how, "rows": 5})


def test_the_index_has_what_was_kept_only(tmp_path: Path, run: Run, write_lines: Any) -> None:
    """What decontamination removes is not known to the next run."""
    text, test = " ".join(words(100, 7)), " ".join(words(100, 7)[:20])
    tests = {"exam": str(write_lines("exam.jsonl", [test]))}
    how = {"index": str(tmp_path / "index")}
    source = write_lines("a.jsonl", [text, " ".join(words(99, 8))])
    assert len(run(source, folder="one", deduplicate=how, decontaminate={"tests": tests}).texts()) == 1
    assert run(write_lines("b.jsonl", [text]), folder="two", deduplicate=how).texts() == [text]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))))
def test_groups_are_connected_components(pairs: list[tuple[int, int]]) -> None:
    groups, sets = Groups(), {member: {member} for member in range(21)}
    for first, second in pairs:
        groups.join(first, second)
        merged = sets[first] | sets[second]
        for member in merged:
            sets[member] = merged
    expected = {tuple(sorted(each)) for each in sets.values() if len(each) > 1}
    assert [tuple(each) for each in groups.sets()] == sorted(expected)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=40))
def test_components_are_those_of_union_find(pairs: list[tuple[int, int]]) -> None:
    groups = Groups()
    for first, second in pairs:
        groups.join(first, second)
    ends = np.array(pairs, np.int64).reshape(-1, 2)
    found = components(ends[:, 0], ends[:, 1], 21)
    assert found.tolist() == [groups.find(member) for member in range(21)]


@pytest.mark.parametrize(("keep", "stays"), [("first", [10, 10, 10, 40, 40]), ("longest", [20, 20, 20, 41, 41])])
def test_who_stays_of_a_group(keep: str, stays: list[int]) -> None:
    """Three that are connected by a chain, a pair, and a pair with what an earlier run kept."""
    own, lengths = OWN << 32, {10: 5, 20: 9, 30: 9, 40: 1, 41: 2, 3: 1, 50: 99}
    number = {name: name if name == 3 else own + name for name in lengths}
    pairs = [(30, 20), (20, 10), (41, 40), (3, 50)]
    rows = [(number[a], number[b], 1.0, lengths[a], lengths[b]) for a, b in pairs]
    found = decided(np.array(rows, PAIR), keep=keep)
    assert found.members.tolist() == [number[each] for each in (3, 10, 20, 30, 40, 41, 50)]
    assert found.stays.tolist() == [number[each] for each in [3, *stays, 3]]
    assert found.sizes() == {"2": 2, "3": 1}
    gone = {10, 20, 30, 40, 41, 50} - set(stays)
    assert sorted(found.drops()["document"].tolist()) == sorted(number[each] for each in gone)


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=12), max_size=5), st.integers(1, 7))
def test_gathered_bands_are_all_bands(
    tmp_path_factory: pytest.TempPathFactory, tasks: list[list[int]], num_parts: int
) -> None:
    """Whatever the parts, and whether they are read from the tasks' own files or from one that was gathered."""
    folder = tmp_path_factory.mktemp("bands")
    sources = [Source(OWN + 3 * task, folder, task) for task in range(len(tasks))]
    expected = []
    for source, bands in zip(sources, tasks, strict=True):
        entries = np.array([(band, number) for number, band in enumerate(bands)], ENTRY)
        entries[np.argsort(entries["band"], kind="stable")].tofile(source.path("bands"))
        expected += [(band, (source.place << 32) + number) for number, band in enumerate(bands)]
    gather(sources, folder / "all")
    apart = [BandFile(source.path("bands"), ENTRY, source.place << 32) for source in sources]
    for files in (apart, [BandFile(folder / "all", GATHERED, 0)]):
        found = [entry for part in range(num_parts) for entry in sorted_entries(files, part, num_parts).tolist()]
        assert found == sorted(expected)
