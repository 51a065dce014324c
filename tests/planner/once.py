"""What tests ask of the program again and again, worked out once: functions of what they are given and of no more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig, TrainConfig
from colonnade.model import initialize
from colonnade.planner import compose, memory
from tests.predicted import OF_UNITS


@contextmanager
def weights_drawn_once() -> Iterator[None]:
    """Within: the same rows of the same weight are drawn once, whatever model and layout they are for."""
    known: dict[Any, Tensor] = {}
    draw = initialize.normal

    def drawn(keys: np.ndarray, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        return _known(known, (keys.tobytes(), start, count, str(device)), lambda: draw(keys, start, count, device))

    with patch.object(initialize, "normal", drawn):
        yield


@contextmanager
def units_run_once() -> Iterator[None]:
    """Within: what units keep is asked once of all layouts that cut and run them alike.

    The program is given nothing of a layout but what the answer is remembered by: it fails where it asks for more.
    """
    known: dict[Any, Any] = {}
    kept_of = memory.kept_of

    def kept(model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, **more: Any) -> Any:
        cut = SimpleNamespace(**{key: getattr(parallel, key) for key in OF_UNITS["parallel"]})
        size = SimpleNamespace(**{key: getattr(train, key) for key in (*OF_UNITS["train"], "seed")})
        return _known(known, repr((model, cut, size, more)), lambda: kept_of(model, cut, size, **more))  # type: ignore[arg-type]

    with patch.object(memory, "kept_of", kept):
        yield


@contextmanager
def units_timed_once(known: dict[Any, Any]) -> Iterator[None]:
    """Within: what a micro-batch costs in units is asked once of each configuration and machine. `known`: the answers
    so far.
    """
    unit_costs = compose.unit_costs

    def costs(config: Any, vocab_size: int, cost: Any, device: Any) -> Any:
        machine = cost.hardware.having(device__memory=1.0)  # which no unit takes its time by
        key = repr((config, vocab_size, machine, cost.num_ranks, device))
        return _known(known, key, lambda: unit_costs(config, vocab_size, cost, device))

    with patch.object(compose, "unit_costs", costs):
        yield


def _known(known: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    if key not in known:
        known[key] = make()
    return known[key]
