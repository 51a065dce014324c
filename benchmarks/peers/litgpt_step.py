"""litgpt's GPT under Lightning Fabric. One process, or data parallel. It has rotary positions only."""

import logging
import warnings
from collections.abc import Callable
from importlib.metadata import version

warnings.filterwarnings("ignore")

import lightning  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from lightning.fabric.strategies import DDPStrategy  # noqa: E402
from litgpt.config import Config  # noqa: E402
from litgpt.model import GPT  # noqa: E402

from benchmarks.peers.reference import Task, fixed_batch, fused_adamw, measure, num_ranks, read_task  # noqa: E402


def build_model(task: Task) -> GPT:
    model = GPT(
        Config(
            block_size=task.seq_length,
            vocab_size=task.vocab_size,
            padded_vocab_size=task.vocab_size,
            n_layer=task.num_layers,
            n_head=task.num_heads,
            n_embd=task.hidden_size,
            intermediate_size=task.ffn_hidden_size,
            norm_class_name="LayerNorm",
            mlp_class_name="GptNeoxMLP",
            parallel_residual=False,
            bias=True,
            lm_head_bias=False,
            rotary_percentage=0.25,
        )
    )
    model.lm_head.weight = model.transformer.wte.weight
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def build_step(task: Task) -> Callable[[], float]:
    strategy = DDPStrategy(process_group_backend="gloo") if num_ranks() > 1 else "auto"
    precision = "bf16-mixed" if task.bf16 else "32-true"
    fabric = lightning.Fabric(accelerator="cpu", devices=num_ranks(), strategy=strategy, precision=precision)
    fabric.launch()
    torch.set_num_threads(task.threads)  # Lightning sets its own
    torch.manual_seed(1234)
    model = fabric.setup(build_model(task))
    optimizer = fabric.setup_optimizers(fused_adamw(model, task))
    tokens, labels = fixed_batch(task)

    def step() -> float:
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=task.gradient_clip)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def main() -> None:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    task, _ = read_task()
    measure(build_step(task), task, peer=f"litgpt {version('litgpt')}", note="rotary positions")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
