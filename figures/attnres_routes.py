"""Attention Residuals: where attention and MLPs read.

Weight that each read gives to the embedding, the completed blocks and the block still being
written, averaged over tokens and seeds: reads before attention beside those before the MLP, whose
map ends with the output's. An arm a row.
"""

import pandas as pd

from satlens.plotting.heatmaps import colour_bar, route_map, span_of
from satlens.plotting.style import DOUBLE, new_figure, styled
from satlens.plotting.weight_maps import mean_and_range
from satlens.report.paper_figures import Drawing, NotDrawnError

SOURCE = "Attention Residuals (arXiv 2603.15031)"
VARIANTS = ("attnres", "attnres-full", "delta-attnres")
KEYS = ["sublayer", "layer", "source"]
READS = {"reads before attention": ("attn",), "reads before the MLP": ("mlp", "out")}
MARKS = ["weight", "weight_low", "weight_high", "weight_init", "n_seeds"]


def draw(run):
    parts = {
        arm: {seed: result.part("route_weights") for seed, result in found.items()}
        for arm, found in run.of("sparsity").items()
        if run.variant(arm) in VARIANTS
    }
    parts = {
        arm: found for arm, found in parts.items() if any(len(p.table) for p in found.values())
    }
    if not parts:
        raise NotDrawnError(f"needs the sparsity of an arm of variant {' or '.join(VARIANTS)}")
    cells = [
        mean_and_range({k: part.table for k, part in found.items()}, KEYS, "weight").assign(arm=arm)
        for arm, found in parts.items()
    ]
    maps = pd.concat(cells, ignore_index=True)
    if "weight_init" not in maps:  # measured without the untrained models
        maps["weight_init"] = float("nan")
    return Drawing(
        figure=picture(maps),
        plotted=maps[["arm", *KEYS, *MARKS]],
        tables=[part for found in parts.values() for part in found.values()],
        caption=caption(maps, [arm for arm in parts if run.variant(arm) == "delta-attnres"]),
    )


def picture(maps):
    arms = list(dict.fromkeys(maps["arm"]))
    deepest = max(span.last + 1 for span in map(span_of, maps["source"]) if span is not None)
    figure = new_figure(DOUBLE, 0.25 + (0.6 + 0.17 * maps["layer"].nunique()) * len(arms))
    with styled():
        axes = figure.subplots(len(arms), len(READS), squeeze=False, sharex=True)
        for line, arm in zip(axes, arms, strict=True):
            for ax, (title, sublayers) in zip(line, READS.items(), strict=True):
                rows = maps[(maps["arm"] == arm) & maps["sublayer"].isin(sublayers)]
                if "out" in set(rows["sublayer"]):
                    title += "; output (out)"
                reader = rows["layer"].astype(str).where(rows["sublayer"] != "out", "out")
                mesh = route_map(
                    ax,
                    rows.assign(row=reader),
                    "weight",
                    limits=(0.0, 1.0),
                    deepest=deepest,
                    title=f"{arm}: {title}" if ax is line[0] else title,
                )
                ax.set_ylabel("reading layer" if ax is line[0] else "")
                ax.set_xlabel("")
            colour_bar(list(line), mesh, "weight (cells: %)")
        figure.supxlabel("source layer (attention, MLP)", fontsize=7.5)
    return figure


def caption(maps, additive):
    counts = ", ".join(
        f"{arm} {n}" for arm, n in maps.groupby("arm", sort=False)["n_seeds"].max().items()
    )
    widest = maps.loc[(maps["weight_high"] - maps["weight_low"]).fillna(0).idxmax()]
    said = (
        "Weight of each source, averaged over tokens and seeds "
        f"(seeds: {counts}). Rows are reading layers; a source that sums several sublayers is one "
        "cell as wide as they are, the block still being written has a dotted frame."
    )
    if maps["weight_init"].notna().any():
        said += " Untrained, every source of a read weighs the same."
    if pd.notna(widest["weight_low"]):
        said += (
            " The cell in which seeds differ most goes from "
            f"{widest['weight_low']:.2f} to {widest['weight_high']:.2f}."
        )
    for arm in additive:
        said += f" In {arm} the mixture is added to the residual stream; it does not replace it."
    return said
