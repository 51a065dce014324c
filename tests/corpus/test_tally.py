"""Counts of tasks, put together."""

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
