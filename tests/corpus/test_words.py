"""Words and their hashes."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from colonnade.corpus.words import (
    PlainWords,
    WordHashes,
    ngram_hashes,
    normal_form,
    shingles_of,
    spans_of,
    spans_within,
    words_of,
)

WORDS = st.lists(st.sampled_from(["a", "b", "c", "word", "Ä"]), max_size=12)


def test_words_are_letters_and_digits_in_small_letters() -> None:
    assert words_of("The dog's 1,000 cats—ÉTÉ.") == ["the", "dog", "s", "1", "000", "cats", "été"]


def test_scripts_without_spaces_have_a_word_a_character() -> None:
    assert words_of("日本語 and Thai ไทย") == ["日", "本", "語", "and", "thai", *"ไทย"]
    for text in ("ສະບາຍດີ", "မြန်မာ", "ភាសាខ្មែរ"):  # Lao, Burmese and Khmer, whose vowel signs are characters too
        assert words_of(text) == [*text]


FORMS = st.text(st.sampled_from("ab ,\n…½²\xa0\u0301\u0308\u0323éậñガがｶﾞ각각ᆨﬁÅİ語"), max_size=30)
"""Texts of characters that a normal form takes apart or puts together."""


@given(st.text(max_size=60) | FORMS)
@example("İzmir and Ankara")  # İ in small letters is two characters
def test_spans_are_where_the_words_stand(text: str) -> None:
    words, spans = spans_of(text)
    assert words == [normal_form(text)[start:stop].lower() for start, stop in spans]
    within = [text[start:stop] for start, stop in spans_within(text, spans)]
    assert all(word in normal_form(part).lower() for word, part in zip(words, within, strict=True))


@given(FORMS)
def test_what_is_around_a_span_is_left_as_it_is(text: str) -> None:
    normal = normal_form(text)
    for start, stop in spans_of(text)[1]:
        ((first, end),) = spans_within(text, [(start, stop)])
        assert normal.startswith(normal_form(text[:first])) and normal.endswith(normal_form(text[end:]))
        assert normal_form(text[:first]) + normal_form(text[first:end]) + normal_form(text[end:]) == normal


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_words_are_the_same_in_every_normal_form(form: str) -> None:
    text = "Ｗｏｒｄ, résumé—Tiếng Việt: ﬁn 10² 각하 ガラス"
    other = unicodedata.normalize(form, text)
    words, spans = spans_of(other)
    assert words == ["word", "résumé", "tiếng", "việt", "fin", "102", "각하", *"ガラス"]
    found = [other[start:stop] for start, stop in spans_within(other, spans)]
    alike = ("résumé", "Tiếng", "Việt")
    assert [*found[1:4], found[6]] == [unicodedata.normalize(form, word) for word in (*alike, "각하")]


def test_near_duplicates_go_by_the_text_as_it_is() -> None:
    """An index of earlier runs holds signatures of such words."""
    assert words_of("été e\u0301te\u0301 10²") == ["été", "e", "te", "10²"]


@given(WORDS, WORDS, st.integers(1, 5))
def test_ngrams_are_equal_where_their_words_are(first: list[str], second: list[str], n: int) -> None:
    hashes = WordHashes()
    one, other = (ngram_hashes(hashes.of(words), n) for words in (first, second))
    assert len(one) == max(0, len(first) - n + 1)
    for i, left in enumerate(one):
        for j, right in enumerate(other):
            assert (left == right) == (first[i : i + n] == second[j : j + n])


@given(WORDS, st.integers(1, 5))
def test_shingles_are_a_set(words: list[str], n: int) -> None:
    found = shingles_of(" ".join(words), n, WordHashes())
    lower = [word.lower() for word in words]
    size = min(n, len(words))
    expected = {tuple(lower[i : i + size]) for i in range(len(words) - size + 1)} if words else {()}
    assert len(found) == len(expected)
    assert (np.diff(found.astype(object)) > 0).all()


def test_a_text_without_words_is_told_by_what_it_has_between_spaces() -> None:
    marks, spaced, others = (shingles_of(text, 5, WordHashes()).tolist() for text in ("?!", " ?!\n", "!!"))
    assert marks == spaced != others


def test_hashes_do_not_depend_on_the_process() -> None:
    assert int(WordHashes().of(["the"])[0]) == 0x2E3A97906CABDA5E


def test_shingles_are_those_that_earlier_runs_have_in_their_index() -> None:
    """Numbers of before: with others every document would be a new one."""
    assert [hex(each) for each in shingles_of("the cat sat on the mat", 5, WordHashes()).tolist()] == [
        "0x66c90b7677ce8a65",
        "0xe53832b28c2be5b3",
    ]


@given(st.text(alphabet="ab .!?\n'語。", max_size=60))
def test_sentences_cover_the_text(text: str) -> None:
    plain = PlainWords()
    spans = plain.span_tokenize(text)
    assert "".join(text[start:stop] for start, stop in spans) == text
    assert "".join(plain.word_tokenize(text)) == "".join(text.split())


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ('He said "Go." Then he left. ', ['He said "Go."', "Then he left."]),
        ("Is it (this one?) Yes! ", ["Is it (this one?)", "Yes!"]),
        ("这是一个。 那是另一个！ 好", ["这是一个。", "那是另一个！", "好"]),
        ("Version 1.5 is out", ["Version 1.5 is out"]),
    ],
)
def test_sentences_end_with_a_sign_and_a_space(text: str, sentences: list[str]) -> None:
    """And the marks that close it are its own."""
    assert PlainWords().sent_tokenize(text) == sentences


def test_words_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colonnade.corpus.words._MAX_CACHED", 3)
    hashes = WordHashes()
    found = hashes.of([*"abcdefgabc"]).tolist()
    assert len(hashes) <= 3 and found == [int(WordHashes().of([word])[0]) for word in "abcdefgabc"]
