"""Writes the tables of docs/compiled.md from the results of `benches.kernels`.

    python -m benches kernels --json benches/results/kernels-cpu.json --check
    python -m benches kernels_page --results benches/results/kernels-cpu.json --page docs/compiled.md

Nothing is run. What is between the two comments of the page is replaced, for any number of networks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benches.common.page import Page, table, wrapped

KERNELS = ("aten", "exact", "fused")
BUDGETS = ("1.0", "0.5", "least")
OWN = ("0.5", "0.2")

Row = dict[str, Any]
Network = dict[tuple[str, str], Row]


def networks_of(found: dict[str, Any]) -> dict[str, Network]:
    """Returns the rows of a document that `benches.kernels` wrote: by network, then by method and budget."""
    networks: dict[str, Network] = {}
    for row in found["rows"]:
        networks.setdefault(row["network"], {})[row["method"], row["budget"]] = row
    return networks


def _time(row: Row) -> str:
    return "-" if row["refused"] else f"{row['time_ratio']['median']:.2f}"


def _peak(row: Row, network: Network) -> str:
    return "-" if row["refused"] else f"{row['peak_bytes'] / network['plain', '']['peak_bytes']:.2f}"


def regions(networks: dict[str, Network]) -> str:
    """Returns the table of `fckpt.remat`: by budget, the peak and the time with each kind of kernels."""
    heads = ["network", "plain MiB", *(head for budget in BUDGETS for head in (f"peak at {budget}", *KERNELS))]
    lines = []
    for name, network in networks.items():
        cells = [name, f"{network['plain', '']['peak_bytes'] / 2**20:.1f}"]
        for budget in BUDGETS:
            cells.append(_peak(network["aten", budget], network))
            cells += [_time(network[kernels, budget]) for kernels in KERNELS]
        lines.append(cells)
    return table(heads, lines)


def compiled(networks: dict[str, Network]) -> str:
    """Returns the table of `torch.compile`: alone, and with its budgets beside the backend at the same peaks."""
    heads = ["network", "compile", "time"]
    heads += [head for own in OWN for head in (f"compile {own}", "time", "backend", "time")]
    lines = []
    for name, network in networks.items():
        cells = [name]
        for key in [("compile", ""), *((method, own) for own in OWN for method in ("compile", "backend"))]:
            cells += [_peak(network[key], network), _time(network[key])]
        lines.append(cells)
    return table(heads, lines)


def _pairs(networks: dict[str, Network], one: str, other: str, budget: str) -> list[tuple[Row, Row]]:
    """Returns the rows of two methods at a budget, for networks where neither is refused."""
    return _accepted(networks, (one, budget), (other, budget))


def _accepted(networks: dict[str, Network], one: tuple[str, str], other: tuple[str, str]) -> list[tuple[Row, Row]]:
    """Returns the rows of two methods, each at its budget, for networks where neither is refused."""
    pairs = [(network[one], network[other]) for network in networks.values()]
    return [pair for pair in pairs if not any(row["refused"] for row in pair)]


def _mean(pairs: Sequence[tuple[Row, Row]]) -> float:
    """Returns the geometric mean of the ratios of times."""
    times = [[row["time_ratio"]["median"] for row in pair] for pair in pairs]
    return statistics.geometric_mean(one / other for one, other in times)


def slower(pairs: Sequence[tuple[Row, Row]]) -> int:
    """Returns how many of the first are slower than the second beyond noise: the quartiles do not overlap."""
    return sum(one["time_ratio"]["low"] > other["time_ratio"]["high"] for one, other in pairs)


def remarks(networks: dict[str, Network]) -> list[str]:
    """Returns paragraphs on what was kept, and how the times compare."""
    rows = [row for network in networks.values() for row in network.values() if not row["refused"]]
    planned = [row for row in rows if row["method"] in (*KERNELS, "around")]
    exact = [row for row in rows if row["method"] in ("aten", "exact")]
    backend = [row for row in rows if row["method"] == "backend"]
    kept = lambda found: f"{sum(row['peak_bytes'] <= row['budget_bytes'] for row in found)} of {len(found)}"
    means = {k: ", ".join(f"{_mean(_pairs(networks, k, 'aten', b)):.2f}" for b in BUDGETS) for k in KERNELS[1:]}
    half = _pairs(networks, "fused", "aten", "0.5")
    most = min(half, key=lambda pair: _mean([pair]))[0]["network"] if len(half) > 1 else ""
    others = {name: network for name, network in networks.items() if name != most}
    rest = [f"{_mean(_pairs(others, k, 'aten', '0.5')):.2f}" for k in KERNELS[1:]]
    alone = f" Without {most}, which gains most, it is {rest[0]} and {rest[1]} at half of the peak." if most else ""
    slow = sum(slower(_pairs(networks, "exact", "aten", b)) for b in BUDGETS)
    count = sum(len(_pairs(networks, "exact", "aten", b)) for b in BUDGETS)
    beside = [pair for own in OWN for pair in _pairs(networks, "backend", "compile", own)]
    first = lambda method, budget: statistics.median(n[method, budget]["first_seconds"] for n in networks.values())
    return [
        f"Of `fckpt.remat`, {kept(planned)} functions kept their budget, and with `aten` and `exact` "
        f"{sum(not row['difference'] for row in exact)} of {len(exact)} have the bits of the plain function. At the "
        f"budgets {', '.join(BUDGETS)}, the geometric mean of the times relative to `aten` is {means['exact']} with "
        f"`exact` and {means['fused']} with `fused`.{alone} `exact` is slower than `aten` beyond noise in "
        f"{slow} of {count} cases.",
        f"The backend kept the peak that torch.compile reaches with its own budget in {kept(backend)} cases (elsewhere "
        f"it says so with a `BudgetWarning`). It took {_mean(beside):.2f} of the time of torch.compile "
        f"(geometric mean), and was slower beyond noise in {slower(beside)} of {len(beside)} cases. The median first "
        f"call, with empty caches, took {first('compile', ''):.0f} s by torch.compile, {first('exact', '1.0'):.0f} s "
        f"with `exact` and {first('fused', '1.0'):.0f} s with `fused` kernels at the budget 1.0, and "
        f"{first('backend', '0.5'):.0f} s by the backend at the peak of torch.compile's budget 0.5, for which it "
        f"compiles up to seven times.{_compilation(networks)}",
    ]


def _compilation(networks: dict[str, Network]) -> str:
    """Returns a sentence on the time of compilation; nothing for results without it, which were measured earlier."""
    cases = [_accepted(networks, ("fused", budget), ("compile", "")) for budget in BUDGETS]
    if not all("compile_seconds" in row for pairs in cases for pair in pairs for row in pair):
        return ""
    total = lambda pairs, i: f"{sum(pair[i]['compile_seconds'] for pair in pairs):.0f}"
    longer = sum(one["compile_seconds"] > other["compile_seconds"] for pairs in cases for one, other in pairs)
    return (
        f" Compilation with empty caches took {total(cases[0], 1)} s in total by torch.compile alone, and "
        f"{', '.join(total(pairs, 0) for pairs in cases)} s with `fused` kernels at the budgets {', '.join(BUDGETS)}; "
        f"with `fused` it took longer in {longer} of {sum(map(len, cases))} cases."
    )


def text(found: dict[str, Any]) -> str:
    """Returns what stands between the two comments, for the document that `benches.kernels` wrote."""
    networks = networks_of(found)
    first, second = map(wrapped, remarks(networks))
    return "\n\n".join([regions(networks), first, compiled(networks), second])


PAGE = Page("kernels", "docs/compiled.md", text)


def main(arguments: list[str]) -> int:
    """Rewrites the page."""
    return PAGE.write(__doc__, arguments)
