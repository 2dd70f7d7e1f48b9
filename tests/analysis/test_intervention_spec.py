"""Interventions as text: what is read, what is refused, and labels that read back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import satlens
from satlens.analysis.interventions.gates import (
    FreezeGate,
    Intervention,
    MeanGate,
    OpenGate,
    ScaleGate,
    ShuffleGate,
    ZeroGate,
)
from satlens.analysis.interventions.means import Means
from satlens.analysis.interventions.removal import RemoveSublayer
from satlens.analysis.interventions.routes import (
    MaskRoute,
    OneHotRoute,
    SwapRoutes,
    TieValueRoute,
    UniformRoute,
    ZeroRoute,
)
from satlens.analysis.interventions.spec import (
    FITTED,
    SPELT,
    intervention_label,
    interventions_label,
    parse_intervention,
    parse_interventions,
)
from satlens.errors import ConfigError

MEANING = {
    "zero-gate": ZeroGate(),
    "zero-gate:layer=5,head=1": ZeroGate(layer=5, head=1),
    "zero-gate:layer=5:head=1": ZeroGate(layer=5, head=1),
    " zero-gate : layer = 3+5 ": ZeroGate(layer=(3, 5)),
    "open-gate:value=1": OpenGate(value=1.0),
    "scale-gate:factor=0.5": ScaleGate(factor=0.5),
    "scale-gate:factor=1e+1": ScaleGate(factor=10.0),
    "shuffle-gate:seed=3": ShuffleGate(seed=3),
    "zero-route:role=v+qk": ZeroRoute(role=("v", "qk")),
    "uniform-route:sublayer=mlp": UniformRoute(sublayer="mlp"),
    "mask-route:source=embed": MaskRoute(source="embed"),
    "mask-route:source=block 0..3+-1": MaskRoute(source=("block 0..3", -1)),  # type: ignore[arg-type]
    "mask-route:family=blocks,layer=2": MaskRoute(family="blocks", layer=2),
    "one-hot-route:source=0": OneHotRoute(source=0),
    "tie-value-route": TieValueRoute(),
    "swap-routes:layer=1": SwapRoutes(layer=1),
    "remove-sublayer:component=L0.attn+embed": RemoveSublayer(component=("L0.attn", "embed")),
}


@pytest.mark.parametrize("text", MEANING)
def test_a_text_means_its_intervention(text):
    assert parse_intervention(text) == MEANING[text]
    assert parse_intervention(intervention_label(MEANING[text])) == MEANING[text]


def test_every_intervention_of_the_package_has_a_text_or_is_refused():
    def concrete(cls):
        own = [] if cls.__subclasses__() else [cls]
        return own + [leaf for sub in cls.__subclasses__() for leaf in concrete(sub)]

    ours = {cls for cls in concrete(Intervention) if cls.__module__.startswith("satlens.")}
    assert {*SPELT.values(), *FITTED.values()} == ours
    assert SPELT["one-hot-route"] is OneHotRoute
    assert satlens.parse_intervention is parse_intervention


numbers = st.integers(0, 40) | st.lists(st.integers(0, 40), min_size=2, max_size=4).map(tuple)
reals = st.floats(allow_nan=False, allow_infinity=False)
axes = st.fixed_dictionaries({}, optional={"layer": numbers, "role": st.sampled_from(["v", "qk"])})
sources = st.integers(-9, 9) | st.sampled_from(["embed", "block 0..3", "partial 4..5", "state ..3"])
settings = st.one_of(
    st.builds(lambda a, h: ZeroGate(**a, head=h), axes, st.none() | numbers),
    st.builds(lambda a, v: OpenGate(**a, value=v), axes, reals),
    st.builds(lambda a, v: ScaleGate(**a, factor=v), axes, reals),
    st.builds(lambda a, s: OneHotRoute(**a, source=s), axes, sources),
    st.builds(
        lambda a, s: MaskRoute(**a, source=s),
        axes,
        sources | st.lists(sources, min_size=2, max_size=3).map(tuple),
    ),
)


@given(st.lists(settings, min_size=1, max_size=3))
def test_labels_read_back(interventions):
    assert parse_interventions(interventions_label(interventions)) == tuple(interventions)
    assert parse_interventions(interventions) == tuple(interventions)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zero-gates", "did you mean zero-gate"),
        ("", "unknown kind ''"),
        ("nonsense", "known: zero-gate, open-gate"),
        ("mean-gate:layer=1", "use satlens.MeanGate in Python"),
        ("resample-route", "use satlens.ResampleRoute in Python"),
        ("freeze-gate", "use satlens.FreezeGate in Python"),
        ("zero-gate:layers=5", "no setting 'layers'; it has: layer, role, sublayer, head"),
        ("zero-route:head=1", "no setting 'head'"),
        ("zero-gate:layer=five", "layer 'five': not whole numbers"),
        ("zero-gate:layer=1.5", "layer '1.5': not whole numbers"),
        ("zero-gate:layer=", "layer: a value is missing"),
        ("zero-gate:layer=3++5", "layer: a value is missing"),
        ("zero-gate:layer=3,layer=5", "layer: given twice"),
        ("zero-gate:5", "'5': setting=value expected"),
        ("zero-gate:layer=1,", "'': setting=value expected"),
        ("scale-gate", "scale-gate needs factor=..."),
        ("scale-gate:factor=nan", "factor 'nan': not a number"),
        ("shuffle-gate:seed=1+2", "seed '1+2': not a whole number"),
        ("one-hot-route", "one-hot-route needs source=..."),
        ("mask-route", "needs source=... or family=..."),
        ("mask-route:source=0,family=blocks", "needs source=... or family=..."),
        ("remove-sublayer:recorded=1", "no setting 'recorded'"),
    ],
)
def test_refusals_are_one_line_naming_the_text(text, said):
    with pytest.raises(ConfigError) as caught:
        parse_intervention(text)
    assert said in str(caught.value) and repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_texts():
    both = (ZeroGate(layer=5), OneHotRoute(source=0))
    assert parse_interventions("zero-gate:layer=5; one-hot-route:source=0") == both
    assert parse_interventions(["zero-gate:layer=5", both[1]]) == both
    assert parse_interventions(None) == parse_interventions([]) == ()
    wrongs: list[Any] = ["", "zero-gate;", [3]]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            parse_interventions(wrong)


def test_labels_of_fitted_interventions_tell_them_apart():
    one, other = (Means({"hook": np.full(2, value)}) for value in (0.25, 0.5))
    labels = [intervention_label(MeanGate(layer=3, means=means)) for means in (one, one, other)]
    assert labels[0] == labels[1] != labels[2]
    assert labels[0].startswith("mean-gate:layer=3,means=")
    plain = intervention_label(FreezeGate(values={"hook": np.zeros(2)}))
    assert plain.startswith("freeze-gate:values=")
