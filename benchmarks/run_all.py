"""All benchmarks that this folder has, one after the other; their results are in `results/`.

    python -m benchmarks.run_all                 everything: about an hour, on a machine with nothing else to do
    python -m benchmarks.run_all --quick         Colonnade's training speed beside plain PyTorch: a few minutes

Further options go to `train_speed`, for instance `--peer-python litgpt=/venvs/litgpt/bin/python`.
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
QUESTIONS = ("train_speed", "dropout_cost", "collectives", "tokenize_speed", "data_open", "blend_open", "checkpoint")


def commands(options: list[str]) -> list[list[str]]:
    """What to run: with `--quick`, training speed alone."""
    questions = QUESTIONS[:1] if "--quick" in options else QUESTIONS
    present = [name for name in questions if (FOLDER / f"{name}.py").exists()]
    return [["-m", f"benchmarks.{name}", *(options if name == "train_speed" else [])] for name in present]


def main() -> int:
    failed = []
    for command in commands(sys.argv[1:]):
        print(f"\n=== python {' '.join(command)}\n", flush=True)
        if subprocess.run([sys.executable, *command], cwd=FOLDER.parent, check=False).returncode:
            failed.append(command[1])
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
