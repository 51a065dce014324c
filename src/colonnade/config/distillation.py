"""[distillation]: what a student learns from a teacher besides the labels."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from colonnade.config.section import CountsOrZero, Positive, Section, Size, Text


class DistillationConfig(Section):
    """Distillation (Hinton et al., 2015): the loss is (1 - alpha) · cross entropy with the labels + alpha ·
    temperature² · KL(teacher ‖ student), both softened by the temperature: of tokens, or of the labels of a head
    classification or choice. With student_layers, hidden_weight · the mean squared error of hidden states is added.
    """

    teacher: Text | None = None
    """Checkpoint, run (its newest) or folder of Hugging Face whose model teaches, of any layout and size, with the
    run's vocabulary. Unset: nobody."""
    alpha: Annotated[float, Ge(0), Le(1.0)] = 0.5
    """[share] Of the teacher in the loss; 1: labels do not count."""
    temperature: Positive = 2.0
    """[1] What logits of both are divided by: the higher, the more the unlikely tokens count."""
    top_k: Size | None = None
    """[tokens] Store the teacher's so many likeliest tokens for every token that the run reads, once, before the first
    step: the teacher then takes no memory and no time. Unset: the teacher runs beside the student in each step."""
    store: Text | None = None
    """Folder of what top_k stores, which runs on the same data in the same order may share. Unset: teacher in the run's
    folder."""
    student_layers: CountsOrZero = ()
    """[layers] Blocks of a BERT, counted from 0, whose outputs are to be those of teacher_layers. Empty: logits alone
    teach."""
    teacher_layers: CountsOrZero = ()
    """[layers] The teacher's blocks, counted from 0: one for each of student_layers, in their order."""
    hidden_weight: Positive = 1.0
    """[1] Of the mean squared error of hidden states in the loss: over features, tokens that are no padding, and pairs
    of layers."""
    teacher_hidden_size: Size | None = None
    """[features] Of the teacher, where it is not model.hidden_size: each of student_layers gets a linear map to it,
    which is learned with the student. Unset: states are compared as they are."""
