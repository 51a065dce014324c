"""Every mutation of `python -m tests.mutations` still finds its line; that script, in minutes, says who catches it."""

import ast

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, mutated

NAMES = [mutation.name for mutation in MUTATIONS]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=NAMES)
def test_it_matches_once_and_leaves_a_program(mutation: Mutation) -> None:
    broken = mutated(mutation)
    if not mutation.file.endswith(".py"):
        return  # it matches; whether it compiles is known where its tests run
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse((ROOT / "src/colonnade" / mutation.file).read_text()))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=NAMES)
def test_its_tests_exist(mutation: Mutation) -> None:
    assert mutation.tests and all((ROOT / test).is_file() for test in mutation.tests)


def test_a_mutation_that_does_not_match_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"stands 0 times in train/step\.py"):
        mutated(Mutation("x", "train/step.py", "no such line", "", ()))
