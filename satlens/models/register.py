"""Depth streams from outside of the package: a notebook's, or another package's.

    satlens.register_stream(EchoStream, Echo, families={r"\\.echo$": "scalars"})
    model = satlens.build("echo", n_layers=4)

From then on the stream is an architecture like those that ship: ``build``, ``train``, ``load`` and
every analysis know it, in this process. Registering comes first in every process that opens its
checkpoints, so the command line, which runs no code of yours, knows only what ships.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast, get_args

from satlens import config as configs
from satlens.errors import ConfigError
from satlens.models import initialise
from satlens.models.block import DepthStream
from satlens.models.initialise import Family
from satlens.models.presets import PRESETS, VARIANTS
from satlens.models.streams import STREAMS

_BUILT_IN = frozenset(STREAMS)
_BUILT_IN_NAMES = frozenset((*VARIANTS, *PRESETS))


def register_stream(
    config: type,
    stream: type,
    *,
    families: Mapping[str, str] | None = None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Make a depth stream known by the ``kind`` of its configuration.

    Called again for the same kind, as when a notebook cell runs twice, it replaces what was
    registered; models that were built before keep the old code.

    Args:
        config: a frozen, keyword-only pydantic dataclass whose field ``kind`` has its name as the
            default, and every other field a default too.
        stream: what computes it.
        families: regular expression of parameter names -> ``matrices``, ``embeddings``, ``norms``,
            ``gates``, ``scalars``, ``routes`` or ``biases``: how they start and whether they decay
            (:mod:`satlens.models.initialise`). The names of the backbone are known already, and a
            name that they cover stays theirs.
        variants: name -> fields of the configuration that it changes; by default one variant, named
            as the kind. ``satlens.build`` takes the name.

    Raises:
        ConfigError: a configuration without such a kind, a kind or a name that ships with satlens,
            no depth stream, an impossible family, no variant or one whose name is not words in
            lower case joined by hyphens, a field that the configuration does not have.
    """
    kind = _kind(config)
    if kind in _BUILT_IN:
        raise ConfigError(f"{config.__name__}.kind: {kind!r} ships with satlens; choose another")
    if not (isinstance(stream, type) and issubclass(stream, DepthStream)):
        raise ConfigError(f"stream: expected a subclass of DepthStream, got {stream!r}")
    families = _checked({} if families is None else families)
    named = _named({kind: {}} if variants is None else variants)
    made = {
        name.replace("_", "-"): {
            "stream": configs.make(config, {"kind": kind, **changes}, f"variants: {name}")
        }
        for name, changes in named.items()
    }
    for name in made:
        if name in _BUILT_IN_NAMES or f"tiny-{name}" in _BUILT_IN_NAMES:
            raise ConfigError(f"variants: {name!r} ships with satlens; choose another name")
    replaced = [name for name, parts in VARIANTS.items() if _kind_of(parts) == kind]
    for name in replaced:
        del VARIANTS[name], PRESETS[f"tiny-{name}"]
    configs.REGISTERED[kind] = config
    STREAMS[kind] = stream
    initialise.REGISTERED.update(families)
    for name, parts in made.items():
        VARIANTS[name], PRESETS[f"tiny-{name}"] = parts, {**parts}


def _kind(config: Any) -> str:
    """The name that a configuration class gives its stream."""
    if not isinstance(config, type):
        raise ConfigError(f"config: expected a class, got {config!r}")
    own = {f.name: f.default for f in fields(config)} if is_dataclass(config) else {}
    kind = own.get("kind")
    if not isinstance(kind, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", kind):
        found = getattr(config, "__name__", config)
        raise ConfigError(
            f"{found}: kind: needs a name in lower case as its default, as in "
            'kind: Literal["echo"] = "echo"'
        )
    return kind


def _named(variants: Any) -> Mapping[str, Mapping[str, Any]]:
    """The variants, whose names can be asked for."""
    if not isinstance(variants, Mapping) or not variants:
        raise ConfigError(f"variants: expected one name -> fields or more, got {variants!r}")
    for name, changes in variants.items():
        if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9]+([-_][a-z0-9]+)*", name):
            raise ConfigError(
                f"variants: {name!r}: a name is words in lower case, as in 'loud-echo'"
            )
        if not isinstance(changes, Mapping) or not all(isinstance(key, str) for key in changes):
            raise ConfigError(f"variants: {name}: expected field -> value, got {changes!r}")
    return variants


def _kind_of(variant: Mapping[str, Any]) -> str:
    return variant["stream"].kind if "stream" in variant else "residual"


def _checked(families: Any) -> dict[str, Family]:
    if not isinstance(families, Mapping):
        raise ConfigError(f"families: expected regular expression -> family, got {families!r}")
    for pattern, family in families.items():
        if not isinstance(pattern, str):
            raise ConfigError(f"families: {pattern!r}: expected a regular expression as text")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"families: {pattern!r}: {error}") from None
        if family not in get_args(Family):
            known = ", ".join(get_args(Family))
            raise ConfigError(f"families: {pattern!r}: must be one of {known}, got {family!r}")
    return cast(dict[str, Family], dict(families))
