"""Adapters beside a published model: loss and gradients of `peft`, and folders that it loads with the same logits."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor

from colonnade.architecture.adapters import LORA_A, LORA_B
from colonnade.checkpoint.manifest import read_manifest
from colonnade.checkpoint.whole import read_whole
from colonnade.config.compare import model_metadata
from colonnade.config.load import load, loads
from colonnade.config.parts import LoraConfig, PartsConfig
from colonnade.config.schema import Config, OptimConfig, RunConfig, TrainConfig
from colonnade.convert import adapted
from colonnade.convert import convert as conversion
from colonnade.convert.adapted import Adapted, _BaseWeights, _weights_at
from colonnade.convert.merge import _files, _metadata
from colonnade.convert.to_peft import _check_only_adapters, _compare_models, _targets
from colonnade.convert.to_peft import _config as _peft_config
from colonnade.data.loader import Batch
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import CheckpointError
from colonnade.huggingface.folder import open_published
from colonnade.huggingface.order import to_theirs
from colonnade.mesh.mesh import Mesh
from colonnade.serving.trained import open_trained
from colonnade.train.init_from import origin_at
from colonnade.train.recovery import shards_of
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import train_step
from tests.commands import forked, here
from tests.convert.published import VOCAB, saved, transformers
from tests.convert.test_logits import TOKENS, assert_equal, in_float64, logits_of
from tests.parity.runs import SERIAL, Case, configured, local_ranges, whole
from tests.runs import Finished, tensors

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of peft to transformers
NAMES = ["gpt2", "llama", pytest.param("llama, grouped, tied, biases", marks=pytest.mark.slow)]
ALL = ["attention.*", "mlp.*"]


def settings_of(folder: Path, **lora: Any) -> Config:
    """Eight numbers in float64, no dropout, nothing clipped."""
    model = open_published(folder).model
    train = TrainConfig(steps=1, global_batch_size=2, micro_batch_size=2, precision="fp64", gradient_clip=0.0)
    return Config(
        model=model.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0}),
        train=train,
        optim=OptimConfig(learning_rate=1e-3),
        lora=LoraConfig(**{"rank": 4, "targets": ALL, **lora}),
        run=RunConfig(folder="unused"),
    )


def begun(folder: Path, config: Config) -> TrainState:
    """A state with the folder's weights, and adapters that are not zero."""
    state = build_state(config, Mesh(), VOCAB, CPU)
    origin = origin_at(folder)
    origin.fill([shard for shard in shards_of(state) if shard.name in origin.shapes])
    generator = torch.Generator().manual_seed(3)
    for shard in shards_of(state):
        if shard.name.endswith("lora_b") and not shard.name.startswith("optimizer."):
            shard.data.detach().copy_(torch.randn(shard.data.shape, generator=generator) * 0.1)
    state.ownership.publish()
    return state


def theirs_by_our_module(folder: Path, config: Config) -> dict[str, Any]:
    published = open_published(folder)
    return {name.removesuffix(".weight"): source for name, source in published.sources.items()}


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_peft(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path, name)
    config = settings_of(tmp_path, alpha=10.0)
    state = begun(tmp_path, config)
    weights = whole(local_ranges(state, "master"))
    sources = theirs_by_our_module(tmp_path, config)
    modules = [each.removesuffix(".lora_a") for each in weights if each.endswith(".lora_a")]
    targets = [part.removesuffix(".weight") for module in modules for part in sources[module].theirs]
    is_conv = any(sources[module].transposed for module in modules)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=10.0, target_modules=targets, fan_in_fan_out=is_conv)
    ).double()

    def layer(theirs: str) -> Any:
        return adapted.base_model.model.get_submodule(theirs.removesuffix(".weight"))

    def rows(module: str, ours: Tensor) -> list[Tensor]:
        return to_theirs(sources[module]._replace(transposed=False), ours, config.model.head_width)

    for module in modules:
        for theirs, part in zip(sources[module].theirs, rows(module, weights[f"{module}.lora_b"]), strict=True):
            layer(theirs).lora_A.default.weight.data.copy_(weights[f"{module}.lora_a"])
            layer(theirs).lora_B.default.weight.data.copy_(part)
    labels = TOKENS.roll(-1, 0)
    samples = torch.arange(TOKENS.shape[1])
    result = train_step(state, [Batch(TOKENS, labels, torch.ones(TOKENS.shape), samples)], Mesh(), config.train)
    with in_float64(adapted.base_model.model, SimpleNamespace(config=config)) as exact:  # type: ignore[arg-type]
        logits = exact(input_ids=TOKENS.t()).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.t().flatten())
        loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-10)
    gradients = whole(local_ranges(state, "reduced"))
    assert gradients.keys() == {f"{module}.{each}" for module in modules for each in ("lora_a", "lora_b")}
    for module in modules:
        layers = [layer(theirs) for theirs in sources[module].theirs]
        assert_equal(gradients[f"{module}.lora_a"], sum(each.lora_A.default.weight.grad for each in layers))
        for each, part in zip(layers, rows(module, gradients[f"{module}.lora_b"]), strict=True):
            assert_equal(part, each.lora_B.default.weight.grad)


# --- runs, and what is made of them -----------------------------------------------------------------------------------

CONFIG = """\
[model]
{model}
[data]
train = "{data}"
tokenizer = "{base}/tokenizer.json"
split = "5:1"
[train]
init_from = "{base}"
steps = 3
global_batch_size = 4
micro_batch_size = 2
threads = 1
device = "cpu"
evaluate_every = 0
[optim]
learning_rate = 0.1
warmup_steps = 1
[lora]
rank = 3
alpha = 7.5
dropout = 0.1
targets = {targets}
[run]
folder = "{run}"
"""


def trained(base: Path, folder: Path, targets: list[str] = ALL) -> Path:
    """A run of three steps beside a published base: its folder."""
    published = open_published(base)
    with TokenFileWriter(folder / "data", np.dtype("<u2")) as writer:
        for first in range(60):
            writer.add_document([(first * 7 + 3 * i) % VOCAB for i in range(40)])
    model = published.model.model_dump(exclude_none=True, exclude={"rotary"})
    rotary = published.model.rotary.model_dump(exclude_none=True)
    lines = [f"{key} = {value!r}".replace("True", "true").replace("False", "false") for key, value in model.items()]
    if published.model.position == "rotary":
        inner = [
            f"{key} = {value!r}".replace("True", "true").replace("False", "false") for key, value in rotary.items()
        ]
        lines += ["[model.rotary]", *inner]
    text = CONFIG.format(model="\n".join(lines), data=folder / "data", base=base, run=folder / "run", targets=targets)
    (folder / "config.toml").write_text(text)
    answer = forked("train", folder / "config.toml")
    assert answer.status == 0, answer
    return folder / "run"


@pytest.fixture(scope="module", params=NAMES)
def run(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    model = saved(folder / "base", request.param)
    return trained(folder / "base", folder), folder / "base", model


@pytest.mark.slow
def test_peft_loads_an_export_with_our_logits(run: tuple[Path, Path, Any], tmp_path: Path) -> None:
    folder, base, _ = run
    answer = here("convert", folder, tmp_path / "peft")
    assert answer.status == 0 and "adapters of PEFT" in answer.out, answer
    newest = folder / "checkpoints" / "step_00000003"
    ours = open_trained(newest, Mesh(), CPU, "fp64")
    twin = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "peft")
    for dtype, tolerance in ((torch.float64, 1e-10),):
        with in_float64(twin.base_model.model, ours) as exact, torch.no_grad():
            theirs = exact(input_ids=TOKENS.t()).logits.transpose(0, 1)
        found = logits_of(ours)
        assert found is not None
        torch.testing.assert_close(found.to(dtype), theirs, rtol=tolerance, atol=tolerance)
    single = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "peft"
    ).eval()
    with torch.no_grad():
        theirs = single(input_ids=TOKENS.t()).logits.transpose(0, 1)
    found = logits_of(open_trained(newest, Mesh(), CPU, "fp32"))
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)


def test_an_export_goes_back_beside_its_own_base_alone(run: tuple[Path, Path, Any], tmp_path: Path) -> None:
    folder, base, _ = run
    answer = here("convert", folder, tmp_path / "peft")
    assert answer.status == 0 and "note:" not in answer.out, answer
    trained = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    lora = load(folder / "config.toml").lora
    assert (trained["r"], trained["lora_alpha"]) == (lora.rank, lora.alpha) and lora.alpha != lora.rank
    moved = Path(shutil.copytree(base, tmp_path / "moved"))
    answer = here("convert", tmp_path / "peft", tmp_path / "back", "--base", moved)
    assert answer.status == 0 and "note:" not in answer.out, answer
    (file,) = moved.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    answer = here("convert", tmp_path / "peft", tmp_path / "other", "--base", moved)
    assert answer.status == 2 and "has other weights than the base of the adapters in" in answer.err, answer
    assert not (tmp_path / "other").exists()


def test_adapters_are_not_cut_in_files(run: tuple[Path, Path, Any], tmp_path: Path) -> None:
    answer = here("convert", run[0], tmp_path / "peft", "--max-shard-size", "1KB")
    assert answer.status == 2 and f"{run[0]} has adapters, which become a single file" in answer.err, answer
    assert not (tmp_path / "peft").exists()


def test_an_export_names_whole_modules_where_only_some_layers_have_adapters() -> None:
    def sources(layers: int, *modules: str) -> dict[str, Any]:
        names = [f"model.layers.{layer}.self_attn.{module}" for layer in range(layers) for module in modules]
        return {name: SimpleNamespace(theirs=(f"{name}.weight",)) for name in names}

    every = sources(3, "q_proj", "k_proj", "o_proj")
    assert _targets(sources(3, "q_proj", "o_proj"), every) == ["o_proj", "q_proj"]
    assert _targets(some := sources(2, "q_proj"), every) == sorted(some)


@pytest.mark.parametrize("head", ["pretraining", "preferences"])
def test_what_a_merged_checkpoint_has_beside_its_weights(tmp_path: Path, head: str) -> None:
    """Its tokenizer with the chat template, and a configuration without adapters, that can be read."""
    for name in ("tokenizer.json", "tokenizer_config.json", "notes.txt"):
        (tmp_path / name).write_text(name)
    config = configured(Case(parts="lora"), SERIAL)
    train, parts = config.train.model_copy(update={"init_from": "base"}), PartsConfig(frozen=("!head.*",))
    config = config.model_copy(update={"train": train, "parts": parts})
    preferences = config.preferences.model_copy(update={"beta": 0.5}) if head == "preferences" else config.preferences
    model = config.model.model_copy(update={"head": head})
    it: Any = SimpleNamespace(
        config=config.model_copy(update={"model": model, "preferences": preferences}),
        manifest=SimpleNamespace(files=dict.fromkeys(("tokenizer.json", "tokenizer_config.json", "notes.txt"))),
        path=tmp_path,
    )
    files = _files(it)
    assert files.keys() == {"config.toml", "tokenizer.json", "tokenizer_config.json"}
    assert files["tokenizer_config.json"] == b"tokenizer_config.json"
    plain = loads(files["config.toml"].decode(), source="config.toml")
    assert (plain.lora, plain.parts, plain.train.init_from) == (LoraConfig(), PartsConfig(), None)


def test_a_merged_checkpoint_says_what_it_was_merged_from() -> None:
    """And what its weights were trained with: the tokenizer, the end of documents, and the names of labels."""
    metadata = SimpleNamespace(
        step=7,
        samples=28,
        model=SimpleNamespace(vocab_size=VOCAB),
        tokenizer_sha256="0" * 64,
        end_of_document=5,
        labels=("no", "yes"),
        published=None,
        base=SimpleNamespace(path="/models/base"),
    )
    adapters = SimpleNamespace(rank=4, scale=0.5)
    it: Any = SimpleNamespace(config=configured(Case(parts="lora"), SERIAL), metadata=metadata, adapters=adapters)
    found = _metadata(it)
    assert found["merged_from"] == {
        "step": 7, "samples": 28, "head": "pretraining", "rank": 4, "scale": 0.5, "base": "/models/base",
    }  # fmt: skip
    assert (found["step"], found["samples"], found["labels"]) == (0, 0, ["no", "yes"])
    assert found["tokenizer_sha256"] == "0" * 64 and found["end_of_document"] == 5 and found["published"] is None
    metadata.base, metadata.published = None, SimpleNamespace(model_dump=lambda: {"begin": 3})
    assert _metadata(it)["merged_from"]["base"] is None and _metadata(it)["published"] == {"begin": 3}


@pytest.mark.parametrize("is_causal", [True, False])
def test_an_export_says_how_its_adapters_were_trained(is_causal: bool) -> None:
    """peft goes on from there: alpha is the scale times the rank."""
    it: Any = SimpleNamespace(
        config=SimpleNamespace(model=SimpleNamespace(is_causal=is_causal)),
        metadata=SimpleNamespace(base=SimpleNamespace(path="/models/base")),
        adapters=SimpleNamespace(rank=4, scale=0.5, dropout=0.25),
    )
    every: Any = {
        name: SimpleNamespace(theirs=(f"{name}.weight",), transposed=name == "c_fc") for name in ("a", "c_fc")
    }
    found = {name: _peft_config(it, {name: every[name]}, every) for name in every}
    told = found["a"]
    assert (told["r"], told["lora_alpha"], told["lora_dropout"]) == (4, 2.0, 0.25)
    assert told["base_model_name_or_path"] == "/models/base" and told["target_modules"] == ["a"]
    assert told["task_type"] == ("CAUSAL_LM" if is_causal else None)
    assert [each["fan_in_fan_out"] for each in found.values()] == [False, True]


def beside_a_base(here: dict[str, Tensor], base: dict[str, Tensor] | None, monkeypatch: pytest.MonkeyPatch) -> Adapted:
    """A checkpoint with these tensors, opened beside a base with those."""
    monkeypatch.setattr(adapted, "read_whole", lambda path, manifest, name: here[name])
    names: Any = SimpleNamespace(weights=lambda: dict.fromkeys([*(base or {}), *here]))
    manifest: Any = SimpleNamespace(tensors={name: SimpleNamespace(dtype=x.dtype) for name, x in here.items()})
    weights = (
        None if base is None else _BaseWeights(Path(), base.__getitem__, lambda name: base[name].dtype, lambda: None)
    )
    nothing: Any = None
    adapters: Any = SimpleNamespace(scale=0.5, rank=2)
    return Adapted(Path("run"), manifest, nothing, nothing, names, adapters, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_base", [True, False])
def test_a_weight_is_merged_with_the_adapter_of_its_own_module(
    has_base: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 at least, wherever the weight lies."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (3, 4)}
    weights = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    pair = {f"a{LORA_A}": torch.randn(2, 4, generator=draw), f"a{LORA_B}": torch.randn(3, 2, generator=draw)}
    it = beside_a_base(pair if has_base else weights | pair, weights if has_base else None, monkeypatch)
    assert it.modules == ["a"]
    wide = torch.promote_types(dtype, torch.float32)
    product = pair[f"a{LORA_B}"].double() @ pair[f"a{LORA_A}"].double()
    expected = {name: x.double() + (0.5 * product if name == "a.weight" else 0.0) for name, x in weights.items()}
    for name, x in expected.items():
        assert it.merged_dtype(name) == wide and torch.equal(it.merged(name), x.to(wide)), name


def test_a_checkpoint_with_more_than_adapters_is_no_folder_of_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its base lacks would be lost: a head that was drawn, a norm that was trained. Maps to a teacher's states
    belong to training alone.
    """
    base = {"a.weight": torch.ones(3, 4)}
    here = {f"a{LORA_A}": torch.ones(2, 4), f"a{LORA_B}": torch.ones(3, 2), "a.to_teacher.weight": torch.ones(5, 4)}
    _check_only_adapters(beside_a_base(here, base, monkeypatch))
    for names, said in ((["n.weight"], r"has 1 weight besides .* \(n\.weight\)"),
                        (["n.weight", "n.bias"], r"has 2 weights besides .* \(n\.weight, …\)")):  # fmt: skip
        it = beside_a_base(here | {name: torch.ones(3) for name in names}, base, monkeypatch)
        with pytest.raises(CheckpointError, match=said):
            _check_only_adapters(it)


@pytest.mark.parametrize("is_known", [True, False])
def test_adapters_of_another_model_than_their_base_is_are_no_folder_of_peft(is_known: bool, tmp_path: Path) -> None:
    """peft builds the base's. What an older checkpoint does not say of it is read where the base lies."""
    saved(tmp_path / "base", "llama")
    model = open_published(tmp_path / "base").model
    base = SimpleNamespace(path=str(tmp_path / "base"), model=model_metadata(model, VOCAB) if is_known else None)
    rotary = model.rotary.model_copy(update={"base": 5.0})
    for other, said in (
        ({}, None),
        ({"seq_length": model.seq_length * 2}, None),
        ({"num_layers": 1, "window": 3}, r"model\.num_layers is 3 there and 1 here, model\.window is None there and 3"),
        ({"rotary": rotary}, r"model\.rotary\.base is 5000\.0 there and 5\.0 here\).* `colonnade merge run TARGET`"),
    ):
        it: Any = SimpleNamespace(
            path="run",
            config=SimpleNamespace(model=model.model_copy(update=other)),
            metadata=SimpleNamespace(base=base, model=SimpleNamespace(vocab_size=VOCAB)),
        )
        with nullcontext() if said is None else pytest.raises(CheckpointError, match=said):
            assert _compare_models(it) == []
    base.path = str(tmp_path / "gone")
    if not is_known:
        assert _compare_models(it) == ["the base is not there: whether its model is the run's is not known."]


@pytest.mark.parametrize(("dtype", "kind"), [(None, None), ("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_checkpoint_with_adapters_becomes_a_folder_of_peft_of_the_format_that_is_asked_for(
    dtype: str | None, kind: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    for name, answer in (("find", tmp_path / "step"), ("chosen", tmp_path), ("has_adapters", True)):
        monkeypatch.setattr(conversion, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(conversion, "to_peft", lambda *paths, **how: asked.append((paths, how)) or ["done"])
    rest: dict[str, Any] = {"max_shard_size": None, "best": False}
    conversion.convert(tmp_path, tmp_path / "out", dtype=dtype, dry_run=True, **rest)
    assert asked == [((tmp_path / "step", tmp_path / "out"), {"dtype": kind, "dry_run": True})]


@pytest.mark.one_in(2)
def test_damaged_adapters_are_not_given_on(run: tuple[Path, Path, Any], tmp_path: Path) -> None:
    """A bit of a number is another: what holds the numbers can be read as before."""
    newest = run[0] / "checkpoints" / "step_00000003"
    damaged = Path(shutil.copytree(newest, tmp_path / newest.name))
    manifest = read_manifest(newest)
    name = next(name for name in manifest.tensors if name.endswith(LORA_A))
    number = read_whole(newest, manifest, name).flatten()[0].numpy().tobytes()
    file = next(file for file in sorted(damaged.glob("*.distcp")) if number in file.read_bytes())
    file.write_bytes(file.read_bytes().replace(number, bytes([*number[:-1], number[-1] ^ 0x40])))
    for command in ("convert", "merge"):
        answer = here(command, damaged, tmp_path / "made")
        assert answer.status == 2 and f"{file} is damaged: its bytes are not those" in answer.err, answer
        assert not (tmp_path / "made").exists()


@pytest.mark.one_in(2)
def test_a_merged_checkpoint_computes_the_same(run: tuple[Path, Path, Any], tmp_path: Path) -> None:
    folder, base, _ = run
    answer = here("merge", folder, tmp_path / "merged")
    assert answer.status == 0 and "adapters of rank 3" in answer.out, answer
    before = logits_of(open_trained(folder / "checkpoints" / "step_00000003", Mesh(), CPU, "fp64"))
    after = logits_of(open_trained(tmp_path / "merged", Mesh(), CPU, "fp64"))
    assert before is not None and after is not None
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)  # merged weights are rounded to fp32
    without = logits_of(open_trained(converted_base(base, tmp_path), Mesh(), CPU, "fp64"))
    assert without is not None and (without - before).abs().max() > 0.01, "the adapters do something"


def converted_base(base: Path, folder: Path) -> Path:
    assert here("convert", base, folder / "plain").status == 0
    return folder / "plain"


@pytest.mark.slow
def test_a_base_whose_numbers_are_damaged_is_refused(finished: Finished, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(finished.newest, base)
    assert _weights_at(base).path == base
    file = max((path for path in base.iterdir() if path.suffix == ".distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        _weights_at(base)


@pytest.mark.slow
def test_what_was_trained_besides_adapters_is_not_lost_in_an_export(tmp_path: Path) -> None:
    saved(tmp_path / "base", "gpt2")
    folder = trained(tmp_path / "base", tmp_path, ["attention.qkv"])
    assert not any("mlp" in name for name in tensors(folder))
    config = (tmp_path / "config.toml").read_text().replace("[run]", '[parts]\nfrozen = ["!head.*"]\n[run]')
    (tmp_path / "config.toml").write_text(config.replace(str(tmp_path / "run"), str(tmp_path / "more")))
    assert forked("train", tmp_path / "config.toml").status == 0
    assert "head.norm.weight" in tensors(tmp_path / "more")
    answer = here("convert", tmp_path / "more", tmp_path / "peft")
    assert answer.status == 2 and "colonnade merge" in answer.err, answer
    assert here("merge", tmp_path / "more", tmp_path / "merged").status == 0
