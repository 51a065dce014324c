"""What a converted model computes is what `transformers` computes: both ways, in float64, on one rank and on several.

Theirs compute norms, angles and softmax in float32 whatever the model's type; that is put right here, so that digits
tell a wrong map from rounding.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from colonnade.mesh.collectives import all_gather
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.model.bert import BERT, BertInputs
from colonnade.model.gpt import GPT
from colonnade.model.inputs import Inputs
from colonnade.model.rotary import attention_scale, inverse_wavelengths
from colonnade.model.t5 import T5, T5Inputs
from colonnade.serving.trained import Trained, open_trained
from tests.commands import forked
from tests.convert.published import MODELS, VOCAB, saved, transformers
from tests.convert.test_round_trip import converted
from tests.distributed import run_on_ranks
from tests.model.test_llama import norm_in_float64
from tests.runs import Finished

S, B = 13, 2
CPU = torch.device("cpu")
GPTS = [name for name in MODELS if "bert" not in name and "t5" not in name]
T5S = [name for name in MODELS if "t5" in name]
BERTS = [name for name in MODELS if "bert" in name]
THREE_HEADS_OF_KEYS = ("smollm", "qwen3", "llama, for three ranks")
"""Which two tensor-parallel ranks cannot share evenly."""
TWO_RANKS = (Layout(tp=2), Layout(pp=2))
TOKENS = torch.randint(0, VOCAB, (S, B), generator=torch.Generator().manual_seed(3))


@contextmanager
def in_float64(twin: Any, trained: Trained) -> Iterator[Any]:
    """Their model in float64 throughout."""
    twin = twin.double().eval()
    model = trained.config.model
    for module in twin.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm_in_float64(module)
    if model.position == "rotary":
        inverse, scale = inverse_wavelengths(model.rotary, model.rotary_width), attention_scale(model.rotary)
        inner = twin.get_decoder() if hasattr(twin, "get_decoder") else twin.base_model
        inner.rotary_emb.forward = angles(inverse, scale)
    with pytest.MonkeyPatch.context() as patch:
        if twin.config.model_type == "bloom":
            from transformers.models.bloom import modeling_bloom

            softmax = nn.functional.softmax
            patch.setattr(modeling_bloom.F, "softmax", lambda x, dim, dtype: softmax(x, dim))
            patch.setattr(modeling_bloom, "bloom_gelu_forward", lambda x: nn.functional.gelu(x, approximate="tanh"))
            for module in twin.modules():
                if type(module).__name__ == "BloomGelu":
                    module.forward = lambda x: nn.functional.gelu(x, approximate="tanh")
        yield twin


def angles(inverse: Tensor, scale: float) -> Callable[..., tuple[Tensor, Tensor]]:
    def forward(x: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        half = position_ids[..., None].double() * inverse
        both = torch.cat([half, half], -1)
        return both.cos() * scale, both.sin() * scale

    return forward


@torch.no_grad()
def logits_of(trained: Trained) -> Tensor | None:
    """Of `TOKENS`, [s, b, v], on the last stage."""
    stages = trained.stages
    assert stages.hidden is not None
    carry = stages.hidden(Inputs(TOKENS))
    trained.hidden.__self__.close()  # type: ignore[attr-defined]  what was sent has arrived
    if carry is None:
        return None
    assert isinstance(trained.model, GPT)
    local = trained.model.head.logits(carry[0])
    padded = torch.zeros(S, B, -(-VOCAB // stages.tp.size), dtype=local.dtype)
    padded[..., : local.shape[-1]] = local
    return torch.cat(list(all_gather(padded[None].contiguous(), stages.tp)), -1)[..., :VOCAB]


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", GPTS)
def test_logits_are_theirs(name: str, tmp_path: Path) -> None:
    twin = saved(tmp_path / "theirs", name)
    converted(tmp_path / "theirs", tmp_path / "ours")
    trained = open_trained(tmp_path / "ours", Mesh(), CPU, "fp64")
    ours = logits_of(trained)
    with in_float64(twin, trained) as exact, torch.no_grad():
        assert ours is not None and ours.std() > 0.3
        assert_equal(ours, exact(input_ids=TOKENS.t()).logits.transpose(0, 1))


@pytest.mark.parametrize("name", BERTS)
def test_both_heads_of_bert_are_theirs(name: str, tmp_path: Path) -> None:
    twin = saved(tmp_path / "theirs", name)
    converted(tmp_path / "theirs", tmp_path / "ours")
    trained = open_trained(tmp_path / "ours", Mesh(), CPU, "fp64")
    types, real = (TOKENS > 30).long(), torch.ones(S, B, dtype=torch.bool)
    real[9:, 1] = False
    bert = trained.model
    assert isinstance(bert, BERT)
    with torch.no_grad(), in_float64(twin, trained) as exact:
        carry = trained.hidden(BertInputs(TOKENS, types=types, real=real))
        assert carry is not None
        x = bert.head.normed(carry[0])
        words = nn.functional.linear(bert.head.transformed(x), bert.head.output.weight, bert.head.bias)[..., :VOCAB]
        out = exact(input_ids=TOKENS.t(), token_type_ids=types.t(), attention_mask=real.t().long())
        theirs = out.prediction_logits.transpose(0, 1)
        assert_equal(words[real], theirs[real])
        assert_equal(bert.head.pair_logits(x), out.seq_relationship_logits)


@pytest.mark.parametrize(("name", "has_output"), [*((name, True) for name in T5S), ("t5, gated, untied", False)])
def test_what_a_t5_writes_is_theirs(name: str, has_output: bool, tmp_path: Path) -> None:
    """An output layer that version 1.1 is written without is the table."""
    twin = saved(tmp_path / "theirs", name)
    if not has_output:
        file = tmp_path / "theirs" / "model.safetensors"
        save_file({key: x for key, x in load_file(file).items() if key != "lm_head.weight"}, file, {"format": "pt"})
        twin = type(twin).from_pretrained(tmp_path / "theirs")
    converted(tmp_path / "theirs", tmp_path / "ours")
    trained = open_trained(tmp_path / "ours", Mesh(), CPU, "fp64")
    t5 = trained.model
    assert isinstance(t5, T5) and t5.tied == (name == "t5")
    written = torch.randint(2, VOCAB, (7, B), generator=torch.Generator().manual_seed(3))
    for module in twin.modules():
        if type(module).__name__ == "T5LayerNorm":
            module.forward = norm_in_float64(module)  # type: ignore[method-assign]
    with torch.no_grad():
        carry = trained.hidden(T5Inputs(TOKENS, decoder_tokens=written))
        assert carry is not None
        theirs = twin.double()(input_ids=TOKENS.t(), decoder_input_ids=written.t()).logits
        assert_equal(t5.head.logits(carry[0])[..., :VOCAB], theirs.transpose(0, 1))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama, grouped, tied, biases", Layout(tp=2)),
        ("gpt2", Layout(pp=2)),
        ("llama, for three ranks", Layout(tp=3)),
        pytest.param("bloom", Layout(tp=3), marks=pytest.mark.slow),
        *(
            pytest.param(name, layout, marks=pytest.mark.slow)
            for name in GPTS
            for layout in TWO_RANKS
            if layout.tp == 1 or name not in THREE_HEADS_OF_KEYS
        ),
    ],
    ids=str,
)
def test_logits_are_theirs_on_several_ranks(name: str, layout: Layout, tmp_path: Path) -> None:
    twin = saved(tmp_path / "theirs", name)
    converted(tmp_path / "theirs", tmp_path / "ours")

    def on_rank(rank: int, num_ranks: int) -> Tensor | None:
        return logits_of(open_trained(tmp_path / "ours", build_mesh(layout, rank), CPU, "fp64"))

    *_, last = run_on_ranks(on_rank, layout.num_ranks)
    with in_float64(twin, open_trained(tmp_path / "ours", Mesh(), CPU, "fp64")) as exact, torch.no_grad():
        assert_equal(last, exact(input_ids=TOKENS.t()).logits.transpose(0, 1))


@pytest.mark.slow
def test_a_trained_run_writes_the_same_text_with_transformers(finished: Finished, tmp_path: Path) -> None:
    """A run of ours, given to them: logits and greedy text, with the tokenizer that went along."""
    converted(finished.folder, tmp_path / "theirs")
    ours = open_trained(finished.newest, Mesh(), CPU, "fp64")
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float64).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    ids = tokenizer("aeion rst", return_tensors="pt").input_ids
    assert ids[0].tolist() == ours.tokenizer.encode("aeion rst")
    with torch.no_grad():
        hidden = ours.hidden(Inputs(ids.t()))
        assert hidden is not None and isinstance(ours.model, GPT)
        assert_equal(ours.model.head.logits(hidden[0]), twin(ids).logits.transpose(0, 1))
        made = twin.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(made[0])
    options = ["--temperature", 0, "--max-new-tokens", 8, "--precision", "fp64"]
    answer = forked("generate", finished.folder, "--prompt", "aeion rst", *options)
    assert answer.out.rstrip("\n").startswith(text.removesuffix("<|endoftext|>")) and answer.status == 0
    assert math.isclose(len(answer.out.rstrip("\n")), len(text.removesuffix("<|endoftext|>")), abs_tol=0)


def test_a_checkpoint_cut_over_ranks_gives_the_same_folder(finished: Finished, tmp_path: Path) -> None:
    """Whatever layout wrote it: here a checkpoint is converted that the serial run has not written."""
    written = Path(__file__).parents[1] / "checkpoint" / "written"
    folders = {}
    for name in ("serial", "pp2_dp2_zero2", "tp2"):
        converted(written / name, tmp_path / name)
        (file,) = (tmp_path / name).glob("*.safetensors")
        folders[name] = file.stat().st_size
    assert len(set(folders.values())) == 1
