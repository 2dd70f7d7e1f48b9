"""Figures of AttnRes and RD-AttnRes: every mark against the tables, and what is not drawn."""

from __future__ import annotations

import shutil
from functools import cache

import mock_tables as mock
import numpy as np
import pandas as pd
import pytest
import route_study
from scipy import stats

from satlens.analysis.result import Result
from satlens.plotting.paired import BOOTSTRAP, IDENTITY, SEED, T, is_cut, limits
from satlens.report.collect import collect
from satlens.report.paper_figures import NotDrawnError, scripts


def drawn(root, name):
    (script,) = scripts([name])
    return script.module.draw(collect(root))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return route_study.write(tmp_path_factory.mktemp("routes") / "study")


@pytest.fixture(scope="module")
def drawing(study):
    """Drawings of the whole study, each made once."""
    run = collect(study)
    return cache(lambda name: scripts([name])[0].module.draw(run))


@pytest.fixture
def own_study(study, tmp_path):
    return shutil.copytree(study, tmp_path / "study")


def student(values) -> tuple[float, float]:
    found = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return found.low, found.high


def chosen(table, **where):
    for column, value in where.items():
        table = table[table[column] == value]
    return table


# -- paired differences ----------------------------------------------------------------------------


def test_milestones_are_paired_by_seed_with_both_intervals(drawing):
    plotted = drawing("seeds_and_milestones").plotted
    losses = route_study.losses()
    for at, tokens in enumerate(route_study.TOKENS):
        here = chosen(plotted, first="split", second="parent", tokens=tokens)
        changes = [losses["split", k][at] - losses["parent", k][at] for k in range(6)]
        assert chosen(here, mark=SEED)["value"].tolist() == pytest.approx(changes)
        t, bootstrap = chosen(here, mark=T).iloc[0], chosen(here, mark=BOOTSTRAP).iloc[0]
        assert (t["low"], t["high"]) == pytest.approx(student(changes))
        assert t["value"] == bootstrap["value"] == pytest.approx(np.mean(changes))
        assert min(changes) < bootstrap["low"] < bootstrap["value"] < bootstrap["high"]
        assert t["low"] < bootstrap["low"] < bootstrap["high"] < t["high"]  # six seeds are few


def test_final_differences_are_those_of_the_comparison(study, drawing):
    plotted = drawing("seeds_and_milestones").plotted
    final = plotted[plotted["tokens"].isna()]
    for _, row in collect(study).study["comparison"].table.iterrows():
        here = chosen(final, first=row["first"], second=row["second"])
        if row["n_seeds"] == 1:
            assert here.empty
            continue
        t = chosen(here, mark=T).iloc[0]
        ends = [row[f"difference{end}"] for end in ("", "_low", "_high")]
        assert t[["value", "low", "high"]].tolist() == pytest.approx(ends)
        assert len(chosen(here, mark=SEED)) == row["n_seeds"]
        assert len(chosen(here, mark=BOOTSTRAP)) == (row["n_seeds"] >= 5)


def test_seeds_of_their_own_are_no_contrast(own_study):
    table = route_study.comparison(route_study.losses())
    route_study.save_comparison(own_study, table[table["n_seeds"] < 2])
    with pytest.raises(NotDrawnError, match="two seeds"):
        drawn(own_study, "seeds_and_milestones")
    (own_study / "results" / "curves.csv").unlink()
    (own_study / "results" / "curves.json").unlink()
    with pytest.raises(NotDrawnError, match="curves"):
        drawn(own_study, "seeds_and_milestones")


def test_controls_stand_against_the_parent_and_the_tied_one_is_the_parent(drawing):
    found = drawing("route_controls")
    plotted = found.plotted
    (tied,) = chosen(plotted, mark=IDENTITY).to_dict("records")
    assert (tied["first"], tied["second"], tied["value"]) == ("tied", "parent", 0.0)
    assert pd.isna(tied["low"])
    means = chosen(plotted, mark=T).set_index(["first", "second"])["value"]
    assert list(means.index) == [
        ("split", "parent"),
        ("mixed", "parent"),
        ("even", "parent"),
        ("split", "mixed"),
        ("split", "even"),
    ]
    losses = route_study.losses()
    changes = [losses["split", k][-1] - losses["even", k][-1] for k in (0, 1)]
    assert means["split", "even"] == pytest.approx(np.mean(changes))
    assert "2 or 6" in found.caption


def test_no_controls_no_figure_of_controls(own_study):
    table = route_study.comparison(route_study.losses())
    route_study.save_comparison(own_study, table[table["first"].isin(["parent", "split"])][:2])
    with pytest.raises(NotDrawnError, match="controls"):
        drawn(own_study, "route_controls")


def test_wide_intervals_of_two_seeds_leave_the_axis_and_are_said_to():
    marks = pd.DataFrame(
        {"mark": [SEED, SEED, T], "value": [0.01, 0.03, 0.02], "n_seeds": 2, "row": 0}
    ).assign(low=[np.nan, np.nan, -0.11], high=[np.nan, np.nan, 0.15])
    low, high = limits(marks)
    assert -0.01 < low < 0 < 0.03 < high < 0.04
    assert is_cut(marks)
    many = marks.assign(n_seeds=6)
    assert limits(many)[0] < -0.11
    assert not is_cut(many)


# -- divergence ------------------------------------------------------------------------------------


def test_divergence_shows_every_seed_its_interval_and_the_mean_over_layers(study, drawing):
    plotted = drawing("route_divergence").plotted
    tables = {k: result.table for k, result in collect(study).of("divergence")["split"].items()}
    for stat in ("js_token", "js_mean"):
        seeds = chosen(plotted, stat=stat, mark="seed")
        for k, table in tables.items():
            inside = seeds[(seeds["seed"] == k) & (seeds["layer"] != "layers' mean")]
            for ours, theirs in (("value", ""), ("low", "_low"), ("high", "_high")):
                assert inside[ours].tolist() == pytest.approx(table[stat + theirs].tolist())
        of_reads = [table.loc[table["n_sources"] > 1, stat].mean() for table in tables.values()]
        whole = chosen(plotted, stat=stat, mark="mean of seeds", layer="layers' mean").iloc[0]
        assert whole["value"] == pytest.approx(np.mean(of_reads))
        assert (whole["low"], whole["high"]) == pytest.approx(student(of_reads))
        assert (chosen(plotted, stat=stat, mark="untrained")["value"] == 0).all()


def test_divergence_over_sublayers_is_another_figure(own_study):
    for seed in range(route_study.ANALYSED):
        table = mock.divergence(4)
        route_study.save_divergence(own_study, "split", seed, table, over="sublayers")
    with pytest.raises(NotDrawnError, match="same sources"):
        drawn(own_study, "route_divergence")


def test_units_of_divergence_do_not_mix(own_study):
    path = own_study / "results" / "split-seed1" / "divergence.json"
    path.write_text(path.read_text().replace('"nats"', '"bits"'))
    with pytest.raises(NotDrawnError, match="one unit"):
        drawn(own_study, "route_divergence")


# -- maps ------------------------------------------------------------------------------------------


def test_maps_of_both_roles_are_distributions_and_their_difference_sums_to_zero(drawing):
    plotted = drawing("route_maps").plotted
    assert list(dict.fromkeys(plotted["arm"])) == ["split", "mixed", "even"]
    sums = plotted.groupby(["route", "arm", "layer"])["weight"].sum()
    assert sums["qk"].to_numpy() == pytest.approx(1)
    assert sums["v"].to_numpy() == pytest.approx(1)
    assert sums["v - qk"].to_numpy() == pytest.approx(0)
    wide = plotted.pivot(index=["arm", "layer", "source"], columns="route", values="weight")
    assert (wide["v"] - wide["qk"]).to_numpy() == pytest.approx(wide["v - qk"].to_numpy())


def test_a_cell_whose_seeds_disagree_is_marked(drawing):
    made = drawing("route_maps")
    differences = chosen(made.plotted, route="v - qk")
    rings = [line for ax in made.figure.axes for line in ax.lines if line.get_marker() == "o"]
    assert len(rings) == differences["signs_differ"].sum()
    assert "In mixed, queries, keys and values all read the average" in made.caption
    difference = chosen(differences, arm="split")
    found = []
    for seed in range(route_study.ANALYSED):
        table = chosen(route_study.weights("split", seed), sublayer="attn")
        wide = table.pivot(index=["layer", "source"], columns="role", values="weight")
        found.append(wide["v"] - wide["qk"])
    seeds = pd.concat(found, axis=1).loc[
        list(zip(difference["layer"], difference["source"], strict=True))
    ]
    disagree = ((seeds > 0).any(axis=1) & (seeds < 0).any(axis=1)).to_numpy()
    assert difference["signs_differ"].to_numpy(dtype=bool).tolist() == disagree.tolist()
    assert disagree.any()
    assert not disagree.all()
    assert difference["weight_low"].to_numpy() == pytest.approx(seeds.min(axis=1).to_numpy())


def test_attnres_maps_have_both_reads_and_leave_split_routes_to_their_own_figure(drawing):
    found = drawing("attnres_routes")
    plotted = found.plotted
    assert list(dict.fromkeys(plotted["arm"])) == ["parent", "delta"]
    assert set(chosen(plotted, arm="parent")["sublayer"]) == {"attn", "mlp", "out"}
    sums = plotted.groupby(["arm", "sublayer", "layer"])["weight"].sum()
    assert sums.to_numpy() == pytest.approx(1)
    cell = chosen(plotted, arm="parent", sublayer="out").iloc[0]
    tables = [route_study.weights("parent", seed) for seed in range(route_study.ANALYSED)]
    seeds = [chosen(t, sublayer="out", source=cell["source"])["weight"].item() for t in tables]
    assert cell["weight"] == pytest.approx(np.mean(seeds))
    widest = plotted.loc[(plotted["weight_high"] - plotted["weight_low"]).idxmax()]
    assert f"from {widest['weight_low']:.2f} to {widest['weight_high']:.2f}" in found.caption
    assert "In delta the mixture is added" in found.caption


def test_without_routes_no_maps(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    (root / "plan.json").write_text('{"recipe": {"arms": {}}}')
    for name in ("route_maps", "attnres_routes", "route_divergence"):
        with pytest.raises(NotDrawnError, match="needs"):
            drawn(root, name)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("seeds_and_milestones", "(nats/token)"),
        ("route_controls", "(nats/token)"),
        ("route_divergence", "(nats)"),
        ("route_maps", "(cells: %)"),
        ("attnres_routes", "(cells: %)"),
    ],
)
def test_axes_name_their_units_and_text_is_readable(drawing, name, unit):
    from matplotlib.text import Text

    figure = drawing(name).figure
    written = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert any(unit in text.get_text() for text in written)
    assert min(text.get_fontsize() for text in written) >= 5.5
    assert figure.get_figwidth() <= 6.9
    assert figure.get_figheight() <= 8.9


def _rewritten(study, name, change):
    """Every table of an analysis changed, with its parts."""
    for path in (study / "results").rglob(f"{name}.json"):
        found = Result.load(path.parent, name)
        parts = [Result(p.name, change(p.table), p.provenance) for p in found.parts]
        made = Result(
            name, change(found.table), found.provenance, found.summary, parts=tuple(parts)
        )
        made.save(path.parent, figures=False)


@pytest.mark.parametrize(
    ("name", "analysis"), [("attnres_routes", "sparsity"), ("route_divergence", "divergence")]
)
def test_without_untrained_models_their_marks_are_left_out(name, analysis, own_study, drawing):
    _rewritten(own_study, analysis, lambda table: table[[c for c in table if "_init" not in c]])
    found, whole = drawn(own_study, name), drawing(name)
    assert "ntrained" in whole.caption and "ntrained" not in found.caption
    found.figure.draw(found.figure.canvas.get_renderer())
    if "mark" in found.plotted:
        assert set(whole.plotted["mark"]) - set(found.plotted["mark"]) == {"untrained"}


@pytest.mark.parametrize(
    ("name", "analysis"), [("attnres_routes", "sparsity"), ("route_divergence", "divergence")]
)
def test_tables_without_rows_are_not_drawn(name, analysis, own_study):
    _rewritten(own_study, analysis, lambda table: table.iloc[:0])
    with pytest.raises(NotDrawnError, match="needs the"):
        drawn(own_study, name)
