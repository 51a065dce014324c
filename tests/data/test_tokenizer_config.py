"""What lies beside a vocabulary is obeyed as transformers obeys it, and refused by name where it cannot be."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from colonnade.data import byte_level, sentencepiece, wordpiece
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.data.tokenizer_classes import OF_MODELS
from colonnade.errors import DataError

from .test_tokenizer import save_pair
from .test_tokenizer_files import train

END = "<|endoftext|>"
LETTERS = "abcdefghijklmnopqrstuvwxyzäöü0123456789.,漢é"
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "schon", "schön", *LETTERS, *(f"##{each}" for each in LETTERS)]
TEXTS = [
    "Hello World, IT'S schön ÄÖ",
    "漢字ab café E\u0301 e\u0301",
    "It's 1234 o'clock\n\n  foo\r\n ",
    f"  <|user|>hi<keep>x <keep> {END}[USER] <KEEP>",
]


def added(content: str, **flags: Any) -> dict[str, Any]:
    return {"content": content, **dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False), **flags}


def as_theirs(folder: Path, **files: Any) -> Tokenizer:
    """The tokenizer of a folder with these files in JSON beside the vocabulary: its ids, names and control tokens are
    those of transformers, in which no text becomes a control token either.
    """
    transformers = pytest.importorskip("transformers")
    write(folder, **files)
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    theirs.split_special_tokens = theirs.backend_tokenizer.encode_special_tokens = True
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), (files, text)
    assert {name: ours.id_of(name) for name in ours.names} == theirs.get_vocab()
    assert ours.special_ids == {id_ for id_, token in theirs.added_tokens_decoder.items() if token.special}
    assert Tokenizer.from_json(ours.to_json()).sha256 == ours.sha256
    return ours


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def pair(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A folder with GPT-2's two files."""
    save_pair(tokenizer, tmp_path / "vocab.json", tmp_path / "merges.txt")
    return tmp_path


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A folder with BERT's vocab.txt, which has no capital letter."""
    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB), encoding="utf-8")
    return tmp_path


@pytest.fixture
def lines(stories: list[str]) -> list[str]:
    return [line for line in stories[0].split("\n") if line.strip()]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True},
        {"tokenize_chinese_chars": False},
        {"do_lower_case": None, "strip_accents": None, "do_basic_tokenize": True, "never_split": None},
    ],
    ids=str,
)
def test_a_berts_settings(words: Path, settings: dict[str, Any]) -> None:
    found = {key: value for key, value in settings.items() if value is not None}
    as_theirs(words, tokenizer_config={"tokenizer_class": "BertTokenizer", **found})
    plain = Tokenizer.load(words)
    write(words, tokenizer_config=settings)
    assert Tokenizer.load(words).sha256 == plain.sha256 == Tokenizer.load(words / "vocab.txt").sha256


def test_a_capital_letter_decides_only_where_nothing_is_said(words: Path) -> None:
    (words / "vocab.txt").write_text("\n".join([*VOCAB, "A"]), encoding="utf-8")
    assert Tokenizer.load(words).encode("A b") == [len(VOCAB), VOCAB.index("b")]
    as_theirs(words, tokenizer_config={"tokenizer_class": "BertTokenizerFast", "do_lower_case": True})


@pytest.mark.parametrize(
    "settings",
    [
        {"extra_special_tokens": ["[USER]"]},
        {"extra_special_tokens": {"user_token": "[USER]"}},
        {"additional_special_tokens": ["[USER]"], "extra_special_tokens": None},
        {"additional_special_tokens": None, "user_token": "[USER]"},
        {"user_token": {"content": "[USER]"}, "bos_token": "", "eos_token": None},
    ],
    ids=str,
)
def test_a_control_token_is_named_in_a_list_in_a_table_or_alone(words: Path, settings: dict[str, Any]) -> None:
    """Beside keys that name none."""
    alone = Tokenizer.load(words)
    write(words, tokenizer_config=settings)
    ours = Tokenizer.load(words)
    assert ours.names == [*alone.names, "[USER]"] and ours.special_ids == alone.special_ids | {len(VOCAB)}


def test_a_mark_of_byte_order_is_no_text(words: Path) -> None:
    """As some editors begin a file."""
    write(words, tokenizer_config={"do_lower_case": False})
    plain = Tokenizer.load(words)
    for path in (words / "vocab.txt", words / "tokenizer_config.json"):
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
        assert Tokenizer.load(words).sha256 == plain.sha256, path.name


def test_tokens_that_are_added_to_a_wordpiece_vocabulary(words: Path) -> None:
    several = ["[USER]", "<|user|>"]
    ours = as_theirs(words, tokenizer_config={"tokenizer_class": "BertTokenizer", "additional_special_tokens": several})
    assert [ours.id_of(name) for name in several] == [len(VOCAB), len(VOCAB) + 1]


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast"])
@pytest.mark.parametrize("prefixed", [False, True])
def test_classes_of_byte_level_tokenizers(pair: Path, name: str, prefixed: bool) -> None:
    config = {"tokenizer_class": name, "add_prefix_space": prefixed, "pad_token": END}
    ours = as_theirs(pair, tokenizer_config=config)
    assert (ours.encode("hi") == ours.encode(" hi")) == prefixed
    assert ours.is_gpt2_split == (name == "GPT2Tokenizer" and not prefixed)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "qwen3_moe"])
def test_a_models_type_names_the_class_where_nothing_else_does(pair: Path, kind: str) -> None:
    """What another file than the vocabulary's would be read by is not meant."""
    composed = as_theirs(pair, config={"model_type": kind}).encode("e\u0301")
    assert (composed == Tokenizer.load(pair).encode("é")) == (kind != "gpt2")
    write(pair, config={"model_type": "t5"})
    assert Tokenizer.load(pair).is_gpt2_split


@pytest.mark.parametrize(
    ("kind", "text", "tokens"),
    [
        ("gpt2", "a\n\nb", ["a", "Ċ", "Ċ", "b"]),  # the last blank before a word is cut off
        ("qwen2", "a\n\nb", ["a", "ĊĊ", "b"]),
        ("qwen2", "a \n\nb", ["a", "Ġ", "ĊĊ", "b"]),
        ("gpt2", "AT'SO", ["A", "T", "'", "SO"]),
        ("qwen2", "AT'SO", ["A", "T", "'", "S", "O"]),  # an ending in capitals is one, too
        ("qwen2", "at'so", ["a", "t", "'", "s", "o"]),
        ("qwen2", "SO", ["SO"]),
    ],
)
def test_words_are_cut_as_a_models_class_cuts_them(tmp_path: Path, kind: str, text: str, tokens: list[str]) -> None:
    """A vocabulary with tokens of two letters shows which of these are in one word."""
    save_pair(train_bpe(["a\n\n", "SO", "so"] * 9, 260), tmp_path / "vocab.json", tmp_path / "merges.txt")
    write(tmp_path, config={"model_type": kind})
    ours = Tokenizer.load(tmp_path)
    assert [ours.names[token] for token in ours.encode(text)] == tokens


OTHER_NAMES = ["LEDTokenizer", "RobertaTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", "OfSomeone"]


@pytest.mark.parametrize("name", OTHER_NAMES)
@pytest.mark.parametrize("file", ["tokenizer_config", "config"])
def test_a_class_that_is_not_known_to_give_other_ids_is_read_as_the_usual_one(
    pair: Path, words: Path, lines: list[str], name: str, file: str
) -> None:
    for vocabulary in (pair / "vocab.json", words / "vocab.txt", train(words, lines, model_type="bpe")[1]):
        alone = Tokenizer.load(vocabulary)
        write(words, **{file: {"tokenizer_class": name}})
        assert Tokenizer.load(vocabulary).sha256 == alone.sha256
        (words / f"{file}.json").unlink()


@pytest.mark.parametrize("name", ["BartTokenizer", "RobertaTokenizer", "WhisperTokenizer"])
def test_the_same_ids_come_from_classes_that_treat_text_as_gpt2(pair: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    write(pair, tokenizer_config={"tokenizer_class": name})
    theirs = transformers.AutoTokenizer.from_pretrained(pair)
    for text in TEXTS[:3]:
        assert Tokenizer.load(pair).encode(text) == theirs.encode(text, add_special_tokens=False)


def test_a_blenderbot_has_a_space_in_front_unless_another_thing_is_said(pair: Path) -> None:
    write(pair, config={"model_type": "blenderbot"})
    assert Tokenizer.load(pair).encode("hi") == Tokenizer.load(pair).encode(" hi")
    write(pair, tokenizer_config={"add_prefix_space": False})
    assert Tokenizer.load(pair).is_gpt2_split


def test_the_classes_of_models_are_those_of_transformers() -> None:
    auto = pytest.importorskip("transformers.models.auto.tokenization_auto")
    theirs = {kind: str(name).removesuffix("Fast") for kind, name in auto.TOKENIZER_MAPPING_NAMES.items()}
    ours = {*byte_level.CLASSES, *byte_level.OTHERS, *wordpiece.OTHERS, *sentencepiece.OTHERS, "T5Tokenizer"}
    assert {kind: name for kind, name in theirs.items() if name in ours - {"GPT2Tokenizer"}} == {
        kind: name for kind, name in OF_MODELS.items() if kind in theirs
    }
    assert OF_MODELS.keys() - theirs.keys() == {"longt5"}


@pytest.mark.parametrize("content", ["[]", "{ // not set\n}", '{"tabSize": 4}', '{"model_type": ["qwen2"]}'])
def test_a_config_json_that_is_no_models_is_left_alone(pair: Path, content: str) -> None:
    (pair / "config.json").write_text(content)
    assert Tokenizer.load(pair).is_gpt2_split


def test_tokens_that_are_added_by_their_ids(pair: Path, tokenizer: Tokenizer) -> None:
    """Those that are no control tokens are found in text; a name of one makes one."""
    listed = {
        "601": added("<keep>"),
        "600": added("<|user|>", special=True),
        "602": added("<strip>", rstrip=True, normalized=True),
        "603": added("<pad>"),
        "599": added(END, special=True),
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": listed,
        "eos_token": END,
        "pad_token": "<pad>",
    }
    write(pair, added_tokens={"<|ignored|>": 7}, special_tokens_map={"pad_token": "<|ignored|>"})
    ours = as_theirs(pair, tokenizer_config=config)
    assert ours.vocab_size == 604 and ours.special_ids == {599, 600, 603}
    assert ours.encode("<keep>") == [601] and 600 not in ours.encode("<|user|>")


def test_tokens_that_older_folders_add(pair: Path) -> None:
    """Ids in one file, names of control tokens in another; what has only a name comes behind what has an id."""
    names = {"eos_token": {**added(END), "normalized": True}, "pad_token": "<pad>", "bos_token": "<|user|>"}
    files = {"special_tokens_map": names, "added_tokens": {"<keep>": 601, "<|user|>": 600}}
    ours = as_theirs(pair, tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "pad_token": "<other>"}, **files)
    assert [ours.id_of(name) for name in ("<|user|>", "<keep>", "<pad>", "<other>")] == [600, 601, 602, None]


def test_a_token_of_the_vocabulary_that_is_named_a_control_token_becomes_one(pair: Path) -> None:
    plain = Tokenizer.load(pair)
    name = next(name for name in plain.names[256:] if name.isascii() and name.isalpha())
    ours = as_theirs(pair, tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "pad_token": name})
    assert ours.vocab_size == plain.vocab_size and ours.special_ids == plain.special_ids | {plain.id_of(name)}


def test_files_beside_are_of_the_vocabulary_that_its_folder_has(pair: Path, tokenizer: Tokenizer) -> None:
    """Not of those that are named by a prefix, nor of a tokenizer.json."""
    write(pair, tokenizer_config={"tokenizer_class": "Qwen2Tokenizer"}, added_tokens={"<keep>": 600})
    for named in (pair, pair / "vocab.json", pair / "merges.txt"):
        assert Tokenizer.load(named).encode("<keep>") == [600]
    save_pair(tokenizer, pair / "other-vocab.json", pair / "other-merges.txt")
    assert Tokenizer.load(pair / "other").sha256 == tokenizer.sha256
    tokenizer.save(pair / "tokenizer.json")
    assert Tokenizer.load(pair).sha256 == tokenizer.sha256


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config": {"tokenizer_class": "CLIPTokenizer"}},
            '_class = "CLIPTokenizer", and .* other ids .*json',
        ),
        ({"config": {"tokenizer_class": "CTRLTokenizerFast"}}, r"[/]config\.json has .*CTRL.*GPT2Tokenizer"),
        (
            {"tokenizer_config": {"tokenizer_class": None}, "config": {"tokenizer_class": "CTRLTokenizer"}},
            r"[/]config\.json has tokenizer_class = .*CTRL",
        ),
        ({"config": {"model_type": "qwen3_5_moe"}}, 'model_type = "qwen3_5_moe", and Qwen3_5Tokenizer gives other ids'),
        ({"tokenizer_config": {"add_prefix_space": 1}}, r"add_prefix_space = 1, which is neither.*Copy"),
        ({"added_tokens": {"<a>": 605}}, r'"<a>" the id 605, and behind this vocabulary it gets 600.*Copy all'),
        ({"added_tokens": {"<a>": 0}}, r'"<a>" the id 0, and behind this vocabulary it gets 600'),
        ({"added_tokens": {"Ġ": 605}}, r"the id 605, and .* gets 220: they do not belong together"),
        ({"added_tokens": {"<a>": True}}, r'added_tokens\.json has "<a>" = true, which is no id'),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": added("<a>")}}}, "which is no table of tokens"),
        ({"tokenizer_config": {"added_tokens_decoder": {"600": added("<a>", special=1)}}}, "which is no table"),
        ({"tokenizer_config": {"added_tokens_decoder": ["<a>"]}}, r'added_tokens_decoder = \["<a>"\], which is no'),
        ({"special_tokens_map": {"additional_special_tokens": [3]}}, "has 3 among its control tokens"),
        ({"special_tokens_map": {"additional_special_tokens": "<a>"}}, "among its control tokens, which names none"),
        ({"special_tokens_map": []}, r"special_tokens_map\.json holds no object"),
        ({"added_tokens": {"\ud800": 600}}, r"added_tokens\.json is no JSON .*surrogates not allowed"),
    ],
    ids=str,
)
def test_what_cannot_be_obeyed_beside_a_byte_level_vocabulary(pair: Path, files: dict[str, Any], message: str) -> None:
    write(pair, **files)
    with pytest.raises(DataError, match=message):
        Tokenizer.load(pair)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "BertJapaneseTokenizer gives other ids than BertTokenizer"),
        ({"do_lower_case": "no"}, 'do_lower_case = "no", which is neither true nor false'),
        ({"do_basic_tokenize": False}, "do_basic_tokenize = false: text is cut"),
        ({"never_split": ["a"]}, r'never_split = \["a"\]'),
        ({"wordpieces_prefix": "@@"}, 'wordpieces_prefix = "@@"'),
        ({"unk_token": {"content": "<unk>"}}, r'unk_token = "<unk>", and what is no word is \[UNK\]'),
    ],
    ids=str,
)
def test_what_cannot_be_obeyed_beside_a_wordpiece_vocabulary(
    words: Path, settings: dict[str, Any], message: str
) -> None:
    write(words, tokenizer_config=settings)
    with pytest.raises(DataError, match=message):
        Tokenizer.load(words)


# SentencePiece


def test_a_t5s_sentinels_lie_behind_its_pieces_the_first_one_last(tmp_path: Path, lines: list[str]) -> None:
    """As in published T5s, whose SentencePiece models have none."""
    theirs, path = train(tmp_path, lines, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    alone = Tokenizer.load(path)
    names = [f"<extra_id_{number}>" for number in range(100)]
    listed = {str(499 - number): added(name, special=True) for number, name in enumerate(names)}
    for files in (
        {"config": {"model_type": "t5"}},
        {"config": {"model_type": "mt5"}, "tokenizer_config": {"tokenizer_class": "MT5Tokenizer"}},
        {"tokenizer_config": {"tokenizer_class": "T5Tokenizer", "extra_ids": None, "added_tokens_decoder": listed}},
        {"tokenizer_config": {"additional_special_tokens": names, "eos_token": "</s>", "unk_token": "<unk>"}},
    ):
        write(tmp_path, **files)
        ours = Tokenizer.load(tmp_path)
        assert [ours.id_of(name) for name in (names[0], names[99], "</s>", "<unk>")] == [499, 400, 1, 2]
        assert ours.vocab_size == 500 and ours.special_ids == alone.special_ids | set(range(400, 500))
        for text in (lines[3], f"{lines[3]} <extra_id_0>"):
            assert ours.encode(text) == theirs.encode(text)
    write(tmp_path, tokenizer_config={"extra_ids": 3})
    assert Tokenizer.load(tmp_path).id_of("<extra_id_0>") == 402
    write(tmp_path, tokenizer_config={"extra_ids": 0})
    assert Tokenizer.load(tmp_path).vocab_size == alone.vocab_size, "none is a number too"
    write(tmp_path, tokenizer_config={"extra_ids": -1})
    with pytest.raises(DataError, match="extra_ids = -1, which is no number of tokens"):
        Tokenizer.load(tmp_path)


def test_control_tokens_that_are_added_to_a_sentencepiece_model(tmp_path: Path, lines: list[str]) -> None:
    _, path = train(tmp_path, lines, model_type="bpe")
    alone = Tokenizer.load(path)
    listed = {str(id_): added(name, special=True) for id_, name in enumerate(("<unk>", "<s>", "</s>"))}
    write(tmp_path, tokenizer_config={"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": listed})
    assert Tokenizer.load(tmp_path).sha256 == alone.sha256, "it has them itself"
    write(tmp_path, tokenizer_config={"added_tokens_decoder": {**listed, "400": added("<|user|>", special=True)}})
    ours = Tokenizer.load(tmp_path)
    assert ours.special_ids == alone.special_ids | {400}
    assert ours.encode("a <|user|>") == alone.encode("a <|user|>")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"tokenizer_class": "XLMRobertaTokenizer"}}, "XLMRoberta.*LlamaTokenizer, T5Tokenizer"),
        ({"tokenizer_config": {"add_prefix_space": False}}, "add_prefix_space = false: the add_dummy_prefix of spiece"),
        ({"tokenizer_config": {"sp_model_kwargs": {"enable_sampling": True}}}, "sp_model_kwargs = .*same tokens"),
        (
            {"added_tokens": {"<|user|>": 400, "<keep>": 401}, "special_tokens_map": {"bos_token": "<|user|>"}},
            'has an added token "<keep>" that text becomes',
        ),
        ({"added_tokens": {"<keep>": 400}}, 'has an added token "<keep>" that text becomes'),
        ({"added_tokens": {"</s>": 400}}, 'the added token "</s>" the id 400, and behind this vocabulary it gets 2'),
    ],
    ids=str,
)
def test_what_cannot_be_obeyed_beside_a_sentencepiece_model(
    tmp_path: Path, lines: list[str], files: dict[str, Any], message: str
) -> None:
    train(tmp_path, lines)
    write(tmp_path, **files)
    with pytest.raises(DataError, match=message):
        Tokenizer.load(tmp_path)
