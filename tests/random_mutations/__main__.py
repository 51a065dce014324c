"""`python -m tests.random_mutations`."""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.random_mutations import lines
from tests.random_mutations.changes import Change, drawn
from tests.random_mutations.loaded import SOURCE
from tests.random_mutations.run import IMPOSSIBLE, UNNOTICED, UNREACHED, Session
from tests.random_mutations.written import written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", nargs="*", metavar="TEST", help="run all tests, or these, to learn their lines")
    parser.add_argument("--number", type=int, default=400, help="changes to draw (400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=12.0, help="of tests that are asked about a change (12)")
    parser.add_argument("--files", nargs="+", default=[""], help="beginnings of files' paths below src/colonnade")
    parser.add_argument(
        "--list", type=_resolved, metavar="FILE", help='of these changes, JSON: [{"file", "old", "new"}, …]'
    )
    parser.add_argument("--folder", type=Path, default=lines.ROOT / ".random_mutations", help="for what is recorded")
    line = parser.parse_args()
    os.chdir(lines.ROOT)
    if line.record is not None:
        return lines.record(line.folder, line.record)
    executed, draw = lines.Lines(line.folder), Random(line.seed)
    if line.list is None:
        files = [SOURCE / file for file in executed.files if file.startswith(tuple(line.files))]
        changes = [change for file in files for change in drawn(file, SOURCE, draw)]
        changes = draw.sample(changes, min(line.number, len(changes)))
    else:
        changes = written(line.list, SOURCE)
    verdicts = line.folder / f"verdicts-{line.seed if line.list is None else line.list.stem}.jsonl"
    verdicts.unlink(missing_ok=True)
    session = Session(changes, executed, line.seconds, verdicts)
    tests = {test.partition("::")[0] for change in changes for test in executed.tests(change.file, change.line)}
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sorted(tests)], [session])
    told = [json.loads(text) for text in verdicts.read_text().splitlines()]
    for each in told:
        if each["outcome"] in (UNNOTICED, UNREACHED, IMPOSSIBLE):
            change = Change(**each["change"])
            print(f"\n{each['outcome']}, {each['tests']} tests: {change.shown((SOURCE / change.file).read_bytes())}")
    outcomes = Counter(each["outcome"] for each in told)
    print(f"\nof {len(told)} changes: {', '.join(f'{count} {outcome}' for outcome, count in outcomes.most_common())}")
    return int(status)


def _resolved(text: str) -> Path:
    return Path(text).resolve()


if __name__ == "__main__":
    sys.exit(main())
