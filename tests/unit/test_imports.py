"""No module of ours needs itself, by whatever way, to be imported."""

from graphlib import TopologicalSorter

import grimp


def test_imports_go_round_nowhere() -> None:
    graph = grimp.build_graph("controlplane", "worker", "pool", "web", "compose", cache_dir=None)
    needs = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(needs) > 100
    TopologicalSorter(needs).prepare()  # raises CycleError, which names the circle
