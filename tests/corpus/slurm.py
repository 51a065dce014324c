"""A stand-in for Slurm: `sbatch` keeps what is submitted, and `Cluster` runs it as Slurm would, in this process."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import dill
import pytest

SBATCH = """#!/bin/bash
n=$(ls {folder} | grep -c arguments)
if [ $n = {refused} ]; then echo "sbatch: error: invalid" >&2; exit 3; fi
cp "${{@: -1}}" {folder}/$((1000 + n)).script
echo "$@" > {folder}/$((1000 + n)).arguments
if [ "$SLURM_CLUSTERS" ]; then echo "a word of the site"; fi
case " $* " in
  *" --parsable "*) echo $((1000 + n))"${{SLURM_CLUSTERS:+;$SLURM_CLUSTERS}}" ;;
  *) echo Submitted batch job $((1000 + n))"${{SLURM_CLUSTERS:+ on cluster $SLURM_CLUSTERS}}" ;;
esac
"""


class Cluster:
    """Job arrays, their dependencies, and tasks that fail."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs, self._patch = folder / "jobs", monkeypatch
        for name in ("jobs", "bin"):
            (folder / name).mkdir()
        self.refuse("none")
        self.command("squeue", "#!/bin/bash\n")
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        self.ended: dict[str, bool] = {}

    def refuse(self, number: int | str) -> None:
        """Takes so many jobs, and no more."""
        self.command("sbatch", SBATCH.format(folder=self.jobs, refused=number))

    def command(self, name: str, content: str) -> None:
        """Puts a command in place."""
        path = self.jobs.parent / "bin" / name
        path.write_text(content)
        path.chmod(0o755)

    def submitted(self) -> list[str]:
        """The numbers of all jobs."""
        return sorted(path.stem for path in self.jobs.glob("*.arguments"))

    def script(self, job: str) -> str:
        return (self.jobs / f"{job}.script").read_text()

    def arguments(self, job: str) -> str:
        return (self.jobs / f"{job}.arguments").read_text()

    def waits_for(self, job: str) -> list[str]:
        """The jobs that have to end well before."""
        found = re.search(r"--dependency=afterok:(\S+)", self.arguments(job))
        return found[1].split(":") if found else []

    def options(self, job: str) -> dict[str, str]:
        """What the script asks of Slurm, with quotes and spaces as sbatch takes them: as a shell does."""
        lines = [shlex.split(line)[1:] for line in self.script(job).splitlines() if line.startswith("#SBATCH ")]
        assert all(len(line) == 1 for line in lines), f"what follows an option is an argument of its own: {lines}"
        return {name: value for name, _, value in (line[0].partition("=") for line in lines)}

    def size(self, job: str) -> int:
        found = re.match(r"0-(\d+)", self.options(job)["--array"])
        assert found is not None
        return int(found[1]) + 1

    def name(self, job: str) -> str:
        return self.options(job)["--job-name"].removeprefix("colonnade-")

    def command_line(self, job: str) -> list[str]:
        """What the script runs, as the shell takes it."""
        (line,) = (line for line in self.script(job).splitlines() if line.startswith("srun "))
        return shlex.split(line)

    def run(self, job: str, *, without: Collection[int] = (), order: int = 1, force: bool = False) -> bool:
        """Runs a job's tasks if Slurm would start it. `without`: tasks that the machine loses."""
        if not force and not all(self.ended.get(other) for other in self.waits_for(job)):
            return False
        well = True
        for index in range(self.size(job))[::order]:
            well &= index not in without and self.task(job, index) is None
        self.ended[job] = well
        return True

    def task(self, job: str, index: int) -> Exception | None:
        """Runs one task; gives what it raised."""
        offset = re.search(r"RUN_OFFSET=(\d+)", self.arguments(job))
        assert offset is not None
        with self._patch.context() as patch:
            patch.setenv("SLURM_ARRAY_TASK_ID", str(index))
            patch.setenv("RUN_OFFSET", offset[1])
            patch.setenv("SLURM_NODELIST", "node")
            patch.setattr("datatrove.executor.slurm.expand_slurm_nodelist", lambda nodes: [nodes])
            executor: Any = dill.loads(Path(self.command_line(job)[-1]).read_bytes())
            executor.requeue_signals = ()
            try:
                executor.run()
            except Exception as error:  # noqa: BLE001  whatever it is, the test looks at it
                return error
        return None
