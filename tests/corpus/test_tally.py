"""Counts of tasks, put together."""

import gzip
import json
from pathlib import Path

import pytest

from colonnade.corpus.tally import Account, Amount, Tally, merged, read_tallies


def tally(task: int) -> Tally:
    found = Tally(
        entered=Amount(10, 100, 1_000), left=Amount(7, 70, 700), changed={"cut": 2}, metadata={f"{task}": "said"}
    )
    for number in range(3):
        found.drop("short", 10, 100)
        found.samples.setdefault("short", []).append({"id": f"{task}.{number}"})
    found.count("languages", "en", 4)
    return Tally.from_json(found.as_json())


def test_counts_add_up_and_the_first_samples_are_kept() -> None:
    total = merged([tally(task) for task in range(3)], samples=4)
    assert (total.entered, total.left) == (Amount(30, 300, 3_000), Amount(21, 210, 2_100))
    assert total.dropped == {"short": Amount(9, 90, 900)} and total.changed == {"cut": 6}
    assert total.histograms == {"languages": {"en": 12}} and total.metadata == dict.fromkeys("012", "said")
    assert [each["id"] for each in total.samples["short"]] == ["0.0", "0.1", "0.2", "1.0"]


def test_each_reason_has_samples_of_its_own(tmp_path: Path) -> None:
    account = Account(tmp_path, "filter", 3, samples=2)
    for number, reason in enumerate(["short", "short", "short", "long"]):
        account.drop(reason, place={"id": f"d{number}"}, text="words")
    account.close()
    ((task, found),) = read_tallies(tmp_path, "filter")
    listed = {reason: [each["id"] for each in samples] for reason, samples in found.samples.items()}
    assert task == 3 and listed == {"short": ["d0", "d1"], "long": ["d3"]}


def test_counts_of_more_tasks_than_their_names_have_digits_for_are_in_the_order_of_tasks(tmp_path: Path) -> None:
    for task in (100_000, 99_999, 10_001, 2):
        Account(tmp_path, "filter", task, samples=0).close()
    assert [task for task, _ in read_tallies(tmp_path, "filter")] == [2, 10_001, 99_999, 100_000]


def test_documents_whose_tokens_nobody_has_counted_add_up() -> None:
    one, other = Tally(), Tally()
    one.drop("short", 10)
    one.drop("short", 10, 3)
    other.drop("short", 10)
    total = merged([one, other, Tally()], samples=0)
    assert total.as_json()["dropped"] == {"short": {"documents": 3, "bytes": 30, "tokens": 3, "uncounted": 2}}


def test_counts_are_written_in_one_order_whatever_came_first() -> None:
    one, other = Tally(), Tally()
    for tally, order in ((one, ("cut", "mended")), (other, ("mended", "cut"))):
        tally.changed.update(dict.fromkeys(order, 1))
        for name in order:
            tally.drop(name, 1, 1)
            tally.count("languages", name)
    assert json.dumps(one.as_json()) == json.dumps(other.as_json())


def test_of_a_dropped_document_the_beginning_is_shown_and_a_detail_where_there_is_one(tmp_path: Path) -> None:
    account = Account(tmp_path, "filter", 0, samples=2)
    account.drop("short", place={"id": "d0"}, text="begins" + "x" * 1_000 + "\ud800")
    account.drop("short", place={"id": "d1"}, text="\ud800", detail="3 tokens")
    account.close()
    (path,) = tmp_path.rglob("*.jsonl.gz")
    assert [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()] == [
        {"id": "d0", "reason": "short"},
        {"id": "d1", "reason": "short", "detail": "3 tokens"},
    ]
    ((_, found),) = read_tallies(tmp_path, "filter")
    assert [each["text"][:7] for each in found.samples["short"]] == ["beginsx", "?"]


def test_a_list_of_what_was_dropped_is_the_same_bytes_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day in range(2):
        monkeypatch.setattr("time.time", lambda day=day: 1e9 + 86_400 * day)
        account = Account(tmp_path / str(day), "filter", 0, samples=0)
        account.drop("short", place={"id": "d0"})
        account.close()
    one, other = (path.read_bytes() for path in tmp_path.rglob("*.jsonl.gz"))
    assert one == other
