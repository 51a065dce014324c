"""One failure for all ranks: of several the one that says what to do."""

import errno
import traceback
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from colonnade.checkpoint.failure import same_on_all_ranks
from colonnade.errors import CheckpointError, UnreadableError


def raised(**failures: BaseException) -> BaseException:
    """What all ranks raise where these ranks have failed."""
    gathered: dict[int, Any] = {
        int(rank.removeprefix("rank")): (error, traceback.extract_stack(limit=1)) for rank, error in failures.items()
    }
    with pytest.raises(BaseException) as caught, same_on_all_ranks():
        raise CheckpointException("message", gathered)
    return caught.value


def test_what_says_what_to_do_comes_first() -> None:
    mine = CheckpointError("mend it")
    assert raised(rank0=ValueError("bug"), rank1=OSError(5, "lost"), rank2=mine) is mine
    assert raised(rank3=CheckpointError("later"), rank1=mine) is mine, "and of several that of the first rank"


def test_what_a_disk_refuses_is_told_with_its_rank() -> None:
    error = raised(rank2=PermissionError(13, "Permission denied", "/x"), rank5=ValueError("bug"))
    assert type(error) is CheckpointError
    assert str(error).startswith("Rank 2 could not read or write the checkpoint: [Errno 13] Permission denied: '/x'.")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_of_a_disk_that_is_away_it_is_said_so_that_it_can_be_read_again(number: int) -> None:
    error = raised(rank1=OSError(number, "away", "/x"))
    assert type(error) is UnreadableError and str(error).startswith("Rank 1 could not read or write the checkpoint: ")


def test_a_bug_keeps_its_kind_and_where_it_was() -> None:
    error = raised(rank4=ValueError("bug"))
    assert isinstance(error, ValueError) and str(error) == "bug"
    (note,) = error.__notes__
    assert note.startswith("on rank 4:\n") and __file__ in note


def test_other_errors_go_through() -> None:
    with pytest.raises(KeyError), same_on_all_ranks():
        raise KeyError("x")
    with same_on_all_ranks():
        pass
