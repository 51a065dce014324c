"""The plain GPT cut in two stages by `torch.distributed.pipelining`, 1F1B.

The head is not tied to the embedding: the two stages have no common parameter, and PyTorch ties none across stages.
That is 19 million parameters more than the other contestants have. The cut is the one that evens out time: the
embedding and all blocks in front, the head behind.
"""

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.peers.reference import Task, fixed_batch, fused_adamw, measure, num_ranks, rank, read_task, start_gloo
from benchmarks.plain_gpt import GPT


class Front(nn.Module):
    """tokens `[b, s]` -> stream `[b, s, h]`: embedding and blocks."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        whole = GPT(task)
        self.tokens, self.positions, self.blocks = whole.tokens, whole.positions, whole.blocks
        self.bf16 = task.bf16

    def forward(self, tokens: Tensor) -> Tensor:
        with _precision(self.bf16):
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return x.float()  # type: ignore[no-any-return]


class Behind(nn.Module):
    """stream `[b, s, h]` -> logits `[b, s, v]`."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(task.hidden_size)
        self.head = nn.Linear(task.hidden_size, task.vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        self.bf16 = task.bf16

    def forward(self, x: Tensor) -> Tensor:
        with _precision(self.bf16):
            return self.head(self.norm(x))  # type: ignore[no-any-return]


def _precision(bf16: bool) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()


def build_step(task: Task) -> Callable[[], float]:
    torch.manual_seed(1234)
    module = Front(task) if rank() == 0 else Behind(task)
    optimizer = fused_adamw(module, task)
    stage = PipelineStage(module, rank(), num_ranks(), torch.device("cpu"))
    schedule = Schedule1F1B(
        stage,
        task.num_microbatches,
        loss_fn=lambda logits, labels: F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()),
    )
    tokens, labels = (part.repeat(task.num_microbatches, 1) for part in fixed_batch(task))

    def step() -> float:
        losses: list[Tensor] = []
        if rank() == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=labels, losses=losses)
        nn.utils.clip_grad_norm_(module.parameters(), task.gradient_clip)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(())
        dist.all_reduce(total)
        return float(total)

    return step


def main() -> None:
    task, _ = read_task()
    start_gloo()
    measure(build_step(task), task, peer=f"torch pipelining {torch.__version__}", note="1F1B; head not tied")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
