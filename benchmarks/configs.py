"""Configurations of GPT-2s that are only planned, or run on random tokens: without data, folder or checkpoints."""

from collections.abc import Mapping

from colonnade.config.model import ModelConfig
from colonnade.config.saving import CheckpointConfig
from colonnade.config.schema import Config, DataConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig


def gpt(model: Mapping[str, object], parallel: Mapping[str, object], train: Mapping[str, object]) -> Config:
    """One step of a GPT-2, without dropout where `model` says nothing of it; keys of the sections of their names."""
    return Config(
        model=ModelConfig.model_validate({"dropout": 0.0, "attention_dropout": 0.0, **model}),
        parallel=ParallelConfig.model_validate(parallel),
        data=DataConfig(train="unused"),
        train=TrainConfig.model_validate({"steps": 1, **train}),
        optim=OptimConfig(learning_rate=1e-4),
        checkpoint=CheckpointConfig(every=0),
        run=RunConfig(folder="unused"),
    )
