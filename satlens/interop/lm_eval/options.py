"""Options of the lm-eval adapter, which lm-eval may hand over as text."""

from __future__ import annotations

from typing import Any

import torch

import satlens
from satlens.checkpoints.files import FLOATS
from satlens.errors import ConfigError

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


def positive(name: str, value: int | str) -> int:
    """A positive whole number.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not str(value).isdecimal() or int(value) < 1:
        raise ConfigError(f"{name}: must be a positive whole number, got {value!r}")
    return int(value)


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    """The value.

    Raises:
        ConfigError: it is none of the choices.
    """
    if value not in choices:
        raise ConfigError(f"{name}: must be one of {', '.join(choices)}, got {value!r}")
    return value


def within_context(max_length: int | str | None, n_ctx: int) -> int:
    """``max_length``, by default n_ctx.

    Raises:
        ConfigError: no positive whole number, or above n_ctx.
    """
    length = n_ctx if max_length is None else positive("max_length", max_length)
    if length > n_ctx:
        raise ConfigError(f"max_length: {length} exceeds n_ctx={n_ctx}")
    return length


def named_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype by name.

    Raises:
        ConfigError: no dtype of weights.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    return DTYPES[one_of("dtype", dtype, tuple(DTYPES))]


def parsed_interventions(given: Any) -> tuple[Any, ...]:
    """Intervention objects from texts and objects; a text may hold several between semicolons.

    Raises:
        AnalysisError, ConfigError, HookError: a text that names no intervention.
    """
    several = given if isinstance(given, list | tuple) else [] if given is None else [given]
    found: list[Any] = []
    for one in several:
        if isinstance(one, str):
            # By its public name: interventions are analyses, which come after this in the package.
            found += [satlens.parse_intervention(text) for text in one.split(";") if text.strip()]
        else:
            found.append(one)
    return tuple(found)
