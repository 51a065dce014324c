from collections.abc import Callable

from colonnade.config.compare import (
    as_now,
    before_it_was_saved,
    difference,
    may_change_on_resume,
    model_metadata,
    moved_files,
)
from colonnade.config.describe import all_keys, first_line
from colonnade.config.load import loads
from colonnade.config.model import ModelConfig
from colonnade.config.schema import Config, DataConfig

from .conftest import SMALL

Loaded = Callable[..., Config]


def test_a_line_for_each_key_that_differs(loaded: Loaded) -> None:
    other = loaded("train.steps=200", "data.validation=v", "optim.learning_rate=2e-3", "run.folder=elsewhere")
    assert difference(loaded(), other) == [
        'data.validation: (unset) -> "v"',
        "train.steps: 100 -> 200",
        "optim.learning_rate: 0.001 -> 0.002",
        "optim.min_learning_rate: 0.0001 -> 0.0002",
        "optim.decay_steps: 100 -> 200",
        'run.folder: "runs/small" -> "elsewhere"',
    ]
    assert difference(loaded(), other, only_what_forbids_resume=True) == [
        'data.validation: (unset) -> "v"',
        "optim.learning_rate: 0.001 -> 0.002",
        "optim.min_learning_rate: 0.0001 -> 0.0002",
    ]


def test_of_long_tables_the_entries_are_told_that_differ() -> None:
    """A blend may have hundreds of files."""
    files = {f"t{number}": 1.0 for number in range(10)}

    def told(before: dict[str, float] | None, after: dict[str, float] | None) -> str:
        one, other = (Config.model_construct(data=DataConfig.model_construct(blend=each)) for each in (before, after))
        (line,) = moved_files(one, other)
        return line.removeprefix("data.blend: ")

    assert told(files, files | {"t3": 2.0}) == '{"t3" = 1.0, … 9 more} -> {"t3" = 2.0, … 9 more}'
    first = ", ".join(f'"t{number}" = 1.0' for number in range(8))
    assert told(files, None) == f"{{{first}, … 2 more}} -> (unset)"
    assert told(files, files | {"new": 3.0}) == f'{{{first}, … 2 more}} -> {{"new" = 3.0, … 10 more}}'
    few = dict(list(files.items())[:8])
    assert told(few, files) == f'{{{first}}} -> {{"t8" = 1.0, "t9" = 1.0, … 8 more}}'


def test_the_same_values_written_otherwise_are_no_difference(loaded: Loaded) -> None:
    assert difference(loaded(), loaded()) == []
    for spelled in ("ffn_hidden_size=256", "head_dim=16", "num_key_value_heads=4", "query_key_value_bias=true"):
        assert difference(loaded(), loaded(f"model.{spelled}")) == []
    for spelled in ("warmup_steps=100", "min_learning_rate=0.0001", "decay_steps=100"):
        assert difference(loaded(), loaded(f"optim.{spelled}")) == []
    tiny = ("model.num_layers=2", "model.hidden_size=64", "model.num_heads=4", "model.seq_length=64")
    assert difference(loaded(*tiny), loaded(*tiny, "model.preset=tiny")) == []


def test_the_end_of_the_decay_is_compared_as_it_comes_out(loaded: Loaded) -> None:
    """Unset it is train.steps, and moves with it; what keeps it, or does without a decay, is no difference."""

    def forbids(before: tuple[str, ...], after: tuple[str, ...]) -> list[str]:
        short = "optim.warmup_steps=10"
        return difference(loaded(short, *before), loaded(short, *after), only_what_forbids_resume=True)

    longer, kept = ("train.steps=200",), ("train.steps=200", "optim.decay_steps=100")
    assert forbids((), kept) == forbids(kept, ()) == forbids((), longer) == []
    assert forbids(("optim.decay_steps=100",), (*longer, "optim.decay_steps=200")) == [], "both spelled out"
    assert forbids(kept, longer) == ["optim.decay_steps: 100 -> 200"]
    assert forbids((), ("optim.decay_steps=50",)) == ["optim.decay_steps: 100 -> 50"]
    constant = ("optim.decay=constant", "optim.warmup_steps=10")
    assert difference(loaded(*constant), loaded(*constant, "optim.decay_steps=50")) == []


def test_where_files_lie_is_no_difference_to_a_run(loaded: Loaded) -> None:
    """Their content is compared elsewhere; whether there is one, here."""
    assert forbidden(loaded(), loaded("data.train=elsewhere", "data.tokenizer=t")) == []
    for key in ("data.test", "data.validation", "train.init_from", "distillation.teacher"):
        assert forbidden(loaded(f"{key}=a"), loaded(f"{key}=b")) == []
    assert forbidden(loaded(), loaded("data.test=b")) == ['data.test: (unset) -> "b"']


def test_numbers_of_a_blend_belong_to_their_places() -> None:
    """Files may lie elsewhere, so that only the order tells which number is whose."""

    def blended(blend: str) -> Config:
        return loads(SMALL.replace('train = "corpus"', f"blend = {{{blend}}}"))

    assert forbidden(blended("a = 1, b = 3"), blended("c = 1, d = 3")) == []
    assert len(forbidden(blended("a = 1, b = 3"), blended("a = 3, b = 1"))) == 1


def forbidden(before: Config, after: Config) -> list[str]:
    return difference(before, after, only_what_forbids_resume=True)


def test_layout_and_length_may_change_and_mathematics_may_not() -> None:
    may = {key for key in all_keys() if may_change_on_resume(key)}
    sections = {"parallel", "divergence", "thermometers", "checkpoint", "restarts", "run", "tracking"}
    assert {key for key in all_keys() if key.partition(".")[0] in sections} <= may
    assert {key for key in may if key.partition(".")[0] not in sections} == {
        "data.cache",
        "data.questions",
        *(f"train.{key}" for key in ("steps", "micro_batch_size", "log_every", "threads", "device", "products")),
        *(f"train.{key}" for key in ("evaluate_every", "evaluate_at_start", "evaluate_samples")),
        "train.epochs",
        "train.patience",
        *(f"train.{key}" for key in ("deterministic", "timeout")),
        *(f"optim.{key}" for key in ("decay_start", "decay_start_tokens", "rewarm_at", "rewarm_steps")),
        *(f"parts.{key}" for key in ("frozen", "learning_rate", "weight_decay")),
    }
    assert may >= {
        "train.steps",
        "train.micro_batch_size",
        "parallel.tp",
        "parallel.dp",
        "checkpoint.every",
        "run.folder",
    }
    assert may.isdisjoint({"train.seed", "train.global_batch_size", "train.precision", "model.dropout", "data.train"})


def test_what_is_spelled_out_makes_no_other_model() -> None:
    """A width, or a number of heads, that would come out anyway is written as unset: as before there were such keys."""
    plain = ModelConfig(hidden_size=32, num_heads=4)
    spelled = ModelConfig(hidden_size=32, num_heads=4, head_dim=8, num_key_value_heads=4, ffn_hidden_size=128)
    assert model_metadata(spelled, 99) == model_metadata(plain, 99)
    without = ModelConfig(bias=False, query_key_value_bias=False)
    assert model_metadata(without, 99) == model_metadata(ModelConfig(bias=False), 99)
    other = model_metadata(ModelConfig(hidden_size=32, num_heads=4, head_dim=16, num_key_value_heads=2), 99)
    assert (other["head_dim"], other["num_key_value_heads"]) == (16, 2)
    assert other["rotary.base"] == plain.rotary.base and "dropout" not in other


def test_the_lengths_of_t5s_decoder_may_be_spelled_out() -> None:
    """And are compared where there is a decoder alone."""
    text = SMALL.replace("num_layers", 'kind = "t5"\nseq_length = 512\nnum_layers', 1)
    plain = loads(text)
    spelled = loads(text.replace("num_layers", "num_decoder_layers = 2\ndecoder_seq_length = 114\nnum_layers", 1))
    assert difference(plain, spelled) == []
    assert model_metadata(spelled.model, 99) == model_metadata(plain.model, 99)
    other = loads(text.replace("num_layers", "num_decoder_layers = 1\nnum_layers", 1))
    assert forbidden(plain, other) == ["model.num_decoder_layers: 2 -> 1"]
    assert model_metadata(other.model, 99)["num_decoder_layers"] == 1
    gpt = loads(SMALL)
    assert forbidden(gpt, loads(SMALL.replace("num_layers", "seq_length = 512\nnum_layers", 1))) == [
        "model.seq_length: 1024 -> 512"
    ]


def test_what_an_older_checkpoint_spells_out_is_read_as_unset() -> None:
    plain = model_metadata(ModelConfig(kind="t5", num_layers=2), 99)
    assert as_now({**plain, "num_decoder_layers": 2}) == plain
    assert as_now({**plain, "num_decoder_layers": 1})["num_decoder_layers"] == 1
    assert as_now({"hidden_size": 8})["num_decoder_layers"] is None


def test_a_models_metadata_leaves_out_what_changes_no_weight_and_knows_what_held_before() -> None:
    metadata = model_metadata(ModelConfig(hidden_size=32, dropout=0.3), vocab_size=99)
    assert {"dropout", "attention_dropout", "init_std", "fp32_residual", "preset"}.isdisjoint(metadata)
    assert (metadata["hidden_size"], metadata["ffn_hidden_size"], metadata["vocab_size"]) == (32, 128, 99)
    assert before_it_was_saved().items() <= model_metadata(ModelConfig(), 99).items(), "defaults mean what they meant"


def test_token_files_behind_credentials_have_moved_only_if_the_files_have(loaded: Loaded) -> None:
    here = loaded("data.train=s3://someone:secret@bucket/books")
    assert moved_files(here, loaded("data.train=s3://someone:other@bucket/books")) == []
    (line,) = moved_files(here, loaded("data.train=s3://someone:secret@bucket/web"))
    assert line.startswith("data.train: ") and "secret" not in line


def test_a_run_introduces_itself_with_all_of_its_ranks(loaded: Loaded) -> None:
    assert first_line(loaded("parallel.tp=2", "parallel.pp=2")).endswith("on 4 ranks.")
    assert first_line(loaded()).endswith("on 1 rank.")
