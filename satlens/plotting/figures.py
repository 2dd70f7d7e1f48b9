"""One figure for each kind of result, composed of the pictures of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure

from satlens.errors import AnalysisError
from satlens.plotting.figures_ablation import ablation_figure, by_category_figure
from satlens.plotting.figures_arms import comparison_figure, curves_figure, evaluation_figure
from satlens.plotting.figures_attribution import attribution_figure
from satlens.plotting.figures_categories import categories_figure, contrasts_figure
from satlens.plotting.figures_circuits import circuits_figure
from satlens.plotting.figures_controls import controls_figure
from satlens.plotting.figures_cost import bench_figure
from satlens.plotting.figures_divergence import divergence_figure
from satlens.plotting.figures_drivers import drivers_figure, features_figure
from satlens.plotting.figures_routes import reads_figure, routes_figure
from satlens.plotting.figures_sites import route_weights_figure, sparsity_figure
from satlens.plotting.figures_tasks import task_differences_figure, tasks_figure
from satlens.plotting.figures_tokens import token_view_figure
from satlens.plotting.figures_trajectory import (
    categories_trajectory,
    circuits_trajectory,
    divergence_trajectory,
    evaluation_trajectory,
    routes_trajectory,
    sparsity_trajectory,
)
from satlens.plotting.style import Frame, Parts

Maker = Callable[[Frame, Mapping[str, Any], Parts], Figure]

FIGURES: dict[str, Maker] = {
    "sparsity": sparsity_figure,
    "route_weights": route_weights_figure,
    "routes": routes_figure,
    "routes_reads": reads_figure,
    "categories": categories_figure,
    "categories_contrasts": contrasts_figure,
    "categories_drivers": drivers_figure,
    "categories_sae": features_figure,
    "categories_sae_contrasts": contrasts_figure,
    "divergence": divergence_figure,
    "ablation": ablation_figure,
    "ablation_categories": by_category_figure,
    "attribution": attribution_figure,
    "circuits": circuits_figure,
    "comparison": comparison_figure,
    "controls": controls_figure,
    "curves": curves_figure,
    "evaluation": evaluation_figure,
    "bench": bench_figure,
    "token_view": token_view_figure,
    "tasks": tasks_figure,
    "task_differences": task_differences_figure,
    "trajectory_sparsity": sparsity_trajectory,
    "trajectory_routes": routes_trajectory,
    "trajectory_categories": categories_trajectory,
    "trajectory_divergence": divergence_trajectory,
    "trajectory_circuits": circuits_trajectory,
    "trajectory_evaluation": evaluation_trajectory,
}
"""By name of the result; each maker takes the table, the summary and the tables of the parts."""


def figure_for(
    result_name: str,
    table: Frame,
    summary: Mapping[str, Any] | None = None,
    parts: Parts | None = None,
) -> Figure:
    """The figure of a result, drawn from its table (and the labels in its summary) alone.

    Args:
        parts: tables that belong to the result, by name, for the pictures that use them.

    Raises:
        AnalysisError: no figure is known for a result of this name.
    """
    maker = FIGURES.get(result_name)
    if maker is None:
        known = ", ".join(FIGURES)
        raise AnalysisError(f"result {result_name!r}: no figure is known; there are {known}")
    return maker(table, summary or {}, parts or {})
