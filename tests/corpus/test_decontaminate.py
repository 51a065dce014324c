"""Passages of evaluation sets are found whatever stands around them, and cut out or dropped."""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.corpus.decontaminate import Shared, outside, shared_runs
from colonnade.corpus.testsets import normal_title, passages, read_tests, texts, titles
from colonnade.corpus.words import WordHashes
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from tests.corpus.recipes import Result, words

Run = Callable[..., Result]
EXAM = words(40, 100)


@pytest.fixture
def exam(write_lines: Any) -> dict[str, str]:
    return {"exam": str(write_lines("exam.jsonl", [" ".join(EXAM), "only three words"]))}


def test_thirteen_words_in_a_row_are_enough_and_twelve_are_not(
    run: Run, write_lines: Any, exam: dict[str, str]
) -> None:
    texts = [" ".join([*words(30, seed), *EXAM[5 : 5 + seed], *words(30, seed + 50)]) for seed in (12, 13, 14)]
    result = run(write_lines("in.jsonl", texts), decontaminate={"tests": exam})
    assert result.texts() == texts[:1]
    assert result.reasons("decontaminate") == {"shares 13-grams with exam": 2}
    assert " ".join(EXAM[5:18]) in result.dropped("decontaminate")[0]["detail"]


def test_a_document_counts_once_for_a_test_however_many_of_its_passages_it_shares(
    run: Run, write_lines: Any, exam: dict[str, str]
) -> None:
    twice = " ".join([*words(30, 1), *EXAM[:14], *words(60, 2), *EXAM[20:34], *words(30, 3)])
    result = run(write_lines("in.jsonl", [twice]), decontaminate={"tests": exam})
    assert result.manifest["steps"]["decontaminate"]["histograms"]["contaminated documents"] == {"exam": 1}


def test_a_passage_of_several_tests_counts_for_each(run: Run, write_lines: Any, exam: dict[str, str]) -> None:
    """Whether it is the same in all of them, or one begins within the other."""
    tests = {**exam, "again": exam["exam"], "end": str(write_lines("end.jsonl", [" ".join(EXAM[10:])]))}
    result = run(write_lines("in.jsonl", [" ".join([*words(30, 1), *EXAM])]), decontaminate={"tests": tests})
    contaminated = result.manifest["steps"]["decontaminate"]["histograms"]["contaminated documents"]
    assert contaminated == dict.fromkeys(tests, 1)
    assert result.reasons("decontaminate") == {"shares 13-grams with exam": 1}


def test_small_edits_do_not_hide_a_passage(run: Run, write_lines: Any, exam: dict[str, str]) -> None:
    edited = [*EXAM]
    edited[20] = "another"
    text = "Intro. " + ", ".join(edited).upper() + " — end."
    assert run(write_lines("in.jsonl", [text]), decontaminate={"tests": exam}).texts() == []


FORMS = ("NFC", "NFD", "NFKC", "NFKD")
ACCENTED = [f"{word}é" if number % 3 else f"ﬁ{word}ệ" for number, word in enumerate(EXAM)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normalization", ["NFC", "NFKC", "none"])
def test_a_passage_is_found_whatever_its_normal_form(run: Run, write_lines: Any, normalization: str, form: str) -> None:
    test = write_lines("exam.jsonl", [unicodedata.normalize(form, " ".join(ACCENTED))])
    (found := test.parent / "titles.txt").write_text(unicodedata.normalize(form, "Liberté ﬁnale"), encoding="utf-8")
    clean = " ".join(words(30, 1))
    passages = [unicodedata.normalize(each, " ".join([clean, *ACCENTED[5:25]])) for each in FORMS]
    named = [{"text": clean, "title": unicodedata.normalize(each, "LIBERTÉ_ﬁnale")} for each in FORMS]
    result = run(
        write_lines("in.jsonl", [clean, *passages, *named]),
        repair={"normalization": normalization},
        decontaminate={"tests": {"exam": str(test)}, "titles": [str(found)]},
    )
    assert result.texts() == [clean]
    assert result.reasons("decontaminate") == {"shares 13-grams with exam": 4, "title of a test article": 4}


@pytest.mark.parametrize("form", FORMS)
def test_a_passage_is_cut_out_of_a_text_that_keeps_its_form(run: Run, write_lines: Any, form: str) -> None:
    test = write_lines("exam.jsonl", [" ".join(ACCENTED)])
    around = [unicodedata.normalize(form, " ".join(f"{word}…½ậ" for word in words(60, seed))) for seed in (1, 2)]
    text = f"{around[0]} {unicodedata.normalize(form, ' '.join(ACCENTED))} {around[1]}"
    cut = {"tests": {"exam": str(test)}, "action": "cut", "cut_characters": 0}
    assert run(write_lines("in.jsonl", [text]), decontaminate=cut).texts() == around


def test_cutting_keeps_what_is_around(run: Run, write_lines: Any, exam: dict[str, str]) -> None:
    before, after = " ".join(words(60, 1)), " ".join(words(60, 2))
    text = f"{before} {' '.join(EXAM)} {after}"
    row = {"text": text, "id": "x", "title": "T"}
    result = run(write_lines("in.jsonl", [row]), decontaminate={"tests": exam, "action": "cut", "cut_characters": 10})
    assert result.ids() == ["x#1", "x#2"]
    one, other = result.texts()
    assert before.startswith(one) and len(before) - 12 <= len(one) and after.endswith(other)
    assert not set(EXAM) & {*one.split(), *other.split()}
    assert result.manifest["steps"]["decontaminate"]["changed"] == {"cut around exam": 1}
    short = run(write_lines("in.jsonl", [row]), folder="short", decontaminate={"tests": exam, "action": "cut"})
    assert short.ids() == ["x#1", "x#2"]
    gone = {"tests": exam, "action": "cut", "min_piece_characters": 5_000}
    assert run(write_lines("in.jsonl", [row]), folder="gone", decontaminate=gone).ids() == []
    just = {"tests": exam, "action": "cut", "cut_characters": 10, "min_piece_characters": min(len(one), len(other))}
    just["max_pieces"] = 2
    assert run(write_lines("in.jsonl", [row]), folder="just", decontaminate=just).ids() == ["x#1", "x#2"]
    many = {"tests": exam, "action": "cut", "max_pieces": 1}
    assert "in too many pieces" in next(
        iter(run(write_lines("in.jsonl", [row]), folder="many", decontaminate=many).reasons("decontaminate"))
    )


def test_nothing_between_a_cut_and_the_end_is_no_piece(run: Run, write_lines: Any, exam: dict[str, str]) -> None:
    """However short a piece may be."""
    after = " ".join(words(60, 2))
    cut = {"tests": exam, "action": "cut", "cut_characters": 0, "min_piece_characters": 0}
    texts = [f"  {' '.join(EXAM)} {after}", f"{after} {' '.join(EXAM)} \n"]
    assert run(write_lines("in.jsonl", texts), decontaminate=cut).texts() == [after, after]


def test_each_piece_has_its_own_tokens_and_bytes(
    tmp_path: Path, run: Run, write_lines: Any, exam: dict[str, str], tokenizer: Tokenizer
) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    text = " ".join([*words(60, 1), *EXAM, *words(90, 2)])
    cut = {"tests": exam, "action": "cut", "cut_characters": 10}
    result = run(
        write_lines("in.jsonl", [text]), run={"tokenizer": str(tmp_path / "tokenizer.json")}, decontaminate=cut
    )
    counts = [len(tokenizer.encode(piece)) for piece in result.texts()]
    assert [row["tokens"] for row in result.rows()] == counts and len(set(counts)) == 2
    told = result.manifest["parts"]["train"]
    assert (told["tokens"], told["bytes"]) == (sum(counts), sum(map(len, result.texts())))


def test_the_pieces_of_a_document_are_in_one_part(run: Run, write_lines: Any, exam: dict[str, str]) -> None:
    rows = [
        {"id": f"d{seed}", "text": " ".join([*words(60, seed), *EXAM, *words(60, seed + 50)])} for seed in range(20)
    ]
    cut = {"tests": exam, "action": "cut", "cut_characters": 10}
    result = run(write_lines("in.jsonl", rows), decontaminate=cut, split={"shares": {"train": 1.0, "test": 1.0}})
    found = {part: sorted(result.ids(part)) for part in ("train", "test")}
    for part, names in found.items():
        of = {name.partition("#")[0] for name in names}
        assert names == sorted(f"{document}#{number}" for document in of for number in (1, 2)), part
    assert len(found["train"]) + len(found["test"]) == 40 and all(found.values())


def test_the_pieces_of_a_document_without_an_id_are_in_its_part(
    run: Run, write_lines: Any, exam: dict[str, str]
) -> None:
    texts = [" ".join([*words(60, seed), *EXAM, *words(60, seed + 50)]) for seed in range(20)]
    path, split = write_lines("in.jsonl", texts), {"shares": {"train": 1.0, "test": 1.0}}
    cut = {"tests": exam, "action": "cut", "cut_characters": 10}
    whole = run(path, folder="whole", split=split)
    result = run(path, folder="cut", split=split, decontaminate=cut)
    for part in ("train", "test"):
        pieces = [f"{document}#{number}" for document in whole.ids(part) for number in (1, 2)]
        assert result.ids(part) == pieces and pieces, part


def test_short_passages_count_whole(run: Run, write_lines: Any) -> None:
    question = "In what year did the Normans cross the narrow sea"
    tests = {"squad": str(write_lines("q.jsonl", [question]))}
    texts = [f"They asked: {question.lower()}? Nobody knew.", question.replace("narrow", "wide")]
    assert run(write_lines("in.jsonl", texts), decontaminate={"tests": tests}).texts() == texts[1:]


def test_a_line_of_json_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    """Other characters that end a line in Python may stand within a text."""
    written = ["one\u2028two", "three\u0085four", "five\u000bsix"]
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in written]
    (tmp_path / "a.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert list(texts(tmp_path / "a.jsonl", "text")) == written


@pytest.mark.parametrize(
    ("ngram", "length", "looked_for"),
    [(13, 7, 0), (13, 8, 8), (13, 12, 12), (13, 13, 13), (13, 20, 13), (8, 7, 0), (8, 8, 8), (5, 4, 0), (5, 5, 5)],
)
def test_which_passages_are_looked_for(write_lines: Any, ngram: int, length: int, looked_for: int) -> None:
    """Of eight words or more, or of an n-gram where that is less: whole up to the length of an n-gram."""
    passage = words(length, 1)
    path = write_lines("exam.jsonl", [" ".join(passage), " ".join(words(30, 2))])
    tests = read_tests({"exam": str(path)}, ngram=ngram, key="text")
    before, after = words(5, 3), words(5, 4)
    runs = shared_runs([*before, *passage, *after], tests, WordHashes())
    assert runs == ([Shared(("exam",), 5, 5 + length)] if looked_for else [])
    part = passage[: looked_for - 1]
    assert shared_runs([*before, *part, *after], tests, WordHashes()) == []
    alone = write_lines("alone.jsonl", [" ".join(passage)])
    if not looked_for:
        with pytest.raises(DataError, match=f"has no passage of {min(8, ngram)} words or more"):
            read_tests({"exam": str(alone)}, ngram=ngram, key="text")


def test_a_short_passage_within_a_long_one_does_not_end_it(write_lines: Any) -> None:
    passage = words(13, 1)
    path = write_lines("exam.jsonl", [" ".join(passage), " ".join(passage[2:10])])
    tests = read_tests({"exam": str(path)}, ngram=13, key="text")
    runs = shared_runs([*words(5, 3), *passage, *words(5, 4)], tests, WordHashes())
    assert runs == [Shared(("exam",), 5, 18)]


def test_articles_go_by_title(tmp_path: Path, run: Run, write_lines: Any) -> None:
    (tmp_path / "wiki.test.raw").write_text(" = Du Fu 's Poems @-@ II = \n text here \n = = Not a title = = \n")
    assert titles(tmp_path / "wiki.test.raw") == {"du fu s poems ii"}
    (tmp_path / "latin.txt").write_bytes("Été".encode("latin-1"))
    for unreadable in ("latin.txt", "missing.txt"):
        with pytest.raises(DataError, match=f"{unreadable} cannot be read as a list of titles: .* It has to be UTF-8"):
            titles(tmp_path / unreadable)
    rows = [{"text": "a", "title": "Du_Fu's poems-II"}, {"text": "b", "title": "Not a title"}, {"text": "c"}]
    result = run(write_lines("in.jsonl", rows), decontaminate={"titles": [str(tmp_path / "wiki.test.raw")]})
    assert result.texts() == ["b", "c"]
    (entry,) = result.dropped("decontaminate")
    assert (entry["reason"], entry["detail"]) == ("title of a test article", "Du_Fu's poems-II")
    assert normal_title("C++") == normal_title("c")


def test_a_title_without_letters_is_that_of_no_article(tmp_path: Path, run: Run, write_lines: Any) -> None:
    (tmp_path / "titles.txt").write_text("One\n-----\n")
    rows = [{"text": "a", "title": "???"}, {"text": "b", "title": "one"}]
    assert run(write_lines("in.jsonl", rows), decontaminate={"titles": [str(tmp_path / "titles.txt")]}).texts() == ["a"]


def test_formats_of_evaluation_sets(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(
        json.dumps({"data": [{"paragraphs": [{"context": "Con text", "qas": [{"question": "Who is it?"}]}]}]})
    )
    assert list(passages(tmp_path / "s.json", "text")) == [["con", "text"], ["who", "is", "it"]]
    (tmp_path / "w.tokens").write_text(" = T = \n one <unk> two @-@ three \n\n")
    assert list(passages(tmp_path / "w.tokens", "text")) == [["one"], ["two", "three"]]
    for name, content in (("b.json", "{}"), ("b.jsonl", '{"txt": 1}\n'), ("b.txt", "\udcff")):
        (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(DataError, match=name):
            list(passages(tmp_path / name, "text"))


def test_evaluation_sets_may_be_compressed_and_a_bad_line_is_told_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "con text"}\n'))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b" = Title = \n\ncon text"))
    for name in ("a.jsonl.gz", "a.txt.gz"):
        assert list(texts(tmp_path / name, "text")) == ["con text"]
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n\n{"txt": "two"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl, line 3: not a JSON object with the key 'text'"):
        list(texts(tmp_path / "b.jsonl", "text"))


def test_a_byte_order_mark_is_no_part_of_an_evaluation_set(tmp_path: Path) -> None:
    squad = {"data": [{"paragraphs": [{"context": "Con text", "qas": []}]}]}
    for name, content in (("a.jsonl", '{"text": "con text"}\n'), ("a.json", json.dumps(squad)), ("a.txt", "con text")):
        (tmp_path / name).write_bytes(f"\ufeff{content}".encode())
        assert list(texts(tmp_path / name, "text")) in (["con text"], ["Con text"])
    (tmp_path / "wiki.raw").write_bytes("\ufeff = Title = \n text \n".encode())
    assert titles(tmp_path / "wiki.raw") == {"title"} and list(texts(tmp_path / "wiki.raw", "text")) == [" text "]


def test_a_broken_evaluation_set_stops_before_any_work(tmp_path: Path, run: Run, write_lines: Any) -> None:
    deep, no_text = "[" * 2000 + "]" * 2000, r"not in SQuAD's format \(a context or question is no text\)"
    for name, content, message in (
        ("bad.json", "[]", "not in SQuAD's format"),
        ("bad.json", deep, "not in SQuAD's format"),
        ("bad.json", '{"data": [{"paragraphs": [{"context": null, "qas": []}]}]}', no_text),
        ("bad.json", '{"data": [{"paragraphs": [{"context": "", "qas": [{"question": 5}]}]}]}', no_text),
        ("bad.jsonl", deep, "line 1: not a JSON object"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=message):
            run(write_lines("in.jsonl", ["text"]), decontaminate={"tests": {"bad": str(tmp_path / name)}})
    (tmp_path / "latin.txt").write_bytes("Été".encode("latin-1"))
    for name, section in (
        ("titles", {"decontaminate": {"titles": [str(tmp_path / "latin.txt")]}}),
        ("list", {"filter": {"min_tokens": 0, "remove_urls": [str(tmp_path / "latin.txt")]}}),
        ("list", {"filter": {"min_tokens": 0, "remove_ids": {"in": str(tmp_path / "latin.txt")}}}),
    ):
        with pytest.raises(DataError, match=rf"latin\.txt cannot be read as a {name}|as a list of {name}"):
            run(write_lines("in.jsonl", ["text"]), **section)
    (tmp_path / "urls.txt").write_text("example.org\nhttp://[bad/x\n")
    with pytest.raises(DataError, match=r"urls\.txt has an entry that is no URL, 'http://\[bad/x': Invalid IPv6 URL\."):
        run(write_lines("in.jsonl", ["text"]), filter={"min_tokens": 0, "remove_urls": [str(tmp_path / "urls.txt")]})
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        run(write_lines("in.jsonl", ["text"]), run={"tokenizer": str(tmp_path / "tokenizer.json")})
    assert not (tmp_path / "clean").exists()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9))), st.integers(0, 70), st.integers(0, 5))
def test_outside_is_the_complement(cuts: list[tuple[int, int]], length: int, margin: int) -> None:
    ranges = [(start, start + size) for start, size in cuts if start + size <= length]
    gone = {place for start, stop in ranges for place in range(start - margin, stop + margin)}
    spans = list(outside(ranges, length, margin))
    assert all(0 <= start < stop <= length for start, stop in spans), "as slices of a text"
    left = [place for start, stop in spans for place in range(start, stop)]
    assert left == [place for place in range(length) if place not in gone]
