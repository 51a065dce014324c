"""Every mutation of `python -m tests.mutations` still finds its line; that script, in minutes, says who catches it."""

import ast

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, mutated


def test_each_matches_once_and_leaves_another_program() -> None:
    parsed: dict[str, str] = {}
    same = []
    for mutation in MUTATIONS:
        broken, file = mutated(mutation), mutation.file
        if not file.endswith(".py"):
            continue  # it matches; whether it compiles is known where its tests run
        if file not in parsed:
            parsed[file] = ast.dump(ast.parse((ROOT / "src/colonnade" / file).read_text()))
        if ast.dump(ast.parse(broken)) == parsed[file]:
            same.append(mutation.name)
    assert not same


def test_their_tests_exist() -> None:
    without = [each.name for each in MUTATIONS if not each.tests]
    missing = {test for each in MUTATIONS for test in each.tests if not (ROOT / test).is_file()}
    assert not without and not missing


def test_a_mutation_that_does_not_match_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"stands 0 times in train/step\.py"):
        mutated(Mutation("x", "train/step.py", "no such line", "", ()))
