"""What docs/proof.md points to exists: files, tests, mutations."""

import re
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, ROOT

PAGE = (ROOT / "docs" / "proof.md").read_text()
OWN_WORDS, _, TABLE = PAGE.partition("| mutation | tests that failed |")


def test_files_exist() -> None:
    named = set(re.findall(r"`(tests/[\w/]+(?:\.py)?)`", PAGE))
    assert len(named) > 20 and all((ROOT / name).exists() for name in named)


@pytest.mark.parametrize("line", [line for line in OWN_WORDS.splitlines() if re.search(r"\btest_\w+(?!\.py|`)", line)])
def test_tests_exist(line: str) -> None:
    """A test is named behind its file: `tests/a/test_b.py`: test_c, test_d."""
    for file, tests in re.findall(r"`(tests/[\w/]+\.py)`: (test_\w+(?:, test_\w+)*)", line):
        text = Path(ROOT / file).read_text()
        assert all(f"def {test}(" in text for test in tests.split(", ")), line


def test_the_table_has_every_mutation() -> None:
    rows = re.findall(r"^\| ([^|]+) \| `", TABLE, flags=re.MULTILINE)
    assert sorted(rows) == sorted(mutation.name for mutation in MUTATIONS)
