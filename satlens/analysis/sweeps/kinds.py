"""The kinds of interventions that an ablation sweeps: those of the registry that a model has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from satlens.analysis.interventions.kinds import GATE_KINDS, ROUTE_KINDS
from satlens.analysis.sweeps.cases import WIDE, Kind
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite

KINDS = tuple(dict.fromkeys((*GATE_KINDS, *ROUTE_KINDS)))
DEFAULT_KINDS = ("zero", "mean", "shuffle", "uniform", "mask", "tie_v")
_SCOPES = {
    "mask": ("model", "source"),
    "onehot": ("source",),
    "tie_v": ("model", "layer", "site"),
    "swap": ("model", "layer"),
}
"""Of kinds whose scopes are special."""


def available_kinds(model: Decoder) -> tuple[str, ...]:
    """Every kind that a model has something for; removing components suits any model."""
    gates, routes = _by_target(model)
    found = [kind for kind in GATE_KINDS if gates[kind]]
    found += [kind for kind in ROUTE_KINDS if kind not in found and routes.get(kind)]
    return (*found, "remove")


def needs_of(model: Decoder, wanted: Iterable[str]) -> set[str]:
    """What has to be fitted, or given, for the wanted kinds that a model has."""
    both = zip((GATE_KINDS, ROUTE_KINDS), _by_target(model), strict=True)
    return {
        need
        for kinds, sites in both
        for name in wanted
        if sites.get(name)
        for need in kinds[name].needs.values()
    }


def kinds_of(model: Decoder, wanted: Sequence[str], given: Mapping[str, Any]) -> list[Kind]:
    """The wanted kinds as the model has them: of gates, then of routes, then of reads.

    Args:
        given: what they need, by the names of the registry
            (:mod:`satlens.analysis.interventions.kinds`); ``recorded`` is filled with the clean
            pass of each batch.
    """
    gates, routes = _by_target(model)
    found = [
        Kind(
            name=name,
            target="gate",
            make=GATE_KINDS[name].maker(given),
            sites=gates[name],
            scopes=(*WIDE, "head"),
        )
        for name in wanted
        if gates.get(name)
    ]
    found += [
        Kind(
            name=name,
            target="route",
            make=ROUTE_KINDS[name].maker(given),
            sites=routes[name],
            scopes=_SCOPES.get(name, WIDE),
        )
        for name in wanted
        if routes.get(name)
    ]
    if "remove" in wanted:
        make = partial(ROUTE_KINDS["remove"].maker(given), recorded=given["recorded"])
        found.append(Kind(name="remove", target="read", make=make, scopes=("component",)))
    return found


def _by_target(model: Decoder) -> tuple[dict[str, list[AccessSite]], dict[str, list[AccessSite]]]:
    """Of each kind, the gates and the routes where it says something."""
    gates = {name: kind.sites(model) for name, kind in GATE_KINDS.items()}
    routes = {name: kind.sites(model) for name, kind in ROUTE_KINDS.items()}
    for name in ("mask", "onehot"):
        routes[name] = [site for site in routes[name] if len(site.sources) > 1]
    return gates, routes
