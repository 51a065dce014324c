"""[tracking]: where a run's numbers go besides its folder."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from colonnade.config.section import Section, Text


class TrackingConfig(Section):
    """Where the numbers of metrics.jsonl go besides the run's folder (TensorBoard: run.tensorboard). Needs the extra
    `track`. Passwords and keys are left to these programs' own files and variables.
    """

    MAY_CHANGE: ClassVar[bool] = True

    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: offline writes to the run's folder, for `wandb sync` later."""
    mlflow: Text | None = None
    """MLflow's tracking URI, like http://tracking:5000. That of a database, like sqlite:///runs/mlflow.db, needs all of
    MLflow (pip install mlflow).
    """
    prometheus: Text | None = None
    """A file, like metrics.prom, for node_exporter's textfile collector; or a port of this machine alone, like 9105."""
    project: Text = "colonnade"
    """Project of Weights & Biases, experiment of MLflow."""
    name: Text | None = None
    """Name of the run there. Unset: that of its folder."""
    patience: Annotated[float, Ge(0)] = 10.0
    """[seconds] How long the end of a run waits for what is still being sent."""
