"""The kinds of interventions by the names that tables give them, and what each has to be given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from satlens.analysis.interventions.gates import (
    FreezeGate,
    Intervention,
    MeanGate,
    OpenGate,
    ResampleGate,
    ShuffleGate,
    SiteIntervention,
    ZeroGate,
)
from satlens.analysis.interventions.removal import RemoveSublayer
from satlens.analysis.interventions.routes import (
    MaskRoute,
    MeanRoute,
    OneHotRoute,
    ResampleRoute,
    SwapRoutes,
    TieValueRoute,
    UniformRoute,
    ZeroRoute,
    tied_sites,
)
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite


@dataclass(frozen=True, kw_only=True)
class InterventionKind:
    """One kind of intervention."""

    intervention: type[Intervention]
    """Its class."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Argument of the class -> what it is given there: ``means``, ``means_position`` and
    ``means_category`` from :func:`satlens.fit_means`, ``donors`` from :func:`satlens.fit_donors`,
    ``static`` from :func:`satlens.fit_static`, ``tags`` of the documents that run, a ``seed``."""
    of_token: bool = False
    """Says nothing where a weight is the same for every token: that is its own mean."""

    def sites(self, model: Decoder) -> list[AccessSite]:
        """The sites of a model where it can change something; none for what acts on reads."""
        if self.intervention is TieValueRoute:
            return tied_sites(model)
        if self.intervention is SwapRoutes:
            return SwapRoutes().sites(model) if tied_sites(model) else []
        if not issubclass(self.intervention, SiteIntervention):
            return []
        fitting = [site for site in model.sites if self.intervention.fits(site)]
        return [site for site in fitting if site.per_token or not self.of_token]

    def maker(self, given: Mapping[str, Any]) -> Callable[..., Intervention]:
        """A function of the arguments that are left: where it applies, and to which source or
        component.

        Raises:
            KeyError: ``given`` lacks something it needs.
        """
        return partial(
            self.intervention, **{name: given[what] for name, what in self.needs.items()}
        )


GATE_KINDS: dict[str, InterventionKind] = {
    "zero": InterventionKind(intervention=ZeroGate),
    "mean": InterventionKind(intervention=MeanGate, needs={"means": "means"}),
    "mean_position": InterventionKind(intervention=MeanGate, needs={"means": "means_position"}),
    "mean_category": InterventionKind(
        intervention=MeanGate, needs={"means": "means_category", "tags": "tags"}
    ),
    "resample": InterventionKind(
        intervention=ResampleGate, needs={"donors": "donors", "seed": "seed"}
    ),
    "shuffle": InterventionKind(intervention=ShuffleGate, needs={"seed": "seed"}),
    "optimal": InterventionKind(intervention=FreezeGate, needs={"values": "static"}),
    "open": InterventionKind(intervention=OpenGate),
}
"""Kinds for gates."""

ROUTE_KINDS: dict[str, InterventionKind] = {
    "zero": InterventionKind(intervention=ZeroRoute),
    "uniform": InterventionKind(intervention=UniformRoute),
    "mean": InterventionKind(intervention=MeanRoute, needs={"means": "means"}, of_token=True),
    "mean_position": InterventionKind(
        intervention=MeanRoute, needs={"means": "means_position"}, of_token=True
    ),
    "mean_category": InterventionKind(
        intervention=MeanRoute, needs={"means": "means_category", "tags": "tags"}, of_token=True
    ),
    "resample": InterventionKind(
        intervention=ResampleRoute, needs={"donors": "donors", "seed": "seed"}, of_token=True
    ),
    "mask": InterventionKind(intervention=MaskRoute),
    "onehot": InterventionKind(intervention=OneHotRoute),
    "tie_v": InterventionKind(intervention=TieValueRoute),
    "swap": InterventionKind(intervention=SwapRoutes),
    "remove": InterventionKind(intervention=RemoveSublayer),
}
"""Kinds for routes. mask and onehot are given a source too, remove a component; remove acts on the
reads of any model."""
