"""Interventions as a line of text, for command lines, configurations and labels of rows.

    zero-gate                          every gate closed
    zero-gate:layer=5,head=1           one head of one layer
    open-gate:value=1,layer=3+5        several values of an axis, joined by +
    mask-route:source=block 0..3       a source by its label or its place

A kind is the name of its class in kebab-case; after the first colon come settings of that class,
separated by commas (or by colons, where commas mean something else, as in ``--model_args``).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from typing import Any

from satlens.analysis.interventions.gates import (
    FreezeGate,
    Intervention,
    MeanGate,
    OpenGate,
    ResampleGate,
    ScaleGate,
    ShuffleGate,
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
)
from satlens.errors import ConfigError

SEPARATOR = ";"
"""Between several interventions in one text."""


def _kebab(cls: type[Intervention]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()


def _by_name(*classes: type[Intervention]) -> dict[str, type[Intervention]]:
    return {_kebab(cls): cls for cls in classes}


SPELT = _by_name(
    ZeroGate,
    OpenGate,
    ScaleGate,
    ShuffleGate,
    ZeroRoute,
    UniformRoute,
    MaskRoute,
    OneHotRoute,
    TieValueRoute,
    SwapRoutes,
    RemoveSublayer,
)
"""Kinds that a text can say in full."""

FITTED = _by_name(MeanGate, ResampleGate, FreezeGate, MeanRoute, ResampleRoute)
"""Kinds that need something fitted on data first, which a text cannot hold."""

_WHOLE, _REAL = frozenset({"layer", "head", "seed"}), frozenset({"value", "factor"})
_SEVERAL = frozenset({"layer", "head", "role", "sublayer", "component"})


def parse_intervention(text: str) -> Intervention:
    """The intervention that a text names.

    Args:
        text: ``kind`` or ``kind:setting=value,...``; see the module.

    Raises:
        ConfigError: an unknown kind or setting, one that lacks a setting or says it twice, a
            value of the wrong type, or a kind that needs fitted data; it names the text.
    """
    if not isinstance(text, str):
        raise ConfigError(f"intervention: a text was expected, got {type(text).__name__}")
    name, _, rest = text.strip().partition(":")
    name = name.strip()
    if name in FITTED:
        raise ConfigError(
            f"intervention {text!r}: {name} needs data to be fitted on, which a text cannot hold; "
            f"use satlens.{FITTED[name].__name__} in Python"
        )
    if name not in SPELT:
        near = difflib.get_close_matches(name, SPELT, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"intervention {text!r}: unknown kind {name!r}; {hint}known: {', '.join(SPELT)}"
        )
    cls = SPELT[name]
    settings = _settings(text, name, cls, rest)
    lacking = [f.name for f in _fields(cls) if _is_required(f) and f.name not in settings]
    if lacking:
        raise ConfigError(f"intervention {text!r}: {name} needs {lacking[0]}=...")
    if cls is MaskRoute and len(settings.keys() & {"source", "family"}) != 1:
        raise ConfigError(f"intervention {text!r}: {name} needs source=... or family=..., one")
    return cls(**settings)


def parse_interventions(
    given: str | Intervention | Iterable[str | Intervention] | None,
) -> tuple[Intervention, ...]:
    """Interventions of texts, each one or several separated by ``;``, among ready objects.

    Raises:
        ConfigError: as :func:`parse_intervention`.
    """
    if given is None:
        return ()
    entries = (given,) if isinstance(given, str | Intervention) else given
    parsed: list[Intervention] = []
    for entry in entries:
        if isinstance(entry, Intervention):
            parsed.append(entry)
        elif isinstance(entry, str) and entry.strip():
            parsed += [parse_intervention(one) for one in entry.split(SEPARATOR)]
        else:
            raise ConfigError(f"intervention: a text or an intervention was expected: {entry!r}")
    return tuple(parsed)


def intervention_label(intervention: Intervention) -> str:
    """The text of an intervention, which :func:`parse_intervention` reads back.

    Fitted data appears as the first digits of its SHA-256: such a label tells interventions apart
    but cannot be read back.
    """
    texts = []
    for field in _fields(type(intervention)):
        value = getattr(intervention, field.name)
        if value is not None:
            texts.append(f"{field.name}={_spelt(intervention, field.name, value)}")
    name = _kebab(type(intervention))
    return f"{name}:{','.join(texts)}" if texts else name


def interventions_label(interventions: Iterable[Intervention]) -> str:
    """Labels of several, in their order, as :func:`parse_interventions` reads them."""
    return f"{SEPARATOR} ".join(intervention_label(one) for one in interventions)


# -- settings --------------------------------------------------------------------------------------


def _fields(cls: type[Intervention]) -> list[Field[Any]]:
    """Settings of a class; what only helps it to run, and does not identify it, is none."""
    return [field for field in fields(cls) if field.compare]


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _settings(text: str, name: str, cls: type[Intervention], rest: str) -> dict[str, Any]:
    known = [field.name for field in _fields(cls)]
    settings: dict[str, Any] = {}
    if not rest.strip():
        return settings
    for entry in re.split("[,:]", rest):
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or not key:
            raise ConfigError(f"intervention {text!r}: {entry.strip()!r}: setting=value expected")
        if key not in known:
            raise ConfigError(
                f"intervention {text!r}: {name} has no setting {key!r}; it has: {', '.join(known)}"
            )
        if key in settings:
            raise ConfigError(f"intervention {text!r}: {key}: given twice; join values by +")
        several = key in _SEVERAL or (key == "source" and cls is MaskRoute)
        settings[key] = _value(text, key, value, several)
    return settings


def _value(text: str, key: str, value: str, several: bool) -> Any:
    parts = [part.strip() for part in value.split("+")] if several else [value]
    if not all(parts):
        raise ConfigError(f"intervention {text!r}: {key}: a value is missing")
    read = _reader(key)
    try:
        values = [read(part) for part in parts]
    except ValueError:
        what = "whole numbers" if several else "a whole number" if key in _WHOLE else "a number"
        raise ConfigError(f"intervention {text!r}: {key} {value!r}: not {what}") from None
    return tuple(values) if len(values) > 1 else values[0]


def _reader(key: str) -> Callable[[str], Any]:
    if key in _WHOLE:
        return int
    if key in _REAL:
        return _finite
    return _place_or_label if key == "source" else str


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0:  # infinite or no number
        raise ValueError(text)
    return number


def _place_or_label(text: str) -> int | str:
    return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else text


# -- labels ----------------------------------------------------------------------------------------


def _spelt(intervention: Intervention, key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(int(value)) if float(value).is_integer() else repr(value)
    if isinstance(value, tuple | list) and all(isinstance(v, int | str) for v in value):
        return "+".join(map(str, value))
    plain = json.dumps(intervention.identity[key], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:8]
