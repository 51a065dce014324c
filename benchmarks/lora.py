"""Training adapters beside `peft`: tokens a second and peak memory of the reference model, in turns, in own processes.

    python -m benchmarks.lora                                        three rounds, one process of two threads, fp32
    python -m benchmarks.lora --rounds 1 --tiny --steps 3            a small try

Both adapt every linear layer of the blocks with rank 8, without dropout: forward, backward, the gradients' norm and
AdamW on the adapters. peft is as its documentation has it, with torch's fused AdamW.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks import colonnade_step
from benchmarks.hardware import describe
from benchmarks.peers.reference import Task, fixed_batch, fused_adamw, measure, read_task
from colonnade.config.parts import LoraConfig

RANK, ALPHA = 8, 16
CONTESTANTS = ("colonnade", "peft")


def peft_step(task: Task) -> Callable[[], float]:
    import peft
    import transformers

    config = transformers.GPT2Config(
        vocab_size=task.vocab_size,
        n_positions=task.seq_length,
        n_embd=task.hidden_size,
        n_layer=task.num_layers,
        n_head=task.num_heads,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    targets = ["c_attn", "c_proj", "c_fc"]
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, fan_in_fan_out=True)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora).train()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = fused_adamw(model, task)
    tokens, labels = fixed_batch(task)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), labels.flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, task.gradient_clip)
        optimizer.step()
        return float(loss)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=CONTESTANTS, help="time one of them, here")
    task, line = read_task(parser)
    if line.only:
        step = (
            colonnade_step.build_step(task, LoraConfig(rank=RANK, alpha=ALPHA))
            if line.only == "colonnade"
            else peft_step(task)
        )
        measure(step, task, peer=line.only)
        return
    print(json.dumps(describe()))
    found: dict[str, list[dict[str, Any]]] = {who: [] for who in CONTESTANTS}
    for _ in range(line.rounds):
        for who in CONTESTANTS:
            command = [sys.executable, "-m", "benchmarks.lora", *sys.argv[1:], "--only", who]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
            (result,) = (each.removeprefix("RESULT ") for each in out if each.startswith("RESULT "))
            print(result, flush=True)
            found[who].append(json.loads(result))
    for who, results in found.items():
        rate = median(each["tokens_per_second"] for each in results)
        print(f"{who:<10} {rate:>10,.0f} tokens/s {max(each['peak_rss_mb'][0] for each in results):>8,.0f} MB at most")


if __name__ == "__main__":
    main()
