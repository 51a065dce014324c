"""Windows of long texts: how they are cut unless said otherwise, and which of several a token has most text in."""

import tracemalloc

import numpy as np
import pytest

from colonnade.data.question_windows import Windows, most_context


def test_windows_are_those_of_the_first_scripts_for_bert_unless_something_else_is_said() -> None:
    """run_squad.py: --doc_stride 128, --max_query_length 64."""
    assert Windows() == Windows(doc_stride=128, max_query_length=64)
    assert Windows().ranges(10, 300, 384) == [range(300)]
    assert Windows().ranges(64, 400, 384) == [range(317), range(128, 400)]


@pytest.mark.parametrize(("second", "owner"), [(range(2, 8), 1), (range(2, 7), 0)])
def test_of_windows_with_as_much_text_around_a_token_the_longer_one_has_it_and_then_the_first(
    second: range, owner: int
) -> None:
    windows = [range(5), second]
    found = most_context(windows)
    token = 3  # one token lies behind it in the first, and one before it in the second
    assert [bool(flags[token - window.start]) for flags, window in zip(found, windows, strict=True)] == [
        owner == 0,
        owner == 1,
    ]
    assert most_context([]) == []


def test_the_windows_of_a_long_text_take_memory_in_proportion_to_it() -> None:
    windows = Windows().ranges(10, 20_000, 384)
    tracemalloc.start()
    found = most_context(windows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(int(flags.sum()) for flags in found) == 20_000
    assert peak < 100 * 20_000


def test_no_token_is_left_out_between_windows_however_far_apart_they_are_to_begin() -> None:
    """There is room for 5 tokens of the text. And as many are counted as are cut."""
    for stride in (1, 4, 5, 6, 128):
        for text in (0, 1, 5, 6, 17):
            windows = Windows(stride).ranges(2, text, 10)
            assert {token for window in windows for token in window} == set(range(text))
            assert max(map(len, windows)) == min(text, 5) and windows[-1].stop == text
            assert [window.start for window in windows] == [min(stride, 5) * at for at in range(len(windows))]
            assert Windows(stride).counts(np.array([2]), np.array([text]), 10).tolist() == [len(windows)]
