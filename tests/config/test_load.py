import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config.describe import Key, all_keys, short
from colonnade.config.load import TomlFile, apply_, load, loads, to_toml, value_of
from colonnade.config.problems import ALSO_CALLED
from colonnade.config.schema import Config
from colonnade.errors import ConfigError

Problems = Callable[..., list[str]]
Loaded = Callable[..., Config]


def test_a_file_with_overrides(loaded: Loaded) -> None:
    config = loaded("train.steps=7", "optim.learning_rate=2e-4", "run.folder=/tmp/a b", "model.tie_embeddings=false")
    assert (config.train.steps, config.train.seed) == (7, 1234)
    assert config.optim.learning_rate == 2e-4
    assert config.run.folder == "/tmp/a b"
    assert not config.model.tie_embeddings


def test_spaces_around_a_name_and_a_value_are_none_of_theirs(loaded: Loaded) -> None:
    config = loaded(" train.steps = 7 ", "run.folder= runs/a b ", "model.preset =tiny")
    assert (config.train.steps, config.run.folder, config.model.preset) == (7, "runs/a b", "tiny")


def test_names_in_a_table_may_have_points_and_signs_of_equality() -> None:
    """As patterns of weights and paths of files have."""
    content: dict[str, Any] = {"data": {"blend": {"a": 1.0}}}
    for override in (
        *("parts.learning_rate.blocks.0.*=0.5", " parts.learning_rate.*.norm = 2 ", "data.blend.en-1.5/a=b=0.4"),
        *("parts.weight_decay={'a.b' = 0.5}", "data.blend.c=3"),
    ):
        assert apply_(content, override) == []
    assert content == {
        "data": {"blend": {"a": 1.0, "en-1.5/a=b": 0.4, "c": 3}},
        "parts": {"learning_rate": {"blocks.0.*": 0.5, "*.norm": 2}, "weight_decay": {"a.b": 0.5}},
    }


@pytest.mark.parametrize("override", ["parts.learning_rate.blocks.0.*", "parts.learning_rate.=2", "data.blend."])
def test_a_name_in_a_table_without_a_value_or_a_name_is_refused(problems: Problems, override: str) -> None:
    (problem,) = problems(override)
    assert problem.startswith(f"{override!r} is not of the form section.key=value. Write for instance ")


def test_the_last_override_of_a_key_counts(loaded: Loaded) -> None:
    assert loaded("train.steps=7", "train.steps=8").train.steps == 8


def test_an_override_is_stronger_than_a_preset_in_any_order(loaded: Loaded) -> None:
    assert loaded("model.seq_length=32", "model.preset=gpt2-1.2b").model.seq_length == 32


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-4", 1e-4),
        ("300_000", 300_000),
        ("true", True),
        ('"3"', "3"),
        ("data/books", "data/books"),
        ("29:1:0", "29:1:0"),
        ("bf16", "bf16"),
        ("", ""),
        ("1\nother = 2", "1\nother = 2"),
        ("True", "True"),
    ],
)
def test_values_on_the_command_line(text: str, value: object) -> None:
    assert value_of(text, "a.key") == value


def test_all_problems_come_at_once(problems: Problems) -> None:
    found = problems(
        "model.num_layer=3",
        "train.num_layers=3",
        "paralel.tp=2",
        "steps=4",
        "train.steps=1e3",
        "train.log_every=0",
        "optim.learning_rate='1e-4'",
        "parallel.dp=5",
    )
    assert len(found) == 8, "\n".join(found)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_layer=3", "model.num_layer is not a key: did you mean model.num_layers?"),
        ("train.num_layers=3", "train.num_layers: num_layers belongs to [model]. Write it as model.num_layers."),
        (
            "model.num_experts=4",
            "model.num_experts is not a key: there is no mixture of experts here. Leave it out.",
        ),
        (
            "run.seq_length=[3]",
            "run.seq_length: seq_length belongs to [model] and [curriculum]. Write it as model.seq_length or "
            "curriculum.seq_length.",
        ),
        ("optim.lr=3", "optim.lr is not a key: did you mean optim.learning_rate?"),
        ("optim.micro_batch_sizes=3", "optim.micro_batch_sizes is not a key: did you mean train.micro_batch_size?"),
        (
            "run.xyz=3",
            "run.xyz is not a key. [run] has folder, time_limit, heartbeat, slow_ranks_every, slow_ranks_factor, "
            "tensorboard.",
        ),
        (
            "sweep.score=loss",
            "[sweep] is read by `colonnade finetune` alone, which trains a run for each of its points. Use that "
            "command, or remove the section.",
        ),
        ("paralel.tp=1", "[paralel] is not a section. Did you mean [parallel]?"),
        (
            "zzz.tp=1",
            "[zzz] is not a section. The sections are "
            "[model], [model.rotary], [parallel], [data], [data.masking], [data.corruption], [curriculum], "
            "[train], [optim], [parts], [lora], [preferences], [distillation], [divergence], [thermometers], "
            "[checkpoint], [restarts], [run], [tracking].",
        ),
        ("steps=4", "'steps=4' is not of the form section.key=value. Write for instance train.steps=4"),
        ("train.steps", "'train.steps' is not of the form section.key=value. Write for instance train.steps=…"),
        (
            "train.steps.x=3",  # nothing of it is dropped in silence, whether the key is there or not
            "'train.steps.x=3' is not of the form section.key=value. Write for instance train.steps=3",
        ),
        (
            "model.nothing.deep=3",
            "'model.nothing.deep=3' is not of the form section.key=value. Write for instance train.steps=3",
        ),
        (
            "train.steps=1e3",
            "train.steps = 1000.0 is a number with a decimal point or exponent, where a whole number of at least 1 is "
            "expected. Write train.steps = 1000.",
        ),
        ("train.steps=0", "train.steps = 0 is out of range, where a whole number of at least 1 is expected."),
        ("train.steps=[1]", "train.steps = [1] is a list, where a whole number of at least 1 is expected."),
        ("train.steps=true", "train.steps = true is a truth value, where a whole number of at least 1 is expected."),
        (
            'optim.learning_rate="1e-4"',
            'optim.learning_rate = "1e-4" is text, where a number above 0 is expected. '
            "Write optim.learning_rate = 0.0001, without quotes.",
        ),
        (
            "optim.learning_rate=.5",
            'optim.learning_rate = ".5" is text, where a number above 0 is expected. '
            "Write optim.learning_rate = 0.5, without quotes.",
        ),
        ("optim.learning_rate=nan", "optim.learning_rate = nan is not finite, where a number above 0 is expected."),
        (
            "data.split=inf",
            "data.split = inf is a number with a decimal point or exponent, where text in quotes is expected. Write "
            'the shares of train and validation, like data.split = "9:1".',
        ),
        (
            "parallel.cuts=nan",
            "parallel.cuts = nan is a number with a decimal point or exponent, where a list of whole numbers of at "
            "least 1 is expected.",
        ),
        ("optim.epsilon=-inf", "optim.epsilon = -inf is not finite, where a number above 0 is expected."),
        ("train.gradient_clip=inf", "train.gradient_clip = inf is not possible: 0 turns clipping off."),
        (
            "model.dropout=1.0",
            "model.dropout = 1.0 is out of range, where a number of at least 0 and below 1 is expected.",
        ),
        (
            "checkpoint.resume=True",
            'checkpoint.resume = "True" is text, where true or false is expected. '
            "Write checkpoint.resume = true, without quotes and in small letters.",
        ),
        ("run.folder=''", 'run.folder = "" is empty, where text in quotes is expected.'),
        (
            "distillation.top_k=",
            'distillation.top_k = "" is empty, where a whole number of at least 1 is expected. To leave it '
            "unset, leave the key out of the file and of the command line.",
        ),
        (
            "optim.decay_steps=None",
            'optim.decay_steps = "None" is text, where a whole number of at least 1 is expected. To leave it '
            "unset, leave the key out of the file and of the command line.",
        ),
        ("run.folder=5", "run.folder = 5 is a number, where text in quotes is expected."),
        (
            "train.precision=bf17",
            'train.precision = "bf17" is not one of the choices. Did you mean "bf16"? Use "fp32", "bf16", '
            '"fp16" or "fp64".',
        ),
        (
            "train.precision=BF16",
            'train.precision = "BF16" is not one of the choices. Did you mean "bf16"? Use "fp32", "bf16", "fp16" or '
            '"fp64".',
        ),
        (
            "model.activation=silu",
            'model.activation = "silu" is not possible: gated by a second layer it is "swiglu", and alone it is not '
            'there. Use "gelu", "gelu_tanh", "swiglu", "relu" or "geglu_tanh".',
        ),
        (
            "optim.learning_rate=-1",
            "optim.learning_rate = -1 is out of range, where a number above 0 is expected.",
        ),
        (
            "data.split=9.1",
            "data.split = 9.1 is a number with a decimal point or exponent, where text in quotes is expected. Write "
            'the shares of train and validation, like data.split = "9:1".',
        ),
        (
            "run.folder=2024-01-02",
            "run.folder = 2024-01-02 is a date or time, where text in quotes is expected.",
        ),
        (
            "thermometers.sites=['mlp_hiden']",
            'thermometers.sites has "mlp_hiden" in it, where a list of "embedding", "attention_logits", '
            '"attention_output", "mlp_hidden", "residual_stream", "final_norm", "gradients" or "updates" is '
            'expected. Did you mean "mlp_hidden"?',
        ),
        (
            "model.position=rope",
            'model.position = "rope" is not possible: it is called "rotary" here. Use "learned", "alibi", "rotary" '
            'or "relative".',
        ),
        (
            "parallel.cuts=[1, 0]",
            "parallel.cuts has 0 in it, where a list of whole numbers of at least 1 is expected.",
        ),
        (
            "model.preset=gpt2-125m",
            'model.preset = "gpt2-125m" is not one of the choices. Did you mean "gpt2-124m"? Use "tiny", "gpt2-124m", '
            '"gpt2-355m", "gpt2-1.2b", "gpt2-2.5b", "gpt2-4.2b", "gpt2-8.3b", "turing-nlg-17b", "bloom-176b", '
            '"bert-tiny", "bert-base", "bert-large", "bert-336m", "bert-1.3b", "bert-3.9b", '
            '"t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b", "t5-v1.1-small", "t5-v1.1-base", "t5-v1.1-large", '
            '"t5-v1.1-xl", "t5-v1.1-xxl", '
            '"llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3.1-8b", "llama3.2-1b", '
            '"smollm-135m", "smollm-360m", "smollm-1.7b", "pythia-160m", "pythia-410m", "pythia-1b", '
            '"pythia-1.4b", "pythia-2.8b", "pythia-6.9b", "pythia-12b", "qwen2.5-0.5b", "qwen2.5-1.5b", '
            '"qwen2.5-3b", "qwen2.5-7b", "qwen3-0.6b" or "qwen3-8b".',
        ),
    ],
)
def test_one_problem_in_words(problems: Problems, override: str, message: str) -> None:
    assert problems(override) == [message]


@pytest.mark.parametrize("override", ["model.num_layers=2", "model.rotary.base=2.0"])
def test_an_override_of_a_section_that_was_given_a_value_is_told_by_the_section(small: Path, override: str) -> None:
    small.write_text("model = 3\n" + small.read_text().partition("\n\n")[2])
    with pytest.raises(ConfigError) as caught:
        load(small, [override])
    (line,) = str(caught.value).splitlines()[1:]
    assert line == "  - model = 3 gives a value to a section. Write [model] and its keys under it."


def test_credentials_are_stored_only_where_it_is_asked_for(loaded: Loaded) -> None:
    """By whoever removes the file again: in their place a run would find nothing."""
    config = loaded("data.train=s3://someone:secret@bucket/books", "checkpoint.upload_to=s3://me:word@bucket/run")
    shown, whole = to_toml(config), to_toml(config, credentials=True)
    assert "secret" not in shown and "word" not in shown and "bucket/books" in shown
    assert loads(whole) == config


def test_what_is_wrong_twice_is_told_once(problems: Problems) -> None:
    assert len(problems("train.stops=4", "steps=4", "train.stops=5", "steps=4")) == 2


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("train.batch_size", "train.global_batch_size"),
        ("optim.batch_size", "train.global_batch_size"),
        ("train.max_steps", "train.steps"),
        ("optim.max_lr", "optim.learning_rate"),
        ("optim.min_lr", "optim.min_learning_rate"),
        ("train.clip_grad", "train.gradient_clip"),
        ("model.n_head", "model.num_heads"),
        ("model.n_embd", "model.hidden_size"),
    ],
)
def test_the_words_of_other_programs_are_understood(problems: Problems, theirs: str, ours: str) -> None:
    """The batch of a step of theirs is that of all ranks."""
    assert problems(f"{theirs}=3") == [f"{theirs} is not a key: did you mean {ours}?"]


def test_every_word_of_other_programs_is_of_a_key_that_exists_and_is_none_itself() -> None:
    assert set(ALSO_CALLED.values()) <= set(all_keys())
    assert not set(ALSO_CALLED) & {short(name) for name in all_keys()}


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("train.steps", "1e3", "1000"),
        ("train.steps", "2.5", None),
        ("train.steps", "'2.5'", None),
        ("train.steps", "'1e3'", "1000"),
        ("train.steps", "'1000 steps'", None),
        ("train.steps", "inf", None),
        ("train.steps", "true", None),
        ("optim.learning_rate", "'2.5e-4'", "0.00025"),
        ("optim.learning_rate", "'nan'", None),
        ("optim.learning_rate", "true", None),
        ("train.deterministic", "'True'", "true"),
        ("train.deterministic", "'yes'", None),
        ("train.deterministic", "1", None),
    ],
)
def test_another_value_is_told_only_where_it_is_the_same_in_another_form(
    problems: Problems, key: str, value: str, meant: str | None
) -> None:
    (said,) = problems(f"{key}={value}")
    assert (f" Write {key} = {meant}" in said) if meant else ("Write" not in said)


def test_keys_that_are_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        loads('[data]\ntrain = "x"\ntokenizer = "y"\n[train]\nsteps = 3\n')
    assert [line.split()[1] for line in str(caught.value).split("\n")[1:]] == [
        "train.global_batch_size",
        "train.micro_batch_size",
        "optim.learning_rate",
        "run.folder",
    ]


def test_keys_and_values_that_stand_in_the_wrong_place() -> None:
    with pytest.raises(ConfigError) as caught:
        loads("steps = 3\nseq_length = 4\nzzz = 1\ntrain = 5\n[model.deep]\nx = 1\n[[optim]]\nlearning_rate = 1.0\n")
    message = str(caught.value)
    assert "steps = 3 stands outside of any section. Write it as train.steps." in message
    assert (
        "seq_length = 4 stands outside of any section. Write it as model.seq_length or curriculum.seq_leng" in message
    )
    assert "zzz = 1 stands outside of any section. The sections are [model]," in message
    assert "train = 5 gives a value to a section. Write [train] and its keys under it." in message
    assert "model.deep is not a key." in message
    assert "optim = [" in message


def test_beside_a_bad_value_a_preset_is_still_what_it_stands_for() -> None:
    """Its 24 heads go with 8 ranks, as the schema's default would not."""
    with pytest.raises(ConfigError) as caught:
        loads(
            '[model]\npreset = "gpt2-8.3b"\n[parallel]\ntp = 8\n[data]\ntrain = "x"\n[train]\nsteps = "ten"\n'
            'global_batch_size = 8\nmicro_batch_size = 1\n[optim]\nlearning_rate = 1e-3\n[run]\nfolder = "r"\n'
        )
    (line,) = str(caught.value).split("\n")[1:]
    assert line.startswith('  - train.steps = "ten" is text')


@pytest.mark.parametrize(
    ("section", "values", "known"),
    [
        ("dta", {"train": "corpus/train"}, "data"),  # [data] without train: "there is nothing to train on"
        ("optm", {"min_learning_rate": 1e-5, "learning_rate": 1e-6}, "optim"),
        ("modle", {"num_heads": 5, "hidden_size": 64}, "model"),
    ],
)
def test_of_a_misspelled_section_it_is_said_that_it_is_misspelled_and_nothing_of_what_is_in_it(
    section: str, values: dict[str, object], known: str
) -> None:
    """Checks would be made with defaults that stand in for its values, and their answers would confuse."""
    content = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    with pytest.raises(ConfigError) as caught:
        loads(f"[{section}]\n{content}")
    lines = str(caught.value).split("\n")
    assert f"  - [{section}] is not a section. Did you mean [{known}]?" in lines
    own = [f"{known}.{key}" for key in values]
    others = [line for line in lines[1:] if "is not set, and has no default" not in line and section not in line]
    assert not [line for line in others if any(key in line for key in own)]


def test_what_is_no_toml_is_reported_alone(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[train]\nsteps = = 3\n")
    with pytest.raises(ConfigError, match=r"bad.toml is not TOML: .*line 2"):
        load(path, ["nonsense"])


def test_a_file_is_what_it_was_when_it_was_read(loaded: Loaded, small: Path) -> None:
    """It may be a pipe, or somebody goes on editing it."""
    before, read = loaded(), TomlFile.read(small)
    small.write_text("steps = ")
    assert load(read) == before and load(read, ["train.steps=7"]).train.steps == 7


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'[run]\nfolder = "\xe9"\n')
    with pytest.raises(ConfigError, match="not a text file in UTF-8"):
        load(tmp_path / "latin.toml")


def test_a_file_may_begin_with_a_byte_order_mark(loaded: Loaded, tmp_path: Path) -> None:
    """As some editors write it."""
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf" + to_toml(loaded()).encode())
    assert load(tmp_path / "marked.toml") == loaded()


def value_for(key: Key) -> st.SearchStrategy[Any]:
    """Any value that a key accepts."""
    if key.choices:
        one = st.sampled_from(key.choices)
        return st.lists(one, max_size=3) if key.many else one
    if key.type is bool:
        return st.booleans()
    if key.type is str:
        text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
        return st.lists(text, max_size=3) if key.many else text
    if key.many:
        return st.lists(st.integers(1, 10**9), max_size=3)
    if key.type is dict:
        names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
        return st.dictionaries(names, st.floats(1e-300, 1e300), max_size=3)
    if key.type is int:
        return st.integers(max([1, *(int(limit.rsplit(" ", 1)[1]) for limit in key.limits)]), 10**5)
    low = 1e-300 if "above 0" in key.limits else 0
    low_and_high = (low, 0.999) if "below 1" in key.limits else (1.001 if "above 1" in key.limits else 1e-300, 1e300)
    return st.floats(low, 1.0) if "at most 1.0" in key.limits else st.floats(*low_and_high)


def test_a_key_has_one_lower_limit() -> None:
    limits = {
        name: [limit for limit in key.limits if "least" in limit or "above" in limit]
        for name, key in all_keys().items()
    }
    assert not {name: several for name, several in limits.items() if len(several) > 1}


@given(st.fixed_dictionaries({}, optional={name: value_for(key) for name, key in all_keys().items()}))
def test_to_toml_and_back(values: dict[str, Any]) -> None:
    content: dict[str, Any] = {
        "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
        "optim": {"learning_rate": 1.0},
        "run": {"folder": "x"},
    }
    for name, value in values.items():
        *sections, key = name.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    config = Config.model_validate(content)
    assert Config.model_validate(tomllib.loads(to_toml(config))) == config


JUNK = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=3)


@given(st.sampled_from(sorted(all_keys())), JUNK)
def test_no_value_of_any_key_is_more_than_a_config_error(name: str, value: object) -> None:
    section, _, key = name.rpartition(".")
    text = f"[{section}]\n{key} = {json.dumps(value)}\n".replace("NaN", "nan").replace("Infinity", "inf")
    with pytest.raises(ConfigError):  # some required key is missing at any rate
        loads(text)


@given(st.text(), st.text(), st.text())
def test_no_override_is_more_than_a_config_error(section: str, key: str, value: str) -> None:
    with pytest.raises(ConfigError):
        load(Path(__file__).parents[2] / "examples" / "books.toml", [f"{section}.{key}={value}"])


@pytest.mark.parametrize("key", ["learning_rate", "weight_decay"])
def test_factors_of_some_weights_are_not_below_0(loaded: Loaded, key: str) -> None:
    """A rate below 0 would lead them up the gradient."""
    assert getattr(loaded(f'parts.{key}={{"embedding*"=0.0}}').parts, key) == {"embedding*": 0.0}
    with pytest.raises(ConfigError, match=rf"parts\.{key} has -1\.0 in it, where a table of numbers of at least 0"):
        loaded(f'parts.{key}={{"embedding*"=-1.0}}')
