"""What is imported is looked through for garbage no more; what comes later is."""

import gc

import pytest

from colonnade.garbage import imports_stay


@pytest.mark.parametrize("error", [None, ModuleNotFoundError("no such module")], ids=["all there", "one missing"])
def test_garbage_is_collected_again_behind_imports(error: Exception | None) -> None:
    frozen = gc.get_freeze_count()
    try:
        with imports_stay():
            made = [[number] for number in range(1000)]
            assert not gc.isenabled()
            if error is not None:
                raise error
    except ModuleNotFoundError as caught:
        assert caught is error
    assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(made)
