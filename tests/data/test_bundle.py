"""The bundled text is what its README says."""

from __future__ import annotations

import json
import lzma

from colonnade.config.split import parse_split
from colonnade.data import bundle
from colonnade.data.datasets import split_documents


def test_the_stories() -> None:
    with lzma.open(bundle.books(), "rt", encoding="utf-8") as lines:
        stories = [json.loads(line) for line in lines]
    size = sum(len(story["text"].encode()) for story in stories)
    readme = (bundle.books().parent / "README.md").read_text()
    assert f"{bundle.books().stat().st_size:,} bytes; {size:,} bytes of text" in readme
    titles = [story["title"] for story in stories]
    assert len(titles) == 37 and titles == sorted(set(titles))
    assert {story["author"] for story in stories} == {"Arthur Conan Doyle"}
    assert not any(word in story["text"] for story in stories for word in ("Gutenberg", "Copyright", "\r"))
    train, validation, test = split_documents(37, parse_split(bundle.BOOKS_SPLIT))
    assert [titles[document] for document in validation] == ["The Stockbroker's Clerk", "The Yellow Face"]
    assert (len(train), len(test)) == (35, 0)
