"""The oldest versions that pyproject.toml allows: `python -m tests.lowest` prints those of the run time as constraints
for pip, for `make lowest`.
"""

import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def pins(*extras: str) -> list[str]:
    """A line for each package of these extras, or without any of the run time."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    found = [line for extra in extras for line in project["optional-dependencies"][extra]] or project["dependencies"]
    return [line.replace(">=", "==") for line in dict.fromkeys(found)]


if __name__ == "__main__":
    print("\n".join(pins()))
