"""A plain GPT-2 in one file of native PyTorch: what a careful engineer writes in an afternoon.

Pre-LayerNorm blocks, learned positions, fused causal attention, a head tied to the embedding, autocast for bf16, fused
AdamW, clipping. `--compile` gives the whole model and its loss to `torch.compile`. Two ranks under torchrun train data
parallel (DistributedDataParallel), fully sharded (`zero3`: FSDP2) or tensor parallel (DTensor with `loss_parallel`,
PyTorch's own way).

    python -m benchmarks.plain_gpt --dtype bf16 --threads 2 --compile
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.plain_gpt --mode dp --threads 1
    python -m benchmarks.plain_gpt --profile         where the time goes, instead of how fast
"""

import argparse
import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.reference import Task, fixed_batch, fused_adamw, measure, num_ranks, read_task, start_gloo


class Attention(nn.Module):
    """The rows of `qkv` are ordered `[head, (q, k, v), head_dim]`, so any cut by whole heads is a cut of its rows."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.head_dim, self.dropout = task.head_dim, task.dropout
        self.qkv = nn.Linear(task.hidden_size, 3 * task.hidden_size)
        self.output = nn.Linear(task.hidden_size, task.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)  # 3 × [b, n, s, d]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.output(mixed.transpose(1, 2).reshape(b, s, -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(task.hidden_size)
        self.attention = Attention(task)
        self.mlp_norm = nn.LayerNorm(task.hidden_size)
        self.up = nn.Linear(task.hidden_size, task.ffn_hidden_size)
        self.down = nn.Linear(task.ffn_hidden_size, task.hidden_size)
        self.dropout = nn.Dropout(task.dropout) if task.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """tokens, labels `[b, s]` -> mean loss."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.tokens = nn.Embedding(task.vocab_size, task.hidden_size)
        self.positions = nn.Embedding(task.seq_length, task.hidden_size)
        self.blocks = nn.ModuleList(Block(task) for _ in range(task.num_layers))
        self.norm = nn.LayerNorm(task.hidden_size)
        self.dropout = nn.Dropout(task.dropout) if task.dropout else nn.Identity()
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        x, head = self.norm(x), self.tokens.weight
        if isinstance(head, DTensor):
            x = DTensor.from_local(x, head.device_mesh, [Replicate()])
        logits = F.linear(x, head)  # [b, s, v/tp]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def shard(model: GPT, mesh: DeviceMesh) -> None:
    """Cut the model over `mesh` by DTensor: columns, then rows, and the tied embedding by vocabulary."""
    parallelize_module(model, mesh, {"tokens": RowwiseParallel(input_layouts=Replicate())})
    plan = {
        "attention.qkv": ColwiseParallel(),
        "attention.output": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def shard_fully(model: GPT, task: Task) -> None:
    """FSDP2: every block, and the rest, gathered for use and freed afterwards; bf16 parameters, fp32 reduction."""
    dtype = torch.bfloat16 if task.bf16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (num_ranks(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def clip_sharded_(parameters: list[nn.Parameter], limit: float) -> None:
    """Clip by the global norm; `clip_grad_norm_` refuses a mixture of DTensors and plain tensors."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    sharded = [g for g in gradients if isinstance(g, DTensor)]
    plain = [g for g in gradients if not isinstance(g, DTensor)]
    norm_sharded = nn.utils.get_total_norm(sharded).full_tensor()  # type: ignore[attr-defined]
    norm = torch.hypot(norm_sharded, nn.utils.get_total_norm(plain))
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([g.to_local() for g in sharded] + plain, scale)


class SplitOptimizer:
    """One fused AdamW for the DTensors and one for the plain tensors, which fused AdamW refuses to mix."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        everything = list(model.parameters())
        self.optimizers = []
        for kind in (True, False):
            part = nn.ParameterList([p for p in everything if isinstance(p, DTensor) is kind])
            self.optimizers.append(fused_adamw(part, task))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def build_step(task: Task, compiled: bool) -> Callable[[], float]:
    """A function that takes one training step and returns its loss."""
    torch.manual_seed(1234)
    model = GPT(task).to(task.device)
    precision = torch.autocast(task.device, torch.bfloat16) if task.bf16 else contextlib.nullcontext()
    if task.mode == "zero3":
        shard_fully(model, task)
        precision = contextlib.nullcontext()  # FSDP2 casts by itself
    if task.mode == "tp":
        shard(model, init_device_mesh("cpu", (num_ranks(),)))
    vocabulary = loss_parallel if task.mode == "tp" else contextlib.nullcontext
    parameters = list(model.parameters())
    optimizer = SplitOptimizer(model, task) if task.mode == "tp" else fused_adamw(model, task)
    loss_of: Callable[..., Tensor] = model
    if task.mode == "dp":
        loss_of = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if compiled:
        loss_of = torch.compile(loss_of)
    tokens, labels = (part.to(task.device) for part in fixed_batch(task))

    def step() -> float:
        with vocabulary():
            with precision:
                loss = loss_of(tokens, labels)
            loss.backward()  # type: ignore[no-untyped-call]
        if task.mode == "tp":
            clip_sharded_(parameters, task.gradient_clip)
        else:
            nn.utils.clip_grad_norm_(parameters, task.gradient_clip)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)

    return step


def profile(step: Callable[[], float], steps: int) -> None:
    """Print the fifteen operators that take the most time of their own."""
    for _ in range(2):
        step()
    with torch.profiler.profile() as recorded:
        for _ in range(steps):
            step()
    print(recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description="A plain PyTorch GPT-2, timed.")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the operators that take the most time")
    task, line = read_task(parser)
    if num_ranks() > 1:
        start_gloo()
    step = build_step(task, line.compile)
    if line.profile:
        profile(step, task.steps)
    else:
        name = "plain torch + compile" if line.compile else "plain torch"
        notes = {"tp": "DTensor, loss_parallel", "zero3": "FSDP2"}
        measure(step, task, peer=name, note=notes.get(task.mode, ""))
    if num_ranks() > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
