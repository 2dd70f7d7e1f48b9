"""Figures of the routes of single architectures: the numbers of the tables, at their places."""

from __future__ import annotations

import map_study
import mock_tables as mock
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.text import Text

from satlens.analysis.result import Result
from satlens.plotting.style import DOUBLE, PAGE, new_figure
from satlens.plotting.weight_maps import mean_and_range, state_label, symmetric, weight_map
from satlens.report.collect import Run, collect
from satlens.report.paper_figures import Drawing, NotDrawnError, scripts

NAMES = (
    "denseformer_weights",
    "muddformer_weights",
    "hyperconnections_weights",
    "mass_and_cause",
    "effective_routes",
)


def draw(name: str, run: Run) -> Drawing:
    (script,) = scripts([name])
    return script.module.draw(run)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return map_study.write(tmp_path_factory.mktemp("maps") / "study")


@pytest.fixture(scope="module")
def run(root) -> Run:
    return collect(root)


@pytest.fixture(scope="module")
def drawings(run) -> dict[str, Drawing]:
    return {name: draw(name, run) for name in NAMES}


def table_of(root, arm: str, seed: int, name: str) -> pd.DataFrame:
    return Result.load(root / "results" / f"{arm}-seed{seed}", name).table


# -- the averages ----------------------------------------------------------------------------------


def test_the_mean_and_the_range_are_those_of_the_seeds():
    tables = {seed: pd.DataFrame({"cell": ["a", "b"], "x": x}) for seed, x in enumerate(VALUES)}
    cells = mean_and_range(tables, ["cell"], "x").set_index("cell")
    assert cells["x"].tolist() == [0.0, 2.0]
    assert cells["x_low"].tolist() == [-3.0, 1.0]
    assert cells["x_high"].tolist() == [2.0, 3.0]
    assert cells["signs_differ"].tolist() == [True, False]
    assert (cells["n_seeds"] == 3).all()


VALUES = ([1.0, 2.0], [2.0, 3.0], [-3.0, 1.0])


def test_one_seed_has_no_range_and_a_missing_cell_fewer_seeds():
    one = mean_and_range({0: pd.DataFrame({"cell": ["a"], "x": [1.0]})}, ["cell"], "x")
    assert one[["x_low", "x_high"]].isna().all(axis=None)
    tables = {0: pd.DataFrame({"cell": ["a", "b"], "x": [1.0, 5.0]})}
    tables[1] = pd.DataFrame({"cell": ["a"], "x": [3.0]})
    two = mean_and_range(tables, ["cell"], "x").set_index("cell")
    assert two["n_seeds"].to_dict() == {"a": 2, "b": 1}
    assert two["x"].to_dict() == {"a": 2.0, "b": 5.0}


def test_a_map_has_each_number_at_its_row_and_column():
    planted = np.arange(12.0).reshape(3, 4) - 5
    rows, columns = np.indices(planted.shape)
    cells = pd.DataFrame({"r": rows.ravel(), "c": columns.ravel(), "w": planted.ravel()})
    cells = cells[cells["c"] <= cells["r"] + 1]
    ax = new_figure(3, 3).subplots()
    mesh = weight_map(ax, cells, "w", row="r", column="c", norm=symmetric(cells, "w"))
    shown = np.asarray(mesh.get_array().filled(np.nan)).reshape(3, 4)
    expected = np.where(columns <= rows + 1, planted, np.nan)
    np.testing.assert_array_equal(shown, expected)
    assert ax.get_ylim() == (3, 0)  # the first row on top
    assert mesh.norm(0.0) == pytest.approx(0.5)  # zero is the middle of the colours


def test_states_are_named_after_the_layer_they_follow():
    names = ["embed", "state ..1", "state ..3", "state ..15", "block 0..3"]
    assert [state_label(name) for name in names] == ["emb", "0", "1", "7", "1"]


# -- the figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["denseformer_weights", "muddformer_weights"])
def test_weights_are_means_of_the_tables(name, drawings, root):
    arm = {"denseformer_weights": "dense", "muddformer_weights": "mudd"}[name]
    tables = [table_of(root, arm, seed, "route_weights") for seed in range(3)]
    stacked = np.stack([table["weight"] for table in tables])
    plotted = drawings[name].plotted
    assert plotted["source"].tolist() == tables[0]["source"].tolist()
    np.testing.assert_allclose(plotted["weight"], stacked.mean(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(plotted["weight_low"], stacked.min(axis=0))
    np.testing.assert_array_equal(plotted["weight_high"], stacked.max(axis=0))
    np.testing.assert_array_equal(plotted["signs_differ"], np.ptp(np.sign(stacked), axis=0) == 2)


def test_the_newest_state_stands_on_the_diagonal(drawings):
    mesh = next(each for each in drawings["denseformer_weights"].figure.findobj(QuadMesh))
    values = np.asarray(mesh.get_array().filled(-np.inf))
    values = values.reshape(map_study.N_LAYERS, -1)
    assert values.argmax(axis=1).tolist() == [1, 2, 3, 4]


def test_hyper_connections_show_streams_and_what_they_unfold_to(drawings, root):
    plotted = drawings["hyperconnections_weights"].plotted
    reads = plotted[plotted["number"] == "coefficient of an output"]
    tables = [table_of(root, "hyper", seed, "routes") for seed in range(3)]
    expected = np.mean([table["coefficient"] for table in tables], axis=0)
    np.testing.assert_allclose(reads["value"], expected, rtol=1e-12)
    streams = plotted[plotted["number"] == "weight of a stream"]
    assert len(streams) == 2 * map_study.N_LAYERS * 4
    assert set(streams["source"]) == {f"stream {k}" for k in range(4)}


def test_mass_and_cause_has_every_unit_and_its_correlation(drawings, root):
    drawing = drawings["mass_and_cause"]
    units = drawing.plotted[drawing.plotted["mass"].notna()]
    source = pd.concat([table_of(root, "rd", seed, "attribution") for seed in range(3)])
    of_arm = units[units["arm"] == "rd"]
    np.testing.assert_array_equal(of_arm["dnll"], source["dnll"])
    np.testing.assert_array_equal(of_arm["disagrees"], source["flags"] == "disagrees")
    ranks = drawing.plotted[drawing.plotted["mass"].isna()]
    assert len(ranks) == 2 * 3 * 2  # arms, seeds, what is ranked
    assert (ranks["rank_correlation"] == 0.5).all()
    said = {text.get_text() for text in drawing.figure.findobj(Text)}
    assert {"L1 head 0", "L7 head 3"} <= said  # the units that the mock tables set apart


def test_captions_say_which_units_are_coloured_and_what_the_axis_is(drawings, tmp_path):
    caption = drawings["mass_and_cause"].caption
    assert "by both intervals, on opposite sides of the median unit" in caption
    # Costs of the mock tables span four orders of magnitude.
    assert "the vertical axis is logarithmic in both directions, linear about 0" in caption
    run = Run(tmp_path, {}, ["satformer"], {"satformer": [0]})
    table = mock.attribution()
    for column in ("dnll", "dnll_low", "dnll_high"):
        table[column] = mock.np.linspace(0.1, 0.2, len(table))
    run.results["satformer", 0, "attribution"] = Result(
        "attribution", table, summary=mock.attribution_summary()
    )
    assert "logarithmic" not in draw("mass_and_cause", run).caption


def test_correlations_stand_in_the_row_of_their_checkpoint(tmp_path):
    """A checkpoint without a second-order estimate moves no other's."""
    run = Run(tmp_path, {}, ["satformer"], {"satformer": [0, 1]})
    for seed, second in ((0, None), (1, 0.9)):
        summary = mock.attribution_summary()
        if second is None:
            del summary["by_kind"]["gate"]["fisher_dnll"]
        else:
            summary["by_kind"]["gate"]["fisher_dnll"] = mock.cell(second, 0.01)
        result = Result("attribution", mock.attribution(seed=seed), summary=summary)
        run.results["satformer", seed, "attribution"] = result
    axes = draw("mass_and_cause", run).figure.axes
    (ax,) = [ax for ax in axes if _left(ax) == "Agreement, arm and seed"]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["satformer 0", "satformer 1"]
    drawn = [
        float(y)
        for line in ax.get_lines()
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
        if x == 0.9
    ]
    assert drawn and all(0.5 < y < 1.5 for y in drawn)


def test_units_that_were_only_screened_are_not_drawn(tmp_path):
    arms = {"satformer": {"variant": "satformer"}}
    run = Run(tmp_path, {"arms": arms}, ["satformer"], {"satformer": [0]})
    table = mock.attribution().assign(dnll=np.nan)
    run.results["satformer", 0, "attribution"] = Result("attribution", table)
    with pytest.raises(NotDrawnError, match="units removed exactly"):
        draw("mass_and_cause", run)


def test_effective_routes_of_every_arm_add_up_to_the_read(drawings, root):
    plotted = drawings["effective_routes"].plotted
    shares = plotted[plotted["number"] == "signed_share"]
    assert list(dict.fromkeys(shares["arm"])) == ["dense", "mudd", "hyper", "rd"]
    for arm, part in shares.groupby("arm"):
        tables = [table_of(root, arm, seed, "routes")["signed_share"] for seed in range(3)]
        np.testing.assert_allclose(part["value"], np.mean(tables, axis=0), rtol=1e-12)
    one = table_of(root, "mudd", 0, "routes")
    totals = one["signed_share"].abs().groupby([one["layer"], one["sublayer"], one["role"]]).sum()
    np.testing.assert_allclose(totals, 1.0)


def test_labels_of_layers_stand_at_their_rows(drawings):
    """A layer of mudd has five reads: q, k, v, r and the MLP's."""
    axes = [ax for ax in drawings["effective_routes"].figure.axes if ax.get_title() == "mudd"]
    axes += [ax for ax in drawings["effective_routes"].figure.axes if _left(ax) == "mudd"]
    labels = [text.get_text() for text in axes[0].get_yticklabels()]
    assert labels == ["0", "1", "2", "3", "out"]
    assert axes[0].get_yticks().tolist() == [2.5, 7.5, 12.5, 17.5, 20.5]


def _left(ax) -> str:
    return ax.get_title(loc="left")


@pytest.mark.parametrize("name", NAMES)
def test_pages_hold_the_figures_and_text_is_large_enough(name, drawings):
    figure = drawings[name].figure
    width, height = figure.get_size_inches()
    assert width <= DOUBLE and height <= PAGE + 1e-9
    small = [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_fontsize() < 6.5]
    assert not small


@pytest.mark.parametrize("name", NAMES)
def test_captions_say_how_many_seeds_there_are(name, drawings):
    assert "3 seeds" in drawings[name].caption


@pytest.mark.parametrize("name", NAMES[:3])
def test_arms_are_found_by_variant_and_a_study_without_them_says_so(name, run, tmp_path):
    other = Run(
        tmp_path, {"arms": {"dense": {"variant": "transformer"}}}, ["dense"], {"dense": [0]}
    )
    other.results["dense", 0, "sparsity"] = run.results["dense", 0, "sparsity"]
    with pytest.raises(NotDrawnError, match="needs the sparsity of an arm of variant"):
        draw(name, other)


def test_one_seed_is_enough_and_is_said_to_be_one(tmp_path):
    single = collect(map_study.write(tmp_path / "single", seeds=1))
    for name in ("denseformer_weights", "mass_and_cause"):
        drawing = draw(name, single)
        assert "one seed" in drawing.caption or "1 seed" in drawing.caption
        assert not drawing.plotted.get("signs_differ", pd.Series(dtype=bool)).eq(True).any()


def test_routes_without_rows_are_not_drawn(run, tmp_path):
    whole = run.results["dense", 0, "routes"]
    empty = Result("routes", whole.table.iloc[:0], parts=whole.parts)
    bare = Run(tmp_path, {}, ["dense"], {"dense": [0]}, {("dense", 0, "routes"): empty})
    with pytest.raises(NotDrawnError, match="needs the routes"):
        draw("effective_routes", bare)
