"""megatron-core's GPTModel, its data parallelism and its optimizer, on a CPU through `cpu_as_cuda`.

The local (not Transformer Engine) layers; fusions that are CUDA kernels are off. bf16 is Megatron's own: bf16
parameters with fp32 main parameters and gradients. Without apex its AdamW is PyTorch's for-loop version; the fused one
is switched on by hand (several times faster), so that this peer is as fast as its user could have it.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator

from benchmarks.peers import cpu_as_cuda  # noqa: F401  (must come before megatron is imported)

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import megatron.core  # noqa: E402
import torch  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from benchmarks.peers.reference import Task, fixed_batch, measure, num_ranks, read_task, start_gloo  # noqa: E402


def tensor_ranks(task: Task) -> int:
    return num_ranks() if task.mode == "tp" else 1


def stages(task: Task) -> int:
    return num_ranks() if task.mode == "pp" else 1


def transformer_config(task: Task) -> TransformerConfig:
    return TransformerConfig(
        num_layers=task.num_layers,
        hidden_size=task.hidden_size,
        num_attention_heads=task.num_heads,
        ffn_hidden_size=task.ffn_hidden_size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_ranks(task),
        pipeline_model_parallel_size=stages(task),
        pipeline_dtype=torch.bfloat16 if task.bf16 else torch.float32,
        batch_p2p_comm=True,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=True,
        bf16=task.bf16,
        params_dtype=torch.bfloat16 if task.bf16 else torch.float32,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def build_model(task: Task, config: TransformerConfig) -> DistributedDataParallel:
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=task.vocab_size,
        max_sequence_length=task.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    )
    if task.bf16:
        model = Float16Module(config, model)
    gradients = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=task.mode == "dp",
        use_distributed_optimizer=task.mode == "zero1",
    )
    model = DistributedDataParallel(config, gradients, model)
    model.broadcast_params()
    return model


def build_optimizer(task: Task, model: DistributedDataParallel) -> "megatron.core.optimizer.MegatronOptimizer":
    config = OptimizerConfig(
        optimizer="adam",
        lr=task.learning_rate,
        weight_decay=task.weight_decay,
        adam_beta1=task.beta1,
        adam_beta2=task.beta2,
        clip_grad=task.gradient_clip,
        bf16=task.bf16,
        params_dtype=torch.bfloat16 if task.bf16 else torch.float32,
        use_distributed_optimizer=task.mode == "zero1",
    )
    optimizer = get_megatron_optimizer(config, [model])
    for group in optimizer.param_groups:
        group["lr"] = task.learning_rate
        group["fused"] = True
    return optimizer


def build_step(task: Task) -> Callable[[], float]:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_ranks(task), pipeline_model_parallel_size=stages(task)
    )
    # The tracker of CUDA's random states has nothing to fork here: there is no dropout.
    type(tensor_parallel.get_cuda_rng_tracker()).fork = lambda *_: contextlib.nullcontext()
    torch.manual_seed(1234)
    config = transformer_config(task)
    model = build_model(task, config)
    optimizer = build_optimizer(task, model)
    tokens, labels = fixed_batch(task)
    positions = torch.arange(task.seq_length).expand(task.micro_batch_size, -1)
    future = torch.ones(1, 1, task.seq_length, task.seq_length, dtype=torch.bool).triu(1)

    def forward_step(microbatches: Iterator[int], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., object]]:
        next(microbatches)
        losses = model(tokens, positions, future, labels=labels)
        return losses, lambda out: (out.float().mean(), {"loss": out.detach().float().mean()})

    def pipelined_step() -> float:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(range(task.num_microbatches)),
            model=model,
            num_microbatches=task.num_microbatches,
            seq_length=task.seq_length,
            micro_batch_size=task.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()
        mean = sum(float(each["loss"]) for each in losses) / task.num_microbatches
        total = torch.tensor(mean)
        torch.distributed.all_reduce(total)  # only the last stage has any
        return float(total)

    def step() -> float:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens, positions, future, labels=labels).float().mean()
        optimizer.scale_loss(loss).backward()
        finalize_model_grads([model])
        optimizer.step()
        return float(loss.detach())

    if task.mode == "pp":
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss if task.bf16 else None
        return pipelined_step
    return step


def main() -> None:
    task, _ = read_task()
    start_gloo()
    note = "fused AdamW by hand" + ("; bf16 parameters, fp32 main parameters" if task.bf16 else "")
    measure(build_step(task), task, peer=f"megatron-core {megatron.core.__version__}", note=note)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
