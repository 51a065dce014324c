"""Near-duplicates: planted at known similarity, across sources, tasks and runs."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datatrove.data import Document
from hypothesis import example, given
from hypothesis import strategies as st

from colonnade.corpus import duplicates, matching, signatures
from colonnade.corpus.components import DROP, PAIR, components, decided
from colonnade.corpus.duplicates import Comparison, Group, RemoveDuplicates, pairs_path, publish, read_pairs
from colonnade.corpus.matching import Groups, similar_pairs
from colonnade.corpus.minhash import Bands, jaccard
from colonnade.corpus.recipe import DeduplicateStep
from colonnade.corpus.run import run_stage
from colonnade.corpus.signatures import (
    ENTRY,
    FAN_IN,
    GATHERED,
    OWN,
    BandFile,
    SignatureIndex,
    SignatureWriter,
    Source,
    band_files,
    gather,
    num_gathered,
    sorted_entries,
)
from colonnade.corpus.step import Drop, Setting
from colonnade.corpus.tally import Account
from colonnade.corpus.words import WordHashes, shingles_of
from colonnade.errors import DataError
from tests.corpus.recipes import Result, words
from tests.corpus.templates import groups_of, matched, template_pages

Run = Callable[..., Result]
ROOT = Path(__file__).parents[2]


def planted(seed: int, shared: int, length: int = 300) -> tuple[str, str]:
    """Two texts that begin alike for `shared` words."""
    base = words(length, seed)
    return " ".join(base), " ".join(base[:shared] + words(length - shared, seed + 10_000))


def exact(first: str, second: str) -> float:
    hashes = WordHashes()
    return jaccard(shingles_of(first, 5, hashes), shingles_of(second, 5, hashes))


@pytest.mark.slow
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


def test_the_longest_has_the_most_characters_not_bytes(run: Run, write_lines: Any) -> None:
    text = " ".join(words(100, 9))
    rows = [{"id": "bytes", "text": text + "…" * 10}, {"id": "characters", "text": text + "." * 15}]
    assert run(write_lines("in.jsonl", rows), deduplicate={"keep": "longest"}).ids() == ["characters"]


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


def test_a_run_is_no_duplicate_of_itself_in_a_new_folder(tmp_path: Path, run: Run, write_lines: Any) -> None:
    """Its part of the index is there already: what it kept then is what it keeps now."""
    texts = [" ".join(words(100, seed)) for seed in (5, 6)]
    source, how = write_lines("a.jsonl", [*texts, texts[0]]), {"index": str(tmp_path / "index")}
    for folder in ("one", "two"):
        assert run(source, folder=folder, deduplicate=how).texts() == texts
    assert len(list((tmp_path / "index").iterdir())) == 1


def test_what_a_changed_run_has_in_the_index_is_told(tmp_path: Path, run: Run, write_lines: Any) -> None:
    """A new folder alone would have all documents dropped. Both ways out that are named keep them."""
    source = write_lines("a.jsonl", [" ".join(words(100, seed)) for seed in range(5)])
    index = tmp_path / "index"
    how = {"index": str(index)}
    other = run(write_lines("b.jsonl", [" ".join(words(100, 9))]), folder="other", deduplicate=how)
    run(source, deduplicate=how)
    part = index / json.loads((tmp_path / "clean" / "manifest.json").read_bytes())["identity"][:16]
    said = (
        rf"or set write\.folder to a new folder and deduplicate\.index to a new one: {index} has what the other "
        rf"run kept, .* dropped as near-duplicates \(to use this index still, .* remove {part} when no run that has "
        r"begun reads it\)\.$"
    )
    with pytest.raises(DataError, match=said):
        run(source, deduplicate=how, repair={})
    with pytest.raises(DataError, match=r"or set write\.folder to a new folder\.$"):
        run(source, deduplicate={"index": str(tmp_path / "empty")}, repair={})
    assert len(run(source, folder="again", deduplicate={"index": str(tmp_path / "new")}, repair={}).texts()) == 5
    shutil.rmtree(part)
    assert len(run(source, folder="instead", deduplicate=how, repair={}).texts()) == 5
    assert (index / other.manifest["identity"][:16]).is_dir()


def test_a_part_of_the_index_that_is_there_stays(tmp_path: Path, run: Run, write_lines: Any) -> None:
    """A run that is started again after its end makes its part once more, and it is the one that goes."""
    part, again = tmp_path / "0123456789abcdef", tmp_path / "0123456789abcdef.partial"
    how = DeduplicateStep(index=str(tmp_path))
    unfinished = again / "00000.shingles.123-0123abcd.partial"
    again.mkdir()
    unfinished.touch()  # by a worker that was killed
    publish(how, "0123456789abcdef0123", 1)
    assert [path.name for path in part.iterdir()] == ["index.json"]
    shutil.rmtree(part)
    for folder, content in ((part, "first"), (again, "second")):
        folder.mkdir()
        (folder / "00000.sets").write_text(content)
    publish(how, "0123456789abcdef0123", 1)
    assert not again.exists() and (part / "00000.sets").read_text() == "first"


def test_what_another_run_is_about_to_publish_is_not_in_the_index_yet(
    tmp_path: Path, run: Run, write_lines: Any
) -> None:
    """It may have been killed between writing what its part is and giving it its name."""
    text = " ".join(words(100, 5))
    how = {"index": str(tmp_path / "index")}
    run(write_lines("a.jsonl", [text]), folder="one", deduplicate=how)
    (part,) = (tmp_path / "index").iterdir()
    part.rename(part.with_suffix(".partial"))
    assert run(write_lines("b.jsonl", [text]), folder="two", deduplicate=how).texts() == [text]


def test_a_run_that_goes_on_has_the_index_that_it_began_with(
    tmp_path: Path, run: Run, write_lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another that ends in between adds what it kept."""

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    text, how = " ".join(words(100, 5)), {"index": str(tmp_path / "index")}
    source = write_lines("a.jsonl", [text])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("colonnade.corpus.run.run_stage", stopped)
        run(source, folder="one", deduplicate=how)
    assert run(write_lines("b.jsonl", [text]), folder="two", deduplicate=how).texts() == [text]
    assert run(source, folder="one", deduplicate=how).texts() == [text]


def test_a_run_that_was_stopped_when_all_is_read_goes_on_with_what_earlier_runs_kept(
    tmp_path: Path, run: Run, write_lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_stage(*arguments: Any, **more: Any) -> None:
        run_stage(*arguments, **more)
        raise KeyboardInterrupt

    old, new = (" ".join(words(100, seed)) for seed in (5, 6))
    how = {"index": str(tmp_path / "index")}
    run(write_lines("a.jsonl", [old]), folder="one", deduplicate=how)
    source = write_lines("b.jsonl", [old, new])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("colonnade.corpus.run.run_stage", first_stage)
        run(source, folder="two", deduplicate=how)
    assert run(source, folder="two", deduplicate=how).texts() == [new]


def test_a_part_of_the_index_that_is_gone_is_told_where_it_is_needed_still(
    tmp_path: Path, run: Run, write_lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is done needs none."""

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    how = {"index": str(tmp_path / "index")}
    first = run(write_lines("a.jsonl", [" ".join(words(100, 5))]), folder="one", deduplicate=how)
    second, third = (write_lines(f"{name}.jsonl", [" ".join(words(100, ord(name)))]) for name in "bc")
    run(second, folder="two", deduplicate=how)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("colonnade.corpus.run.run_stage", stopped)
        run(third, folder="three", deduplicate=how)
    part = tmp_path / "index" / first.manifest["identity"][:16]
    shutil.rmtree(part)
    assert "nothing is left to do" in run(second, folder="two", deduplicate=how).said
    said = rf"^{part}, a part of deduplicate\.index, cannot be read \(.*\)\. Put it back as it was; or remove it, and "
    with pytest.raises(DataError, match=said + r"begin in a new write\.folder\.$"):
        run(third, folder="three", deduplicate=how)


def test_every_task_of_an_earlier_run_is_in_the_index(tmp_path: Path, run: Run, write_lines: Any) -> None:
    texts = [" ".join(words(100, seed)) for seed in range(8)]
    how = {"index": str(tmp_path / "index")}
    first = run(write_lines("a.jsonl", texts), folder="one", deduplicate=how, run={"piece_bytes": 1_500})
    assert len(first.manifest["inputs"]) > 2 and first.texts() == texts
    assert run(write_lines("b.jsonl", texts), folder="two", deduplicate=how).texts() == []


def test_tasks_of_earlier_runs_count_among_those_that_are_gathered(
    run: Run, write_lines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One task of this run, and more of earlier ones than are read one by one."""
    for where in (signatures, duplicates):
        monkeypatch.setattr(where, "FAN_IN", 2)
    texts = [" ".join(words(100, seed)) for seed in range(8)]
    how = {"index": str(tmp_path / "index")}
    first = run(write_lines("a.jsonl", texts), folder="one", deduplicate=how, run={"piece_bytes": 1_500})
    assert len(first.manifest["inputs"]) > 2 and first.texts() == texts
    second = run(write_lines("b.jsonl", [*texts[2:6], "of its own"]), folder="two", deduplicate=how)
    assert len(second.manifest["inputs"]) == 1 and second.texts() == ["of its own"]


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


def test_pairs_that_many_tasks_have_found_are_held_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two documents that agree in 30 bands are a pair in 30 tasks; what is held grows with the documents."""
    monkeypatch.setattr(duplicates, "_PAIRS", 50)
    draw, every, most = random.Random(0), list[Any](), 0
    inner = duplicates.connecting

    def measured(pairs: Any) -> Any:
        nonlocal most
        most = max(most, len(pairs))
        return inner(pairs)

    monkeypatch.setattr(duplicates, "connecting", measured)
    lengths = [draw.randrange(1_000) for _ in range(100)]
    ends = [sorted(draw.sample(range(100), 2)) for _ in range(60)]
    for task in range(300):
        rows = [((OWN << 32) + a, (OWN << 32) + b, 0.8, lengths[a], lengths[b]) for a, b in draw.sample(ends, 20)]
        every.append(np.array(rows, PAIR))
        pairs_path(tmp_path, task).parent.mkdir(parents=True, exist_ok=True)
        every[-1].tofile(pairs_path(tmp_path, task))
    found = read_pairs(tmp_path, 300)
    assert most <= 100 + 100 + 20 and len(found) <= 200
    for keep in ("first", "longest"):
        for one, other in zip(decided(found, keep=keep), decided(np.concatenate(every), keep=keep), strict=True):
            assert np.array_equal(one, other)


def test_no_document_is_decided_about_where_the_pairs_of_a_task_are_missing(tmp_path: Path) -> None:
    """Without them near-duplicates would stay, and nothing would say so."""
    rows = np.array([((OWN << 32) + 1, (OWN << 32) + 2, 0.9, 5, 5)], PAIR)
    pairs_path(tmp_path, 1).parent.mkdir(parents=True)
    rows.tofile(pairs_path(tmp_path, 1))
    with pytest.raises(DataError, match="the pairs of 2 match tasks are missing: 00000, 00002"):
        list(Group("group", Comparison(DeduplicateStep(), (), tmp_path, 3)).run())
    assert not duplicates.drops_path(tmp_path).exists()


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


@pytest.mark.parametrize("keep", ["first", "longest"])
def test_nothing_is_dropped_of_earlier_runs(keep: str) -> None:
    """Two of their documents may fall into one group: the first stays, and only this run's are dropped."""
    own = OWN << 32
    lengths = {7: 1, (1 << 32) + 3: 9, own + 1: 5, own + 2: 50}
    first, second, third, fourth = lengths
    rows = [(a, b, 1.0, lengths[a], lengths[b]) for a, b in [(first, third), (second, third), (third, fourth)]]
    found = decided(np.array(rows, PAIR), keep=keep)
    assert found.stays.tolist() == [first] * 4 and found.sizes() == {"4": 1}
    assert found.drops().tolist() == [(third, first), (fourth, first)]
    assert found.first_groups(5, 3) == [[first, second, third]] and found.first_groups(0, 3) == []


def test_what_is_dropped_of_a_task_is_found_by_its_numbers(tmp_path: Path) -> None:
    """Of tasks before and behind it nothing, and documents beyond 65,536 too."""
    drops = [((OWN + task << 32) + number, 5) for task in (0, 2, 3) for number in (0, 70_000, (1 << 32) - 1)]
    duplicates.drops_path(tmp_path).parent.mkdir(parents=True)
    np.array(drops, DROP).tofile(duplicates.drops_path(tmp_path))
    for task in range(5):
        found = duplicates.drops_of(tmp_path, task)["document"].tolist()
        assert [number & 0xFFFFFFFF for number in found] == [0, 70_000, (1 << 32) - 1] * (task in (0, 2, 3))
        assert all(number >> 32 == OWN + task for number in found)
    duplicates.drops_path(tmp_path).write_bytes(b"")
    assert len(duplicates.drops_of(tmp_path, 0)) == 0


def test_documents_beyond_65536_of_a_task_are_dropped_and_those_with_the_same_last_bits_are_not(tmp_path: Path) -> None:
    setting, own = Setting(tmp_path, 0), OWN << 32
    writer = SignatureWriter(duplicates.sign_folder(tmp_path), 0, Bands(2, 1))
    for name in ("first", "second"):
        writer.add(name, 1, np.arange(3, dtype=np.uint64))
    writer.close()
    duplicates.drops_path(tmp_path).parent.mkdir(parents=True, exist_ok=True)
    np.array([(own + 70_000, own + 1), (own + (1 << 31), own)], DROP).tofile(duplicates.drops_path(tmp_path))
    step = RemoveDuplicates(Comparison(DeduplicateStep(), (), tmp_path, 1), setting)
    step.prepare(0)
    places = (0, 1, 70_000 - 65_536, 70_000, 1 << 31)
    account = Account(tmp_path, step.name, 0, samples=0)
    found = [step.examine(Document("", "", metadata={"index": place}), account) for place in places]
    near = "near-duplicate"
    assert found == [None, None, None, Drop(near, "of second"), Drop(near, "of first")]
    step.prepare(1)
    assert [step.examine(Document("", "", metadata={"index": place}), account) for place in places] == [None] * 5, (
        "of another task nothing"
    )


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


def test_a_task_may_have_millions_of_documents(tmp_path: Path) -> None:
    source = Source(OWN + 3, tmp_path, 3)
    np.arange(70_000, dtype="<i8").tofile(source.path("lengths"))
    with SignatureIndex([source]) as index:
        assert [index.length((OWN + 3 << 32) + number) for number in (0, 65_535, 65_536, 69_999)] == [
            0,
            65_535,
            65_536,
            69_999,
        ]


def test_only_many_tasks_are_gathered() -> None:
    assert [num_gathered(count) for count in (1, FAN_IN, FAN_IN + 1, 2 * FAN_IN, 2 * FAN_IN + 1)] == [0, 0, 2, 2, 3]


def test_a_pair_of_just_the_similarity_counts(tmp_path: Path) -> None:
    """Of seven shingles of ten in common, and all of a page that has seven of another's ten."""
    pages = [
        np.arange(start, stop, dtype=np.uint64) << np.uint64(32)
        for start, stop in ((0, 10), (3, 10), (20, 37), (23, 40))
    ]
    assert matched(tmp_path, pages)[0] == [(0, 1, 0.7), (2, 3, 0.7)]


def test_documents_of_earlier_runs_are_not_compared_with_each_other(tmp_path: Path) -> None:
    """They have been once; nothing is dropped of them."""
    page = np.arange(50, dtype=np.uint64) << np.uint64(32)
    sources = [Source(0, tmp_path, 0), Source(1, tmp_path, 1), Source(OWN, tmp_path, 2)]
    for task in range(3):
        writer = SignatureWriter(tmp_path, task, Bands(32, 4))
        writer.add(str(task), 1, page)
        writer.close()
    with SignatureIndex(sources) as index:
        pairs, compared = similar_pairs(index, band_files(sources, tmp_path), 0, 1, similarity=0.7)
    assert compared == len(pairs) == 2
    assert [second >> 32 for _, second, _ in pairs] == [OWN, OWN]


def test_a_document_joins_a_group_by_any_of_its_members(tmp_path: Path) -> None:
    """And by the first that is like it: the others need no comparison."""
    pages = [np.arange(start, start + 100, dtype=np.uint64) << np.uint64(32) for start in (0, 15, 30, 45, 1000)]
    writer = SignatureWriter(tmp_path, 0, Bands(4, 2))
    for number, page in enumerate(pages):
        writer.add(str(number), 1, page)
    writer.close()
    with SignatureIndex([Source(OWN, tmp_path, 0)]) as index:
        matcher = matching.Matcher(index, 0.7)
        matcher.add([(OWN << 32) + number for number in range(5)])
    assert [(first & 0xFF, second & 0xFF) for first, second, _ in matcher.pairs] == [(0, 1), (1, 2), (2, 3)]
    assert matcher.num_compared == 1 + 2 + 3 + 4


class Shingles:
    """Stands for a SignatureIndex of one task; of the first `earlier` documents an earlier run is the source."""

    def __init__(self, sets: list[set[int]], earlier: int) -> None:
        self._sets, self._earlier = [np.array(sorted(each), np.uint64) for each in sets], earlier

    def shingles(self, document: int) -> Any:
        return self._sets[document]

    def is_earlier(self, document: int) -> bool:
        return document < self._earlier


@given(
    st.lists(st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=2, max_size=7), min_size=1, max_size=3),
    st.integers(0, 4),
)
@example([[{0, 1}, {2, 3}, {0, 1, 2, 3}, {0}, {2}]], 0)
@example([[{0, 1}, {2, 3}, {4, 5}, {0, 1, 2, 3}, {2, 3, 4, 5}, {5}, {0}]], 2)
def test_what_is_compared_connects_all_that_is_alike(buckets: list[list[set[int]]], earlier: int) -> None:
    """A document may join several groups at once, and a later one any member of what they have become; documents of
    earlier runs, which come first, are not compared with each other."""
    sets = [each for bucket in buckets for each in bucket]
    matcher, expected, first = matching.Matcher(Shingles(sets, earlier), 0.5), Groups(), 0  # type: ignore[arg-type]
    for bucket in buckets:
        places = range(first, first + len(bucket))
        matcher.add(list(places))
        first += len(bucket)
        for one, other in itertools.combinations(places, 2):
            if other >= earlier and len(sets[one] & sets[other]) >= 0.5 * len(sets[one] | sets[other]):
                expected.join(one, other)
    assert groups_of(matcher.pairs) == expected.sets()


@pytest.mark.parametrize(("similarity", "whole", "part"), [(0.55, 100, 55), (0.56, 25, 14), (0.68, 75, 51)])
def test_a_part_of_just_the_similarity_counts_where_floats_say_a_little_more(
    similarity: float, whole: int, part: int
) -> None:
    """0.56 of 25 shingles are 14.000000000000002."""
    assert similarity * whole > part
    sets = [set(range(part)), set(range(whole))]
    matcher = matching.Matcher(Shingles(sets, 0), similarity)  # type: ignore[arg-type]
    matcher.add([0, 1])
    assert matcher.pairs == [(0, 1, similarity)]
    assert matching.likely_pairs([np.array(sorted(each), np.uint64) for each in sets], similarity) == [(0, 1)]


def test_of_those_that_share_a_rare_shingle_the_first_and_the_ones_before_are_likely() -> None:
    sets = [np.array([1, 1_000 + n, 2_000 + n], np.uint64) for n in range(2 * matching.NEIGHBOURS)]
    near = range(1, matching.NEIGHBOURS + 1)
    expected = {(a, b) for b in range(len(sets)) for a in range(b) if a == 0 or b - a in near}
    found = matching.likely_pairs(sets, 0.01)
    assert set(found) == expected and len(found) == len(expected)


def test_of_many_that_are_likely_those_that_share_the_most_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many for each document."""
    monkeypatch.setattr(matching, "MOST", 3)
    last = np.arange(100, 110, dtype=np.uint64)
    sets = [np.sort(np.r_[last[: 1 + n % 6], np.uint64(1_000 + n)]) for n in range(6)]
    found = matching.likely_pairs([*sets, last], 0.01)
    assert [pair for pair in found if pair[1] == 6] == [(5, 6), (4, 6), (3, 6)]
    assert max(sum(second == place for _, second in found) for place in range(7)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "own"), [(60, 40), (75, 25), (85, 10)], ids=["unlike", "nearly alike", "alike"])
def test_pages_of_a_template_fall_into_the_same_groups_as_with_all_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: int, own: int
) -> None:
    """Below the similarity each with its copy, above it all together."""
    pages = template_pages(300, shared=shared, own=own, copies=40)
    monkeypatch.setattr(matching, "ALL_PAIRS", 16)
    pairs, compared = matched(tmp_path / "some", pages)
    monkeypatch.setattr(matching, "ALL_PAIRS", 10**9)
    every, all_compared = matched(tmp_path / "all", pages)
    assert groups_of(pairs) == groups_of(every)
    assert len(groups_of(every)) == (1 if own == 10 else 40)
    assert own != 40 or compared < all_compared / 5


@pytest.mark.slow
def test_the_work_on_pages_of_a_template_grows_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the pages, about twice the comparisons; with all pairs it would be four times as many."""
    monkeypatch.setattr(matching, "ALL_PAIRS", 16)
    small, large = (matched(tmp_path / f"{count}", template_pages(count, shared=60, own=30))[1] for count in (400, 800))
    assert large < 2.6 * small and large < 800 * matching.MOST


@pytest.mark.slow
def test_twenty_thousand_pages_of_a_template(tmp_path: Path) -> None:
    """In a process of its own, whose memory is nothing else."""
    command = [sys.executable, "-m", "tests.corpus.templates", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    groups, compared, seconds, peak = map(float, done.stdout.split())
    print(f"{seconds:.1f} s, {compared:,.0f} pairs compared, peak {peak / 1e6:.0f} MB")
    assert groups == 500
    assert compared < 20_000 * matching.MOST and peak < 700e6


@given(
    st.lists(st.frozensets(st.integers(0, 30), min_size=1, max_size=12), max_size=9, unique=True),
    st.sampled_from([0.5, 0.7, 0.9]),
)
def test_no_pair_of_few_sets_is_unlikely(sets: list[frozenset[int]], similarity: float) -> None:
    """Where each shingle is one of at most nine sets, every similar pair is among the likely ones."""
    arrays = [np.array(sorted(each), np.uint64) for each in sets]
    found = matching.likely_pairs(arrays, similarity)
    for first, second in itertools.combinations(range(len(sets)), 2):
        assert jaccard(arrays[first], arrays[second]) < similarity or (first, second) in found
