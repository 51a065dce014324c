"""What is said of a run that differs from the one that a folder holds."""

from __future__ import annotations

from typing import Any

import pytest

from colonnade.corpus.differences import differences


def facts(*inputs: tuple[str, int, int], named: dict[str, Any] | None = None, **read: Any) -> dict[str, Any]:
    splits = [{"path": path, "size": size, "modified": modified} for path, size, modified in inputs]
    return {"recipe": {"read": read}, "inputs": splits, "named files": named or {}}


def test_each_input_that_changed_is_named_with_what_about_it() -> None:
    old = facts(("a", 1_000, 0), ("b", 5, 10**18 + 7), ("c", 5, 0))
    new = facts(("a", 2_000, 9), ("b", 5, 0), ("d", 5, 0))
    changed, more = differences(old, new)[0].removeprefix("inputs have changed: ").rsplit(" and ", 1)
    assert changed.split("), ") == [
        "a (its size was 1,000 bytes and is 2,000",
        "b (its modification time was 2001-09-09 01:46:40.000000007 UTC and is 1970-01-01 00:00:00.000000000 UTC",
        "c (no longer read)",
    ]
    assert more == "1 more"


def test_an_input_that_was_added_is_new_and_those_that_are_as_before_are_not_named() -> None:
    same = [(name, 1, 1) for name in "abcd"]
    assert differences(facts(*same), facts(*same, ("e", 1, 1))) == ["inputs have changed: e (new)"]


@pytest.mark.parametrize(("number", "more"), [(1, ""), (3, ""), (4, " and 1 more"), (1_003, " and 1,000 more")])
def test_three_inputs_are_named_and_the_others_counted(number: int, more: str) -> None:
    (told,) = differences(facts(), facts(*((f"{n:04d}", 1, 1) for n in range(number))))
    named = ", ".join(f"{n:04d} (new)" for n in range(min(number, 3)))
    assert told == f"inputs have changed: {named}{more}"


def test_a_change_of_the_recipe_that_shares_inputs_out_in_another_way_is_told_alone() -> None:
    a, b = ("a", 1, 1), ("b", 1, 1)
    assert differences(facts(a, b, paths="ab"), facts(b, a, paths="ba")) == ["read.paths was 'ab' and is 'ba'"]
    assert differences(facts(a, b), facts(b, a)) == ["inputs are shared out in another way, as another version does"]


def test_named_files_are_named_too() -> None:
    old = {"lists/urls.txt": [["urls.txt", 1, 1]], "gpt2": [["merges.txt", 1, 1], ["vocab.json", 1, 1]]}
    new = {"lists/urls.txt": [["urls.txt", 2, 1]], "gpt2": [["merges.txt", 1, 1]]}
    assert differences(facts(named=old), facts(named=new)) == [
        "named files have changed: lists/urls.txt (its size was 1 byte and is 2), vocab.json of gpt2 (no longer read)"
    ]


def test_files_of_one_name_are_told_from_each_other() -> None:
    def of(*sizes: int) -> dict[str, Any]:
        return facts(named={"bert": [["config.json", size, 1] for size in sizes]})

    assert differences(of(1, 2), of(3, 2)) == [
        "named files have changed: config.json of bert (its size was 1 byte and is 3)"
    ]
    assert differences(of(1, 2), of(1, 3)) == [
        "named files have changed: config.json of bert, number 2 (its size was 2 bytes and is 3)"
    ]


def test_sections_and_keys_that_came_or_went_are_told() -> None:
    old, new = facts(key="text", paths="a"), facts(paths="a")
    assert differences(old, new) == ["read.key was 'text' and is None"]
    new["recipe"]["filter"] = {"min_tokens": 3}
    assert differences(new, facts(paths="a")) == ["filter.min_tokens was 3 and is None"]
    assert differences(facts(paths="a"), new) == ["filter.min_tokens was None and is 3"]


def test_another_tokenizer_is_told() -> None:
    assert differences({**facts(), "tokenizers": ["a"]}, {**facts(), "tokenizers": ["b"]}) == [
        "tokenizers have changed"
    ]


def test_nothing_that_differs_is_another_version() -> None:
    assert differences(facts(), facts()) == ["it was made by another version"]
