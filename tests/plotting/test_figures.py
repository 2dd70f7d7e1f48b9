"""Figures are made from tables alone, for every shape of table, and always the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mock_tables as mock
import mock_tasks
import numpy as np
import pandas as pd
import pytest

from satlens.errors import AnalysisError
from satlens.plotting import FORMATS, figure_for, picture_bytes
from satlens.plotting.figures import FIGURES
from satlens.plotting.heatmaps import Span, span_of
from satlens.plotting.style import COLUMN, DOUBLE, carries


def no_intervals(table):
    ends = [name for name in table if name.endswith(("_low", "_high"))]
    return table.assign(**dict.fromkeys(ends, np.nan))


def static(table):
    return table.assign(flags="static", mean=-0.3)


def trajectories(gates, routes, contrasts) -> dict:
    effective = mock.effective_routes()
    reads = {"trajectory_routes_reads": mock.along(mock.effective_reads(effective))}
    shifts = {"trajectory_categories_contrasts": mock.along(contrasts)}
    losses = {"0": {"nll": mock.cell(7.6)}, "9000": {"nll": {**mock.cell(5.0), "low": None}}}
    signed = mock.signed_routes(mock.signed_route_weights("states"))
    pairs = mock.along(mock.divergence())
    return {
        "gates over training": ("trajectory_sparsity", mock.along(gates), {}, {}),
        "static gates over training": ("trajectory_sparsity", mock.along(static(gates)), {}, {}),
        "routes over training": ("trajectory_sparsity", mock.along(routes), {}, {}),
        "signed routes over training": ("trajectory_sparsity", mock.along(signed), {}, {}),
        "the untrained model alone": ("trajectory_sparsity", mock.along(gates, (0,)), {}, {}),
        "without milestones": ("trajectory_sparsity", mock.along(gates, (600,)), {}, {}),
        "nothing over training": ("trajectory_sparsity", mock.along(gates).iloc[:0], {}, {}),
        "effective routes over training": ("trajectory_routes", mock.along(effective), {}, reads),
        "divergence over training": ("trajectory_divergence", pairs, {}, {}),
        "contrasts over training": ("trajectory_categories", mock.along(gates), {}, shifts),
        "categories without contrasts": ("trajectory_categories", mock.along(gates), {}, {}),
        "circuits over training": ("trajectory_circuits", mock.along(mock.circuits()), {}, {}),
        "losses over training": (
            "trajectory_evaluation",
            mock.along(mock.evaluation()[0]),
            {"tokens_seen": [0, 9000], "checkpoints": losses},
            {},
        ),
        "no losses": ("trajectory_evaluation", mock.along(mock.evaluation()[0]), {}, {}),
    }


def task_cases() -> dict:
    retrieval, (model, closed) = mock_tasks.RETRIEVAL, (mock_tasks.MODEL, mock_tasks.CLOSED)
    scores = {model: dict.fromkeys(retrieval, 0.5), closed: dict.fromkeys(retrieval, 0.3)}
    shares = mock_tasks.group(mock_tasks.tasks(scores, chance=0.0, n_truncated=3, n_skipped=1))
    lost = mock_tasks.task_differences(dict.fromkeys(retrieval, -0.2) | {"nq": 0.01})
    perplexity = mock_tasks.tasks(
        {model: {"wikitext": 900.0}, closed: {"wikitext": 950.0}},
        metric="word_perplexity",
        chance=np.nan,
        half=20.0,
    )
    dearer = mock_tasks.task_differences({"wikitext": 50.0}, metric="word_perplexity", half=20.0)
    models = {
        f"model {k}": dict.fromkeys([*retrieval, *mock_tasks.ZERO_SHOT], 0.1 * k) for k in range(7)
    }
    mixed = {"task_differences": pd.concat([lost, dearer], ignore_index=True)}
    empty = mock_tasks.task_differences({})
    return {
        "tasks and what they lose": ("tasks", shares, {}, {"task_differences": lost}),
        "tasks of one model": ("tasks", mock_tasks.tasks({model: {"mqar": 0.2}}), {}, {}),
        "tasks of two units": ("tasks", pd.concat([shares, perplexity]), {}, mixed),
        "tasks of seven models": ("tasks", mock_tasks.tasks(models), {}, {}),
        "tasks without intervals": ("tasks", no_intervals(shares), {}, {"task_differences": empty}),
        "no tasks": ("tasks", shares.iloc[:0], {}, {}),
        "differences on tasks": ("task_differences", mixed["task_differences"], {}, {}),
        "undefined differences": ("task_differences", lost.assign(delta=np.nan), {}, {}),
        "no differences on tasks": ("task_differences", empty, {}, {}),
        **token_cases(),
    }


def token_cases() -> dict:
    def case(result) -> tuple:
        parts = {part.name: part.table for part in result.parts}
        return ("token_view", result.table, result.summary, parts)

    intervened, alone = (mock_tasks.token_result(intervened=flag) for flag in (True, False))
    many = mock_tasks.token_result((("a",) * 2000,), n_layers=9, n_heads=32)
    single = mock_tasks.token_result((("a",),))
    results = {"intervened": intervened, "alone": alone, "many": many, "single": single}
    return {f"tokens, {name}": case(result) for name, result in results.items()}


def cases() -> dict:
    gates, weights = mock.gates(), mock.route_weights()
    routes, cells = mock.routes(weights), mock.gate_cells(8, 4)
    delta = np.linspace(-0.2, 0.2, len(cells))
    contrasts = mock.contrasts(cells, delta, delta / 2)
    read_cells = routes[["site", "layer", "sublayer", "role", "head", "kind"]]
    read_delta = np.linspace(-0.1, 0.1, len(read_cells))
    kinds = {"zero": 0.07, "mean": 0.04, "shuffle": -0.05}
    pairs = {("satformer", "transformer"): (-0.047, -0.045)}
    evaluation = mock.evaluation()
    states, streams = (mock.signed_route_weights(kind) for kind in ("states", "streams"))
    pairs_of_roles = [f"attn {pair}" for pair in ("q|k", "q|v", "q|r", "k|v", "k|r", "v|r")]
    several = [mock.divergence().assign(comparison=name) for name in pairs_of_roles]
    several = pd.concat(several, ignore_index=True)
    return {
        "gates": ("sparsity", gates, {}, {}),
        "gates without a baseline": ("sparsity", gates.drop(columns=["mean_init"]), {}, {}),
        "gates without intervals": ("sparsity", no_intervals(gates), {}, {}),
        "one gated layer and one head": ("sparsity", mock.gates(2, 1, 0), {}, {}),
        "all heads dead": ("sparsity", mock.gates(3, 2, 4), {}, {}),
        "32 layers of 32 heads": ("sparsity", mock.gates(32, 32), {}, {}),
        "signed gates": ("sparsity", gates.assign(mean=gates["mean"] - 0.5), {}, {}),
        "static gates": ("sparsity", static(gates), {}, {}),
        "routes": ("sparsity", routes, {}, {"route_weights": weights}),
        "routes without their weights": ("sparsity", routes, {}, {}),
        "one layer of routes": ("sparsity", mock.routes(mock.route_weights(1)), {}, {}),
        "no sites": ("sparsity", gates.iloc[:0], {}, {}),
        "route weights": ("route_weights", weights, {}, {}),
        "deep route weights": ("route_weights", mock.route_weights(32, False), {}, {}),
        "signed routes over states": (
            "sparsity",
            mock.signed_routes(states),
            {},
            {"route_weights": states},
        ),
        "routes over streams": (
            "sparsity",
            mock.signed_routes(streams),
            {},
            {"route_weights": streams},
        ),
        "gates above signed routes": (
            "sparsity",
            pd.concat([gates, mock.signed_routes(states)], ignore_index=True),
            {},
            {"route_weights": states},
        ),
        "effective routes": ("routes", mock.effective_routes(), {}, {}),
        "effective routes of four roles": ("routes", mock.effective_routes(roles="qkvr"), {}, {}),
        "effective routes of 32 layers": ("routes", mock.effective_routes(32, "qkvr"), {}, {}),
        "effective routes of one layer": ("routes", mock.effective_routes(1), {}, {}),
        "reads": ("routes_reads", mock.effective_reads(mock.effective_routes()), {}, {}),
        "divergence of six pairs": ("divergence", several, {}, {}),
        "categories": (
            "categories",
            mock.categories(cells),
            {},
            {"categories_contrasts": contrasts},
        ),
        "categories of reads": ("categories", mock.categories(read_cells), {}, {}),
        "categories and drivers": (
            "categories",
            mock.categories(cells),
            {},
            {"categories_drivers": mock.drivers(cells)},
        ),
        "several breakdowns": (
            "categories",
            pd.concat([mock.categories(cells).assign(by="category"), mock.parts_of_speech(cells)]),
            {},
            {},
        ),
        "parts of speech of reads": ("categories", mock.parts_of_speech(read_cells), {}, {}),
        "drivers": ("categories_drivers", mock.drivers(cells), {}, {}),
        "drivers of 8 heads": ("categories_drivers", mock.drivers(mock.gate_cells(8, 8)), {}, {}),
        "drivers of reads": ("categories_drivers", mock.drivers(read_cells), {}, {}),
        "drivers without variance": (
            "categories_drivers",
            mock.drivers(cells).assign(r2=np.nan),
            {},
            {},
        ),
        "features": ("categories_sae", mock.features(), {}, {}),
        "features without gates": (
            "categories_sae",
            mock.features(2).drop(columns=["layer", "mean"]),
            {},
            {},
        ),
        "contrasts of features": ("categories_sae_contrasts", contrasts, {}, {}),
        "contrasts": ("categories_contrasts", contrasts, {}, {}),
        "contrasts without intervals": ("categories_contrasts", no_intervals(contrasts), {}, {}),
        "contrasts of reads": (
            "categories_contrasts",
            mock.contrasts(read_cells, read_delta, read_delta),
            {},
            {},
        ),
        "contrasts of 32 x 32 heads": (
            "categories_contrasts",
            mock.contrasts(mock.gate_cells(32, 32), np.zeros(992), np.zeros(992)),
            {},
            {},
        ),
        "divergence": ("divergence", mock.divergence(), {}, {}),
        "divergence of one layer": ("divergence", mock.divergence(1), {}, {}),
        "undefined divergence": (
            "divergence",
            mock.divergence().assign(js_token=np.nan, js_mean=np.nan),
            {},
            {},
        ),
        "ablation": ("ablation", mock.ablation(kinds), {}, {}),
        "ablation without effect": ("ablation", mock.ablation({"zero": 0.0}), {}, {}),
        "ablation of routes": ("ablation", mock.ablation(kinds, target="route"), {}, {}),
        "ablation of the model alone": (
            "ablation",
            mock.ablation(kinds).query("scope == 'model'"),
            {},
            {},
        ),
        "ablation without intervals": ("ablation", no_intervals(mock.ablation(kinds)), {}, {}),
        "ablation of 32 x 32 heads": ("ablation", mock.ablation(kinds, 32, 32), {}, {}),
        "ablation of sources": ("ablation", mock.ablation_of_sources(), {}, {}),
        "ablation of one source": ("ablation", mock.ablation_of_sources(("embedding",)), {}, {}),
        "ablation of streams": (
            "ablation",
            mock.ablation_of_sources(tuple(f"stream {k}" for k in range(4)), 24),
            {},
            {},
        ),
        "ablation of components": ("ablation", mock.ablation_of_components(), {}, {}),
        "ablation of components by role": (
            "ablation",
            mock.ablation_of_components(4, ("q", "k", "v", "r")),
            {},
            {},
        ),
        "ablation of everything": (
            "ablation",
            pd.concat(
                [
                    mock.ablation(kinds),
                    mock.ablation(kinds, target="route"),
                    mock.ablation_of_sources(),
                    mock.ablation_of_components(),
                ]
            ),
            {},
            {},
        ),
        "ablation by category": (
            "ablation_categories",
            mock.ablation_by_category(mock.ablation(kinds)),
            {},
            {},
        ),
        "ablation of layers by category": (
            "ablation_categories",
            mock.ablation_by_category(mock.ablation(kinds).query("scope == 'layer'")),
            {},
            {},
        ),
        "ablation of heads by category": (
            "ablation_categories",
            mock.ablation_by_category(mock.ablation(kinds).query("scope == 'head'")),
            {},
            {},
        ),
        "mass and cost": ("attribution", mock.attribution(), mock.attribution_summary(), {}),
        "mass and cost of both kinds": (
            "attribution",
            pd.concat([mock.attribution(), mock.attribution("route")], ignore_index=True),
            mock.attribution_summary("route"),
            {},
        ),
        "mass and cost without intervals": (
            "attribution",
            no_intervals(mock.attribution()),
            {},
            {},
        ),
        "mass and screen": ("attribution", mock.attribution().assign(dnll=np.nan), {}, {}),
        "mass and cost of nothing": (
            "attribution",
            mock.attribution().assign(dnll=0.0, attribution=0.0, fisher=0.0),
            {},
            {},
        ),
        "one unit": ("attribution", mock.attribution(n=1), {}, {}),
        "circuits": ("circuits", mock.circuits(), {}, {}),
        "circuits without intervals": ("circuits", no_intervals(mock.circuits()), {}, {}),
        "circuits of one layer with V_1": ("circuits", mock.circuits(3, 1, 2), {}, {}),
        "circuits of 32 x 32 heads": ("circuits", mock.circuits(32, 32), {}, {}),
        "circuits without V_1": ("circuits", mock.circuits(2, 2, 2), {}, {}),
        "comparison": ("comparison", mock.comparison(pairs), {"noise_floor": 0.01}, {}),
        "comparison of one seed": ("comparison", mock.comparison({("a", "b"): (0.1,)}), {}, {}),
        "controls": ("controls", mock.controls(), {}, {}),
        "controls, some missed": ("controls", mock.controls(3), {}, {}),
        "controls, all missed": ("controls", mock.controls(15), {}, {}),
        "controls without intervals": ("controls", no_intervals(mock.controls()), {}, {}),
        "no controls": ("controls", mock.controls().iloc[:0], {}, {}),
        "curves": ("curves", mock.curves(), {"reference": "transformer"}, {}),
        "one curve": ("curves", mock.curves(("satformer",), 1), {}, {}),
        "evaluation": ("evaluation", *evaluation, {}),
        "bench": ("bench", mock.bench(), {"noise_floor": [0.99, 1.0, 1.01]}, {}),
        **trajectories(gates, routes, contrasts),
        **task_cases(),
        "evaluation of one document": ("evaluation", mock.evaluation(n=1)[0], {}, {}),
    }


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", cases())
def test_every_shape_of_table_gives_a_figure_of_one_or_two_columns(name: str) -> None:
    figure = figure_for(*cases()[name])
    width, height = figure.get_size_inches()
    assert COLUMN <= width <= DOUBLE
    assert height <= 9.0
    assert picture_bytes(figure, dpi=60).startswith(b"\x89PNG")


def test_every_analysis_has_a_figure_and_an_unknown_result_is_one_line() -> None:
    drawn = {result for result, *_ in cases().values()}
    assert drawn == set(FIGURES)
    with pytest.raises(AnalysisError, match="'nothing': no figure is known; there are sparsity"):
        figure_for("nothing", mock.divergence())


def test_files_are_the_same_bytes_on_a_rebuild_and_carry_no_date() -> None:
    contents = []
    for _ in range(2):
        figure = figure_for("divergence", mock.divergence(), {})
        contents.append([picture_bytes(figure, kind) for kind in FORMATS])
    assert contents[0] == contents[1]
    png, pdf = contents[0]
    assert b"Software" not in png
    assert b"CreationDate" not in pdf


def test_no_figure_is_left_in_pyplot_and_no_style_leaks() -> None:
    code = (
        "import sys, matplotlib as mpl; sys.path.insert(0, 'tests')\n"
        # Reading the backend would load pyplot.
        "style = lambda: {k: mpl.rcParams[k] for k in mpl.rcParams if k != 'backend'}\n"
        "before = style()\n"
        "import mock_tables as mock; from satlens.plotting import figure_for, picture_bytes\n"
        "picture_bytes(figure_for('divergence', mock.divergence()))\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules\n"
        "assert style() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def drawn_text(figure) -> list[str]:
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def test_dead_heads_are_crossed_out_and_not_given_a_number() -> None:
    alive = figure_for("sparsity", mock.gates(8, 4, n_dead=0))
    dead = figure_for("sparsity", mock.gates(8, 4, n_dead=2))
    assert "crossed out: never open on the data" in drawn_text(dead)
    assert "crossed out: never open on the data" not in drawn_text(alive)


def test_intervals_are_drawn_where_there_are_any() -> None:
    from matplotlib.collections import LineCollection

    def segments(figure) -> int:
        return sum(len(lines.get_segments()) for lines in figure.findobj(LineCollection))

    table = mock.divergence()
    bare = figure_for("divergence", no_intervals(table))
    # Two aggregations of eight layers.
    assert segments(figure_for("divergence", table)) == segments(bare) + 16


def test_negative_effects_are_written_as_they_are() -> None:
    text = drawn_text(figure_for("ablation", mock.ablation({"zero": -0.123})))
    assert "\N{MINUS SIGN}0.123" in text


@pytest.mark.parametrize(
    ("label", "span"),
    [
        ("embed", Span("embedding", -1, -1)),
        ("block 4..7", Span("block", 4, 7)),
        ("partial 8..8", Span("partial", 8, 8)),
        ("V_1", None),
    ],
)
def test_source_labels_are_read_as_spans_of_sublayers(label: str, span: Span | None) -> None:
    assert span_of(label) == span


def test_source_labels_are_those_of_the_models() -> None:
    from satlens.models.sites import EMBEDDING, Source

    assert span_of(EMBEDDING.label) == Span("embedding", -1, -1)
    assert span_of(Source(kind="partial", first=2, last=3).label) == Span("partial", 2, 3)


def test_flags_of_one_statistic_are_told_from_those_of_another() -> None:
    table = mock.divergence(3).assign(flags=["few;constant", "js_mean:constant", ""])
    assert carries(table, "constant", "js_mean").tolist() == [True, True, False]
    assert carries(table, "constant", "js_token").tolist() == [True, False, False]


def test_a_task_stands_beside_its_chance_and_says_what_was_cut_or_left_out() -> None:
    scores = {mock_tasks.MODEL: {"piqa": 0.6, "mqar": 0.2}}
    text = drawn_text(figure_for("tasks", mock_tasks.tasks(scores, n_truncated=3, n_skipped=1)))
    assert "piqa, 3 cut short, 1 left out" in text
    assert "chance" in text
    bare = drawn_text(figure_for("tasks", mock_tasks.tasks(scores, chance=np.nan)))
    assert "piqa" in bare
    assert "chance" not in bare


def test_a_difference_that_its_interval_does_not_establish_is_hollow() -> None:
    table = mock_tasks.task_differences({"a": -0.2, "b": 0.01, "c": 0.2}, half=0.05)
    axes = figure_for("task_differences", table).axes[0]
    points = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
    fills = {tuple(line.get_xdata()): line.get_markerfacecolor() for line in points}
    assert fills == {(-0.2, 0.2): fills[-0.2, 0.2], (0.01,): "white"}
    assert fills[-0.2, 0.2] != "white"
