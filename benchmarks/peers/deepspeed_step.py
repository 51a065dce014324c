"""The plain GPT under `deepspeed`: one process, data parallel (ZeRO stage 0 in fp32, 1 in bf16), or a ZeRO stage.

bf16 is DeepSpeed's own: bf16 parameters with an fp32 master copy. On CPU stage 0 was the fastest of 0 to 3 in fp32, and
stage 1 of 1 to 3 in bf16. DeepSpeed compiles an operator with g++ and ninja on its first use.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", "0")
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # ninja lives there
warnings.filterwarnings("ignore")

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.utils import logger  # noqa: E402

from benchmarks.peers.reference import Task, fixed_batch, fused_adamw, measure, num_ranks, read_task, start_gloo  # noqa: E402
from benchmarks.plain_gpt import GPT  # noqa: E402


def zero_stage(task: Task) -> int:
    if task.mode.startswith("zero"):
        return int(task.mode.removeprefix("zero"))
    return 1 if task.bf16 and num_ranks() > 1 else 0


def settings(task: Task) -> dict[str, object]:
    bf16 = {"enabled": task.bf16}
    if task.bf16 and zero_stage(task) == 0:
        bf16["immediate_grad_update"] = True
    return {
        "train_micro_batch_size_per_gpu": task.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": task.gradient_clip,
        "zero_optimization": {"stage": zero_stage(task)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": bf16,
        "steps_per_print": 10**9,
    }


def build_step(task: Task) -> Callable[[], float]:
    torch.manual_seed(1234)
    model = GPT(task)
    engine, *_ = deepspeed.initialize(model=model, optimizer=fused_adamw(model, task), config=settings(task))
    torch.set_num_threads(task.threads)
    tokens, labels = fixed_batch(task)

    def step() -> float:
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def main() -> None:
    logger.setLevel(logging.ERROR)
    task, _ = read_task()
    start_gloo()
    deepspeed.init_distributed(dist_backend="gloo")
    note = f"ZeRO {zero_stage(task)}" + ("; bf16 parameters, fp32 master" if task.bf16 else "")
    measure(build_step(task), task, peer=f"deepspeed {deepspeed.__version__}", note=note)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
