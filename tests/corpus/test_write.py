"""Parts, formats, hashes; the manifest, the page and token files that follow from them."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.corpus.folders import cleaned_parts
from colonnade.corpus.manifest import read_manifest
from colonnade.corpus.plan import make_plan, splits_of
from colonnade.corpus.report import report, write_report
from colonnade.corpus.run import summary
from colonnade.corpus.stages import stages
from colonnade.corpus.step import Setting
from colonnade.corpus.write import part_of
from colonnade.data.cleaning import Tokenizers
from colonnade.data.indexed import TokenFile, bin_path, idx_path
from colonnade.data.overlap import overlap
from colonnade.data.sidecar import read_sidecar
from colonnade.data.token_stages import JOINED, MakeTokens, num_joins, token_stages
from colonnade.data.tokenize import tokenize_files
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.errors import DataError
from tests.commands import here
from tests.corpus.recipes import Result, make_recipe, read_rows, words

Run = Callable[..., Result]


def test_parts_have_their_shares_and_do_not_depend_on_other_documents(run: Run, write_lines: Any) -> None:
    rows = [{"id": f"d{number}", "text": f"text {number}"} for number in range(600)]
    split = {"shares": {"train": 8.0, "validation": 1.0, "test": 1.0}}
    result = run(write_lines("in.jsonl", rows), split=split)
    sizes = {part: len(result.ids(part)) for part in split["shares"]}
    assert sum(sizes.values()) == 600 and 430 < sizes["train"] < 530 and 30 < sizes["test"] < 95
    fewer = run(write_lines("in.jsonl", rows[::2]), folder="fewer", split=split)
    assert set(fewer.ids("validation")) == {name for name in result.ids("validation") if int(name[1:]) % 2 == 0}
    other = run(write_lines("in.jsonl", rows), folder="other", split={**split, "seed": 5})
    assert set(other.ids("test")) != set(result.ids("test"))


def test_a_document_without_an_id_keeps_its_part_wherever_its_text_stands(
    tmp_path: Path, run: Run, write_lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path written otherwise, other splits of the input, lines before it, another kind of file; and in later
    versions: with other parts a document of a test set would be trained on."""
    texts = [f"text&amp; {number}" for number in range(24)]
    steps: dict[str, Any] = {"split": {"shares": {"train": 3.0, "test": 1.0}}, "repair": {}}
    monkeypatch.chdir(tmp_path)
    path = write_lines("in.jsonl", texts)
    pq.write_table(pa.table({"text": texts}), "in.parquet")
    again = write_lines("more.jsonl", [*words(9, 1), *texts[::-1]])
    held_out = sorted(f"text& {number}" for number in (1, 2, 5, 16, 19, 22, 23))
    for number, (source, size, more) in enumerate(
        [
            (path, 1 << 20, {}),
            ("in.jsonl", 100, {"deduplicate": {"shingle": 1}}),
            ("in.parquet", 50, {}),
            (again, 60, {}),
        ]
    ):
        result = run(source, folder=f"out{number}", run={"piece_bytes": size}, **steps, **more)
        found = [text for text in result.texts("test") if text.startswith("text")]
        assert sorted(found) == held_out, number


@given(st.text(max_size=20), st.integers(0, 2**40))
def test_every_document_has_a_part(identity: str, seed: int) -> None:
    assert part_of(identity, {"a": 0.5, "b": 0.5}, seed=seed) in ("a", "b")


@pytest.mark.parametrize("compression", ["none", "gz", "zst"])
def test_formats(run: Run, write_lines: Any, compression: str) -> None:
    rows = [{"id": "1", "text": "é", "odd": {"k": [1]}}, {"id": "2", "text": "two", "title": "T"}]
    lines = run(write_lines("in.jsonl", rows), write={"compression": compression})
    table = run(write_lines("in.jsonl", rows), folder="table", write={"compression": compression, "format": "parquet"})
    found = pq.read_table(table.folder / "train" / "00000.parquet").to_pylist()
    assert [row["text"] for row in found] == lines.texts() == ["é", "two"]
    packed = pq.ParquetFile(table.folder / "train" / "00000.parquet").metadata.row_group(0).column(0).compression
    assert packed == {"none": "UNCOMPRESSED", "gz": "GZIP", "zst": "ZSTD"}[compression]
    assert json.loads(found[0]["metadata"]) == lines.rows()[0]["metadata"] == {"odd": {"k": [1]}}
    assert found[1]["title"] == "T"
    without = run(write_lines("in.jsonl", rows), folder="without", write={"metadata": False})
    assert "metadata" not in without.rows()[0]


def test_a_table_of_several_batches_has_every_document_once(run: Run, write_lines: Any) -> None:
    """A batch is 512 documents."""
    rows = [{"id": f"d{number}", "text": f"text {number}"} for number in range(1100)]
    table = run(write_lines("in.jsonl", rows), write={"format": "parquet"})
    file = pq.ParquetFile(table.folder / "train" / "00000.parquet")
    assert [row["id"] for row in file.read().to_pylist()] == [row["id"] for row in rows]
    assert [file.metadata.row_group(group).num_rows for group in range(3)] == [512, 512, 76]


def test_a_batch_of_a_table_holds_no_more_long_documents_than_memory_takes(
    run: Run, write_lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colonnade.corpus.write._BATCH_CHARACTERS", 100)
    rows = [{"text": "x" * 60}, {"text": "y" * 60}, {"text": "z", "odd": "o" * 120}, {"text": "end"}]
    table = run(write_lines("in.jsonl", rows), write={"format": "parquet"})
    file = pq.ParquetFile(table.folder / "train" / "00000.parquet")
    assert [row["text"] for row in file.read().to_pylist()] == [row["text"] for row in rows]
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [2, 1, 1]


def test_a_gz_file_does_not_tell_when_it_was_written(run: Run, write_lines: Any) -> None:
    """A recipe gives the same bytes at any time: the four that gzip has for the time are zero."""
    result = run(write_lines("in.jsonl", ["one", "two"]), write={"compression": "gz"})
    assert (result.folder / "train" / "00000.jsonl.gz").read_bytes()[4:8] == bytes(4)


def test_the_summary_has_every_reason(run: Run, write_lines: Any) -> None:
    """Two reasons of one step, each with its count."""
    lines = write_lines("in.jsonl", ["a b c", {"x": 1}, {"text": 5}, {"text": 6}, {"text": "d e f"}])
    result = run(lines)
    reasons = result.reasons("read")
    assert len(reasons) == 2 and sum(reasons.values()) == 3
    for reason, count in reasons.items():
        assert [line.split() for line in result.said.splitlines() if line.endswith(f"  {reason}")] == [
            ["read", str(count), *reason.split()]
        ]


def test_the_manifest_adds_up(run: Run, write_lines: Any) -> None:
    one = write_lines("one.jsonl", ["a b c", "a b c", "é", {"x": 1}])
    result = run(one, write_lines("two.jsonl.gz", ["other words"]), repair={}, deduplicate={})
    content = result.manifest
    for step, counts in content["steps"].items():
        if step != "read":
            dropped = sum(amount["documents"] for amount in counts["dropped"].values())
            assert counts["in"]["documents"] == counts["out"]["documents"] + dropped, step
    order = list(content["steps"])
    for before, after in pairwise(order):
        assert content["steps"][before]["out"] == content["steps"][after]["in"]
    assert content["steps"]["read"]["out"]["bytes"] == sum(
        len(text.encode()) for text in ("a b c", "a b c", "é", "other words")
    )
    assert [entry["sha256"] for entry in content["inputs"]] == [
        hashlib.sha256(Path(entry["path"]).read_bytes()).hexdigest() for entry in content["inputs"]
    ]
    for entry in content["outputs"]:
        rows = read_rows(result.folder / entry["path"])
        texts = sum(len(row["text"].encode()) for row in rows)
        size = (result.folder / entry["path"]).stat().st_size
        assert (entry["documents"], entry["bytes"], entry["size"]) == (len(rows), texts, size) and size != texts
    assert [(entry["documents"], entry["rejected"]) for entry in content["inputs"]] == [(3, 1), (1, 0)]
    assert (content["duplicates"]["compared"], content["duplicates"]["similar"]) == (1, 2)
    page = write_report(result.folder).read_text()
    assert "2 documents have another one with a Jaccard similarity of 0.7 or more." in page
    total = {"files": 1, "documents": 3, "bytes": 5 + 2 + 11, "tokens": 0, "uncounted": 3}
    assert content["parts"] == {"train": total}
    assert [entry["sha256"] for entry in content["outputs"]] == [
        hashlib.sha256((result.folder / entry["path"]).read_bytes()).hexdigest() for entry in content["outputs"]
    ]
    assert Counter(entry["reason"] for step in order for entry in result.dropped(step)) == Counter(
        {reason: number for step in order for reason, number in result.reasons(step).items()}
    )
    assert content["versions"]["ftfy"] and content["recipe"]["read"]["paths"] == [
        str(one),
        str(one.with_name("two.jsonl.gz")),
    ]


def test_a_manifest_names_the_library_that_told_languages_and_no_credentials(
    tmp_path: Path, run: Run, write_lines: Any
) -> None:
    result = run(
        write_lines("in.jsonl", ["a b c"]),
        run={"ray_address": "ray://user:secret@head:10001"},
        language={"keep": ["en"]},
    )
    content = result.manifest
    assert content["versions"]["pycld2"] not in ("", "not installed") and content["versions"]["python"]
    assert "secret" not in json.dumps(content) and "head:10001" in content["recipe"]["run"]["ray_address"]
    assert content["facts"] == {} and "facts" not in content["steps"]["read"]


def test_what_only_the_run_needs_is_gone_when_it_is_done(run: Run, write_lines: Any) -> None:
    result = run(write_lines("in.jsonl", ["a b", "a b", "c d"]), deduplicate={})
    kept = {path.name for path in (result.folder / "state").iterdir()}
    assert not kept & {"spool", "signatures", "drops.bin", "progress"} and "run.json" in kept


def test_a_folder_without_a_manifest_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no manifest\.json\. Name the write\.folder of a run\."):
        read_manifest(tmp_path)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "run.json").touch()
    with pytest.raises(DataError, match=r"has no manifest\.json\. Its run has not finished: start it again\."):
        read_manifest(tmp_path)
    for content in ('{"colonnade": "checkpoint"}', '{"steps": {}}', "[]", "{"):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(DataError, match=r"manifest\.json is no manifest of `colonnade data clean`"):
            read_manifest(tmp_path)


def test_a_summary_tells_the_speed_by_what_was_read(run: Run, write_lines: Any) -> None:
    result = run(write_lines("in.jsonl", ["a b", "a b", "c d"]), deduplicate={})
    said = summary(result.folder, 2.0).splitlines()
    assert said[0].startswith("3 documents, 9 bytes of text -> 2 documents, 6 bytes in ")
    assert said[0].endswith("; 2.0 s, 2 documents/s") and said[-1] == "train: 2 documents"


@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
def test_values_that_json_does_not_have_are_written_as_text(tmp_path: Path, run: Run, format_: str) -> None:
    """As Parquet files have them: times and bytes."""
    rows = {"text": ["one"], "when": [datetime(2024, 1, 2, 3, 4, 5)], "raw": [b"ab"]}
    pq.write_table(pa.table(rows), tmp_path / "in.parquet")
    result = run(tmp_path / "in.parquet", deduplicate={}, write={"format": format_})
    (row,) = (
        pq.read_table(result.folder / "train" / "00000.parquet").to_pylist() if format_ == "parquet" else result.rows()
    )
    metadata = json.loads(row["metadata"]) if format_ == "parquet" else row["metadata"]
    assert metadata == {"when": "2024-01-02 03:04:05", "raw": "YWI="}


def test_the_comparisons_of_all_tasks_count(run: Run, write_lines: Any) -> None:
    """Equal documents agree in bands of every task, and each compares the first with the other two."""
    text = " ".join(words(100, 1))
    sources = [write_lines(f"{number}.jsonl", [text]) for number in range(3)]
    result = run(*sources, deduplicate={}, run={"piece_bytes": len(text)})
    assert len(list((result.folder / "state" / "pairs").glob("*.pairs"))) == 3
    assert result.manifest["duplicates"]["compared"] == 3 * 2


def test_the_page_shows_all_of_it_and_nothing_from_elsewhere(run: Run, write_lines: Any) -> None:
    evil = {"text": "<script>alert(1)</script> & more"}
    rows = [{"id": "<script>alert(2)</script>", **evil}, evil, {"txt": 1}]
    result = run(
        write_lines("in.jsonl", rows), repair={"unescape_html": False}, deduplicate={}, language={"threshold": 0.0}
    )
    text = write_report(result.folder).read_text()
    assert "&lt;script&gt;alert(1)" in text and "<script" not in text
    assert "of &lt;script&gt;alert(2)" in text, "the id of what a document is a near-duplicate of"
    assert "http" not in text.replace("http://www.w3.org", "")
    for part in (
        "no key &#x27;text&#x27;",
        "near-duplicate",
        "2 documents",
        "Languages",
        "SHA-256",
        "&quot;threshold&quot;",
    ):
        assert part in text, part


def test_the_page_tells_what_the_manifest_says(run: Run, write_lines: Any) -> None:
    """Each number in its place."""
    result = run(write_lines("in.jsonl", [{"text": text} for text in ("a b", "a b", "c d", "e f")]), deduplicate={})
    content = result.manifest
    content["duplicates"] = {
        **content["duplicates"],
        "compared": 12_345,
        "similar": 678,
        "sizes": {"2": 91, "10": 11, "9": 12},
        "groups": [["first", "second"]],
    }
    text = report(content, title="A <title>")
    assert "<title>A &lt;title&gt;</title>" in text
    assert "12,345 times two documents were compared" in text and "678 documents have another one with a" in text
    bars = [text.index(f">{size} documents</text>") for size in (2, 9, 10)]
    assert bars == sorted(bars) and "91 groups" in text and "first, second" in text
    whole = max(int(width) for width in re.findall(r'<svg viewBox="0 0 (\d+) ', text))
    widths = [float(width) for width in re.findall(r'documents</text><rect [^>]*? width="([\d.]+)"', text)]
    assert [widths[0] / width for width in widths] == pytest.approx([1, 91 / 12, 91 / 11], rel=0.01)
    assert whole / 3 < widths[0] < whole, "the longest has room for its label and its number"
    assert ">lines and files</text>" in text and "3 (−1)" in text
    row = "<td>train</td>" + "".join(f'<td class="n">{number}</td>' for number in (3, 9, 0, 1))
    assert row in text, "documents, bytes, tokens, files"
    (part,) = content["outputs"]
    assert f'<td class="n">{part["size"]}</td><td>{part["sha256"]}</td>' in text


def of_a_step(documents: int, **more: Any) -> dict[str, Any]:
    counts = {"in": {"documents": 99}, "out": {"documents": documents}}
    return {**counts, "dropped": {}, "changed": {}, "histograms": {}, "samples": {}, **more}


def test_each_number_of_the_page_stands_in_its_own_column() -> None:
    sample = {"file": "in.jsonl", "line": 1234, "detail": "3 tokens", "text": "so short"}
    dropped = {"short": {"documents": 5, "bytes": 51}, "long": {"documents": 7, "bytes": 72}}
    content: dict[str, Any] = {
        "steps": {
            "read": of_a_step(20, dropped={"no text": {"documents": 3, "bytes": 0}}),
            "filter": of_a_step(
                8,
                dropped=dropped,
                histograms={"tokens": {"16": 2, "4": 6}},
                samples={"short": [sample, {"file": "in.zip", "line": 0, "text": ""}]},
            ),
        },
        "parts": {},
        "left_aside": {".pdf": 17},
        "recipe": {},
        "inputs": [{"path": "a", "documents": 31, "rejected": 32, "bytes": 33, "sha256": "34"}],
        "outputs": [{"path": "b", "documents": 41, "tokens": 42, "size": 43, "sha256": "44"}],
        "versions": {},
    }
    text = report(content, title="")

    def rows(*cells: object) -> str:
        return "".join(f'<td class="n">{cell}</td>' if isinstance(cell, int) else f"<td>{cell}</td>" for cell in cells)

    for row in (
        rows("filter", "long", 7, 72),
        rows("filter", "short", 5, 51),
        rows(".pdf", 17),
        rows("a", 31, 32, 33, "34"),
        rows("b", 41, 42, 43, "44"),
    ):
        assert row in text, row
    assert text.index("<td>long</td>") < text.index("<td>short</td>"), "the most frequent first"
    assert re.findall(r">([^<]*)</text><rect [^>]*>(?:<rect [^>]*>)?<text [^>]*>(\d+)", text) == [
        ("lines and files", "23"), ("read", "20"), ("filter", "8"), ("4 – 7", "6"), ("16 – 31", "2"),
    ]  # fmt: skip
    assert "<code>in.jsonl, line 1,234 · 3 tokens</code></p><blockquote>so short</blockquote>" in text
    assert "<code>in.zip</code></p></details>" in text, "a file has no line, and nothing of it is shown"


def test_the_most_frequent_languages_come_first(run: Run, write_lines: Any) -> None:
    content = run(write_lines("in.jsonl", ["a b"])).manifest
    content["steps"]["language"] = {**content["steps"]["read"], "histograms": {"language": {"de": 2, "en": 9, "cs": 2}}}
    found = re.findall(r">(de|en|cs)</text><rect", report(content, title=""))
    assert found == ["en", "cs", "de"]


def test_languages_behind_the_twenty_most_frequent_are_one_bar(run: Run, write_lines: Any) -> None:
    content = run(write_lines("in.jsonl", ["a b"])).manifest
    for number, others in ((20, ""), (21, "80"), (22, "159")):
        languages = {f"l{place}": 100 - place for place in range(number)}
        content["steps"]["language"] = {**content["steps"]["read"], "histograms": {"language": languages}}
        found = re.findall(r">others</text><rect [^>]*><text [^>]*>(\d+)</text>", report(content, title=""))
        assert "".join(found) == others, number


EVIL = "<script>alert(1)</script>"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(30))
def test_the_page_of_a_forged_manifest_is_safe_or_refused(run: Run, write_lines: Any, seed: int) -> None:
    """Any value may be another, of any type: no markup comes through, and nothing ends in a traceback."""
    result = run(write_lines("in.jsonl", [{"text": "a b c d e"}, {"text": "a b c d e"}]), deduplicate={})
    draws, path = Random(seed), result.folder / "manifest.json"
    content = json.loads(path.read_text())
    for _ in range(draws.randint(1, 3)):
        at: Any = content
        while True:
            key = draws.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], dict | list) or not at[key] or draws.random() < 0.15:
                break
            at = at[key]
        at[key] = draws.choice([EVIL, [EVIL], {EVIL: EVIL}, None, -1, 1e308, True])
    path.write_text(json.dumps(content))
    try:
        text = write_report(result.folder).read_text()
    except DataError:
        return
    assert "<script" not in text


def test_the_page_of_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    answer = here("data", "report", tmp_path)
    assert answer.status == 2 and "has no manifest.json. Name the write.folder of a run." in answer.err


@pytest.mark.parametrize("compression", ["none", "gz", "zst"])
def test_token_files_of_each_part(
    tmp_path: Path, run: Run, write_lines: Any, tokenizer: Tokenizer, compression: str
) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    texts = [f"document {number}" for number in range(40)]
    result = run(
        write_lines("in.jsonl", texts),
        run={"tokenizer": str(tmp_path / "tokenizer.json"), "piece_bytes": 300},
        split={"shares": {"train": 1.0, "test": 1.0}},
        write={"compression": compression},
        tokenize={},
    )
    for part in ("train", "test"):
        file = TokenFile(str(result.folder / "tokens" / part))
        assert file.num_documents == len(result.texts(part))
        tokens = file.read(file.document_start(0), file.document_start(1) - file.document_start(0))
        assert tokenizer.decode(tokens.tolist()) == result.texts(part)[0]


def test_overlap_counts_places(tmp_path: Path, write_lines: Any) -> None:
    passage = words(30, 1)
    exam = write_lines("exam.jsonl", [" ".join(passage), " ".join(words(20, 2)), "too short"])
    corpus = write_lines("corpus.jsonl", ["Before. " + ", ".join(passage[3:15]) + "!", "nothing shared here", {"x": 1}])
    found = overlap([corpus], exam, ngram=8)
    assert (found.ngrams, found.shared) == (23 + 13, 5)
    assert (found.passages, found.passages_touched, found.documents, found.documents_touched) == (2, 1, 2, 1)
    assert found.rejected == 1 and found.share == 5 / 36
    assert "13.89% of the 36 8-grams" in found.summary()
    assert found.summary().endswith("from 1 of 2 documents); 1 line of the corpus is no document")
    same = overlap([exam], exam)
    assert same.share == 1.0 and "no documents" not in same.summary()
    with pytest.raises(DataError, match="no passage of 50 words"):
        overlap([corpus], exam, ngram=50)


def test_a_passage_that_an_evaluation_set_has_twice_overlaps_twice(write_lines: Any) -> None:
    passage = words(30, 1)
    exam = write_lines("exam.jsonl", [" ".join(passage)] * 2)
    found = overlap([write_lines("corpus.jsonl", [" ".join(passage[3:15])])], exam, ngram=8)
    assert (found.ngrams, found.shared, found.passages_touched) == (2 * 23, 2 * 5, 2)


def test_overlap_is_found_whatever_the_normal_form(write_lines: Any) -> None:
    passage = " ".join(f"{word}é" for word in words(30, 1))
    exam = write_lines("exam.jsonl", [unicodedata.normalize("NFD", passage)])
    corpus = write_lines("corpus.jsonl", [unicodedata.normalize(form, passage) for form in ("NFC", "NFD")])
    found = overlap([corpus], exam, ngram=8)
    assert (found.ngrams, found.shared, found.documents_touched) == (23, 23, 2)


def test_overlap_of_a_token_file_is_that_of_its_text(tmp_path: Path, write_lines: Any) -> None:
    texts = [" ".join(words(40, seed)) for seed in range(6)]
    corpus = write_lines("corpus.jsonl", texts)
    exam = write_lines("exam.jsonl", [texts[1], texts[4], " ".join(words(30, 99))])
    train_bpe(texts, 300).save(tmp_path / "tokenizer.json")
    train_bpe(texts[:1], 300).save(tmp_path / "other.json")
    made = here("data", "tokenize", corpus, "--output", tmp_path / "tokens", "--tokenizer", tmp_path / "tokenizer.json")
    assert made.status == 0
    beside = overlap([corpus], exam)
    assert beside.shared == 2 * 33 and beside.documents_touched == 2
    assert overlap([tmp_path / "tokens"], exam, tokenizer=tmp_path / "tokenizer.json") == beside
    with pytest.raises(DataError, match="with --tokenizer"):
        overlap([tmp_path / "tokens"], exam)
    with pytest.raises(DataError, match="another tokenizer"):
        overlap([tmp_path / "tokens"], exam, tokenizer=tmp_path / "other.json")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "in.jsonl",
            b'\n{"content": "words"}\n',
            "1 line rejected. The first: PATH: no key 'text': its keys are 'content'",
        ),
        ("in.txt.gz", b"no gzip", "1 line rejected. The first: PATH: file damaged"),
        ("in.txt", "é".encode("latin-1"), "1 line rejected. The first: PATH: not UTF-8"),
        ("in.txt", b" \n", "1 line rejected. The first: PATH: empty"),
        ("in.jsonl", b"", "0 lines rejected. Check the files; `colonnade data overlap --key` names the key"),
    ],
)
def test_overlap_with_what_holds_no_document_is_refused(
    tmp_path: Path, write_lines: Any, name: str, content: bytes, reason: str
) -> None:
    """A share of 0 % would be taken for a test set that nothing was trained on; beside another corpus, too."""
    exam, corpus = write_lines("exam.jsonl", [" ".join(words(20, 1))]), tmp_path / name
    corpus.write_bytes(content)
    answer = here("data", "overlap", corpus, exam, "--workers", 1)
    assert answer.status == 2 and answer.out == ""
    assert f"{corpus} holds no document with text to compare: {reason.replace('PATH', str(corpus))}" in answer.err
    with pytest.raises(DataError, match=re.escape(f"{corpus} holds no document")):
        overlap([exam, corpus], exam)


def test_overlap_goes_on_without_a_file_that_is_gone(
    tmp_path: Path, write_lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exam = write_lines("exam.jsonl", [" ".join(words(20, 1))])
    (tmp_path / "corpus").mkdir()
    write_lines("corpus/here.jsonl", [" ".join(words(20, 1))])
    gone = write_lines("corpus/gone.jsonl", ["text"])

    def planned(path: str, size: int) -> Any:
        found = splits_of(path, size)
        gone.unlink(missing_ok=True)
        return found

    monkeypatch.setattr("colonnade.data.overlap.splits_of", planned)
    found = overlap([tmp_path / "corpus"], exam)
    assert (found.documents, found.rejected, found.share) == (1, 1, 1.0)


def test_overlap_from_the_command_line(write_lines: Any) -> None:
    exam = write_lines("exam.jsonl", [" ".join(words(20, 2))])
    answer = here("data", "overlap", exam, exam, "--ngram", 5, "--workers", 1, "--json")
    assert answer.status == 0 and json.loads(answer.out)["share"] == 1.0
    answer = here("data", "overlap", exam, exam, "--tokenizer", "nothing")
    assert answer.status == 2 and f"--tokenizer is of a token file, and {exam} is the prefix of none" in answer.err
    gone = exam.with_name("gone")
    answer = here("data", "overlap", gone, exam, "--tokenizer", "nothing")
    assert answer.status == 2 and f"--tokenizer is of a token file, and {gone} is the prefix of none" in answer.err
    exam.with_name("exam.jsonl.idx").touch()
    assert overlap([exam], exam, ngram=5, workers=1).share == 1.0, "text, whatever lies beside it"


def test_rows_can_be_cleaned_again(run: Run, write_lines: Any) -> None:
    """The result is an input like any other."""
    once = run(write_lines("in.jsonl", [{"text": "a", "id": "x", "k": 1}]), folder="once")
    twice = run(once.folder / "train", folder="twice")
    assert cleaned_parts(once.folder) == ["train"], "which are named: the folder has more than them"
    assert twice.rows()[0]["id"] == "x" and read_rows(once.folder / "train" / "00000.jsonl.zst")[0]["text"] == "a"


@pytest.mark.slow
def test_token_files_are_those_of_data_tokenize_however_many_tasks(
    tmp_path: Path, run: Run, write_lines: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file for each part; beyond JOINED tasks several, which end to end are that one."""
    tokenizer.save(tmp_path / "tokenizer.json")
    source = write_lines("in.jsonl", [f"document {number}, é" for number in range(60)])
    options: dict[str, Any] = {
        "run": {"tokenizer": str(tmp_path / "tokenizer.json"), "piece_bytes": 300},
        "split": {"shares": {"train": 3.0, "test": 1.0}},
        "tokenize": {},
    }
    one = run(source, folder="one", **options)
    monkeypatch.setattr("colonnade.data.token_stages.JOINED", 3)
    several = run(source, folder="several", **options)
    names = sorted(path.stem for path in (several.folder / "tokens").glob("train-*.bin"))
    assert len(names) >= 2 and names[0] == "train-00000"  # the last tasks have few documents, maybe none of this part
    for part in ("train", "test"):
        tokenize_files([one.folder / part], tmp_path / part, tokenizer, workers=1, progress=False)
        assert bin_path(one.folder / "tokens" / part).read_bytes() == bin_path(tmp_path / part).read_bytes()
        assert idx_path(one.folder / "tokens" / part).read_bytes() == idx_path(tmp_path / part).read_bytes()
        content = b"".join(path.read_bytes() for path in sorted((several.folder / "tokens").glob(f"{part}-*.bin")))
        assert content == bin_path(tmp_path / part).read_bytes()
        sidecar = read_sidecar(TokenFile(str(one.folder / "tokens" / part)))
        assert sidecar is not None and sidecar.tokenizer_sha256 == tokenizer.sha256
    listed = json.loads((several.folder / "tokens" / "tokens.json").read_bytes())
    assert sum(entry["documents"] for entry in listed.values()) == 60
    assert not (one.folder / "state" / "tokens").exists()


def test_token_files_without_ends_name_none(tmp_path: Path, run: Run, write_lines: Any, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    options: dict[str, Any] = {
        "run": {"tokenizer": str(tmp_path / "tokenizer.json")},
        "tokenize": {"append_end": False},
    }
    result = run(write_lines("in.jsonl", ["One."]), **options)
    file = TokenFile(str(result.folder / "tokens" / "train"))
    assert file.document(0).tolist() == tokenizer.encode("One.")
    sidecar = read_sidecar(file)
    assert sidecar is not None and sidecar.end_of_document is None


def test_the_tokenizer_of_token_files_is_their_own_or_the_runs(
    tmp_path: Path, write_lines: Any, tokenizer: Tokenizer
) -> None:
    source, paths = write_lines("in.jsonl", ["a"]), [tmp_path / "runs.json", tmp_path / "own.json"]
    others = [tokenizer, train_bpe(["other words"] * 9, 300)]
    for path, each in zip(paths, others, strict=True):
        each.save(path)
    for run, own, used in (([paths[0]], [], 0), ([], [paths[1]], 1), ([paths[0]], [paths[1]], 1)):
        recipe = make_recipe(
            source,
            folder=tmp_path / "out",
            run=dict.fromkeys(["tokenizer"] * len(run), *map(str, run)),
            tokenize={**dict.fromkeys(["tokenizer"] * len(own), *map(str, own)), "append_end": False},
        )
        making, joining, listing = token_stages(recipe, 2 * JOINED + 1, Setting(tmp_path, 5))
        for stage in (making, joining):
            (step,) = stage.steps
            assert (step.tokenizer, step.sha256) == (str(paths[used]), others[used].sha256)
            assert step.end is None and step.parts == ("train",)
        assert [stage.tasks for stage in (making, joining, listing)] == [2 * JOINED + 1, 3, 1]
    assert token_stages(make_recipe(source, folder=tmp_path / "out"), 3, Setting(tmp_path, 5)) == []
    assert [num_joins(tasks) for tasks in (1, JOINED, JOINED + 1)] == [1, 1, 2]


def test_what_cannot_be_read_again_stops_the_token_files(
    tmp_path: Path, run: Run, write_lines: Any, tokenizer: Tokenizer
) -> None:
    """An input may be damaged; what the run itself has written may not: nothing of it is left out silently."""
    tokenizer.save(tmp_path / "tokenizer.json")
    result = run(write_lines("in.jsonl", [f"document {number}" for number in range(40)]))
    (file,) = (result.folder / "train").glob("*")
    file.write_bytes(file.read_bytes()[:-9])
    path, setting = str(tmp_path / "tokenizer.json"), Setting(result.folder, 5)
    step = MakeTokens("tokens", path, ["train"], setting, sha256=tokenizer.sha256, end=None)
    with pytest.raises(DataError, match=r"00000.jsonl.zst, line \d+: file cut short.* manifest.json has its SHA-256"):
        list(step.run())
    assert not (result.folder / "state" / "tokens").exists()


def test_a_tokenizer_that_is_another_meanwhile_stops_the_tasks(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """And the tasks of a process share one: 2 MB of each that was used stay for good."""
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    make = Tokenizers().counter(str(path))
    assert make() is make() and make()("two words") == len(tokenizer.encode("two words"))
    other = train_bpe(["other words"] * 9, 300)
    other.save(path)
    assert Tokenizers().counter(str(path))()("two words") == len(other.encode("two words"))
    with pytest.raises(DataError, match=r"has changed since the run was started.*Put the one with sha256"):
        make()


@pytest.mark.parametrize("section", ["run", "tokenize"])
def test_a_tokenizer_that_cannot_be_read_is_told_before_any_work(
    tmp_path: Path, run: Run, write_lines: Any, section: str
) -> None:
    damaged = tmp_path / "tokenizer.json"
    damaged.write_text("{}")
    with pytest.raises(DataError, match=f"{damaged} is no tokenizer"):
        run(write_lines("in.jsonl", ["text"]), **{section: {"tokenizer": str(damaged)}})
    assert not (tmp_path / "clean").exists()


def test_no_step_grows_with_the_number_of_tasks(tmp_path: Path, write_lines: Any) -> None:
    """Steps are sent to every task."""
    source = write_lines("in.jsonl", [f"document {number}" for number in range(3_000)])
    sizes = []
    for piece_bytes in (10_000, 100):
        recipe = make_recipe(
            source, folder=tmp_path / "out", deduplicate={}, run={"piece_bytes": piece_bytes}, split={}
        )
        planned = stages(recipe, make_plan(recipe), Tokenizers())
        sizes.append([len(pickle.dumps(stage.steps)) for stage in planned if stage.name != "gather"])
        assert planned[0].tasks == pytest.approx(100_000 / piece_bytes, rel=0.6)
    assert all(abs(many - few) < 50 for few, many in zip(*sizes, strict=True)), sizes
