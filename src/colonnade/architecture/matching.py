"""Linear maps from a student's hidden states to its teacher's, in the student's statement: where their widths differ.

    y = A x        A [teacher's h, h], to_teacher.weight: the last weight of each block that is compared

They belong to training: nothing but the loss of hidden states reads them, and a converted model is without.
"""

from dataclasses import replace

from colonnade.architecture.statement import Architecture, Weight
from colonnade.config.distillation import DistillationConfig
from colonnade.config.model import ModelConfig

TO_TEACHER = "to_teacher"


def is_map(name: str) -> bool:
    """Whether this is the logical name of a map's weight."""
    return name.endswith(f".{TO_TEACHER}.weight")


def with_maps(architecture: Architecture, model: ModelConfig, distillation: DistillationConfig) -> Architecture:
    """`architecture` with a map in every block of distillation.student_layers; itself where widths are the same."""
    size = distillation.teacher_hidden_size
    if size is None or distillation.teacher is None or not distillation.student_layers:
        return architecture
    shape = (size, model.hidden_size)
    mapped = {unit.name for unit in architecture.units if unit.layer in distillation.student_layers}
    weight = Weight(f"{TO_TEACHER}.weight", shape, std=model.hidden_size**-0.5)
    buckets = {
        name: (*weights, weight) if name in mapped else weights for name, weights in architecture.buckets.items()
    }
    units = (
        unit._replace(kind=unit.other_kind("mapped"), multiply_adds=unit.multiply_adds + weight.size)
        if unit.name in mapped
        else unit
        for unit in architecture.units
    )
    return replace(architecture, buckets=buckets, units=tuple(units))
