"""Where queries, keys and values read.

Routes of queries and keys beside the routes of values over the same sources, and their difference:
weights averaged over tokens and seeds. An arm a row.
"""

import pandas as pd

from satlens.plotting.heatmaps import colour_bar, limits_of, route_map, span_of
from satlens.plotting.style import DOUBLE, new_figure, styled
from satlens.plotting.weight_maps import mean_and_range, ring_note
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "RD-AttnRes (arXiv 2608.01075)"
KEYS = ["layer", "source"]
AVERAGE = "rd-attnres-average"
MINUS = "\N{MINUS SIGN}"
TITLES = {"qk": "queries and keys", "v": "values", "v - qk": f"values {MINUS} queries and keys"}
MARKS = ["weight", "weight_low", "weight_high", "n_seeds", "signs_differ"]


def draw(run):
    parts = {arm: decoupled(found) for arm, found in run.of("sparsity").items()}
    parts = {arm: found for arm, found in parts.items() if found}
    if not parts:
        raise NotDrawnError("needs route weights of an arm whose values have a route of their own")
    maps = pd.concat([maps_of(arm, found) for arm, found in parts.items()], ignore_index=True)
    return Drawing(
        figure=picture(maps),
        plotted=maps[["arm", "route", *KEYS, *MARKS]],
        tables=[part for found in parts.values() for part in found.values()],
        caption=caption(maps, [arm for arm in parts if run.variant(arm) == AVERAGE]),
    )


def decoupled(found):
    """Weights of the seeds of an arm, if its attention reads have routes qk and v."""
    weights = {}
    for seed, result in found.items():
        for part in result.parts:
            if part.name == "route_weights" and {"qk", "v"} <= set(part.table["role"]):
                weights[seed] = part
    return weights


def maps_of(arm, parts):
    """Both routes and their difference: a row a (layer, source)."""
    tables = {seed: part.table[part.table["sublayer"] == "attn"] for seed, part in parts.items()}
    routes = {
        role: {seed: table[table["role"] == role] for seed, table in tables.items()}
        for role in ("qk", "v")
    }
    routes["v - qk"] = {
        seed: values.assign(
            weight=values["weight"].to_numpy()
            - values[KEYS].merge(routes["qk"][seed], on=KEYS)["weight"].to_numpy()
        )
        for seed, values in routes["v"].items()
    }
    return pd.concat(
        [
            mean_and_range(of, KEYS, "weight").assign(arm=arm, route=name)
            for name, of in routes.items()
        ],
        ignore_index=True,
    )


def picture(maps):
    arms = list(dict.fromkeys(maps["arm"]))
    spans = [span_of(label) for label in maps["source"]]
    deepest = max(span.last + 1 for span in spans if span is not None)
    signed = limits_of([maps[maps["route"] == "v - qk"]], ["weight"], signed=True)
    height = 0.6 + 0.17 * maps["layer"].nunique()
    figure = new_figure(DOUBLE, 0.25 + height * len(arms))
    with styled():
        axes = figure.subplots(len(arms), len(TITLES), squeeze=False, sharex=True, sharey=True)
        for number, (line, arm) in enumerate(zip(axes, arms, strict=True), 1):
            for ax, (route, title) in zip(line, TITLES.items(), strict=True):
                rows = maps[(maps["arm"] == arm) & (maps["route"] == route)]
                difference = route == "v - qk"
                mesh = route_map(
                    ax,
                    rows.assign(row=rows["layer"].astype(str)),
                    "weight",
                    limits=signed if difference else (0.0, 1.0),
                    signed=difference,
                    deepest=deepest,
                    ringed="signs_differ" if difference else None,
                    title=f"{arm}\n{title}" if ax is line[0] else f"\n{title}",
                )
                ax.set_ylabel("reading layer" if ax is line[0] else "")
                ax.set_xlabel(ax.get_xlabel() if number == len(arms) else "")
                if route != "qk":
                    label = "difference (cells: hundredths)" if difference else "weight (cells: %)"
                    colour_bar([ax] if difference else list(line[:2]), mesh, label)
        ring_note(figure, maps)
    return figure


def caption(maps, averaged):
    seeds = maps.groupby("arm", sort=False)["n_seeds"].first()
    counts = ", ".join(f"{arm} {n}" for arm, n in seeds.items())
    said = (
        "Weight that each attention read gives to each source, averaged over tokens and seeds "
        f"(seeds: {counts}). Rows are reading layers; a source that sums several sublayers is one "
        "cell as wide as they are, the block still being written has a dotted frame. Ring: the "
        "seeds do not agree on the sign of the difference. Untrained, every source of a read "
        "weighs the same, and the difference is 0. Ends in the CSV: lowest and highest seed."
    )
    for arm in averaged:
        said += f" In {arm}, queries, keys and values all read the average of both mixtures."
    return said
