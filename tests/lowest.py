"""The oldest versions that pyproject.toml allows, as constraints for pip: `python -m tests.lowest [EXTRA]...`, without
extras those of the run time. For `make lowest`.
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def pins(*extras: str) -> list[str]:
    """A line for each package."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    found = [line for extra in extras for line in project["optional-dependencies"][extra]] or project["dependencies"]
    return [line.replace(">=", "==") for line in dict.fromkeys(found)]


if __name__ == "__main__":
    print("\n".join(pins(*sys.argv[1:])))
