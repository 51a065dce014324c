"""Perplexity of files: text and token files alike, bytes and words of the text, and what is refused."""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from colonnade.data.indexed import HEADER
from colonnade.data.rows import Cut
from colonnade.data.tokenize import tokenize_files
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import DataError
from colonnade.evaluation.file import (
    NO_BYTES,
    Tokenized,
    _notes,
    perplexity_of_file,
    perplexity_of_wikitext,
    tokens_of_file,
)
from colonnade.evaluation.perplexity import Perplexity, evaluate_tokens
from colonnade.evaluation.progress import Progress
from colonnade.evaluation.wikitext import WikiText
from colonnade.mesh.mesh import Axis, Mesh
from tests.generation.tiny import tiny_gpt

DOCUMENTS = ["the cat and the hat", "a bät in the hat∞", "and so on"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(DOCUMENTS * 3, 275)


def perplexity(file: Path, tokenizer: Tokenizer, vocab_size: int = 275, words: int | None = None) -> Perplexity:
    model = tiny_gpt(Axis("tp"), vocab_size=vocab_size)
    return perplexity_of_file(model, str(file), tokenizer=tokenizer, mesh=Mesh(), stride=3, words=words)


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "some.jsonl", [json.dumps({"text": document}) for document in DOCUMENTS])


def test_a_text_and_its_token_file_are_alike(lines: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenize_files([lines], tmp_path / "tokens", tokenizer, workers=1, progress=False)
    of_text, of_tokens = perplexity(lines, tokenizer), perplexity(tmp_path / "tokens", tokenizer)
    assert (of_text.loss, of_text.bits_per_byte, of_text.tokens) == (
        of_tokens.loss,
        of_tokens.bits_per_byte,
        of_tokens.tokens,
    )
    first = tokenizer.byte_lengths()[tokenizer.encode(DOCUMENTS[0])[0]]
    assert of_text.bytes == sum(len(document.encode()) for document in DOCUMENTS) - first  # the first is not predicted
    ends = len(DOCUMENTS) - 1
    assert of_text.tokens == sum(len(tokenizer.encode(document)) for document in DOCUMENTS) + ends - 1
    assert of_text.words == 13 and of_tokens.words is None


def test_documents_without_text_are_none(lines: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["", DOCUMENTS[0], "", *DOCUMENTS[1:], ""]
    file = write_lines(tmp_path / "some-empty.jsonl", [json.dumps({"text": text}) for text in texts])
    tokenize_files([file], tmp_path / "tokens", tokenizer, workers=1, progress=False)
    expected, of_tokens = perplexity(lines, tokenizer), perplexity(tmp_path / "tokens", tokenizer)
    assert perplexity(file, tokenizer) == expected
    assert (of_tokens.loss, of_tokens.tokens) == (expected.loss, expected.tokens)


def test_compressed_text_and_the_paper_s_number_of_words(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text(DOCUMENTS[0])
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(DOCUMENTS[0].encode()))
    plain = perplexity(tmp_path / "a.txt", tokenizer)
    assert plain == perplexity(tmp_path / "a.txt.gz", tokenizer)
    assert plain.words == 5 and plain.tokens == len(tokenizer.encode(DOCUMENTS[0])) - 1
    given = perplexity(tmp_path / "a.txt", tokenizer, words=7)
    assert given.words == 7 and plain.word_perplexity is not None and given.word_perplexity is not None
    assert given.word_perplexity**7 == pytest.approx(plain.word_perplexity**5, rel=1e-9)


@pytest.mark.parametrize("of_words", [False, True])
def test_windows_batches_and_progress_are_those_that_are_asked_for(
    tmp_path: Path, tokenizer: Tokenizer, of_words: bool
) -> None:
    model, text, said = tiny_gpt(Axis("tp"), vocab_size=275), " ".join(DOCUMENTS), list[str]()
    (tmp_path / "a.txt").write_text(text)
    clock = itertools.count(0.0, 6.0)
    progress = Progress("windows", clock=lambda: next(clock), say=said.append)
    how: Any = {"tokenizer": tokenizer, "mesh": Mesh(), "batch_size": 2, "progress": progress}
    windows = {"seq_length": 4, "stride": 3}
    if of_words:
        found = perplexity_of_wikitext(model, WikiText(text, 9), **how, **windows)
    else:
        found = perplexity_of_file(model, str(tmp_path / "a.txt"), **how, **windows)
    tokens = np.array(tokenizer.encode(text))
    assert found.loss == pytest.approx(evaluate_tokens(model, tokens, dp=Axis("dp"), **windows).loss, rel=1e-12)
    assert found.bytes == len(text.encode()) - len(tokenizer.decode(tokens[:1].tolist()))
    assert said[0].startswith(f"  2 of {-(-(len(tokens) - 1 - 4) // 3) + 1} windows, ")


def test_a_bad_line_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write_lines(tmp_path / "bad.jsonl", ['{"text": "good"}', "not JSON"])
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2: not JSON"):
        perplexity(file, tokenizer)


def test_files_that_are_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"nothing does not exist, and there is no .*nothing\.bin"):
        perplexity(tmp_path / "nothing", tokenizer)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="the text has 0 tokens"):
        perplexity(tmp_path / "empty.txt", tokenizer)
    (tmp_path / "notes.pdf").write_text("text")
    with pytest.raises(DataError, match="ending that says nothing"):
        perplexity(tmp_path / "notes.pdf", tokenizer)


def test_a_token_file_named_with_its_ending(lines: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenize_files([lines], tmp_path / "tokens", tokenizer, workers=1, progress=False)
    with pytest.raises(DataError, match="named without its ending"):
        perplexity(tmp_path / "tokens.bin", tokenizer)


def test_a_token_file_whose_index_contradicts_itself_is_refused(
    lines: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    tokenize_files([lines], tmp_path / "tokens", tokenizer, workers=1, progress=False)
    content = bytearray((tmp_path / "tokens.idx").read_bytes())
    content[HEADER.size : HEADER.size + 4] = (1).to_bytes(4, "little")
    (tmp_path / "tokens.idx").write_bytes(content)
    with pytest.raises(DataError, match="is damaged: sequence 1 has"):
        perplexity(tmp_path / "tokens", tokenizer)


def test_another_tokenizer_is_noticed(lines: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenize_files([lines], tmp_path / "tokens", train_bpe(["other words"], 260), workers=1, progress=False)
    with pytest.raises(DataError, match="another tokenizer"):
        perplexity(tmp_path / "tokens", tokenizer)
    with pytest.raises(DataError, match="the model's vocabulary has 200 ids"):
        perplexity(lines, tokenizer, vocab_size=200)


def test_examples_with_numbers_among_their_tokens_are_no_text(
    lines: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    tokenize_files([lines], tmp_path / "tokens", tokenizer, workers=1, progress=False)
    file = tmp_path / "tokens.json"
    known = json.loads(file.read_text())
    made_of = {"format": "mnli", "head": "classification", "fields": ["a"], "labels": ["no", "yes"]}
    file.write_text(json.dumps({**known, "examples": made_of}))
    with pytest.raises(DataError, match="holds examples of mnli, with numbers among their tokens, and a perplexity"):
        perplexity(tmp_path / "tokens", tokenizer)
    file.write_text(json.dumps({**known, "examples": {**made_of, "format": "chat", "head": "answers"}}))
    assert perplexity(tmp_path / "tokens", tokenizer).tokens


def test_a_token_file_that_does_not_name_its_tokenizer_is_marked(
    lines: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """As Megatron-LM writes them: nothing can tell the right tokenizer from another of as many ids."""
    tokenize_files([lines], tmp_path / "tokens", tokenizer, workers=1, progress=False)
    known = perplexity(tmp_path / "tokens", tokenizer)
    assert known.tokenizer_checked and known.notes == () and "not checked" not in known.summary()
    (tmp_path / "tokens.json").unlink()
    for used in (tokenizer, train_bpe(["quite other words " * 9], 275)):
        found = perplexity(tmp_path / "tokens", used)
        assert not found.tokenizer_checked
        assert f"({found.bytes} bytes, tokenizer not checked)" in found.summary()
        (note,) = found.notes
        assert note.startswith(f"{tmp_path}/tokens has no tokens.json beside it: that the checkpoint's tokenizer made")


def test_sequences_of_a_document_are_scored_as_one_where_documents_are_apart(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Its sentences, or turns: what begins one is predicted from those before it."""
    model, found = tiny_gpt(Axis("tp"), vocab_size=275), []
    for name, first in (("whole", []), ("cut", [2, 1])):
        with TokenFileWriter(tmp_path / name, np.dtype("<u2")) as writer:
            for tokens in map(tokenizer.encode, DOCUMENTS):
                writer.add_document(tokens, lengths=[*first, len(tokens) - sum(first)])
        file = str(tmp_path / name)
        found.append(perplexity_of_file(model, file, tokenizer=tokenizer, mesh=Mesh(), cut=Cut(separate=True)))
    whole, cut = found
    assert whole.tokens == sum(len(tokenizer.encode(document)) - 1 for document in DOCUMENTS)
    assert (cut.loss, cut.tokens) == (whole.loss, whole.tokens)


@pytest.mark.parametrize(
    "examples", [None, {"format": "chat", "head": "answers", "fields": ["messages"], "labels": []}]
)
def test_answers_are_marked_in_conversations_alone(
    lines: Path, tmp_path: Path, tokenizer: Tokenizer, examples: object
) -> None:
    """There they are every second turn."""
    tokenize_files([lines], tmp_path / "tokens", tokenizer, workers=1, progress=False)
    known = json.loads((tmp_path / "tokens.json").read_text())
    with TokenFileWriter(tmp_path / "turns", np.dtype("<u2")) as writer:
        writer.add_document(range(1, 8), lengths=[2, 1, 3, 1])
    (tmp_path / "turns.json").write_text(
        json.dumps(known | {"documents": 1, "tokens": 7} | ({"examples": examples} if examples else {}))
    )
    found = tokens_of_file(str(tmp_path / "turns"), tokenizer, 275)
    if examples is None:
        assert found.answers is None
    else:
        assert found.answers is not None and found.answers.tolist() == [False, False, True, False, False, False, True]


@pytest.mark.parametrize("marked", [True, False])
def test_where_answers_alone_count_it_is_told_that_none_are_marked(marked: bool, tokenizer: Tokenizer) -> None:
    tokens = np.array(tokenizer.encode(DOCUMENTS[0]))
    text = Tokenized(tokens, np.array([0]), None, answers=np.ones(len(tokens), dtype=bool) if marked else None)
    assert list(_notes("chats", text, tokenizer, Cut())) == []
    notes = list(_notes("chats", text, tokenizer, Cut(answers=True)))
    assert [note.split(":")[0] for note in notes] == ([] if marked else ["no answers are marked in it"])


def test_what_is_left_out_is_told(lines: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = tiny_gpt(Axis("tp"), vocab_size=300)
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain = perplexity_of_file(model, str(lines), tokenizer=Tokenizer(inner), mesh=Mesh())
    assert plain.bits_per_byte is None and [note.split(":")[0] for note in plain.notes] == [
        "no bits per byte",
        "the tokenizer has no end-of-document token",
    ]
    one = write_lines(tmp_path / "one.jsonl", [json.dumps({"text": DOCUMENTS[0]})])
    alone = perplexity_of_file(model, str(one), tokenizer=Tokenizer(inner), mesh=Mesh())
    assert [note.split(":")[0] for note in alone.notes] == ["no bits per byte"], "nothing follows it"
    of_words = perplexity_of_wikitext(
        model, WikiText(DOCUMENTS[0], 5), tokenizer=Tokenizer(inner), mesh=Mesh(), seq_length=4, stride=2
    )
    assert of_words.notes == (NO_BYTES,) and of_words.words == 5
    separate = perplexity_of_file(model, str(lines), tokenizer=tokenizer, mesh=Mesh(), cut=Cut(separate=True))
    assert separate.words is None and [note.split(":")[0] for note in separate.notes] == ["no perplexity a word"]
