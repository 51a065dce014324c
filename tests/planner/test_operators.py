"""What a plan writes down of each operator of a step."""

import pytest
import torch

from colonnade.planner.operators import Operator, Recorder
from colonnade.planner.stand_in import META, StandIn


@pytest.mark.parametrize("first", ["device", "host"])
def test_the_same_operator_runs_where_its_operands_are(first: str) -> None:
    """Of an offloaded optimizer: shapes are those of the model's tensors, on the GPU and in CPU memory."""
    with StandIn("cuda") as place, Recorder(place) as recorder:
        on_device, copied = torch.empty(5, 3, device=META), torch.empty(5, 3, device=META)
        on_host = copied.cpu()
        tensors = {"device": on_device, "host": on_host}
        results = {name: tensors[name] * 2.0 for name in sorted(tensors, key=lambda name: name != first)}
        for name in tensors:
            results[name].add_(1.0)
        assert {name: place.is_on_host(each) for name, each in results.items()} == {"device": False, "host": True}
    found = [each for each in recorder.sections[0].operators if each.name in ("mul", "add_")]
    second = "host" if first == "device" else "device"
    assert [where(each) for each in found] == [first, second, "device", "host"]


def where(operator: Operator) -> str:
    return operator.on_host or "device"
