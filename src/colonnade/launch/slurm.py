"""A Slurm job of a run: the batch script, from a configuration and the machines. Pure: text in, text out.

    sbatch ─▶ the script ─▶ srun ─▶ torchrun, one a machine ─▶ ranks
                 │ a signal before the time is over: run.folder/leave, so that the run saves and leaves
                 └ behind it: queued again where the run is to go on

Queued again is what has left to be gone on with (status 99), what was preempted, and what has failed after a new
checkpoint of its own: a failure without one would come again. A job that somebody has cancelled is not.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colonnade.config.check import check
from colonnade.config.fitting import Fit, exactly, in_words
from colonnade.config.numbers import counted
from colonnade.config.schema import Config
from colonnade.errors import ConfigError
from colonnade.launch.supervisor import UNFINISHED

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d{1,2}){0,2})")
_ARRAY = re.compile(r"(?P<first>\d+)(-(?P<last>\d+))?")
LEAST_STEPS = 60  # seconds of a job that are not for its end


@dataclass(frozen=True)
class Job:
    """What is asked of Slurm."""

    nodes: int
    ranks_per_node: int
    time: str
    """As Slurm takes it: minutes, hours:minutes:seconds, days-hours, …"""
    gpus: bool = True
    cpus_per_rank: int = 1
    """Cores. Slurm gives a job one, where nothing asks for more."""
    margin: int = 300
    """[seconds] Between the signal and the end: for a step and a save."""
    array: str = ""
    """Stages that follow each other: "1-4"."""
    partition: str = ""
    account: str = ""
    name: str = "colonnade"
    logs: str = "."
    """Folder."""

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def cpus_per_node(self) -> int:
        return self.ranks_per_node * self.cpus_per_rank


def seconds_of(time: str) -> int | None:
    """What Slurm understands by a time limit; None where that is nothing."""
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    fields = [int(field) for field in match["fields"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = [*fields, 0, 0][:3]
        return ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(fields) == 3:
        return (fields[0] * 60 + fields[1]) * 60 + fields[2]
    return fields[0] * 60 + (fields[1] if len(fields) == 2 else 0)


def problems(config: Config, job: Job) -> Iterator[str]:
    """Why the job cannot be, all of it."""
    parallel, ranks = config.parallel, job.num_ranks
    size = f"{counted(job.nodes, 'node')} × {counted(job.ranks_per_node, 'rank')} = {ranks} ranks"
    if ranks != parallel.num_ranks:
        yield (
            f"{size}, but the layout, {in_words(config)}, has {parallel.num_ranks}: each place needs a rank. "
            f"{_other_layout(config, job)}"
        )
    if job.ranks_per_node % parallel.tp:
        yield (
            f"parallel.tp = {parallel.tp} does not go into {counted(job.ranks_per_node, 'rank')} of a node: "
            "tensor-parallel ranks would lie across two nodes, which share no fast links. Use a tp that divides it."
        )
    if not job.gpus and config.train.device == "cuda":
        yield '--ranks-per-node asks for no GPUs, and train.device = "cuda" needs them. Use --gpus-per-node.'
    if job.gpus and config.train.device == "cpu":
        yield '--gpus-per-node asks for GPUs, and train.device = "cpu" uses none. Use --ranks-per-node.'
    limit = seconds_of(job.time)
    if limit is None:
        yield f"--time {job.time!r} is no time of Slurm's. Write for instance 90 (minutes), 24:00:00 or 2-12:00:00."
    elif limit < job.margin + LEAST_STEPS:
        yield (
            f"--time {job.time} is {limit} seconds, and the run is asked to leave --margin = {job.margin} seconds "
            "before its end: nothing would be trained. Use a longer time, or a shorter margin."
        )
    if job.array and not _is_array(job.array):
        yield f"--array {job.array!r} names no stages. Write for instance 1-4."


def _is_array(array: str) -> bool:
    match = _ARRAY.fullmatch(array)
    return match is not None and int(match["last"] or match["first"]) >= int(match["first"])


def _other_layout(config: Config, job: Job) -> str:
    """What goes with the machines, or which of them go with a layout."""
    parallel = config.parallel
    if job.num_ranks > parallel.num_ranks:
        dp, rest = divmod(job.num_ranks, parallel.tp * parallel.pp)
        more = config.model_copy(update={"parallel": parallel.model_copy(update={"dp": dp})})
        return f"Ask for {parallel.num_ranks}{'' if rest or check(more) else f', or parallel.dp={dp}'}."
    fit = exactly(config, job.num_ranks, per_node=job.ranks_per_node)
    if fit is not None:
        return f"A layout for them: {_keys(fit, config)}."
    fewer = [(nodes, job.ranks_per_node) for nodes in range(job.nodes - 1, 0, -1)]
    fewer += [(1, ranks) for ranks in range(job.ranks_per_node - 1, 0, -1)]
    fits = (exactly(config, nodes * ranks, per_node=ranks) for nodes, ranks in fewer)
    most = next(each for each in fits if each is not None)  # one rank has a layout
    return f"No layout has so many. Ask for {most.num_ranks}, with {_keys(most, config)}."


def _keys(fit: Fit, config: Config) -> str:
    return " ".join(fit.overrides(config))


def script(config: Config, job: Job, arguments: Sequence[str], python: str) -> str:
    """The batch script. `arguments`: of `colonnade train`. ConfigError with every reason why there can be none."""
    found = list(problems(config, job))
    if found:
        count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise ConfigError("\n".join([f"no such job: {count}", *(f"  - {each}" for each in found)]))
    return "\n".join(["#!/bin/bash", *_directives(job), "", _BODY.format_map(_values(config, job, arguments, python))])


def _directives(job: Job) -> Iterator[str]:
    logged = "%x-%A-%a.log" if job.array else "%x-%j.log"
    yield "# Written by `colonnade slurm`. Submit with sbatch."
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        **({"gpus-per-node": job.ranks_per_node} if job.gpus else {}),
        "cpus-per-task": job.cpus_per_node,
        "time": job.time,
        "signal": f"B:USR1@{job.margin}",
        "output": f"{job.logs.replace('%', '%%')}/{logged}",
        "open-mode": "append",
        **({"array": f"{job.array}%1"} if job.array else {}),
        **({"partition": job.partition} if job.partition else {}),
        **({"account": job.account} if job.account else {}),
    }
    for name, value in options.items():
        yield f"#SBATCH {shlex.quote(f'--{name}={value}')}"  # sbatch takes quotes as a shell does
    yield "#SBATCH --requeue"


def _values(config: Config, job: Job, arguments: Sequence[str], python: str) -> dict[str, object]:
    threads = "" if config.train.threads else _THREADS.format(ranks=job.ranks_per_node)
    return {
        "run": shlex.quote(config.run.folder),
        "python": shlex.quote(python),
        "ranks": job.ranks_per_node,
        "restarts": config.restarts.limit,
        "train": shlex.join(["train", *arguments]) + threads,
        "unfinished": UNFINISHED,
        "again": _NEXT_STAGE if job.array else _REQUEUE,
        "itself": _STAGE if job.array else _JOB,
    }


# By default a step of Slurm may run on all cores of its machine, so that the ranks take them for theirs. Where these
# read a 1, it may be torchrun's, and says nothing; here it is somebody's.
_THREADS = (
    ' $([ "${{OMP_NUM_THREADS:-1}}" != 1 ] || '
    'echo "train.threads=${{OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / {ranks}))}}")'
)
_JOB = '"$SLURM_JOB_ID"'
_STAGE = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'  # the last stage's own number would stand for all of them
_REQUEUE = 'scontrol requeue "$SLURM_JOB_ID"'
_NEXT_STAGE = '[ "$SLURM_ARRAY_TASK_ID" = "$SLURM_ARRAY_TASK_MAX" ] || exit 0  # the next stage of the array goes on'
_BODY = r"""run={run}
python=${{PYTHON:-{python}}}
this=$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}
mkdir -p "$run"
flock -n -E 9 "$run/lock" true  # 9: another job has the run, whose `leave` is not for this one
[ $? -eq 9 ] || rm -f "$run/leave"
newest() {{ ls -d "$run"/checkpoints/step_* 2>/dev/null | tail -n 1; }}
before=$(newest)
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

# Before the time is over, or where Slurm ends the job: save, and leave. srun itself ignores the signals.
trap 'touch "$run/leave"' USR1 TERM

srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" "$python" -m torch.distributed.run \
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={ranks} --max-restarts={restarts} \
  --rdzv-backend=c10d --rdzv-id="$this" --rdzv-endpoint="$head:$port" \
  -m colonnade {train} &
pid=$!
wait "$pid"; status=$?
while kill -0 "$pid" 2>/dev/null; do wait "$pid"; status=$?; done  # a signal ends a wait, not the run

[ "$status" -eq 0 ] && exit 0
# Slurm is ending the job: at its limit, for another one (preempted), or because somebody has cancelled or requeued it.
job=$(scontrol show job {itself})
preempted() {{ [[ $job =~ PreemptTime=[0-9] ]]; }}
[[ $job =~ JobState=(COMPLETING|CANCELLED) && $job != *Reason=TimeLimit* ]] && ! preempted && exit "$status"

# How the run has ended, if it is to be told. Where another job has the run, new checkpoints are not of this one.
noted=$(cat "$run/ended.json" 2>/dev/null)
ours() {{ [[ -z $noted || $noted == *"\"run\": \"$this\""* ]]; }}
ended=$(ours && sed -n 's/.*"status": \([0-9]*\).*/\1/p' <<< "$noted")
[ -e "$run/stop" ] && exit "$status"
if preempted || [ "$ended" = {unfinished} ] || {{ [ -z "$ended" ] && ours && [ "$(newest)" != "$before" ]; }}; then
  {again}
fi
exit "${{ended:-$status}}"
"""
