"""The comparison of training speed: what is timed trains as every contestant does."""

from benchmarks import speed_table
from benchmarks.colonnade_step import build_step
from benchmarks.peers.reference import TINY, Task
from tests.distributed import run_on_ranks


def losses(rank: int, num_ranks: int) -> list[float]:
    step = build_step(Task(threads=1, steps=3, **TINY))
    return [step() for _ in range(6)]


def test_the_full_learning_rate_is_there_from_the_first_step() -> None:
    """Without a warm-up, as the others: a run whose loss does not fall is thrown out of the table."""
    (found,) = run_on_ranks(losses, 1)
    run = {"first_loss": found[0], "last_loss": found[-1]}
    assert not speed_table.failure(run), found


def test_another_checkout_is_no_peer() -> None:
    def run(name: str, speed: float) -> dict[str, object]:
        numbers = {"tokens_per_second": speed, "step_ms": 1.0, "cpu_ms": 1.0, "peak_rss_mb": [9], "others": 0.0}
        return {
            "row": "fp32-tp",
            "contestant": name,
            "peer": "colonnade 1",
            "first_loss": 6.0,
            "last_loss": 5.0,
            "note": "",
            **numbers,
        }

    table = speed_table.rows([run("colonnade", 300.0), run("before", 200.0)])
    assert "fp32-tp" not in speed_table.verdict(table)
    assert "| fp32-tp | 300 | 200 | **1.500** | 9 | 9 |" in speed_table.progress_made(table)
