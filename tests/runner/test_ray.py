"""The same cells on a Ray cluster of two nodes, one of which dies."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qbench.recipe.cells import load_recipe
from qbench.runner import ray as executor
from qbench.runner.lock import RunError
from qbench.runner.matrix import RunOptions, run_matrix

from .driver import left_behind, results


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that runs no cells, and two nodes that run one each."""
    pytest.importorskip("ray", reason="needs the package ray: pip install 'ray>=2.9'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_that_dies_costs_only_its_cells(
    two_nodes: Any, small: Path, undisturbed: tuple[Path, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, killed = executor.write_record, []

    def write_and_kill(*arguments: Any) -> None:
        write(*arguments)
        if not killed:  # after the first cell, when each node has the next one
            killed.append(two_nodes.list_all_nodes()[-1])
            time.sleep(2)
            two_nodes.remove_node(killed[0], allow_graceful=False)

    monkeypatch.setattr(executor, "write_record", write_and_kill)
    assert run_matrix(load_recipe(small), tmp_path / "out", RunOptions(executor="ray", preflight=True))
    assert killed
    assert results(tmp_path / "out") == results(undisturbed[0])
    assert not left_behind(tmp_path / "out")


def test_without_ray_the_error_says_how_to_install_it(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"pip install 'ray>=2\.9'"):
        run_matrix(load_recipe(small), tmp_path / "out", RunOptions(executor="ray"))
