"""Routes of their own for values, against controls.

Role-decoupled routes and their controls against the parent, whose queries, keys and values share a
route: values that use the same route (tied: the parent itself), one average of the two routes for
all roles, a value route that stays uniform.
"""

import pandas as pd

from satlens.analysis.stats import MIN_SEEDS
from satlens.plotting.paired import IDENTITY, contrast_marks, is_cut, paired_rows
from satlens.plotting.style import COLUMN, INK, MUTED, new_figure, styled
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "RD-AttnRes (arXiv 2608.01075)"
PARENT, DECOUPLED = "attnres", "rd-attnres"
CONTROLS = {"rd-attnres-average": "average of both", "rd-attnres-frozen-v": "uniform for V"}
NAMES = {DECOUPLED: "decoupled", **CONTROLS}
TIED = "tied"
MINUS = "\N{MINUS SIGN}"


def draw(run):
    if "comparison" not in run.study:
        raise NotDrawnError("needs the comparison of a study")
    comparison = run.study["comparison"]
    found = {}
    for _, row in comparison.table.iterrows():
        found.setdefault((run.variant(row["first"]), run.variant(row["second"])), row)
    if not any((control, PARENT) in found for control in CONTROLS):
        raise NotDrawnError("needs contrasts of controls of rd-attnres with attnres")
    to_parent = [(name, PARENT) for name in NAMES if (name, PARENT) in found]
    to_controls = [(DECOUPLED, name) for name in CONTROLS if (DECOUPLED, name) in found]
    labels = [*(NAMES[first] for first, _ in to_parent), TIED]
    labels += [f"{MINUS} {NAMES[second]}" for _, second in to_controls]
    marks = []
    for pair in [*to_parent, *to_controls]:
        place = to_parent.index(pair) if pair in to_parent else to_controls.index(pair)
        row = place if pair in to_parent else len(to_parent) + 2 + place
        marks.append(contrast_marks(found[pair]).assign(row=row))
    same = {"first": TIED, "second": found[to_parent[0]]["second"]}
    identity = {"mark": IDENTITY, "value": 0.0, "row": len(to_parent)}
    marks.append(pd.DataFrame([same | identity]))
    marks = pd.concat(marks, ignore_index=True)
    columns = ["first", "second", "mark", "seed", "value", "low", "high", "n_seeds"]
    return Drawing(
        figure=picture(labels, len(to_parent) + 1, marks, comparison.summary.get("noise_floor")),
        plotted=marks[columns].astype({"seed": "Int64", "n_seeds": "Int64"}),
        tables=[comparison],
        caption=caption(marks, int(comparison.table["n_documents"].max())),
    )


def picture(labels, n_parent, marks, noise_floor):
    """Two groups of rows, with a line for the heading of the second between them."""
    names = [*labels[:n_parent], "", *labels[n_parent:]] if len(labels) > n_parent else labels
    figure = new_figure(COLUMN, 1.35 + 0.24 * len(names))
    with styled():
        ax = figure.subplots()
        paired_rows(ax, names, marks, noise_floor=noise_floor)
        ax.set_xlabel("difference in held-out NLL (nats/token)")
        ax.set_title(f"Each {MINUS} the parent (AttnRes)", fontsize=7)
        if len(names) > len(labels):
            ax.axhline(n_parent - 0.45, color=MUTED, linewidth=0.5)
            words = {"fontsize": 7, "fontweight": "bold", "color": INK, "va": "center"}
            ax.text(
                0, n_parent + 0.1, f"Decoupled {MINUS} each control", transform=_beside(ax), **words
            )
        figure.legend(loc="outside lower center", ncols=1)
    return figure


def _beside(ax):
    """Across in shares of the axis, down in rows."""
    return ax.get_yaxis_transform()


def caption(marks, n_documents):
    counts = sorted(set(marks["n_seeds"].dropna().astype(int)))
    said = (
        "Paired differences in held-out NLL of final checkpoints: circles are seeds "
        f"({' or '.join(map(str, counts))} of them, {n_documents} documents). Above: minus the "
        "parent, AttnRes, whose queries, keys and values read one mixture. Tied: values on the "
        "route of queries and keys compute what the parent does to the bit, so the difference is "
        "zero by identity. Below: decoupled routes minus the controls. Blue: 95 % Student's t "
        "interval of the mean over seeds; orange: 95 % percentile bootstrap over seeds, from "
        f"{MIN_SEEDS} seeds on."
    )
    if is_cut(marks):
        said += " Arrows: the interval goes on; the CSV has its ends."
    return said
