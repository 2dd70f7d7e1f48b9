"""Tables of several checkpoints as one, and means over seeds, for figures of whole studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from satlens.analysis.result import Result
from satlens.analysis.statistics.seeds import student_interval
from satlens.report.collect import Run
from satlens.report.effects import Frame

REFERENCE = "transformer"


def by_seed(results: Mapping[int, Result], part: str | None = None) -> Frame:
    """The tables of an arm below each other with a column ``seed``.

    Args:
        results: seed -> result, as :meth:`satlens.report.collect.Run.of` gives them for an arm.
        part: the part of that name of every result; results without it are left out.
    """
    tables = []
    for seed, result in results.items():
        found = [result] if part is None else [p for p in result.parts if p.name == part]
        tables += [each.table.assign(seed=seed) for each in found]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame({"seed": []})


def over_seeds(table: Frame, keys: Sequence[str], value: str) -> Frame:
    """The mean of ``value`` over the rows of each combination of ``keys``, a row a seed.

    Returns:
        ``keys``, ``value``, ``low`` and ``high`` (Student's t, 95 %; NaN from one seed) and
        ``n_seeds``, in order of appearance. Rows without a value are left out.
    """
    rows = []
    for names, part in table.dropna(subset=[value]).groupby(list(keys), sort=False):
        found = student_interval(part[value].to_numpy(dtype=float)[:, None])
        row: dict[str, Any] = dict(zip(keys, names, strict=True))
        row |= {"value": float(found.estimate[0]), "low": float(found.low[0])}
        rows.append(row | {"high": float(found.high[0]), "n_seeds": len(part)})
    return pd.DataFrame(rows, columns=[*keys, "value", "low", "high", "n_seeds"])


def ranked_heads(table: Frame, value: str) -> Frame:
    """The table with a column ``rank``: 0 for the head of a layer and seed with the largest value.

    Heads of models with other initial weights have nothing in common but their number: a mean over
    seeds needs an order that every model has. Rows without a value are left out.
    """
    table = table.dropna(subset=[value])
    order = table.groupby(["seed", "layer"])[value].rank(method="first", ascending=False)
    return table.assign(rank=order.astype(int) - 1)


def own_gates(run: Run, analysis: str) -> tuple[str, dict[int, Result]] | None:
    """The first arm with per-token gates that has results of an analysis, by seed."""
    for arm, results in run.of(analysis).items():
        if run.variant(arm) == "satformer":
            return arm, results
    return None


def fields_of(run: Run, arm: str) -> dict[str, Any]:
    """What a recipe changes in an arm's variant."""
    return run.recipe.get("arms", {}).get(arm, {}).get("fields") or {}


def cost_of_arms(run: Run) -> Frame:
    """What training costs in the arms of a study, as ratios to the transformer.

    Returns:
        A row an arm of an unchanged variant that was timed: ``arm``; ``speed`` (tokens a second)
        with its quartiles ``speed_low``, ``speed_high``; ``memory`` (saved activations). Empty
        where nothing was timed.
    """
    columns = ["arm", "speed", "speed_low", "speed_high", "memory"]
    timed = run.study.get("bench")
    if timed is None:
        return pd.DataFrame(columns=columns)
    table: Frame = timed.table
    found = table[table["reference"] == REFERENCE].set_index("variant")
    arms = [a for a in run.arms if run.variant(a) in found.index and not fields_of(run, a)]
    rows = found.loc[[run.variant(arm) for arm in arms]]
    stats = ["speed_ratio", "speed_ratio_low", "speed_ratio_high", "memory_ratio"]
    values = dict(zip(columns[1:], rows[stats].to_numpy(dtype=float).T, strict=True))
    return pd.DataFrame({"arm": arms, **values}, columns=columns)


def paired_losses(losses: Frame, keys: Sequence[str] = ()) -> Frame:
    """Losses of every arm minus the transformer's of the same seed.

    Args:
        losses: columns ``arm, seed, loss`` and ``keys`` (such as ``tokens``), one row each.

    Returns:
        Its rows whose seed the transformer has too, with ``difference``.
    """
    on = ["seed", *keys]
    base = losses[losses["arm"] == REFERENCE].set_index(on)["loss"].rename("base")
    both = losses.join(base, on=on, how="inner")
    return both.assign(difference=both["loss"] - both["base"]).drop(columns="base")


def scored_seeds(run: Run) -> dict[str, list[int]]:
    """Seeds of every arm that the comparison has a loss of; an arm without any is in it too."""
    losses = held_out(run)
    return {arm: sorted(losses[losses["arm"] == arm]["seed"]) for arm in run.arms}


def held_out(run: Run) -> Frame:
    """Loss of every final checkpoint on the same test windows: ``arm, seed, loss``.

    From the comparison of a study, whose arms were scored together; empty without one.
    """
    compared = run.study.get("comparison")
    found = {} if compared is None else compared.summary.get("nll") or {}
    rows = [
        (arm, int(seed), loss)
        for arm, seeds in found.items()
        for seed, loss in seeds.items()
        if loss is not None
    ]
    return pd.DataFrame(rows, columns=["arm", "seed", "loss"])
