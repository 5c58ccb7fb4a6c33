"""Reads the graphs of the Checkmate and the Moccasin papers.

The files are in https://github.com/haoming-codes/moccasin, in `data/*train_nx.json` and `data/random_layered*.json`.
They are training steps of P. Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization",
2020, https://arxiv.org/abs/1910.02653 (exported by the authors of B. Bartan et al., "Moccasin: efficient tensor
rematerialization for neural networks", 2023, https://arxiv.org/abs/2304.14463), and random layered graphs of M. Gagrani
et al., "Neural topological ordering for computation graphs", 2022, https://arxiv.org/abs/2207.05899, appendix A.

How a file is read:

* It is node-link data of networkx. A node has a cost (`cost_cpu` or `duration`), the bytes of its result (`cost_ram` or
  `out_cost`), and a name (`id` or `name`). An edge has `source` and `target`, or "0" and "1".
* The order of the nodes is the graph's `order`, or that of the file, which must be topological.
* A node makes one value. There are no temporaries, parameters or inputs. Costs become seconds; only their ratios
  matter.
* The backward pass begins with the first node that is marked `backward`. That node reads a cotangent of zero bytes, so
  that it cannot run earlier. Results that nothing reads are gradients. The forward pass has no outputs, because the
  papers free the loss like any other value.
* A graph without a node marked `backward` is a forward pass, and the results that nothing reads are its outputs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fckpt.graph import Graph, Node, Value


def load(path: Path | str) -> Graph:
    """Returns the graph in a file of the Moccasin repository.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not of this form, its nodes are not in topological order, or a node marked `backward`
            does not depend on the first one.
    """
    try:
        data: dict[str, Any] = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    if not ({"nodes", "graph"} <= {*data} and {"links", "edges"} & {*data}):
        raise ValueError(f"{path}: no node-link data of networkx: there are no `nodes`, `graph` and `links` in it.")
    try:
        return _read(data, str(path))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: a node or an edge is not as those of the Moccasin repository: {error!r}") from None


def _read(data: dict[str, Any], path: str) -> Graph:
    found = {_name(node): node for node in data["nodes"]}
    order: list[int] = data["graph"].get("order") or list(found)
    place = {name: i for i, name in enumerate(order)}
    reads: list[list[int]] = [[] for _ in order]
    for edge in data.get("links") or data["edges"]:
        source, target = (place[edge[end]] for end in (("source", "target") if "source" in edge else ("0", "1")))
        if source >= target:
            raise ValueError(f"{path}: node {order[target]} comes before node {order[source]}, which it reads.")
        reads[target].append(source)
    return _graph([found[name] for name in order], reads, path)


def _name(node: dict[str, Any]) -> int:
    return node["id"] if "id" in node else node["name"]


def _graph(found: Sequence[dict[str, Any]], reads: Sequence[list[int]], path: str) -> Graph:
    count = len(found)
    marked = [i for i, node in enumerate(found) if node.get("backward")]
    boundary = marked[0] if marked else count
    cotangents = (count,) if marked else ()
    late = set(cotangents)
    nodes: list[Node] = []
    values: list[Value] = []
    for i, node in enumerate(found):
        inputs = (*dict.fromkeys(sorted(reads[i])), *(cotangents if i == boundary else ()))
        backward = not late.isdisjoint(inputs)
        if backward:
            late.add(i)
        seconds = float(node["cost_cpu"] if "cost_cpu" in node else node["duration"])
        nbytes = int(node["cost_ram"] if "cost_ram" in node else node["out_cost"])
        nodes.append(Node(i, str(node["name"]), inputs, (i,), backward=backward, seconds=seconds))
        values.append(Value(i, nbytes, i, origin=str(node["name"])))
    if not late.issuperset(marked):
        raise ValueError(f"{path}: some nodes marked `backward` do not depend on the first of them, {marked[0]}.")
    values += [Value(v, 0, None, origin="cotangent") for v in cotangents]
    ends = tuple(sorted(set(range(count)).difference(*reads)))
    outputs, gradients = ((), ends) if marked else (ends, ())
    return Graph(tuple(nodes), tuple(values), (), cotangents, outputs, gradients, boundary)
