"""Marks that do not disturb the layout of a figure."""

from __future__ import annotations

from satlens.plotting.style import COLUMN, new_figure, point_range, styled


def test_a_series_without_points_leaves_the_layout_as_it_is():
    def axes_of(*, empty: bool) -> tuple[float, ...]:
        figure = new_figure(COLUMN, 2.0)
        with styled():
            _, right = figure.subplots(1, 2)
            point_range(right, [1, 2], [0.1, 0.2], [0.0, 0.1], [0.2, 0.3])
            if empty:
                point_range(right, [], [], [], [])
        figure.savefig("/dev/null", format="png")
        return right.get_position().bounds

    assert axes_of(empty=True) == axes_of(empty=False)
