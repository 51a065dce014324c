"""The example for Kubernetes is what its schemas take, and asks torchrun for what the Job has."""

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def documents() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    found: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "examples/kubernetes/train.yaml").read_text()))
    return found


def test_it_is_valid(documents: list[dict[str, Any]]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in documents:
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_pods_are_machines_and_find_the_first(documents: list[dict[str, Any]]) -> None:
    service, job = documents
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert f"--nnodes={spec['completions']}" in command
    assert f"--nproc-per-node={pod['containers'][0]['resources']['limits']['nvidia.com/gpu']}" in command
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--rdzv-endpoint={job['metadata']['name']}-0.{pod['subdomain']}:29500" in command


def test_a_pod_that_is_made_anew_may_join_the_others(documents: list[dict[str, Any]]) -> None:
    """As tests/launch/test_machines.py has it of a machine in the place of a lost one."""
    _, job = documents
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
