"""Training adapters beside `peft`: tokens a second and peak memory of the same model, in turns, in own processes.

    python -m benchmarks.lora             6 layers, hidden 384, vocabulary 50,304, sequence 256, micro-batch 4, fp32
    python -m benchmarks.lora --rounds 1 --steps 3 --layers 2 --hidden 64 --vocabulary 1000          a small try

Both adapt every linear layer of a GPT-2's blocks with rank 8, without dropout, in one process: forward, backward, the
gradients' norm and AdamW on the adapters. peft is as its documentation has it, with torch's fused AdamW. Weights are
random.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.hardware import describe

LEARNING_RATE, WEIGHT_DECAY, RANK, ALPHA = 1e-3, 0.1, 8, 16
Step = Callable[[], float]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("rounds", 3),
        ("steps", 8),
        ("warmup", 2),
        ("layers", 6),
        ("hidden", 384),
        ("heads", 6),
        ("vocabulary", 50304),
        ("sequence", 256),
        ("batch", 4),
        ("threads", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=("colonnade", "peft"), help="time one of them, here")
    return parser.parse_args()


def batch_of(how: argparse.Namespace) -> Tensor:
    """Token ids [b, s + 1]."""
    return torch.randint(0, how.vocabulary, (how.batch, how.sequence + 1), generator=torch.Generator().manual_seed(1))


def colonnade_step(how: argparse.Namespace) -> Step:
    from colonnade.config.model import ModelConfig
    from colonnade.config.parts import LoraConfig
    from colonnade.config.schema import Config, OptimConfig, RunConfig, TrainConfig
    from colonnade.data.loader import Batch
    from colonnade.mesh.mesh import Mesh
    from colonnade.train.products import settle
    from colonnade.train.state import build_state
    from colonnade.train.step import train_step

    config = Config(
        model=ModelConfig(
            num_layers=how.layers,
            hidden_size=how.hidden,
            num_heads=how.heads,
            seq_length=how.sequence,
            activation="gelu_tanh",
            dropout=0.0,
            attention_dropout=0.0,
        ),
        train=TrainConfig(
            steps=1000, global_batch_size=how.batch, micro_batch_size=how.batch, threads=how.threads, device="cpu"
        ),
        optim=OptimConfig(
            learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, warmup_steps=0, decay="constant", beta2=0.999
        ),
        lora=LoraConfig(rank=RANK, alpha=ALPHA),
        run=RunConfig(folder="unused"),
    )
    mesh, device = Mesh(), torch.device("cpu")
    products = settle(config, how.vocabulary, mesh.world, device).products
    state = build_state(config, mesh, how.vocabulary, device, products=products)
    tokens = batch_of(how).t().contiguous()
    ones = torch.ones(how.sequence, how.batch)
    microbatch = Batch(tokens[:-1], tokens[1:], ones, torch.arange(how.batch))
    return lambda: train_step(state, [microbatch], mesh, config.train).loss


def peft_step(how: argparse.Namespace) -> Step:
    import peft
    import transformers

    config = transformers.GPT2Config(
        vocab_size=how.vocabulary,
        n_positions=how.sequence,
        n_embd=how.hidden,
        n_layer=how.layers,
        n_head=how.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    lora = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, lora_dropout=0.0
    )
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora).train()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    tokens = batch_of(how)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(loss)

    return step


def timed(how: argparse.Namespace) -> dict[str, float | str]:
    """Time one of them in this process."""
    if how.threads:
        torch.set_num_threads(how.threads)
    step = {"colonnade": colonnade_step, "peft": peft_step}[how.only](how)
    losses = [step() for _ in range(how.warmup)]
    seconds = []
    for _ in range(how.steps):
        begun = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - begun)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    rate = how.batch * how.sequence / median(seconds)
    return {
        "who": how.only,
        "tokens_per_second": rate,
        "peak_mb": peak,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def main() -> None:
    how = arguments()
    if how.only:
        print(json.dumps(timed(how)))
        return
    print(json.dumps(describe()))
    runs: list[dict[str, Any]] = []
    for who in ("colonnade", "peft") * how.rounds:
        command = [sys.executable, "-m", "benchmarks.lora", *sys.argv[1:], "--only", who]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(json.dumps(found), flush=True)
        runs.append(found)
    for who in ("colonnade", "peft"):
        mine = [run for run in runs if run["who"] == who]
        rate, peak = (median(run[key] for run in mine) for key in ("tokens_per_second", "peak_mb"))
        print(f"{who:<10} {rate:>10,.0f} tokens/s {peak:>8,.0f} MB at most")


if __name__ == "__main__":
    main()
