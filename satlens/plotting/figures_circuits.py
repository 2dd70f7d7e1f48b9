"""What each head takes from V_1: its say on the next token, its circuit, its pattern."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from satlens.plotting.heatmaps import colour_bar, head_map, limits_of
from satlens.plotting.intervals import heads_by_layer
from satlens.plotting.style import (
    DOUBLE,
    PAGE,
    Frame,
    Panel,
    Parts,
    colour,
    stacked,
    zero_line,
)

_V_1 = "V\N{SUBSCRIPT ONE}"
_EFFECT = "_gate_effect"
_SCORES = {"induction": "Induction", "previous_token": "Previous token"}


def circuits_figure(table: Frame, summary: Mapping[str, Any], parts: Parts) -> Figure:
    """Maps over (layer, query head) and the direct attributions with their intervals.

    Columns: ``layer, head, dla_v_first, dla_rest, share, copying_eigenvalues`` and, of each score,
    ``<score>, <score>_gate_effect``. Layers that mix no V_1 have no V_1 statistics.
    """
    mixing = table[table["dla_v_first"].notna()]
    height = min(3.6, 1.05 + 0.19 * max(table["layer"].nunique(), 1))
    panels: list[Panel] = []
    if len(mixing):
        panels = [
            (2.0, lambda where: _attributions(where, table, mixing)),
            (height, lambda where: _carried(where, mixing)),
        ]
    if len(table):
        panels.append((height, lambda where: _patterns(where, table)))
    scale = min(1.0, PAGE / sum(tall for tall, _ in panels)) if panels else 1.0
    return stacked([(scale * tall, fill) for tall, fill in panels], width=DOUBLE, empty="no heads")


def _attributions(where: Any, table: Frame, mixing: Frame) -> None:
    """Direct attribution to the next token of the V_1 part and of the rest, each on its scale."""
    series = (
        (mixing, "dla_v_first", f"Heads: from {_V_1}"),
        (table, "dla_rest", "Heads: the rest"),
    )
    for number, (ax, (rows, stat, title)) in enumerate(
        zip(where.subplots(1, 2), series, strict=True)
    ):
        heads_by_layer(ax, rows, stat, colour_=colour(number))
        zero_line(ax)
        ax.set_title(f"{title}, 95 % intervals")
        ax.set_ylabel("logit of the next token" if number == 0 else "")


def _carried(where: Any, mixing: Frame) -> None:
    axes = where.subplots(1, 3)
    shown = mixing.assign(dla=100 * mixing["dla_v_first"])
    drawn = (
        ("dla", f"Direct attribution of {_V_1}", "hundredths of a logit", True, None),
        ("share", f"{_V_1}'s share of the size", "share", False, (0.0, 1.0)),
        ("copying_eigenvalues", f"Copying by {_V_1}'s circuit", "eigenvalues", True, (-1.0, 1.0)),
    )
    for ax, (stat, title, label, signed, limits) in zip(axes, drawn, strict=True):
        limits = limits or limits_of([shown], [stat], signed)
        _map(ax, shown, stat, limits, signed, title, label)
        if ax is not axes[0]:
            ax.set_ylabel("")


def _patterns(where: Any, table: Frame) -> None:
    """Scores of patterns, and what gates do to them, in per cent of a query's attention."""
    axes = where.subplots(1, 4)
    names = [name + suffix for name in _SCORES for suffix in ("", _EFFECT)]
    shown = table.assign(**{name: 100 * table[name].astype(float) for name in names})
    for ax, name in zip(axes, names, strict=True):
        effect = name.endswith(_EFFECT)
        title = _SCORES[name.removesuffix(_EFFECT)]
        title += "\non minus off" if effect else "\ngates on"
        limits = limits_of([shown], [n for n in names if n.endswith(_EFFECT) == effect], effect)
        label = "difference (%)" if effect else "attention (%)"
        _map(ax, shown, name, limits, effect, title, label)
        if ax is not axes[0]:
            ax.set_ylabel("")


def _map(
    ax: Any,
    table: Frame,
    stat: str,
    limits: tuple[float, float],
    signed: bool,
    title: str,
    label: str,
) -> None:
    mesh = head_map(ax, table, stat, limits=limits, signed=signed, title=title)
    ax.set_xlabel("query head")
    colour_bar([ax], mesh, label)
