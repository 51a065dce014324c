"""What a cleaning run asks of tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

from colonnade.data.cleaning import Tokenizers
from colonnade.data.tokenizer import Tokenizer

from .test_tokenizer import save_pair


def test_tokens_are_counted_however_many_a_vocabulary_has(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({f"w{id_}": id_ for id_ in (0, 1, 65_536, 69_999)}, "w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = str(tmp_path / "tokenizer.json")
    inner.save(path)
    count = Tokenizers().counter(path)()
    assert [count(text) for text in ("", "w1", "w1 w69999 no w65536")] == [0, 1, 4]


def test_a_tokenizer_is_another_one_than_alone_by_all_that_lies_beside_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_pair(tokenizer, tmp_path / "vocab.json", tmp_path / "merges.txt")
    found = list[str | None]()
    for content in ({"model_max_length": 1024}, {"pad_token": "<a>"}, {"pad_token": "<b>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        found.append(Tokenizers().other_than_alone(str(tmp_path)))
        assert found[-1] in (None, Tokenizer.load(tmp_path).sha256)
    assert found[0] is None and len(set(found)) == 3


def test_tokens_are_counted_as_the_tokenizer_makes_them(
    tmp_path: Path, tokenizer: Tokenizer, stories: list[str]
) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    make = Tokenizers().counter(str(path))
    texts = ["", "Été — e\u0301 \u180e", stories[0][:500]]
    assert [make()(text) for text in texts] == [len(tokenizer.encode(text)) for text in texts]
