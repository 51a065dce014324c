"""[preferences]: how a model learns which of two answers is preferred."""

from __future__ import annotations

from typing import Literal

from colonnade.config.section import Fraction, Positive, Section, Text


class PreferencesConfig(Section):
    """Preference tuning (model.head = "preferences"): answers that are preferred become likelier than others, beside
    what a reference model, the weights of train.init_from, thinks of both (DPO).
    """

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid is DPO's (Rafailov et al., 2023): -log sigmoid(beta · margin) of the log-probabilities' margin over the
    reference; ipo (Azar et al., 2023) is (margin - 1 / (2 beta))², of log-probabilities a token."""
    beta: Positive = 0.1
    """[1] How strongly the model is held to the reference: the smaller, the further it may go."""
    label_smoothing: Fraction = 0.0
    """[probability] That a preference is the wrong way round (sigmoid)."""
    reference: Text | None = None
    """File of the reference's log-probabilities. Unset: reference.npz in the run's folder. It is written by the first
    start, if it is not there; another run on the same data from the same weights may name it."""
