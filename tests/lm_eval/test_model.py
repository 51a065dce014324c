"""The model `colonnade` of the lm-evaluation-harness, against its own model `hf` on the same weights."""

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ColonnadeError, ConfigError, DataError, LayoutError
from colonnade.launch import process
from colonnade.serving.answers import cut_at_first
from tests.commands import environment
from tests.serving.published import Pair, make_pair

pytest.importorskip("lm_eval")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the harness imports
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.models.huggingface import HFLM

    from colonnade.lm_eval.__main__ import main
    from colonnade.lm_eval.model import ColonnadeLM
    from colonnade.lm_eval.options import ModelArguments, read_arguments

CONTEXTS = [
    ("The man took his hat and his coat, and walked home through the", " rain"),
    ("The man took his hat and his coat, and walked home through the", " snow"),
    ("He had no doubt. ", "that the lamp was lit"),
    ("", "It was morning"),
    ("word " * 60, "and more words of the kind"),
    ("a", "\n\nb"),
]
TEXTS = ["The lamp was lit. " * 12, "no", "It was morning, and nobody was there.\n"]
PROMPTS = [
    ("The man took his hat", {"until": ["e", "\n"], "max_gen_toks": 7}),
    ("He had no doubt that the lamp " * 6, {"until": "zzz", "max_gen_toks": 9, "do_sample": False}),
    ("It was", {"max_new_tokens": 4, "temperature": 0.0}),
]


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), tokenizer, seq_length=32)


@pytest.fixture(scope="module")
def hf(pair: Pair) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return HFLM(pretrained=str(pair.theirs), device="cpu", dtype="float64", batch_size=1, softmax_dtype="float64")


@pytest.fixture(scope="module")
def ours(pair: Pair) -> Iterator[ColonnadeLM]:
    model = ColonnadeLM(checkpoint=str(pair.ours), precision="fp64", batch_size=2, device="cpu")
    yield model
    model.close()


def answers(model: Any) -> list[Any]:
    """To all kinds of requests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs only
        return [
            model.loglikelihood(requests("loglikelihood", CONTEXTS), disable_tqdm=True),
            model.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in TEXTS])),
            model.generate_until(requests("generate_until", [(*prompt,) for prompt in PROMPTS]), disable_tqdm=True),
        ]


def assert_alike(mine: list[Any], theirs: list[Any], digits: float = 1e-10) -> None:
    for (loss, greedy), (wanted, as_greedy) in zip(mine[0], theirs[0], strict=True):
        assert loss == pytest.approx(wanted, rel=digits) and greedy == as_greedy
    assert mine[1] == pytest.approx(theirs[1], rel=digits)
    assert mine[2] == theirs[2]


def test_the_harness_knows_it() -> None:
    assert get_model("colonnade") is ColonnadeLM


@pytest.mark.slow
def test_the_harness_own_models_stay() -> None:
    """In a process of its own: in this one they are imported already."""
    program = "import colonnade.lm_eval.model; from lm_eval.api.registry import get_model; print(get_model('dummy'))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert done.returncode == 0 and "DummyLM" in done.stdout, done.stderr


@pytest.mark.slow
def test_it_answers_as_the_harness_own_model_does(ours: ColonnadeLM, hf: Any) -> None:
    theirs = answers(hf)
    assert_alike(answers(ours), theirs)
    assert all(loss < 0 for loss, _ in theirs[0]) and any(text and "e" not in text for text in theirs[2])


def test_a_text_ends_before_the_first_of_its_ends() -> None:
    assert cut_at_first("one two three", ["three", "", "two", "four"]) == "one "
    assert cut_at_first("one two three", ["four"]) == "one two three"
    assert cut_at_first("one two three", ["one"]) == ""


@pytest.mark.parametrize(("given", "expected"), [({}, -1), ({"prefix_token_id": 0}, 0), ({"prefix_token_id": 7}, 7)])
def test_a_text_without_a_context_begins_behind_the_token_that_is_named(
    pair: Pair, tokenizer: Tokenizer, given: dict[str, int], expected: int
) -> None:
    model = ColonnadeLM(checkpoint=str(pair.ours), device="cpu", **given)
    assert model.prefix_token_id == (tokenizer.end_of_document if expected < 0 else expected)
    model.close()


def test_what_likelihoods_are_asked_of_greedy_text_is_greedy(ours: ColonnadeLM) -> None:
    context = "The man took his hat"
    (text,) = ours.generate_until(requests("generate_until", [(context, {"max_gen_toks": 3})]))
    ((_, greedy), (_, other)) = ours.loglikelihood(
        requests("loglikelihood", [(context, text), (context, " rain")]), disable_tqdm=True
    )
    same = ours.tok_encode(context + text)[: len(ours.tok_encode(context))] == ours.tok_encode(context)
    assert (greedy or not same) and not other


def test_texts_are_drawn_where_a_temperature_is_given_each_on_its_own(
    ours: ColonnadeLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(ours, "_ask", lambda request: [asked.append(each) or "" for each in request["write"]])
    options = (
        {"temperature": 0.8, "top_k": 3, "top_p": 0.9},
        {"temperature": 0.8, "do_sample": False},
        {"do_sample": True, "temperature": None},
        {"num_beams": 1, "repetition_penalty": 1.0, "until": "The end"},
    )
    ours.generate_until(
        requests("generate_until", [("It was", {"max_gen_toks": 4} | each) for each in options]), disable_tqdm=True
    )
    assert [each["temperature"] for each in asked] == [0.8, 0.0, 1.0, 0.0]
    assert [(each["top_k"], each["top_p"]) for each in asked] == [(3, 0.9), *[(0, 1.0)] * 3]
    assert [list(each["until"]) for each in asked] == [[], [], [], ["The end"]], "one text is one"
    assert len({each["seed"] for each in asked}) == len(options)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_ranks_that_stay_answer_as_one_does(pair: Pair, ours: ColonnadeLM, layout: dict[str, int]) -> None:
    model = ColonnadeLM(checkpoint=str(pair.ours), precision="fp64", batch_size=2, device="cpu", **layout)
    try:
        serial = answers(ours)
        for _ in range(2):  # they stay
            assert_alike(answers(model), serial)
        assert model.get_model_info()["layout"] == {"tp": 1, "pp": 1, "dp": 1} | layout
        remote = model._ask.__self__  # type: ignore[attr-defined]
        remote._process.stdin.close()
        assert remote._process.wait(timeout=60) == 0, "they end with who asks"
    finally:
        model.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "names no checkpoint"),
        ({"checkpoint": "nowhere"}, "nowhere is neither a checkpoint nor"),
        ({"pretrained": "gpt2"}, "there is no pretrained"),
        ({"tp": 3}, "--tp 3 does not divide"),
        ({"tp": 0}, "tp = 0 is no number of 1 or more"),
        ({"threads": -1}, "threads = -1 is no number of 0 or more"),
        ({"prefix_token_id": -1}, "prefix_token_id = -1 is no number of 0 or more"),
        ({"prefix_token_id": "<s>"}, "prefix_token_id = '<s>' is no number of 0 or more"),
        ({"best": "no"}, "best = 'no' is neither True nor False"),
        ({"batch_size": "many"}, "--batch_size many"),
        ({"batch_size": 0}, "--batch_size 0 is no number of sequences"),
        ({"device": "tpu"}, "--device 'tpu'"),
        ({"max_length": 33}, "max_length = 33, but the model has learned 32 positions"),
    ],
)
def test_arguments_that_are_none(pair: Pair, arguments: dict[str, Any], said: str) -> None:
    if arguments and "pretrained" not in arguments:
        arguments = {"checkpoint": str(pair.ours), **arguments}
    with pytest.raises(ColonnadeError, match=said):
        ColonnadeLM(**arguments)


def test_a_layout_has_as_many_ranks_as_its_axes_have_together(pair: Pair) -> None:
    given = {"checkpoint": str(pair.ours), "tp": 2, "pp": 2, "dp": 3}
    assert read_arguments(given).num_ranks == 12 and read_arguments({"checkpoint": str(pair.ours)}).num_ranks == 1


def test_what_the_harness_passes_to_every_model_is_no_option_of_ours(pair: Pair) -> None:
    """Its --max_batch_size, and values that nobody gave."""
    given = {"checkpoint": str(pair.ours), "max_batch_size": 64, "precision": None}
    assert read_arguments(given) == read_arguments({"checkpoint": str(pair.ours)})


def test_ranks_are_started_with_all_that_was_asked_for(pair: Pair) -> None:
    given = {"tp": 2, "pp": 3, "dp": 4, "threads": 5, "device": "cpu", "precision": "bf16", "base": "base"}
    line = ModelArguments(pair.ours, **given).command_line(Path("newest"))  # type: ignore[arg-type]
    assert line[0] == "newest"
    assert dict(zip(line[1::2], line[2::2], strict=True)) == {f"--{name}": str(value) for name, value in given.items()}
    assert "--base" not in (usual := ModelArguments(pair.ours).command_line(pair.ours)) and "--precision" not in usual


def test_a_device_that_nobody_gave_is_chosen(pair: Pair) -> None:
    """The harness says cuda:0 then, on any machine."""
    devices = {None: "auto", "cuda:0": "auto", "cuda": "cuda", "cuda:1": "cuda", "cpu": "cpu"}
    for given, device in devices.items():
        assert read_arguments({"checkpoint": str(pair.ours), "device": given}).device == device
    config = pytest.importorskip("lm_eval.config.evaluate_config").EvaluatorConfig()  # not in 0.4.9, which says None
    assert devices[config.device] == "auto"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_by_the_option(pair: Pair) -> None:
    with pytest.raises(LayoutError, match=r"^--device 'cuda', but .* has 0 CUDA GPUs .* Set --device 'cpu'\.$"):
        ColonnadeLM(checkpoint=str(pair.ours), device="cuda")


def test_of_a_long_prompt_the_end_is_read_so_that_its_answer_has_room(ours: ColonnadeLM) -> None:
    context = "word " * 60
    asked = ours._writing(context, {"max_gen_toks": 9}, 0)
    assert asked.prompt == ours.tok_encode(context)[-(32 - 9) :] and len(asked.prompt) == 32 - 9


def told_lengths(request: dict[str, Any]) -> list[Any]:
    """In place of losses: 100 a token of the context and 1 a token to score; greedy where that is one."""
    return [[100.0 * len(context) + len(target), len(target) == 1] for context, target in request["score"]]


def test_likelihoods_stand_in_the_order_of_their_requests(ours: ColonnadeLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they were sorted to be read; they are the losses' negatives."""
    monkeypatch.setattr(ours, "_ask", told_lengths)
    scored = [(None, [1] * context, [2] * target) for context, target in ((1, 1), (5, 2), (3, 1), (40, 3))]
    found = ours._loglikelihood_tokens(scored, disable_tqdm=True)
    assert found == [(-101.0, True), (-502.0, False), (-301.0, True), (-3003.0, False)], "30 and 3 are 32 and a label"


def test_a_long_text_is_scored_once_a_token_in_windows(ours: ColonnadeLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 tokens each, but for the last; each window has a token before it to begin behind, or as much as it has room
    for.
    """
    asked: list[Any] = []
    monkeypatch.setattr(ours, "_ask", lambda request: asked.extend(request["score"]) or told_lengths(request))
    long, short = "word " * 60, "It was"
    lengths = [len(ours.tok_encode(text)) for text in (long, short)]
    totals = ours.loglikelihood_rolling(requests("loglikelihood_rolling", [(long,), (short,)]), disable_tqdm=True)
    assert lengths[0] > 64 and lengths[1] < 32
    assert [-total % 100 for total in totals] == [length % 100 for length in lengths]
    targets = [token for context, target in asked if context != [ours.prefix_token_id] for token in target]
    assert all(len(context) + len(target) <= 33 for context, target in asked) and targets
    assert -totals[1] == 100 + lengths[1]


def test_an_answer_leaves_its_prompt_a_token(ours: ColonnadeLM) -> None:
    """The first of the words for their number counts."""
    asked = ours._writing("It was morning", {"max_gen_toks": 31, "max_tokens": 5}, 0)
    assert asked.tokens == 31 and len(asked.prompt) == 1
    with pytest.raises(ConfigError, match="32 new tokens, and the model reads 32"):
        ours._writing("It was morning", {"max_gen_toks": 32}, 0)
    assert ours._writing("", {"max_gen_toks": 3}, 0).prompt == [ours.prefix_token_id]


def test_requests_that_cannot_be_answered(ours: ColonnadeLM) -> None:
    with pytest.raises(ConfigError, match="40 new tokens, and the model reads 32"):
        ours.generate_until(requests("generate_until", [("a", {"max_gen_toks": 40})]))
    with pytest.raises(DataError, match=r"a continuation of \d+ tokens cannot be scored"):
        ours.loglikelihood(requests("loglikelihood", [("a", "word " * 60)]), disable_tqdm=True)
    with pytest.raises(ConfigError, match="would be read as text"):
        ours.apply_chat_template([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"repetition_penalty": 5.0, "num_beams": 4}, r"repetition_penalty = 5\.0, num_beams = 4 cannot be obeyed"),
        (
            {"min_p": 0.1, "until": ["a"]},
            r"min_p = 0\.1 cannot be obeyed\. .* until, .* max_gen_toks, .* top_p\. ",
        ),
        ({"length_penalty": 1}, "length_penalty = 1 cannot"),
        ({"temperature": "warm"}, "temperature = 'warm' cannot"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample = True draws tokens, and temperature = 0 takes"),
    ],
)
def test_options_of_a_text_that_cannot_be_obeyed(ours: ColonnadeLM, options: dict[str, Any], said: str) -> None:
    """They are in the harness' results as if they had been."""
    with pytest.raises(ConfigError, match=said):
        ours.generate_until(requests("generate_until", [("a", {"max_gen_toks": 4} | options)]))


LAST_WORD = """\
task: last_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{text.split(' ')[:-1]|join(' ')}}}}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
metric_list:
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


@pytest.mark.slow
def test_a_task_of_ones_own_from_the_command_line(pair: Pair, tmp_path: Path) -> None:
    """The harness' whole way, on two ranks, and `evaluate lambada --variant lm-eval` finds the same."""
    data = tmp_path / "test.jsonl"
    passages = ["He had no doubt that the lamp was lit", "They came to the house and nobody was there"]
    data.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages))
    (tmp_path / "last_word.yaml").write_text(LAST_WORD.format(data=data, cache=tmp_path / "cache"))
    arguments = f"checkpoint={pair.ours},tp=2,precision=fp64"
    command = [sys.executable, "-m", "colonnade.lm_eval", "--model", "colonnade", "--model_args", arguments]
    options = ["--tasks", "last_word", "--include_path", tmp_path, "--output_path", tmp_path / "out", "--device", "cpu"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [*command, *map(str, options)], capture_output=True, text=True, env=environment() | offline, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(written.read_text())
    from tests.serving.published import measured

    told = measured(pair, "lambada", "--data", data, "--variant", "lm-eval")
    results = found["results"]["last_word"]
    assert results["perplexity,none"] == pytest.approx(told["perplexity"], rel=1e-9)
    assert results["acc,none"] == told["accuracy"]
    assert found["config"]["model_sha"] == told["checkpoint"]["sha256"]


def test_a_harness_that_is_not_installed_is_one_message() -> None:
    program = "import sys; sys.modules['lm_eval'] = None; from colonnade.lm_eval.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr
    assert done.stderr.endswith("Run `pip install 'colonnade[lm-eval]'`.\n") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AttributeError("transformers has no AutoModel"), "AttributeError: transformers has no AutoModel"),
        (ImportError("cannot import name 'HybridCache'"), "ImportError: cannot import name 'HybridCache'"),
        (ModuleNotFoundError("No module named 'tqdm'", name="tqdm"), "ModuleNotFoundError: No module named 'tqdm'"),
    ],
    ids=["attribute", "name", "module"],
)
def test_a_harness_that_cannot_be_imported_is_one_message(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of versions that do not fit together, about which pip says nothing."""

    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "lm_eval.__main__":
                raise error

    monkeypatch.delitem(sys.modules, "lm_eval.__main__", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        main()
    answer = capsys.readouterr()
    assert (end.value.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("lm-eval", "transformers", "peft"))
    assert answer.err == (
        f"colonnade: the lm-evaluation-harness cannot be imported with what is installed here, {versions} ({said}). "
        "Run `pip install --upgrade lm-eval transformers peft`.\n"
    )


def test_another_module_that_is_missing_is_not_taken_for_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "colonnade.lm_eval.model", None)
    with pytest.raises(ModuleNotFoundError, match=r"colonnade\.lm_eval\.model"):
        main()


@pytest.mark.parametrize("is_imported", [True, False])
def test_ctrl_c_ends_the_harness_as_our_commands(
    is_imported: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while it is imported."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    class Importing(ModuleType):
        def __getattr__(self, name: str) -> None:
            if name == "cli_evaluate":
                raise KeyboardInterrupt
            raise AttributeError(name)

    harness = Importing("lm_eval.__main__")
    if is_imported:
        vars(harness)["cli_evaluate"] = interrupted
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", harness)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        main()
    assert isinstance(ended.value, SystemExit) and ended.value.code == 130 and capsys.readouterr().err == ""


def test_its_command_may_open_as_many_files_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(process, "allow_open_files", lambda: asked.append("files"))
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: asked.append("evaluated"))
    main()
    assert asked == ["files", "evaluated"]


def test_a_task_that_the_harness_does_not_have_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the error of the harness itself; its list of all tasks takes ten seconds."""
    tasks = SimpleNamespace(match_tasks=lambda names: [])

    def evaluate() -> None:
        EvaluatorConfig(tasks=["nosuch", "neither"]).process_tasks()

    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: tasks)
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", evaluate)
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert said.err == (
        "colonnade: --tasks: the lm-evaluation-harness has no nosuch, neither. `python -m colonnade.lm_eval ls tasks` "
        "lists what it has; tasks of your own are found with --include_path FOLDER.\n"
    )


def test_a_user_s_mistake_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate() -> None:
        """Where the harness' command makes the model; its list of all tasks takes ten seconds."""
        get_model("colonnade").create_from_arg_string(f"checkpoint={tmp_path}/none")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", evaluate)
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "") and said.err.count("\n") == 1
    assert said.err.startswith(f"colonnade: {tmp_path}/none is neither a checkpoint nor")
