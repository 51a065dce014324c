"""Every mutation of `python -m tests.mutations` still finds its line; that script, in minutes, says who catches it."""

import ast

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, mutated


def test_each_matches_once_and_leaves_another_program() -> None:
    """Of a file what stands between two pairs of empty lines is parsed, as far as the mutation reaches."""
    same = []
    for mutation in MUTATIONS:
        broken, file = mutated(mutation), ROOT / "src/colonnade" / mutation.file
        if file.suffix != ".py":
            continue  # it matches; whether it compiles is known where its tests run
        text = file.read_text()
        at = text.index(mutation.old)
        begin, end = text.rfind("\n\n\n", 0, at) + 1, text.find("\n\n\n", at + len(mutation.old))
        behind = len(text) - end if end >= 0 else 0
        before, after = (ast.parse(each[begin : len(each) - behind]) for each in (text, broken))
        if ast.dump(before) == ast.dump(after):
            same.append(mutation.name)
    assert not same


def test_their_tests_exist() -> None:
    without = [each.name for each in MUTATIONS if not each.tests]
    missing = {test for each in MUTATIONS for test in each.tests if not (ROOT / test).is_file()}
    assert not without and not missing


def test_a_mutation_that_does_not_match_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"stands 0 times in train/step\.py"):
        mutated(Mutation("x", "train/step.py", "no such line", "", ()))
