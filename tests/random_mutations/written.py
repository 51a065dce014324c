"""Changes that somebody has written down: {"file", "old", "new"}, what stands once in a file and what replaces it."""

import ast
import json
from pathlib import Path

from tests.random_mutations.changes import Change, functions


def written(path: Path, root: Path) -> list[Change]:
    """Those of a JSON list, of files below `root`. One outside of functions is of the function "". SystemExit where
    what is to be replaced does not stand once in its file.
    """
    return [_change(root, number, **each) for number, each in enumerate(json.loads(path.read_text()))]


def _change(root: Path, number: int, file: str, old: str, new: str, **_: object) -> Change:
    text = (root / file).read_text()
    if (count := text.count(old)) != 1:
        raise SystemExit(f"change {number}: {old!r} stands {count} times in {file}")
    begin = text.index(old)
    first = begin + next((place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
    line, tree = 1 + text.count("\n", 0, first), ast.parse(text)
    names = [name for name, each in functions(tree) if each.lineno <= line <= (each.end_lineno or 0)]
    statements = [each for each in ast.walk(tree) if isinstance(each, ast.stmt) and _has(each, line)]
    begin = len(text[:begin].encode())
    at = max((each.lineno for each in statements), default=line)
    return Change(file, "".join(names), at, begin, begin + len(old.encode()), new)


def _has(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or 0)
