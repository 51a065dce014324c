"""A changed function in the place of the one that is loaded, wherever it is referred to."""

import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

import colonnade
from tests.random_mutations.changes import Change

SOURCE = Path(colonnade.__file__).parent


def replace(change: Change) -> bool:
    """Has all that call the function, in this process and in those that it forks, call the changed one. False where
    that cannot be: its module needs what is not installed, it was left behind by a decorator, or it refers to another
    number of variables around it.
    """
    path = SOURCE / change.file
    try:
        importlib.import_module(".".join(("colonnade", *Path(change.file).with_suffix("").parts)))
    except ImportError:
        return False
    source = path.read_bytes()
    before, after = (_named(compile(text, path, "exec"), change.function) for text in (source, change.applied(source)))
    changed = {old.co_firstlineno: new for old, new in zip(before, after, strict=True) if old != new}
    functions = [each for each in _functions(str(path), change.function) if each.__code__.co_firstlineno in changed]
    try:
        for function in functions:
            function.__code__ = changed[function.__code__.co_firstlineno]
    except ValueError:
        return False
    return bool(functions)


def _functions(file: str, name: str) -> list[FunctionType]:
    """All of this name that this process has."""
    gc.unfreeze()  # what is frozen is not among the objects
    found = [each for each in gc.get_objects() if type(each) is FunctionType]
    gc.freeze()
    return [each for each in found if (each.__code__.co_filename, each.__code__.co_qualname) == (file, name)]


def _named(code: CodeType, name: str) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_qualname == name:
                yield each
            else:
                yield from _named(each, name)
