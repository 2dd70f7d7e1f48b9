"""The rows of an ablation: every kind of intervention at every scope that it has a meaning at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from satlens.analysis.engine.reducers import FAMILIES
from satlens.analysis.interventions.gates import Intervention
from satlens.analysis.sweeps.measure import Case
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.reads import component_names, reads_of
from satlens.models.sites import AccessSite

SCOPES = ("model", "layer", "head", "role", "site", "source", "component")
WIDE = ("model", "layer", "role", "site")

Maker = Callable[..., Intervention]
"""An intervention of a kind, from where it applies."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of intervention as a model has it."""

    name: str
    target: str
    """gate, route or read."""
    make: Maker
    sites: Sequence[AccessSite] = ()
    """Where it says something; none for what acts on reads."""
    scopes: tuple[str, ...] = WIDE

    def case(
        self, scope: str, sites: Sequence[AccessSite], where: Mapping[str, Any], **labels: Any
    ) -> Case:
        """Its row at some sites: ``where`` is what the intervention is told."""
        return Case(
            intervention=self.make(**where),
            kind=self.name,
            target=self.target,
            scope=scope,
            first_layer=min(site.layer for site in sites),
            weights=tuple(site.hook for site in sites),
            static=not any(site.per_token for site in sites),
            **labels,
        )


def checked(name: str, given: Sequence[str] | str, known: Sequence[str]) -> tuple[str, ...]:
    """One value or several as a tuple, each of them known.

    Args:
        name: of the argument, for errors.

    Raises:
        AnalysisError: an unknown value, or none.
    """
    values = (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))
    for value in values:
        if value not in known:
            raise AnalysisError(f"{name}: {value!r} is not one of {', '.join(known)}")
    if not values:
        raise AnalysisError(f"{name}: empty; choose from {', '.join(known)}")
    return values


def sweep(model: Decoder, kinds: Iterable[Kind], scopes: Sequence[str]) -> list[Case]:
    """Every case of some kinds, kind by kind and scope by scope."""
    return [
        case
        for kind in kinds
        for scope in scopes
        if scope in kind.scopes
        for case in _of_scope(model, kind, scope)
    ]


def _of_scope(model: Decoder, kind: Kind, scope: str) -> Iterator[Case]:
    if scope == "component":
        yield from _components(model, kind)
    elif kind.name == "onehot":
        yield from _each_source(kind)
    elif kind.name == "mask":
        yield from _families(kind, scope)
    elif not kind.sites:
        return
    elif scope == "model":
        yield kind.case(scope, kind.sites, {})
    elif scope in ("layer", "role"):
        for value, sites in _grouped(kind.sites, scope).items():
            where = {scope: value}
            yield kind.case(
                scope, sites, where, **where, **_output(sites) if scope == "layer" else {}
            )
    else:
        for site in kind.sites:
            yield from _at_site(kind, scope, site)


def _at_site(kind: Kind, scope: str, site: AccessSite) -> Iterator[Case]:
    """A site as a whole, or each of its heads."""
    where = place_of(site)
    if scope == "site":
        yield kind.case(scope, [site], where, site=site.name, **where)
        return
    for head in range(site.n_heads):
        yield kind.case(scope, [site], {**where, "head": head}, site=site.name, **where, head=head)


def place_of(site: AccessSite) -> dict[str, Any]:
    """What names a site to an intervention."""
    return {"layer": site.layer, "sublayer": site.sublayer, "role": site.role}


def _grouped(sites: Sequence[AccessSite], axis: str) -> dict[Any, list[AccessSite]]:
    values = dict.fromkeys(getattr(site, axis) for site in sites)
    return {v: [site for site in sites if getattr(site, axis) == v] for v in values}


def _output(sites: Sequence[AccessSite]) -> dict[str, str]:
    """The label of a "layer" that is the read after the last one."""
    return {"sublayer": "out"} if all(site.sublayer == "out" for site in sites) else {}


# -- sources and components ------------------------------------------------------------------------


_FIELD = {"family": "family", "source": "label"}
"""What an intervention calls a property of sources."""


def maskable(site: AccessSite, name: str, value: str) -> bool:
    """Whether a site has the sources of a family, or one by its label, beside others."""
    hit = [getattr(source, _FIELD[name]) == value for source in site.sources]
    return any(hit) and not all(hit)


def _families(kind: Kind, scope: str) -> Iterator[Case]:
    """Each family of sources, in all layers or in one; each source where all are of one family."""
    by_layer = _grouped(kind.sites, "layer") if scope == "source" else {None: list(kind.sites)}
    for layer, sites in by_layer.items():
        sources = [source for site in sites for source in site.sources]
        name = "family" if len({source.family for source in sources}) > 1 else "source"
        values = dict.fromkeys(getattr(source, _FIELD[name]) for source in sources)
        in_order = [family for family in FAMILIES if family in values]
        for value in in_order or values:
            hit = [site for site in sites if maskable(site, name, value)]
            if not hit:
                continue
            where: dict[str, Any] = {name: value}
            labels: dict[str, Any] = {"source": value}
            if layer is not None:
                where["layer"] = layer
                labels |= {"layer": layer, **_output(sites)}
            yield kind.case(scope, hit, where, **labels)


def _each_source(kind: Kind) -> Iterator[Case]:
    """Each source of each route of several."""
    for site in kind.sites:
        for index, source in enumerate(site.sources if len(site.sources) > 1 else ()):
            where = place_of(site)
            labels = {"site": site.name, "source": source.label, **where}
            yield kind.case("source", [site], {**where, "source": index}, **labels)


def _components(model: Decoder, kind: Kind) -> Iterator[Case]:
    """Each component of each read."""
    names = component_names(model.cfg.n_layers)
    for read in reads_of(model.hook_dict, model.cfg.n_layers):
        where = {"layer": read.layer, "sublayer": read.sublayer, "role": read.role}
        for component in names[: read.n_components]:
            yield Case(
                intervention=kind.make(component=component, **where),
                kind=kind.name,
                target=kind.target,
                scope="component",
                first_layer=read.layer,
                site=read.name,
                component=component,
                **where,
            )
