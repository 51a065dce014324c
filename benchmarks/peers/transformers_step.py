"""GPT2LMHeadModel of `transformers`, trained through `accelerate`. GPT-2 has no tensor-parallel plan."""

import os
import warnings
from collections.abc import Callable
from importlib.metadata import version

import accelerate
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.peers.reference import Task, fixed_batch, fused_adamw, measure, read_task


def build_step(task: Task) -> Callable[[], float]:
    accelerator = accelerate.Accelerator(cpu=task.device == "cpu", mixed_precision="bf16" if task.bf16 else "no")
    torch.set_num_threads(task.threads)  # accelerate sets its own
    torch.manual_seed(1234)
    config = GPT2Config(
        vocab_size=task.vocab_size,
        n_positions=task.seq_length,
        n_embd=task.hidden_size,
        n_layer=task.num_layers,
        n_head=task.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    assert model.config._attn_implementation == "sdpa", "the slower attention would not be a fair peer"
    model, optimizer = accelerator.prepare(model, fused_adamw(model, task))
    model.train()
    tokens, labels = (part.to(task.device) for part in fixed_batch(task))

    def step() -> float:
        loss = model(input_ids=tokens, labels=labels, shift_labels=labels).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), task.gradient_clip)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def main() -> None:
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    task, _ = read_task()
    names = [f"{name} {version(name)}" for name in ("transformers", "accelerate")]
    measure(build_step(task), task, peer=" + ".join(names), note="sdpa")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
