"""A Ray cluster of simulated nodes, with light engines in actors. Skipped without Ray (``make test-ray``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from .actors import KEY, Site  # noqa: E402

ROOT = Path(__file__).parents[2]
VARIABLES = {
    "MEMSAVER_DRIVER": "host",
    "MEMSAVER_HOST_CAPACITY": str(64 << 20),
    "MEMSAVER_API_KEY": KEY,
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/fleet_on_ray/standin"), str(ROOT)]),
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A head and two nodes."""
    saved = dict(os.environ)
    os.environ.update(VARIABLES)  # which Ray's processes inherit
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    try:
        for rack in ("r1", "r2"):
            made.add_node(num_cpus=2, labels={"rack": rack})
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        for node in list(made.worker_nodes):
            made.remove_node(node, allow_graceful=False)
        made.shutdown()
        os.environ.clear()
        os.environ.update(saved)


@pytest.fixture(scope="session")
def nodes(cluster: Cluster) -> list[str]:
    """The ids of the two nodes, by rack; ``cluster.worker_nodes`` has no order."""
    racks = {node["Labels"].get("rack", ""): node["NodeID"] for node in ray.nodes()}
    return [racks["r1"], racks["r2"]]


@pytest.fixture
def site(nodes: list[str], request: pytest.FixtureRequest) -> Iterator[Site]:
    """A fleet of its own for one test."""
    made = Site(request.node.name, nodes)
    yield made
    made.close()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
