"""Every Python example in the README and the documents runs, as a reader would run it."""

import json
import random
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from colonnade.config.schema import ParallelConfig
from colonnade.mesh.layout import Layout
from tests.commands import environment
from tests.distributed import run_on_ranks

ROOT = Path(__file__).parents[1]
WRITTEN = ROOT / "tests" / "checkpoint" / "written"
RECORD = re.compile(r"\d\d-.*\.md")  # a decision record shows what was decided then, and is no instruction
EVERY = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = [path for path in EVERY if "```python" in path.read_text() and not RECORD.fullmatch(path.name)]

BEFORE = {
    "docs/checkpoints.md": """
        from pathlib import Path
        import torch
        from colonnade.checkpoint.plan import Box, Shard, shards_of_range
        my_rows, my_slice = torch.zeros(25128, 768), torch.zeros(2000)
        folder, step, metadata, text = Path("run"), 10, {"model": {"num_layers": 1}}, b"x = 1"
        shards = [Shard("w", (3,), (0,), torch.ones(3))]
        """
}
"""What the text around a page's examples takes for granted."""

INSTEAD = {"stride=32": "stride=4", "It was a dark night": "the"}
"""The model of the tests reads 8 tokens."""


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_there_are_examples() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"docs/data.md", "docs/checkpoints.md", "docs/generation.md"} <= names
    assert BEFORE.keys() <= names


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the files that examples name."""
    draws = random.Random(1)
    words = ["whale", "ship", "night", "captain", "sea", "the", "of", "old"]
    texts = [" ".join(draws.choices(words, k=300)) for _ in range(60)]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "wiki.test.txt").write_text(texts[0][:200])
    (tmp_path / "recipe.toml").write_text('[read]\npaths = ["books.jsonl"]\n[write]\nfolder = "clean"\n')
    shutil.copy(WRITTEN / "serial/step_00000003/tokenizer.json", tmp_path)
    shutil.copytree(WRITTEN / "serial", tmp_path / "runs/demo/run/checkpoints")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_run(page: Path, place: Path) -> None:
    """In one process, from top to bottom. An indented one is an excerpt, and stands in the source."""
    whole = [example for example in examples(page) if not example.startswith(" ")]
    text = "\n".join([textwrap.dedent(BEFORE.get(str(page.relative_to(ROOT)), "")), *whole])
    for old, new in INSTEAD.items():
        text = text.replace(old, new)
    (place / "example.py").write_text(text)
    command = [sys.executable, "-W", "error", "example.py"]
    done = subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def losses_told(rank: int, num_ranks: int, page: str, parallel: ParallelConfig, micro_batch_size: int) -> list[float]:
    """What the page's first examples print, in fp64 and in fewer steps, on a rank of this layout."""
    told: list[float] = []
    text = "\n".join(examples(ROOT / page)[:2])
    for old, new in {
        "build_mesh(Layout(), 0)": "build_mesh(layout, rank)",
        'RunConfig(folder="unused")': 'RunConfig(folder="unused"), parallel=parallel',
        "micro_batch_size=4": f'micro_batch_size={micro_batch_size}, precision="fp64"',
        "train(20)": "train(1)",
        "train(10)": "train(2)",
    }.items():
        assert old in text
        text = text.replace(old, new)
    exec(text, {"layout": Layout(tp=parallel.tp), "rank": rank, "parallel": parallel, "print": told.append})
    return told


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sequence parallel"])
def test_a_loss_of_ones_own_is_the_serial_one_on_every_rank(sequence_parallel: bool) -> None:
    """Also with other micro-batches."""
    (serial,) = run_on_ranks(losses_told, 1, "docs/extend.md", ParallelConfig(), 4)
    parallel = ParallelConfig(tp=2, sequence_parallel=sequence_parallel)
    ranks = run_on_ranks(losses_told, 2, "docs/extend.md", parallel, 2)
    assert len(serial) == 2 and ranks == [pytest.approx(serial, rel=1e-12)] * 2


@pytest.mark.slow
def test_the_step_that_is_walked_through_sends_what_the_page_says() -> None:
    """Times, operation, axis, bytes and file of each collective; the page leaves line numbers out."""
    page = ROOT / "docs/training_step.md"
    (example,) = (example for example in examples(page) if not example.startswith(" "))
    done = subprocess.run(
        [sys.executable, "-c", example], env=environment(), capture_output=True, text=True, timeout=300
    )
    sent = re.compile(r"^\d+ \w+ \w+ \d+ [\w/]+\.py", flags=re.MULTILINE)
    assert done.returncode == 0, done.stderr
    assert sent.findall(page.read_text()) == sent.findall(done.stdout) != []


def excerpts() -> list[str]:
    return [example for page in PAGES for example in examples(page) if example.startswith(" ")]


@pytest.mark.parametrize("excerpt", excerpts(), ids=lambda excerpt: excerpt.split("\n")[0].strip()[:40])
def test_excerpts_are_what_the_source_says(excerpt: str) -> None:
    sources = (ROOT / "src").rglob("*.py")
    lines = [line.strip() for line in excerpt.splitlines() if line.strip()]
    assert any(all(line in source for line in lines) for source in map(_lines, sources)), excerpt


def _lines(path: Path) -> set[str]:
    return {line.strip() for line in path.read_text().splitlines()}
