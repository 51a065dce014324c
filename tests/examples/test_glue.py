"""GLUE's tables: its own columns of every task, JSON, rows that are none, and the token file that is made of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from colonnade.corpus.documents import Rejected
from colonnade.data.indexed import TokenFile
from colonnade.data.sidecar import read_sidecar
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.writer import held
from colonnade.errors import DataError, LockError
from colonnade.examples.format import Texts
from colonnade.examples.formats import FORMATS, format_of
from colonnade.examples.glue import SCORES
from colonnade.examples.make import make_examples
from tests.commands import here
from tests.disks import room_for

MNLI_TRAIN = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse\t"
    "sentence1\tsentence2\tlabel1\tgold_label\n"
)
ROWS = {
    "cola": ("gj04\t1\t\tA dog ran.\nbc01\t0\t*\tRan dog a.\n", [(("A dog ran.",), (1,)), (("Ran dog a.",), (0,))]),
    "sst2": ("sentence\tlabel\na good film \t1\n", [(("a good film",), (1,))]),
    "mrpc": (
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tThe "film.\tThe book.\r\n',
        [(('The "film.', "The book."), (1,))],
    ),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        "0\tmain\tMSR\t2012\t1\tnone\tnone\tA dog.\tThe dog.\t3.667\n",
        [(("A dog.", "The dog."), (3667,))],
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n9\t1\t2\tA film?\tA book?\t0\n3\t4\t5\t\tA dog?\t1\n",
        [(("A film?", "A book?"), (0,)), (("", "A dog?"), (1,))],
    ),
    "mnli": (
        MNLI_TRAIN + "0\t1\t1e\tfiction\tx\tx\tx\tx\tA dog ran.\tA dog.\tneutral\tcontradiction\n",
        [(("A dog ran.", "A dog."), (2,))],
    ),
    "qnli": ("index\tquestion\tsentence\tlabel\n0\tA dog?\tA film.\tnot_entailment\n", [(("A dog?", "A film."), (1,))]),
    "rte": ("index\tsentence1\tsentence2\tlabel\n0\tA dog.\tA film.\tentailment\n", [(("A dog.", "A film."), (0,))]),
    "wnli": ("index\tsentence1\tsentence2\tlabel\n0\tA dog.\tA film.\t1\n", [(("A dog.", "A film."), (1,))]),
}


def written(folder: Path, text: str, name: str = "rows.tsv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("task", ROWS)
def test_reads_the_columns_of_glue(task: str, tmp_path: Path) -> None:
    text, expected = ROWS[task]
    found = list(FORMATS[task].read(written(tmp_path, text)))
    assert found == [Texts(*example) for example in expected]


def test_every_glue_task_has_its_rows() -> None:
    assert set(ROWS) <= set(FORMATS)


def test_labels_have_the_numbers_of_hugging_faces_data_set() -> None:
    """A file that names them and one that numbers them are alike, and so are models that others trained."""
    named = {task: FORMATS[task].fields.labels for task in ROWS}
    assert named == {
        "cola": ("unacceptable", "acceptable"),
        "sst2": ("negative", "positive"),
        "mrpc": ("not_equivalent", "equivalent"),
        "stsb": (),
        "qqp": ("not_duplicate", "duplicate"),
        "mnli": ("entailment", "neutral", "contradiction"),
        "qnli": ("entailment", "not_entailment"),
        "rte": ("entailment", "not_entailment"),
        "wnli": ("not_entailment", "entailment"),
    }


def test_test_sets_have_no_labels(tmp_path: Path) -> None:
    path = written(tmp_path, "index\tsentence\n0\tA dog ran.\n")
    assert list(FORMATS["cola"].read(path)) == [Texts(("A dog ran.",), ())]
    for task, label in (("sst2", "label"), ("stsb", "score")):
        columns = "sentence" if task == "sst2" else "sentence1\tsentence2"
        texts = ("A dog ran.",) * (1 + columns.count("\t"))
        path = written(tmp_path, f"{columns}\t{label}\n" + "\t".join([*texts, "-1"]) + "\n")
        assert list(FORMATS[task].read(path)) == [Texts(texts, ())], "the test sets of the hub have -1"
    path = written(tmp_path, "index\tsentence1\tsentence2\n0\tA dog ran.\tA dog.\n")
    assert list(FORMATS["mnli"].read(path)) == [Texts(("A dog ran.", "A dog."), ())]
    path = written(tmp_path, "sentence\tlabel\nA dog ran.\t-1\n")
    assert list(FORMATS["cola"].read(path)) == [Texts(("A dog ran.",), ())], "as Hugging Face's data set has them"
    path = written(tmp_path, json.dumps({"sentence": "A dog ran.", "label": -1}), "rows.jsonl")
    assert list(FORMATS["cola"].read(path)) == [Texts(("A dog ran.",), ())]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_row_may_end_with_an_empty_column(end: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"id\tquestion1\tquestion2{end}9\tA film?\tA book?{end}3\tA dog?\t{end}")
    assert list(FORMATS["qqp"].read(path)) == [Texts(("A film?", "A book?"), ()), Texts(("A dog?", ""), ())]


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    """And are counted among the lines all the same."""
    path = written(tmp_path, "sentence\tlabel\n\ngood\t1\n \n\r\nbad\t7\n")
    good, bad = FORMATS["sst2"].read(path)
    assert good == Texts(("good",), (1,)) and isinstance(bad, Rejected) and bad.line == 6


def test_a_label_may_have_spaces_around_it(tmp_path: Path) -> None:
    path = written(tmp_path, "sentence\tlabel\ngood\t positive \nbad\t0 \n")
    assert list(FORMATS["sst2"].read(path)) == [Texts(("good",), (1,)), Texts(("bad",), (0,))]


def test_a_line_ends_with_a_line_feed_alone(tmp_path: Path) -> None:
    path = written(tmp_path, "sentence\tlabel\n")
    path.write_bytes(b"sentence\tlabel\nso\rgood\t1\n")
    assert list(FORMATS["sst2"].read(path)) == [Texts(("so\rgood",), (1,))]


@pytest.mark.parametrize(
    ("task", "row", "reason"),
    [
        ("sst2", "good\t2", r'label "2": there are negative, positive (0 to 1)'),
        ("sst2", "good\tgreat", 'label "great"'),
        ("sst2", "good\t²", 'label "²"'),
        ("sst2", "good\t1\t1", "3 columns, where the table has 2"),
        ("sst2", "good", "1 columns"),
        ("sst2", "good\t" + "1" * 5000, 'label "111'),
        ("sst2", " \t1", "all its texts are empty"),
    ],
)
def test_tells_line_and_reason_of_a_row_that_is_none(task: str, row: str, reason: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"sentence\tlabel\nfine\t1\n{row}\n")
    good, bad = FORMATS[task].read(path)
    assert good == Texts(("fine",), (1,))
    assert isinstance(bad, Rejected)
    assert (bad.file, bad.line) == (str(path), 3)
    assert reason in bad.reason


@pytest.mark.parametrize(("score", "reason"), [("5.1", "5.1 is not within 0 to 5"), ("nan", "nan"), ("x", "no number")])
def test_scores_out_of_range(score: str, reason: str, tmp_path: Path) -> None:
    (bad,) = FORMATS["stsb"].read(written(tmp_path, f"sentence1\tsentence2\tscore\na\tb\t{score}\n"))
    assert isinstance(bad, Rejected)
    assert reason in bad.reason


@pytest.mark.parametrize("score", ["1.001", "0.999", "4.2", "5"])
def test_scores_are_kept_to_three_digits(score: str, tmp_path: Path) -> None:
    (found,) = FORMATS["stsb"].read(written(tmp_path, f"sentence1\tsentence2\tscore\na\tb\t{score}\n"))
    assert isinstance(found, Texts)
    assert found.numbers == (round(1000 * float(score)),)
    assert FORMATS["stsb"].fields.scale == 1000 and FORMATS["sst2"].fields.scale == 1


HUB = {
    "mnli": {"premise": ["A dog ran.", "A film."], "hypothesis": ["A dog.", "A book."], "label": [2, -1]},
    "mrpc": {"sentence1": ["A dog ran.", "A film."], "sentence2": ["A dog.", "A book."], "label": [1, -1]},
    "qqp": {"question1": ["A dog ran.", "A film."], "question2": ["A dog.", "A book."], "label": [1, -1]},
    "stsb": {"sentence1": ["A dog ran.", "A film."], "sentence2": ["A dog.", "A book."], "label": [3.667, -1.0]},
}
"""Rows as `datasets` exports them from Hugging Face's data set; the second of each as in its test sets."""


@pytest.mark.parametrize("suffix", ["tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("task", HUB)
def test_reads_what_is_exported_from_hugging_faces_data_set(task: str, suffix: str, tmp_path: Path) -> None:
    columns = HUB[task] | {"idx": [0, 1]}
    path, rows = tmp_path / f"rows.{suffix}", list(zip(*columns.values(), strict=True))
    if suffix == "parquet":
        pq.write_table(pa.table(columns), path)
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    else:
        path.write_text("".join("\t".join(map(str, row)) + "\n" for row in [list(columns), *rows]))
    label = 3667 if task == "stsb" else columns["label"][0]
    expected = [Texts(("A dog ran.", "A dog."), (label,)), Texts(("A film.", "A book."), ())]
    assert list(FORMATS[task].read(path)) == expected


def test_quotes_of_what_is_exported_are_those_of_csv(tmp_path: Path) -> None:
    """Around a value that has a quote, a tab or the end of a line, and doubled in it."""
    exported = 'sentence\tlabel\tidx\n"He said ""hi""."\t1\t0\n"a\tgood\n\nfilm"\t0\t1\nso\rfine\t7\t2\n'
    quoted, long, bad = FORMATS["sst2"].read(written(tmp_path, exported))
    assert (quoted, long) == (Texts(('He said "hi".',), (1,)), Texts(("a\tgood\n\nfilm",), (0,)))
    assert isinstance(bad, Rejected) and bad.line == 6
    windows = written(tmp_path, exported.replace("\n", "\r\n"), "windows.tsv")
    assert next(iter(FORMATS["sst2"].read(windows))) == quoted


@pytest.mark.parametrize("other", ['so "good"\t1\t1', '"so" good\t1\t1', '"good"\t1\t1', '"so good\t1\t1'])
def test_where_csv_would_not_have_written_a_row_quotes_mean_nothing(other: str, tmp_path: Path) -> None:
    """As in GLUE's own tables, which have no column idx."""
    row = '"He said ""hi""."\t1'
    expected = Texts(('"He said ""hi""."',), (1,))
    assert list(FORMATS["sst2"].read(written(tmp_path, f"sentence\tlabel\n{row}\n"))) == [expected]
    path = written(tmp_path, f"sentence\tlabel\tidx\n{row}\t0\n{other}\n")
    assert list(FORMATS["sst2"].read(path)) == [expected, Texts((other.partition("\t")[0],), (1,))]


def test_a_table_that_is_no_parquet_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, "sentence\tlabel\n", "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet, behind record 0: no Parquet \(.*\)\. It may be of another"):
        list(FORMATS["sst2"].read(path))


def test_an_example_that_annotators_did_not_agree_on_is_left_out(tmp_path: Path) -> None:
    (bad,) = FORMATS["mnli"].read(written(tmp_path, "sentence1\tsentence2\tgold_label\na\tb\t-\n"))
    assert isinstance(bad, Rejected)
    assert "no gold label" in bad.reason


def test_reads_json_of_records(tmp_path: Path) -> None:
    record = {"text_a": "A dog.", "text_b": "A film.", "label": "neutral"}
    columns = {"sentence1": "A dog.", "sentence2": "A film.", "label": 1, "idx": 0}
    expected = [Texts(("A dog.", "A film."), (1,))]
    for name, text in {
        "a.json": json.dumps({"0": record}),
        "b.json": json.dumps([record]),
        "marked.json": "\ufeff" + json.dumps([record]),
        "c.jsonl": json.dumps(columns) + "\n",
        "alone.json": json.dumps(columns) + "\n",
    }.items():
        assert list(FORMATS["mnli"].read(written(tmp_path, text, name))) == expected, name
    lines = json.dumps(columns) + "\n\n" + json.dumps(columns | {"label": 7}) + "\n"
    for name in ("lines.json", "lines.jsonl"):
        good, bad = FORMATS["mnli"].read(written(tmp_path, lines, name))
        assert good == expected[0] and isinstance(bad, Rejected) and bad.line == 3, name
    alone = json.dumps({"text_a": "A dog.", "label": "positive"})
    assert list(FORMATS["sst2"].read(written(tmp_path, alone, "alone.jsonl"))) == [Texts(("A dog.",), (1,))]
    broken = list(FORMATS["mnli"].read(written(tmp_path, json.dumps(columns) + "\n{oops\n[]\n", "d.jsonl")))
    assert [row.line for row in broken[1:]] == [2, 3]
    _, other = FORMATS["mnli"].read(written(tmp_path, json.dumps([record, []]), "records.json"))
    assert isinstance(other, Rejected) and other.line == 2, "the second record"
    (pair,) = FORMATS["mnli"].read(written(tmp_path, json.dumps(columns | {"idx": "\ud800"}), "pair.jsonl"))
    assert isinstance(pair, Rejected) and (pair.line, pair.reason) == (1, "half a surrogate pair")
    scored = json.dumps({"text_a": "a", "text_b": "b", "label": 10**400})
    (score,) = FORMATS["stsb"].read(written(tmp_path, scored, "score.jsonl"))
    assert isinstance(score, Rejected) and score.reason.endswith("is no number")
    with pytest.raises(DataError, match=r"e.json, line 2: no JSON"):
        list(FORMATS["mnli"].read(written(tmp_path, '{"0":\n oops}', "e.json")))


def test_the_list_of_rows_that_are_left_out_replaces_no_input(words: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"sentence": "fine", "label": 1}) + "\n", "sst.rejected.jsonl")
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"writes .*sst\.rejected\.jsonl, which is read here"):
        make_examples(FORMATS["sst2"], [path], tmp_path / "sst", words)
    assert path.read_bytes() == before


@pytest.mark.parametrize("bad", [120, 3_000])
def test_a_list_of_rows_for_which_there_is_no_room_leaves_nothing(words: Tokenizer, tmp_path: Path, bad: int) -> None:
    """Also where only its last lines, which are written at the end, do not fit; and it is named."""
    path = written(tmp_path, "sentence\tlabel\na good film \t1\n" + "none\n" * bad)
    with room_for(9_000), pytest.raises(OSError, match=r"File too large: '.*sst\.rejected\.jsonl'"):
        make_examples(FORMATS["sst2"], [path], tmp_path / "sst", words)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_leftovers_of_a_killed_command_are_removed_and_only_one_at_a_time_writes(
    words: Tokenizer, tmp_path: Path
) -> None:
    path, left = written(tmp_path, ROWS["sst2"][0]), tmp_path / "sst.rejected.jsonl.7-0123abcd.partial"
    left.touch()
    with (
        held(tmp_path / "sst", "colonnade data merge", overwrite=False),
        pytest.raises(LockError, match="is in use by `colonnade data merge"),
    ):
        make_examples(FORMATS["sst2"], [path], tmp_path / "sst", words)
    left.touch()
    make_examples(FORMATS["sst2"], [path], tmp_path / "sst", words)
    assert {each.name for each in tmp_path.iterdir()} == {path.name, "sst.bin", "sst.idx", "sst.json"}


def test_a_document_is_an_example_and_its_last_sequence_the_label(words: Tokenizer, tmp_path: Path) -> None:
    made = make_examples(FORMATS["qqp"], [written(tmp_path, ROWS["qqp"][0])], tmp_path / "qqp", words)
    file = TokenFile(tmp_path / "qqp")
    sidecar = read_sidecar(file)
    assert (made.examples, made.labels, made.rejected) == (2, {"not_duplicate": 1, "duplicate": 1}, 0)
    assert made.longest == len(words.encode("A film?")) + len(words.encode("A book?"))
    assert file.num_documents == 2
    assert file.boundaries.tolist() == [0, 3, 6]
    assert file.document(0).tolist() == [*words.encode("A film?"), *words.encode("A book?"), 0]
    assert file.document(1).tolist() == [*words.encode("A dog?"), 1]
    assert file.lengths.tolist()[3] == 0
    assert sidecar is not None
    assert sidecar.examples == FORMATS["qqp"].fields
    assert sidecar.tokenizer_sha256 == words.sha256


def test_the_sidecar_counts_bytes_of_text_and_names_all_files(words: Tokenizer, tmp_path: Path) -> None:
    files = [written(tmp_path, f"sentence\tlabel\nschön\t{n}\n", f"{n}.tsv") for n in range(2)]
    make_examples(FORMATS["sst2"], files, tmp_path / "sst", words)
    sidecar = read_sidecar(TokenFile(tmp_path / "sst"))
    assert sidecar is not None and sidecar.text_bytes == 12 and sidecar.sources == tuple(map(str, files))


def test_however_many_rows_are_tokenized_together_all_are_stored_in_order(
    words: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colonnade.examples.make._AT_ONCE", 2)
    rows = [("film", 1), ("book", 0), ("dog", 7), ("hill", 7), ("film", 0), ("dog", 1), ("book", 1)]
    files = []
    for name, some in (("all.tsv", rows), ("again.tsv", rows[:1])):
        lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in some)]
        files.append(written(tmp_path, "\n".join(lines), name))
    made = make_examples(FORMATS["sst2"], files, tmp_path / "sst", words)
    file, kept = TokenFile(tmp_path / "sst"), [row for row in [*rows, rows[0]] if row[1] < 7]
    stored = [[each.tolist() for each in file.sequences(number)] for number in range(file.num_documents)]
    assert stored == [[words.encode(text), [label]] for text, label in kept] and file.dtype == np.uint16
    assert (made.examples, made.rejected, made.labels) == (6, 2, {"negative": 2, "positive": 4})


def test_a_table_of_another_form_is_to_be_converted(words: Tokenizer, tmp_path: Path) -> None:
    """Under another name alone it would be a table of one column."""
    (tmp_path / "sst.csv").write_text('sentence,label\n"it was good",1\n')
    told = r"sst\.csv: examples of sst2 are read from \.tsv, .* and \.parquet\. Convert it to one of them, or rename"
    with pytest.raises(DataError, match=told):
        make_examples(FORMATS["sst2"], [tmp_path / "sst.csv"], tmp_path / "sst", words)


def test_a_folder_of_tables_is_none(words: Tokenizer, tmp_path: Path) -> None:
    """Of several tables in it nobody knows which are meant."""
    written(tmp_path, ROWS["sst2"][0])
    with pytest.raises(DataError, match=r"is a folder: name its files\. Examples of sst2 are read from files that are"):
        make_examples(FORMATS["sst2"], [tmp_path], tmp_path / "sst", words)


def test_of_a_file_without_labels_none_are_counted(words: Tokenizer, tmp_path: Path) -> None:
    made = make_examples(FORMATS["sst2"], [written(tmp_path, "sentence\nfine\n")], tmp_path / "sst", words)
    assert "labels:" not in made.summary() and "1 example without a label" in made.summary()
    made = make_examples(FORMATS["sst2"], [written(tmp_path, ROWS["sst2"][0])], tmp_path / "more", words)
    assert "labels: negative 0, positive 1" in made.summary()


@pytest.mark.parametrize(
    ("task", "columns", "why"),
    [
        ("mnli", "sentence1\tsentence2\tgoldlabel", " (no column gold_label or label; the columns are {})"),
        ("mnli", "text_a\ttext_b\tgold_label", " (no column label; the columns are {})"),
        ("rte", "sentence1\tsentence2\tLabel", " (no column label; the columns are {})"),
        ("rte", "sentence1\tsentence2\tlabel", ""),
    ],
)
def test_a_column_of_labels_with_another_name_is_told_with_those_that_are_there(
    task: str, columns: str, why: str, words: Tokenizer, tmp_path: Path
) -> None:
    path = written(tmp_path, f"{columns}\na\tb\t-1\nc\td\t-1\n")
    told = why.format(columns.replace("\t", ", "))
    line = f"2 examples without a label{told}: nothing can be trained or scored on them"
    assert line in make_examples(FORMATS[task], [path], tmp_path / "made", words).summary().splitlines()


def test_a_number_has_to_be_less_than_the_vocabulary_has_ids(words: Tokenizer, tmp_path: Path) -> None:
    highest = words.vocab_size - 1
    row = "sentence1\tsentence2\tscore\na\tb\t{}\n"
    made = make_examples(FORMATS["stsb"], [written(tmp_path, row.format(highest / SCORES))], tmp_path / "fits", words)
    assert made.examples == 1 and TokenFile(tmp_path / "fits").document(0)[-1] == highest
    two = f"{row.format(highest / SCORES)}a\tb\t{(highest + 1) / SCORES}\n"
    said = f"example 2 has the number {highest + 1:,}, and a token file of {highest + 1:,} ids"
    with pytest.raises(DataError, match=said):
        make_examples(FORMATS["stsb"], [written(tmp_path, two)], tmp_path / "other", words)


def test_left_out_rows_are_listed_and_a_file_of_none_is_refused(words: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path, "sentence\tlabel\nfine\t1\nfine\t7\n")
    made = make_examples(FORMATS["sst2"], [path], tmp_path / "sst", words)
    assert (made.examples, made.rejected) == (1, 1)
    assert "line 3" in made.summary()
    listed = json.loads((tmp_path / "sst.rejected.jsonl").read_text())
    assert (listed["file"], listed["line"]) == (str(path), 3)
    for text, said in (
        ("sentence\tlabel\nfine\t7\n", "line 2"),
        ("", "have no rows"),
        ("sentence\tlabel\n", "have no rows"),
    ):
        with pytest.raises(DataError, match=said):
            make_examples(FORMATS["sst2"], [written(tmp_path, text, "none.tsv")], tmp_path / "none", words)
    assert not list(tmp_path.glob("none.*in*"))
    (tmp_path / "precious.json").write_text("mine")
    with pytest.raises(DataError, match=r"precious.json exists already\..*--overwrite"):
        make_examples(FORMATS["sst2"], [path], tmp_path / "precious", words)
    assert (tmp_path / "precious.json").read_text() == "mine"
    with pytest.raises(DataError, match="exist already"):
        make_examples(FORMATS["sst2"], [path], tmp_path / "sst", words)
    with pytest.raises(DataError, match="does not exist"):
        make_examples(FORMATS["sst2"], [tmp_path / "no.tsv"], tmp_path / "other", words)
    with pytest.raises(DataError, match="below that"):
        make_examples(FORMATS["stsb"], [written(tmp_path, ROWS["stsb"][0])], tmp_path / "sts", words)


def test_left_out_rows_are_told_without_control_characters(words: Tokenizer, tmp_path: Path) -> None:
    """Which a terminal would obey: those of the file's name, and of what stands in it."""
    path = written(tmp_path, "sentence\tlabel\nfine\t1\nfine\t\x1b[31m\n", "red\x1b[31m.tsv")
    said = make_examples(FORMATS["sst2"], [path], tmp_path / "sst", words).summary()
    assert "red\ufffd[31m.tsv, line 3: " in said
    assert all(line.isprintable() for line in said.splitlines())


def test_the_command(words: Tokenizer, tmp_path: Path) -> None:
    words.save(tmp_path / "tokenizer.json")
    path = written(tmp_path, ROWS["mnli"][0])
    options = ["--output", tmp_path / "mnli", "--tokenizer", tmp_path / "tokenizer.json"]
    answer = here("data", "examples", "mnli", path, *options)
    assert answer.status == 0, answer
    assert "1 example of mnli" in answer.out
    answer = here("data", "examples", "mnlu", path, *options)
    assert answer.status == 2
    assert "mnli, " in answer.err
    shown = here("data", "inspect", tmp_path / "mnli")
    assert "mnli" in shown.out


def test_real_rows(shared: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(shared / "bert-vocab" / "vocab.txt")
    for task, name in (("mnli", "mnli_dev_matched"), ("qqp", "qqp_dev")):
        table = list(FORMATS[task].read(shared / "glue" / "tsv" / f"{name}.tsv"))
        records = list(FORMATS[task].read(shared / "glue" / task.upper() / "dev.json"))
        assert not [row for row in (*table, *records) if isinstance(row, Rejected)]
        made = make_examples(format_of(task), [shared / "glue" / task.upper() / "dev.json"], tmp_path / task, tokenizer)
        assert made.examples == len(records) == sum(made.labels.values())
