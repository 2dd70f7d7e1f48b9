"""Gate functions.

Other functions in place of ReLU: the paired difference in held-out loss, and how often their gates
are closed or almost closed.
"""

import pandas as pd

from satlens.plotting.intervals import arm_differences, ends
from satlens.plotting.style import (
    DOUBLE,
    MARKERS,
    MUTED,
    colour,
    new_figure,
    point_range,
    styled,
)
from satlens.report.effects import MINUS
from satlens.report.over_seeds import fields_of
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "SATFormer (arXiv 2605.03953)"
DEFAULT = "relu"
CLOSED = {"zero_fraction": "= 0", "below_0.01": "< 0.01", "below_0.1": "< 0.1"}


def draw(run):
    gates = {arm: function(run, arm) for arm in run.arms if run.variant(arm) == "satformer"}
    own = next((arm for arm, name in gates.items() if name == DEFAULT), None)
    compared = run.study.get("comparison")
    if own is None or len(gates) < 2 or compared is None:
        raise NotDrawnError("needs arms with other gate functions, compared with ReLU gates")
    pairs = compared.table
    pairs = pairs[(pairs["second"] == own) & pairs["first"].isin(gates)].reset_index(drop=True)
    if not len(pairs):
        raise NotDrawnError(f"needs other gate functions compared with {own}")
    sparsity = {arm: found for arm, found in run.of("sparsity").items() if arm in gates}
    shares = closed(sparsity, gates)
    if shares.empty:
        raise NotDrawnError("needs the sparsity of arms with other gate functions")
    losses = differences(pairs, gates)
    untrained = "; crosses: untrained" if "untrained" in set(shares["mark"]) else ""
    return Drawing(
        figure=picture(pairs, losses, shares, [gates[arm] for arm in pairs["first"]]),
        plotted=pd.concat([losses, shares], ignore_index=True),
        tables=[compared, *(result for found in sparsity.values() for result in found.values())],
        caption=f"Left: held-out loss minus that of {own} (ReLU) of the same seed, every seed and "
        "the mean with its 95 % t interval, cut at the frame. Right: share of gates (all layers, "
        "heads and tokens) that are exactly zero or smaller in size than a threshold, a point a "
        "seed with its 95 % bootstrap interval over documents, mostly narrower than the point"
        f"{untrained}.",
    )


def function(run, arm):
    """Gate function of an arm of variant satformer."""
    return (fields_of(run, arm).get("value_residual") or {}).get("gate", DEFAULT)


def differences(pairs, gates):
    """Every plotted difference: the mean of a pair, then its seeds."""
    rows = []
    for _, pair in pairs.iterrows():
        about = {"arm": pair["first"], "function": gates[pair["first"]], "quantity": "difference"}
        found = {"value": pair["difference"], "low": pair["difference_low"]}
        rows.append(about | found | {"high": pair["difference_high"], "mark": "mean over seeds"})
        for name in pairs:
            if name.startswith("seed_") and pd.notna(pair[name]):
                seed = int(name.removeprefix("seed_"))
                rows.append(about | {"seed": seed, "value": pair[name], "mark": "one seed"})
    return pd.DataFrame(rows)


def closed(sparsity, gates):
    """Shares of closed gates of every seed, from the summaries, trained and untrained."""
    rows = []
    for arm, found in sparsity.items():
        for seed, result in found.items():
            overall, untrained = (
                (result.summary.get("gates") or {}).get(name) or {}
                for name in ("overall", "overall_init")
            )
            for stat in CLOSED:
                about = {"arm": arm, "function": gates[arm], "quantity": stat, "seed": seed}
                cell = overall.get(stat)
                if cell is not None:
                    ends_ = {"low": cell["low"], "high": cell["high"]}
                    rows.append(about | {"value": cell["estimate"], **ends_, "mark": "trained"})
                if untrained.get(stat) is not None:
                    rows.append(about | {"value": untrained[stat], "mark": "untrained"})
    names = ["arm", "function", "quantity", "mark", "seed", "value", "low", "high"]
    return pd.DataFrame(rows, columns=names)


def picture(pairs, losses, shares, names):
    functions = list(dict.fromkeys(shares["function"]))
    figure = new_figure(DOUBLE, 1.3 + 0.3 * max(len(functions), len(names)))
    with styled():
        left, right = figure.subplots(1, 2)
        single = losses[losses["mark"] == "one seed"]
        labels = [f"{name} {MINUS} {DEFAULT}" for name in names]
        seeds = {
            label: single.loc[single["function"] == name, "value"].tolist()
            for label, name in zip(labels, names, strict=True)
        }
        arm_differences(left, labels, seeds, pairs, "difference")
        reach = [0.0, *single["value"]]
        margin = 0.5 * (max(reach) - min(reach)) or 0.01
        left.set_xlim(min(reach) - margin, max(reach) + margin)
        left.set_xlabel("difference in held-out NLL (nats/token)")
        left.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
        _shares(right, shares, functions)
    return figure


def _shares(ax, shares, functions):
    place = {name: row for row, name in enumerate(functions)}
    for number, (stat, label) in enumerate(CLOSED.items()):
        rows = shares[shares["quantity"] == stat].rename(columns={"low": "value_low"})
        rows = rows.rename(columns={"high": "value_high"})
        trained, untrained = (rows[rows["mark"] == mark] for mark in ("trained", "untrained"))
        y = 0.24 * (number - (len(CLOSED) - 1) / 2)
        before = untrained["function"].map(place).astype(float) + y
        ax.plot(untrained["value"], before, "x", color=MUTED, markersize=3.5)
        point_range(
            ax,
            trained["function"].map(place).astype(float) + y,
            trained["value"],
            *ends(trained, "value"),
            horizontal=True,
            colour=colour(number),
            marker=MARKERS[number],
            size=3,
            label=label,
        )
    if "untrained" in set(shares["mark"]):
        ax.plot([], [], "x", color=MUTED, markersize=3.5, label="untrained")
    ax.set_yticks(range(len(functions)), functions)
    ax.set_ylim(len(functions) - 0.4, -0.6)
    ax.set_xlim(-0.02, 1)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")
    ax.set_xlabel("share of gates")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, columnspacing=0.8)
