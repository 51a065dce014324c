"""The model `colonnade` of the lm-evaluation-harness: a checkpoint on any tp, pp and dp.

It cuts, shortens and scores as the harness' own model `hf` does, so that both give the same numbers for the same
weights: contexts and continuations are tokenized together, what is too long loses its beginning, texts are scored in
windows that do not overlap more than they must, and written text ends before the first of its stop sequences.
"""

import atexit
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import lm_eval.models  # noqa: F401  registers the harness' own models, which it does itself only where there are none
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from colonnade import __version__
from colonnade.checkpoint.manifest import read_manifest
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError, DataError
from colonnade.generation.sampling import Sampling
from colonnade.lm_eval.options import read_arguments
from colonnade.serving.answers import Writing, answer
from colonnade.serving.options import chosen
from colonnade.serving.ranks import RemoteModel
from colonnade.serving.trained import described, find, opened, tokenizer_of

Ask = Callable[[dict[str, Any]], list[Any]]
Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""The text of a request, where it has one of its own, and its tokens."""
_BATCHES = 16  # that are asked for at once: between two questions the bar moves
_COUNT_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_NUMBERS = (*_COUNT_NAMES, "do_sample", "temperature", "top_k", "top_p")
_OFF = {"num_beams": 1, "repetition_penalty": 1, "min_p": 0}  # what tasks say of others to have none of them


@register_model("colonnade")
class ColonnadeLM(TemplateLM):
    """A checkpoint: in this process, or on ranks that it starts and that end with it."""

    def __init__(self, **given: Any) -> None:
        """`given`: `ModelArguments`. ConfigError and the like for what cannot be."""
        super().__init__()
        self.arguments = read_arguments(given)
        self.path = find(chosen(self.arguments.checkpoint, self.arguments.best))
        manifest, config, metadata = described(self.path)
        if config.model.kind != "gpt":
            raise ConfigError(
                f'{self.path} is a model of kind "{config.model.kind}", which gives the tokens of a text no chances: '
                "the harness can measure models that read from left to right."
            )
        self.inner: Tokenizer = tokenizer_of(self.path, manifest)
        self.max_length = self._max_length(config.model.seq_length, learned=config.model.position == "learned")
        self.sha256, self.step = read_manifest(self.path).digest, metadata.step
        self._precision = self.arguments.precision or config.train.precision
        self._open = ExitStack()
        self._ask = self._start()
        atexit.register(self.close)

    def _max_length(self, seq_length: int, *, learned: bool) -> int:
        wanted = self.arguments.max_length or seq_length
        if learned and wanted > seq_length:
            raise ConfigError(
                f"--model_args: max_length = {wanted:,}, but the model has learned {seq_length:,} positions. Use 1 to "
                f"{seq_length:,}."
            )
        return wanted

    def _start(self) -> Ask:
        asked = self.arguments
        if asked.num_ranks > 1:
            remote = RemoteModel(asked.command_line(self.path))
            self._open.callback(remote.close)
            return remote.ask
        model, mesh = self._open.enter_context(
            opened(
                self.path,
                tp=1,
                device=asked.device,
                precision=asked.precision,
                threads=asked.threads,
                base=asked.base,
            )
        )
        return lambda request: answer(model, mesh, request)

    def close(self) -> None:
        """End the ranks. Harmless twice."""
        self._open.close()
        atexit.unregister(self.close)

    @property
    def eot_token_id(self) -> int:
        end = self.inner.end_of_document
        if end is None:
            raise ConfigError(
                f"the tokenizer of {self.path} has no end-of-document token, and a text without a context has to begin "
                "behind one. Name a token with --model_args prefix_token_id=ID."
            )
        return end

    @property
    def prefix_token_id(self) -> int:
        given = self.arguments.prefix_token_id
        return self.eot_token_id if given is None else given

    @property
    def tokenizer_name(self) -> str:
        return f"colonnade-{self.inner.sha256}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text, and no others."""
        return self.inner.encode(string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        raise ConfigError(
            "--apply_chat_template: control tokens within a task's text would be read as text. Leave the option out; "
            "`colonnade generate --chat` applies a checkpoint's template."
        )

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        asked = self.arguments
        return {
            "model_sha": self.sha256,
            "model_step": self.step,
            "model_dtype": self._precision,
            "colonnade_version": __version__,
            "layout": {"tp": asked.tp, "pp": asked.pp, "dp": asked.dp},
        }

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether it is what greedy choices would give."""
        wanted = [self._shortened(context, target) for _, context, target in requests]
        order = sorted(range(len(wanted)), key=lambda number: -len(wanted[number][0]) - len(wanted[number][1]))
        found: dict[int, tuple[float, bool]] = {}
        at_once = self.arguments.batch_size * self.arguments.dp * _BATCHES
        for numbers in _watched(order, at_once, "Running loglikelihood requests", disable_tqdm):
            asked = {"score": [wanted[number] for number in numbers], "batch_size": self.arguments.batch_size}
            for number, (loss, greedy) in zip(numbers, self._ask(asked), strict=True):
                found[number] = (-loss, greedy)
                text = requests[number][0]
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, found[number])
        return [found[number] for number in range(len(wanted))]

    def _shortened(self, context: Sequence[int], target: Sequence[int]) -> tuple[list[int], list[int]]:
        """What is read, without the beginning that is too much."""
        if not target or len(target) > self.max_length:
            raise DataError(
                f"a continuation of {len(target):,} tokens cannot be scored: it needs one or more, and the model reads "
                f"{self.max_length:,}."
            )
        tokens = [*context, *target][-(self.max_length + 1) :]
        return tokens[: -len(target)], list(target)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows of which each begins behind one token of the one before."""
        windows = [self._windows(request.args[0]) for request in requests]
        flat: list[Scored] = [(None, context, target) for each in windows for context, target in each]
        scores = iter(self._loglikelihood_tokens(flat, disable_tqdm=disable_tqdm))
        totals = [sum(next(scores)[0] for _ in each) for each in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        tokens, prefix = self.tok_encode(text), self.prefix_token_id
        rolling = get_rolling_token_windows(tokens, prefix, max_seq_len=self.max_length, context_len=1)
        return [make_disjoint_window(window) for window in rolling]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes behind each context, up to a stop sequence."""
        wanted = [self._writing(request.args[0], request.args[1], number) for number, request in enumerate(requests)]
        found: list[str] = []
        for numbers in _watched(range(len(wanted)), self.arguments.dp, "Running generate_until requests", disable_tqdm):
            found += self._ask({"write": [wanted[number].as_json() for number in numbers]})
        for request, text in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return found

    def _writing(self, context: str, given: dict[str, Any], number: int) -> Writing:
        options = {name: value for name, value in given.items() if value is not None}
        _check_obeyed(options)
        until = options.get("until", [])
        counts = [options[name] for name in _COUNT_NAMES if name in options]
        tokens = int(counts[0]) if counts else self.arguments.max_gen_toks
        if tokens >= self.max_length:
            raise ConfigError(
                f"a task asks for {tokens:,} new tokens, and the model reads {self.max_length:,}: no place is left for "
                "its prompt. Set --gen_kwargs max_gen_toks=N, or --model_args max_gen_toks=N where the task says "
                "nothing."
            )
        prompt = self.tok_encode(context)[-(self.max_length - tokens) :] or [self.prefix_token_id]
        is_drawn = options.get("do_sample", options.get("temperature", 0) > 0)
        return Writing(
            prompt,
            tokens,
            [until] if isinstance(until, str) else until,
            temperature=float(options.get("temperature", Sampling.temperature)) if is_drawn else 0.0,
            top_k=int(options.get("top_k", Sampling.top_k)),
            top_p=float(options.get("top_p", Sampling.top_p)),
            seed=number,
        )


def _check_obeyed(options: dict[str, Any]) -> None:
    """ConfigError for options of a text, by a task or by `--gen_kwargs`, that would change nothing here."""
    passed_over = [f"{name} = {value!r}" for name, value in options.items() if not _is_obeyed(name, value)]
    if passed_over:
        raise ConfigError(
            f"--gen_kwargs, or the generation_kwargs of a task: {', '.join(passed_over)} cannot be obeyed. What can be "
            f"is until, with texts, and with numbers {', '.join(_NUMBERS)}. Leave out the rest."
        )
    if options.get("do_sample") and options.get("temperature") == 0:
        raise ConfigError(
            "--gen_kwargs, or the generation_kwargs of a task: do_sample = True draws tokens, and temperature = 0 "
            "takes the likeliest. Set temperature above 0, or do_sample=False."
        )


def _is_obeyed(name: str, value: Any) -> bool:
    is_number = isinstance(value, int | float)
    return name == "until" or (name in _NUMBERS and is_number) or (name in _OFF and value == _OFF[name])


def _watched(numbers: Iterable[int], at_once: int, what: str, silent: bool) -> Iterator[list[int]]:
    """Some numbers at a time, behind a bar."""
    every = list(numbers)
    with tqdm(total=len(every), desc=what, disable=silent) as bar:
        for begin in range(0, len(every), at_once):
            yield every[begin : begin + at_once]
            bar.update(len(every[begin : begin + at_once]))
