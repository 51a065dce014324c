"""The configuration of a run, as its page shows it."""

from pathlib import Path

from colonnade.config.thermometers import ALL_SITES
from colonnade.report.record import read_run
from colonnade.report.settings import drawn
from tests.report import written
from tests.report.test_top import cells


def test_keys_at_their_defaults_are_in_the_table_of_all_alone(tmp_path: Path) -> None:
    """Lists too, which are no lists in the schema."""
    folder = written.run(tmp_path / "r")
    sites = ", ".join(f'"{site}"' for site in ALL_SITES)
    (folder / "config.toml").write_text(
        f"[train]\nsteps = 7\n[checkpoint]\nkeep = 2\nkeep_every = 3\n[thermometers]\nsites = [{sites}]\n"
    )
    (folder / "events.jsonl").unlink()
    own, every = str(drawn(read_run(folder))).split("all 4 keys")
    assert cells(own) == [["train.steps", "7", ""], ["checkpoint.keep_every", "3", "0"]]
    assert [name for name, _ in cells(every)] == [
        "train.steps", "checkpoint.keep", "checkpoint.keep_every", "thermometers.sites",
    ]  # fmt: skip
