"""LAMBADA's passages: how each variant cuts them, and lines that are none."""

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.errors import DataError
from colonnade.evaluation.passages import VARIANTS, Passage, examples, read_passages
from tests.corpus.test_streams import PACK
from tests.evaluation.real import real_file

TEXT = '"Yes," said Ann.  She did not look at the\n\nstatuette'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["Yes said Ann. She did not look at the stat uette", " statue look"] * 3, 300)


def written(folder: Path, content: str | bytes, name: str = "lambada.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_what_is_context_and_what_is_to_be_predicted(tokenizer: Tokenizer) -> None:
    cut = {name: variant(TEXT, tokenizer) for name, variant in VARIANTS.items()}
    decoded = {name: (tokenizer.decode(context), tokenizer.decode(target)) for name, (context, target) in cut.items()}
    bare = '"Yes," said Ann.  She did not look at the'
    assert decoded["whole-word"] == (bare, " statuette")
    assert decoded["lm-eval"] == (bare.removesuffix(" the"), " the\n\nstatuette"), "it is cut at the last space"
    whole = tokenizer.encode(TEXT)
    assert cut["last-token"] == (whole[:-1], whole[-1:]) and len(cut["whole-word"][1]) > 1


def of_pieces(**how: Any) -> Tokenizer:
    """A BPE whose tokens are letters, blanks, and words behind one of them."""
    words = ["▁", "▁▁", *("▁" + "look"[:end] for end in (1, 2, 3, 4)), *sorted(set("lokathe"))]
    vocab = {word: number for number, word in enumerate(words)}
    inner = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "l"), ("▁l", "o"), ("▁lo", "o"), ("▁loo", "k"), ("▁", "▁")]))
    for name, part in how.items():
        setattr(inner, name, part)
    return Tokenizer(inner)


BLANKS = normalizers.Replace(" ", "▁")
KINDS = {
    "LLaMA 2": {"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), BLANKS])},
    "Gemma": {"normalizer": BLANKS},
    "none of its own": {"normalizer": normalizers.Sequence([normalizers.Strip(), BLANKS])},
    "Mistral": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first", split=False)},
    "T5": {"pre_tokenizer": pre_tokenizers.Metaspace()},
}


@pytest.mark.parametrize("kind", [*KINDS, "GPT-2", "RoBERTa"])
def test_a_last_word_has_the_tokens_that_stand_in_the_passage(kind: str, tokenizer: Tokenizer) -> None:
    if kind in KINDS:
        tokenizer = of_pieces(**KINDS[kind])
    elif kind == "RoBERTa":
        content = json.loads(tokenizer.to_json())
        content["pre_tokenizer"]["add_prefix_space"] = True
        tokenizer = Tokenizer.from_json(json.dumps(content))
    for word in ("look", "hat", "o"):
        context, target = VARIANTS["whole-word"](f"the hat to {word}", tokenizer)
        whole = tokenizer.encode(f"the hat to {word}")
        assert (context, target) == (whole[: len(context)], whole[len(context) :]), word
        assert not tokenizer.is_byte_level or target == tokenizer.encode(f" {word}")


def test_a_last_word_whose_tokens_change_with_what_follows_has_those_behind_a_space() -> None:
    """Here its last letter and the space behind it are one token."""
    inner = tokenizers.Tokenizer(models.BPE({"▁": 0, "o": 1, "o▁": 2, "t": 3}, [("o", "▁")]))
    inner.normalizer = BLANKS
    tokenizer = Tokenizer(inner)
    assert (tokenizer.encode("o o"), tokenizer.encode(" o")) == ([2, 1], [0, 1])
    assert VARIANTS["whole-word"]("to o", tokenizer) == ([3, 1], [0, 1])


def test_a_mark_of_byte_order_is_no_text(tmp_path: Path) -> None:
    """As some editors begin a file."""
    path = written(tmp_path, codecs.BOM_UTF8 + b'{"text": "a b"}\n')
    assert [passage.text for passage in read_passages(path)] == ["a b"]


def test_a_last_word_that_stands_in_its_context_too(tokenizer: Tokenizer) -> None:
    """As nearly all of LAMBADA's do."""
    text = "look at the statue , she said , a statue"
    for name in ("whole-word", "lm-eval"):
        context, target = VARIANTS[name](text, tokenizer)
        assert (tokenizer.decode(context), tokenizer.decode(target)) == (text.removesuffix(" statue"), " statue"), name


def test_white_space_before_the_last_space_is_the_target_s_in_the_harness_variant(tokenizer: Tokenizer) -> None:
    context, target = VARIANTS["lm-eval"]("She did not  look", tokenizer)
    assert (tokenizer.decode(context), tokenizer.decode(target)) == ("She did not", "  look")


def test_a_file_of_json_and_one_of_lines(tmp_path: Path) -> None:
    lines = [json.dumps({"text": TEXT}), "", json.dumps({"text": "a b"})]
    wanted = [Passage(1, TEXT), Passage(3, "a b")]
    assert read_passages(written(tmp_path, "\n".join(lines))) == wanted
    for ending, pack in PACK.items():
        assert read_passages(written(tmp_path, pack("\n".join(lines).encode()), f"l.jsonl{ending}")) == wanted, ending
    assert read_passages(written(tmp_path, "one two\r\n\nthree\u2028four\n", "lambada.txt")) == [
        Passage(1, "one two"),
        Passage(3, "three\u2028four"),
    ]
    assert read_passages(written(tmp_path, json.dumps({"body": "a b"})), key="body") == [Passage(1, "a b")]
    for ending in ("json", "ndjson"):
        assert read_passages(written(tmp_path, "\n".join(lines), f"lambada.{ending}")) == wanted, ending


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a b"}\nnot JSON\n', "line 2: not JSON"),
        ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 1: not JSON"),
        ('{"text": "a b"}\n\n{"body": "a b"}\n', "line 3: no text under 'text'"),
        ('["a b"]', "line 1: no text under 'text'"),
        ('{"text": 3}', "line 1: no text under 'text'"),
        ('{"text": " alone "}', "line 1: ' alone ' is one word"),
        ("", "has no passage"),
        (" \n\n", "has no passage"),
        ('{"text": "a b"}\n{"text": "schön"}'.encode("latin-1"), "line 2: not UTF-8"),
    ],
)
def test_lines_that_are_no_passages(tmp_path: Path, content: str | bytes, said: str) -> None:
    with pytest.raises(DataError, match=rf"lambada\.jsonl.*{said}"):
        read_passages(written(tmp_path, content))


@pytest.mark.parametrize("ending", [ending for ending in PACK if ending])
def test_a_file_that_is_cut_short_is_told(tmp_path: Path, ending: str) -> None:
    packed = PACK[ending]("\n".join(["one two"] * 9).encode())[:-3]
    with pytest.raises(DataError, match=rf"lambada\.txt{ending} cannot be read: .*Name a text or a \.jsonl"):
        read_passages(written(tmp_path, packed, f"lambada.txt{ending}"))


def test_a_passage_that_is_longer_than_the_model_reads(tokenizer: Tokenizer) -> None:
    passages = [Passage(7, "She did look")]
    (example,) = examples(Path("l.jsonl"), passages, tokenizer, variant="whole-word", longest=None)
    read = len(example.context) + len(example.target) - 1
    assert examples(Path("l.jsonl"), passages, tokenizer, variant="whole-word", longest=read) == [example]
    with pytest.raises(DataError, match=rf"l\.jsonl, line 7: the passage has {read + 1} tokens, of which {read} are"):
        examples(Path("l.jsonl"), passages, tokenizer, variant="whole-word", longest=read - 1)


@pytest.mark.parametrize(("text", "part"), [("\u4e16 look", "context"), ("look \u4e16", "last word")])
def test_a_passage_of_which_the_tokenizer_makes_nothing_is_told(text: str, part: str) -> None:
    """With the part that it knows no character of."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(dict(zip("look", (0, 1, 1, 2), strict=True)), []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with pytest.raises(DataError, match=f"l.jsonl, line 3: the checkpoint's tokenizer makes no token .* {part}. Rem"):
        examples(Path("l.jsonl"), [Passage(3, text)], Tokenizer(inner), variant="whole-word", longest=None)


@pytest.mark.slow
def test_the_whole_of_lambada() -> None:
    passages = read_passages(real_file("lambada/lambada_test.jsonl"))
    gpt2 = Tokenizer.load(real_file("gpt2-bpe"))
    assert len(passages) == 5153
    cut = {name: examples(Path("l"), passages, gpt2, variant=name, longest=1024) for name in VARIANTS}
    assert all(len(example.target) == 1 for example in cut["last-token"])
    tokens = {name: sum(len(example.target) for example in found) for name, found in cut.items()}
    assert tokens["whole-word"] > 5153
    others = [a.line for a, b in zip(cut["whole-word"], cut["lm-eval"], strict=True) if a[1:] != b[1:]]
    assert others == [each.line for each in passages if each.text[: -len(each.text.split()[-1])][-1] != " "]
    assert len(others) == 7, "a last word behind a line end"
