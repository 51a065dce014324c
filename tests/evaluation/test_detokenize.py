"""WikiText's words to natural text and back: rule by rule, on any text, and on the whole test set."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.evaluation import detokenize as module
from colonnade.evaluation.detokenize import DETOKENIZERS, detokenize, retokenize
from colonnade.evaluation.wikitext import count_words, read_wikitext
from tests.evaluation.real import real_file

WRITTEN = (
    ' \n = = Early = = \n \n Mr. Boulter \'s band ( 1998 – 2004 ) was a well @-@ kept " indie " act in the U.S. ; '
    "it sold 3 @.@ 5 million records , 1 @,@ 204 at $ 5 and / or 7 % . Didn 't it ? [ sic ] The players ' <unk> @-@ TV "
    "show : no . \n"
)
NATURAL = (
    '\n== Early ==\n\nMr. Boulter\'s band (1998 – 2004) was a well-kept "indie" act in the U.S.; it sold 3.5 '
    "million records, 1,204 at $5 and/or 7%. Didn't it? [sic] The players' <unk>-TV show: no.\n"
)
PIECES = st.lists(
    st.sampled_from([*"as1S .,'\"()=-/\n@$%:[]“”°", " @-@ ", " = ", "Mr", "U.S", "<unk>", "  "]), max_size=12
)


def test_words_become_natural_text_and_return() -> None:
    assert detokenize(WRITTEN) == NATURAL
    assert retokenize(NATURAL) == WRITTEN
    for sign in "$£€¥₱#":
        assert (detokenize(f"at {sign} 5 ,"), retokenize(f"at {sign}5,")) == (f"at {sign}5,", f"at {sign} 5 ,")
    for sign in "%°′″":
        assert (detokenize(f"at 5 {sign} ,"), retokenize(f"at 5{sign},")) == (f"at 5{sign},", f"at 5 {sign} ,")
    for sign in ",;:!?":
        assert (detokenize(f"dogs {sign} a ,"), retokenize(f"dogs{sign} a,")) == (f"dogs{sign} a,", f"dogs {sign} a ,")


@pytest.mark.parametrize("word", ["Mr", "Messrs", "No", "etc", "e.g", "vs", "St", "U.S", "A"])
@pytest.mark.parametrize("before", ["", "(", "“", "["])
def test_abbreviations_keep_their_stop_also_behind_a_bracket_or_a_quotation_mark(word: str, before: str) -> None:
    written = f" {before} " if before else " "
    for natural, cut in (
        (f"x {before}{word}. y", f" x{written}{word}. y "),
        (f"x {before}dog. y", f" x{written}dog . y "),
    ):
        assert (detokenize(f"{cut}\n"), retokenize(f"{natural}\n")) == (f"{natural}\n", f"{cut}\n")


@pytest.mark.parametrize("before", '"([“‘')
def test_abbreviations_keep_their_stop_where_a_mark_stands_at_them_already(before: str) -> None:
    assert " Mr. " in f" {detokenize(f' x {before}Mr. y ; z ')}".replace(before, " ")


def test_a_hyphen_that_does_not_break_joins_words() -> None:
    assert detokenize("a \u2011 b") == "a\u2011b" and retokenize("a\u2011b") == "a \u2011 b"


def test_behind_a_quotation_mark_that_is_not_closed_the_line_ends_as_any_other() -> None:
    assert detokenize(' He said " yes . \n " No " . \n') == 'He said "yes.\n"No".\n'


@example("a , , b . . ) ( ( c ) \" \" d's ' e\n =  = \n")
@given(PIECES.map("".join))
def test_each_rule_is_its_own_inverse_on_any_text(text: str) -> None:
    for rule in module._RULES:
        assert rule(rule(text)) == text
    assert retokenize(detokenize(text)) == text == detokenize(retokenize(text))


@pytest.mark.parametrize("name", ["wikitext-103.test.tokens", "wikitext-103.valid.tokens", "wiki.test.raw"])
def test_a_whole_set_returns(name: str) -> None:
    words = real_file(f"wikitext/{name}").read_text()
    text = detokenize(words)
    assert retokenize(text) == words
    assert text.count(" , ") + text.count(" . ") < 0.005 * (words.count(" , ") + words.count(" . ")), "it is undone"
    assert text.count("@") < 0.02 * words.count("@")


@pytest.mark.slow
def test_the_paper_s_counts() -> None:
    """T_o = 245,566 words, and T = 270,329 scored tokens of GPT-2's vocabulary by Megatron-LM's rules."""
    file = real_file("wikitext/wikitext-103.test.tokens")
    gpt2 = Tokenizer.load(real_file("gpt2-bpe"))
    megatron, ours = (read_wikitext(file, name) for name in ("megatron", "invertible"))
    assert megatron.original_tokens == ours.original_tokens == 245_566
    assert len(gpt2.encode(megatron.text)) - 1 == 270_329
    assert len(gpt2.encode(ours.text)) - 1 == 270_225
    assert read_wikitext(file, "none").text == file.read_text()


@pytest.mark.slow
def test_megatron_s_rules_are_those_of_the_harness() -> None:
    harness = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")
    text = real_file("wikitext/wikitext-103.test.tokens").read_text()[:300_000] + " {  a } ' b ' \" c \" N  ° "
    assert DETOKENIZERS["megatron"](text) == harness.wikitext_detokenizer({"page": text})


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_megatron_s_rules_join_the_marks_of_headings_of_all_levels(level: int) -> None:
    spaced, joined = " ".join("=" * level), "=" * level
    assert DETOKENIZERS["megatron"](f" \n {spaced} Title {spaced} \n text") == f"\n{joined} Title {joined}\ntext"


@pytest.mark.parametrize(
    ("written", "natural"),
    [
        ("Theirs ' own", "Theirs' own"),
        ("well @-@ kept , 1 @,@ 204 and 3 @.@ 5", "well-kept, 1,204 and 3.5"),
        ("a : b ; c . d ! e ? f , g", "a: b; c. d! e? f, g"),
        ("( a ) [ b ] { c } \" d \" ' e '", "(a) [b] {c} \"d\" 'e'"),
        ("20 ° C", "20°C"),
        ("of N men", "of 1 men"),
        ("He 's", "He's"),
        ("a \n b", "a\nb"),
    ],
)
def test_megatron_s_rules_undo_what_they_name(written: str, natural: str) -> None:
    assert DETOKENIZERS["megatron"](written) == natural
    assert DETOKENIZERS["none"](written) == written


@pytest.mark.parametrize("detokenizer", sorted(DETOKENIZERS))
def test_lines_may_end_as_on_windows(detokenizer: str, tmp_path: Path) -> None:
    words = ' \n = Robert Boulter = \n \n Robert " Bob " Boulter is , he says , an actor . \n'
    unix, windows = tmp_path / "unix.tokens", tmp_path / "windows.tokens"
    unix.write_bytes(words.encode())
    windows.write_bytes(words.replace("\n", "\r\n").encode())
    assert read_wikitext(windows, detokenizer) == read_wikitext(unix, detokenizer)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.ndjson", "x.jsonl.gz", "X.JSONL"])
def test_json_is_no_words(name: str, tmp_path: Path) -> None:
    """Its braces and keys would be measured."""
    (tmp_path / name).write_text('{"text": "a b"}\n')
    with pytest.raises(DataError, match=rf"{name} has JSON by its name, and WikiText is words\. Name its \.tokens or"):
        read_wikitext(tmp_path / name, "none")


def test_a_file_of_white_space_has_no_word_to_predict(tmp_path: Path) -> None:
    (tmp_path / "empty.tokens").write_text(" \n \n")
    with pytest.raises(DataError, match=r"empty\.tokens is empty"):
        read_wikitext(tmp_path / "empty.tokens", "none")


def test_words_are_what_single_spaces_separate() -> None:
    assert count_words(" \n = A = \n b c \n ") == len(["=", "A", "=", "\n", "b", "c"])
