"""Figures of the SATFormer paper: what is plotted against numbers worked out otherwise."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import mock_tables as mock
import numpy as np
import pandas as pd
import pytest
from matplotlib.axis import Axis, Tick
from matplotlib.text import Text
from scipy import stats

from satlens.analysis.result import Result
from satlens.report.collect import collect
from satlens.report.over_seeds import over_seeds, paired_losses, ranked_heads
from satlens.report.paper_figures import NotDrawnError, scripts

NAMES = (
    "gate_ablation",
    "gate_functions",
    "gate_map",
    "gates_by_category",
    "loss_and_cost",
    "loss_and_time",
    "open_gates_by_depth",
)
SEEDS = 3
TOTAL = 600 * 1024
NLL = {
    "transformer": {"0": 4.56, "1": 4.55, "2": 4.60},
    "resformer": {"0": 4.50, "1": 4.51, "2": 4.49},
    "satformer": {"0": 4.54, "1": 4.56, "2": 4.55},
    "muddformer": {"0": 4.44, "1": 4.40},
    "satformer-tanh": {"0": 4.55, "1": 4.53},
    "satformer-sigmoid": {"0": 4.58, "1": 4.61},
}
SPEED = {"resformer": 0.98, "satformer": 0.95, "muddformer": 0.5}
MEMORY = {"resformer": 1.0, "satformer": 1.01, "muddformer": 1.4}


def save(root: Path, where: str, name: str, table, summary=None, **options) -> None:
    Result(name, table, {"command": "satlens"}, summary or {}, **options).save(
        root / "results" / where, figures=False
    )


def write_gates(root: Path, arm: str, seed: int) -> None:
    table = mock.gates(seed=seed)
    summary = mock.gate_summary(table, zero=0.5 + 0.02 * seed)
    for share, name in ((0.05, "below_0.01"), (0.1, "below_0.1")):
        summary["gates"]["overall"][name] = mock.cell(0.5 + 0.02 * seed + share)
        summary["gates"]["overall_init"][name] = 0.5 + share / 2
    save(root, f"{arm}-seed{seed}", "sparsity", table, summary)


def write_satformer(root: Path, seed: int) -> None:
    cells, where = mock.gate_cells(8, 4), f"satformer-seed{seed}"
    table = mock.categories(cells, seed).assign(by="category")
    table = mock.with_ends(table.assign(open_fraction=table["mean"] / 2), "open_fraction", 0.01)
    delta = np.linspace(-0.2, 0.2, len(cells))
    part = Result("categories_contrasts", mock.contrasts(cells, delta, delta / 2))
    save(root, where, "categories", table, parts=(part,))
    costs = {"zero": 0.08 + 0.01 * seed, "mean": 0.04, "shuffle": 0.05}
    save(root, where, "ablation", mock.ablation(costs, 8, 4))
    write_gates(root, "satformer", seed)


def write_costs(root: Path) -> None:
    rows = [("transformer", 1.0, 1.0), ("transformer (again)", 1.002, 1.0)]
    rows += [(arm, SPEED[arm], MEMORY[arm]) for arm in SPEED]
    table = pd.DataFrame(rows, columns=["variant", "speed_ratio", "memory_ratio"])
    table = mock.with_ends(table.assign(reference="transformer"), "speed_ratio", 0.01)
    save(root, "", "bench", mock.counted(table), {"noise_floor": [0.99, 1.002, 1.01]})


def write_losses(root: Path, nll: dict[str, dict[str, float]] | None = None) -> None:
    nll = NLL if nll is None else nll
    against = {arm: "satformer" if "-" in arm else "transformer" for arm in nll}
    pairs = {
        (arm, other): tuple(nll[arm][k] - nll[other][k] for k in nll[arm])
        for arm, other in against.items()
        if arm != "transformer"
    }
    save(root, "", "comparison", mock.comparison(pairs), {"nll": nll, "noise_floor": 0.01})


def write_curves(root: Path, lifted: float = 0.0) -> None:
    """Losses of seeds 0 and 1 of all; the transformer alone has seed 2, ``lifted`` higher."""
    table = mock.curves(("transformer", "satformer", "muddformer"), 2)
    more = table[(table["arm"] == "transformer") & (table["seed"] == 0)].assign(seed=2)
    more = more.assign(val_loss=more["val_loss"] + lifted)
    table = pd.concat([table, more], ignore_index=True)
    save(root, "", "curves", table, keys=("seed", "step", "tokens"))


def make_study(root: Path) -> Path:
    gated = {"variant": "satformer", "analyses": []}
    arms = {name: {"variant": name} for name in ("transformer", "resformer", "muddformer")}
    arms["satformer"] = gated
    for gate in ("tanh", "sigmoid"):
        fields = {"value_residual": {"kind": "gated", "gate": gate}}
        arms[f"satformer-{gate}"] = {**gated, "fields": fields, "seeds": 2}
        for seed in range(2):
            write_gates(root, f"satformer-{gate}", seed)
    root.mkdir(parents=True, exist_ok=True)
    recipe = {"name": "s", "seeds": SEEDS, "arms": arms}
    (root / "plan.json").write_text(json.dumps({"recipe": recipe}))
    for seed in range(SEEDS):
        write_satformer(root, seed)
    static = mock.ablation({"zero": 0.1}, 8, 1)
    save(root, "resformer-seed0", "ablation", static[static["scope"] != "head"])
    write_costs(root)
    write_losses(root)
    write_curves(root)
    return root


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    return make_study(tmp_path_factory.mktemp("figures") / "study")


@pytest.fixture
def changed(study, tmp_path) -> Path:
    """A copy of the study that a test may spoil."""
    return Path(shutil.copytree(study, tmp_path / "study"))


def drawing(name: str, root: Path):
    return scripts([name])[0].module.draw(collect(root))


def t_interval(values) -> tuple[float, float]:
    found = stats.ttest_1samp(np.asarray(values), 0.0).confidence_interval(0.95)
    return found.low, found.high


# -- numbers over seeds ----------------------------------------------------------------------------


def test_means_over_seeds_have_students_interval_and_one_seed_has_none():
    table = pd.DataFrame({"layer": [1, 1, 1, 2], "seed": [0, 1, 2, 0], "x": [0.1, 0.4, 0.2, 3.0]})
    first, second = over_seeds(table, ["layer"], "x").to_dict("records")
    assert (first["low"], first["high"]) == pytest.approx(t_interval([0.1, 0.4, 0.2]))
    assert (first["value"], first["n_seeds"]) == (pytest.approx(0.7 / 3), 3)
    assert second["value"] == 3.0
    assert np.isnan(second["low"]) and np.isnan(second["high"])


def test_ranks_are_of_one_layer_of_one_seed():
    table = pd.DataFrame({"seed": [0, 0, 1, 1], "layer": 1, "head": [0, 1] * 2, "x": [1, 2, 9, 3]})
    assert ranked_heads(table, "x")["rank"].tolist() == [1, 0, 0, 1]
    gaps = ranked_heads(table.assign(x=[np.nan, 2.0, np.nan, np.nan]), "x")
    assert gaps[["head", "rank"]].to_numpy().tolist() == [[1, 0]]


def test_losses_are_paired_by_seed():
    losses = [("transformer", 0, 4.0), ("a", 0, 3.9), ("a", 7, 1.0), ("transformer", 1, 5.0)]
    table = paired_losses(pd.DataFrame(losses, columns=["arm", "seed", "loss"]))
    assert table[table["arm"] == "a"]["difference"].tolist() == pytest.approx([-0.1])
    assert (table[table["arm"] == "transformer"]["difference"] == 0).all()


# -- loss and cost ---------------------------------------------------------------------------------


def test_loss_and_cost_pairs_seeds_and_takes_costs_from_the_timing(study):
    plotted = drawing("loss_and_cost", study).plotted
    means = plotted[plotted["mark"] == "mean over seeds"].set_index("arm")
    assert set(means.index) == set(SPEED)  # neither the reference nor what was not timed
    for arm in SPEED:
        differences = [NLL[arm][k] - NLL["transformer"][k] for k in NLL[arm]]
        row = means.loc[arm]
        assert row["value"] == pytest.approx(np.mean(differences))
        assert (row["low"], row["high"]) == pytest.approx(t_interval(differences))
        assert (row["speed"], row["memory"]) == (SPEED[arm], MEMORY[arm])
        single = plotted[(plotted["arm"] == arm) & (plotted["mark"] == "one seed")]
        assert single["value"].tolist() == pytest.approx(differences)


def test_loss_and_time_counts_time_by_the_timing_and_ignores_unshared_seeds(changed):
    before = drawing("loss_and_time", changed).plotted.set_index(["arm", "tokens"])
    assert before.loc[("transformer", TOTAL), "time"] == 1.0
    assert before.loc[("satformer", TOTAL), "time"] == pytest.approx(1 / SPEED["satformer"])
    assert before.loc[("muddformer", TOTAL // 2), "time"] == pytest.approx(0.5 / 0.5)
    ends = before.loc[("muddformer", TOTAL), ["time_low", "time_high"]].tolist()
    assert ends == pytest.approx([1 / 0.51, 1 / 0.49])
    # A hard seed that only the transformer has moves every curve alike.
    write_curves(changed, lifted=0.9)
    after = drawing("loss_and_time", changed).plotted.set_index(["arm", "tokens"])
    assert (after["value"] - before["value"]).to_numpy() == pytest.approx(0.3)


# -- gates -----------------------------------------------------------------------------------------


def relabelled(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(head=(table["head"] + 1) % 4)


def test_the_gate_map_does_not_depend_on_the_numbers_of_heads(changed):
    before = drawing("gate_map", changed).plotted
    run = collect(changed)
    found = run.results["satformer", 1, "sparsity"]
    save(changed, "satformer-seed1", "sparsity", relabelled(found.table), found.summary)
    pd.testing.assert_frame_equal(drawing("gate_map", changed).plotted, before)
    of_trained = before[(before["stat"] == "mean") & (before["state"] == "trained")]
    largest = [mock.gates(seed=k).query("layer == 3")["mean"].max() for k in range(SEEDS)]
    shown = of_trained.query("layer == 3 and rank == 0").iloc[0]
    assert shown["value"] == pytest.approx(np.mean(largest))
    assert (shown["low"], shown["high"]) == pytest.approx(t_interval(largest))


def test_open_gates_are_averaged_over_heads_then_over_seeds(study):
    found = drawing("open_gates_by_depth", study)
    plotted = found.plotted
    layers = [mock.gates(seed=k).query("layer == 5")["open_fraction"].mean() for k in range(SEEDS)]
    trained = plotted[(plotted["state"] == "trained") & (plotted["layer"] == 5)]
    assert trained[trained["mark"] == "one seed"]["value"].tolist() == pytest.approx(layers)
    mean = trained[trained["mark"] == "mean over seeds"].iloc[0]
    assert mean["value"] == pytest.approx(np.mean(layers))
    assert (mean["low"], mean["high"]) == pytest.approx(t_interval(layers))
    assert "±0.010" in found.caption  # the half-width over documents that the mock tables have


def test_categories_show_what_is_established_after_control(study):
    plotted = drawing("gates_by_category", study).plotted
    contrasts = plotted[plotted["stat"] == "delta_controlled"]
    delta = np.tile(np.linspace(-0.1, 0.1, 28), SEEDS)
    assert contrasts["value"].to_numpy() == pytest.approx(delta)
    assert contrasts["established"].tolist() == (np.abs(delta) > 0.05).tolist()
    means = plotted[(plotted["stat"] == "open_fraction") & (plotted["layer"] == 2)]
    assert set(means["category"]) == {"semantic", "functional", "structural"}
    functional = [
        mock.categories(mock.gate_cells(8, 4), k).query("layer == 2 and category == 'functional'")
        for k in range(SEEDS)
    ]
    shown = means[means["category"] == "functional"]["value"].item()
    assert shown == pytest.approx(np.mean([rows["mean"].mean() / 2 for rows in functional]))


def test_ablations_stand_beside_a_model_that_never_had_gates(changed):
    def rows(root):
        return drawing("gate_ablation", root).plotted.set_index(["arm", "kind", "scope"])

    before = rows(changed)
    zero = before.loc[("satformer", "zero", "model"), "value"].tolist()
    assert zero == pytest.approx([0.08, 0.09, 0.10])
    differences = [NLL["transformer"][k] - NLL["satformer"][k] for k in NLL["satformer"]]
    never = before.loc[[("satformer", "trained without access", "model")]].iloc[0]
    assert never["value"] == pytest.approx(np.mean(differences))
    assert (never["low"], never["high"]) == pytest.approx(t_interval(differences))
    assert len(before.loc[("satformer", "mean", "head")]) == 28 * SEEDS
    mirrored = {arm: {k: -loss for k, loss in seeds.items()} for arm, seeds in NLL.items()}
    write_losses(changed, mirrored)
    after = rows(changed).loc[[("satformer", "trained without access", "model")]].iloc[0]
    assert after["value"] == pytest.approx(-never["value"])


def test_gate_functions_are_named_by_the_recipe(study):
    plotted = drawing("gate_functions", study).plotted
    means = plotted[plotted["mark"] == "mean over seeds"].set_index("function")
    for gate in ("tanh", "sigmoid"):
        arm = NLL[f"satformer-{gate}"]
        differences = [arm[k] - NLL["satformer"][k] for k in arm]
        assert means.loc[gate, "value"] == pytest.approx(np.mean(differences))
    closed = plotted[(plotted["quantity"] == "below_0.1") & (plotted["mark"] == "trained")]
    relu = closed[closed["function"] == "relu"]["value"].tolist()
    assert relu == pytest.approx([0.6, 0.62, 0.64])


# -- every figure ----------------------------------------------------------------------------------


def texts(figure) -> list[Text]:
    """Every text that is drawn; ticks beyond the limits have labels too and are not."""
    ticks = figure.findobj(Tick)
    of_ticks = {id(label) for tick in ticks for label in (tick.label1, tick.label2)}
    found = [text for text in figure.findobj(Text) if id(text) not in of_ticks]
    for axis in figure.findobj(Axis):
        low, high = sorted(axis.get_view_interval())
        # An axis whose labels another one carries has places without labels.
        places = zip(axis.get_majorticklabels(), axis.get_majorticklocs(), strict=False)
        found += [label for label, place in places if low <= place <= high]
    return [text for text in found if text.get_visible() and text.get_text()]


@pytest.fixture(scope="module", params=NAMES)
def whole(request, study):
    """One figure of the whole study after another, drawn."""
    found = drawing(request.param, study)
    found.figure.draw(found.figure.canvas.get_renderer())
    return found


def test_no_text_covers_another_or_leaves_the_page(whole):
    figure = whole.figure
    shown = texts(figure)
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    assert len(boxes) > 5
    page = figure.bbox
    for text, box in boxes:
        assert box.x0 > page.x0 - 1 and box.x1 < page.x1 + 1, text
        assert box.y0 > page.y0 - 1 and box.y1 < page.y1 + 1, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        up = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across < 1 or up < 1, f"{one!r} over {other!r}"
    assert min(text.get_fontsize() for text in shown) >= 6.5


def test_every_axis_says_what_it_shows_and_every_mark_is_in_the_table(whole):
    axes = whole.figure.axes
    below = [
        ax for ax in axes if ax.get_subplotspec() is None or ax.get_subplotspec().is_last_row()
    ]
    assert all(
        ax.get_xlabel() or not ax.xaxis.get_visible() or ax in colour_bars(axes) for ax in below
    )
    assert whole.caption and whole.tables
    assert np.isfinite(whole.plotted["value"].astype(float)).all()


def colour_bars(axes) -> list:
    return [ax for ax in axes if ax.get_label() == "<colorbar>"]


@pytest.mark.parametrize(
    ("name", "without", "reason"),
    [
        ("loss_and_cost", "bench", "needs the timing"),
        ("loss_and_time", "bench", "needs the timing"),
        ("loss_and_cost", "comparison", "needs the comparison"),
        ("loss_and_time", "curves", "needs losses along training"),
        ("gate_functions", "comparison", "needs arms with other gate functions"),
        ("gate_map", "sparsity", "needs the sparsity"),
        ("open_gates_by_depth", "sparsity", "needs the sparsity"),
        ("gates_by_category", "categories", "needs the token categories"),
        ("gate_ablation", "ablation", "needs the ablation"),
    ],
)
def test_what_is_missing_is_said(name, without, reason, changed):
    for path in [*(changed / "results").rglob(f"{without}.*")]:
        path.unlink()
    with pytest.raises(NotDrawnError, match=reason):
        drawing(name, changed)


def test_gate_functions_without_untrained_models_and_without_shares(changed):
    for path in (changed / "results").rglob("sparsity.json"):
        found = Result.load(path.parent, "sparsity")
        gates = {"overall": {"zero_fraction": found.summary["gates"]["overall"]["zero_fraction"]}}
        save(changed, path.parent.name, "sparsity", found.table, {"gates": gates})
    found = drawing("gate_functions", changed)
    assert set(found.plotted["mark"]) == {"mean over seeds", "one seed", "trained"}
    assert "untrained" not in found.caption
    found.figure.draw(found.figure.canvas.get_renderer())
    for path in (changed / "results").rglob("sparsity.*"):
        path.unlink()
    with pytest.raises(NotDrawnError, match="needs the sparsity of arms"):
        drawing("gate_functions", changed)


@pytest.mark.parametrize("part", ["categories", "categories_contrasts"])
def test_categories_without_rows_are_not_drawn(part, changed):
    for k in range(SEEDS):
        found = Result.load(changed / "results" / f"satformer-seed{k}", "categories")
        contrasts = found.part("categories_contrasts").table
        tables = {"categories": found.table, "categories_contrasts": contrasts}
        tables[part] = tables[part].iloc[:0]
        parts = (Result("categories_contrasts", tables["categories_contrasts"]),)
        save(changed, f"satformer-seed{k}", "categories", tables["categories"], parts=parts)
    with pytest.raises(NotDrawnError, match="needs the"):
        drawing("gates_by_category", changed)
