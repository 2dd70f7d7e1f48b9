"""What an intervention is told about where it applies: one value of an axis, or several."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satlens.errors import HookError

Which = int | str | Sequence[int] | Sequence[str] | None

_WHOLE = ("layer", "head")


def axis_values(who: str, axis: str, given: Any) -> int | str | tuple[Any, ...]:
    """What an axis was given, as one value or a tuple; layers and heads as numbers of Python.

    Args:
        who: the intervention, for errors.

    Raises:
        HookError: an empty list; a layer or head that is no whole number.
    """
    single = isinstance(given, str) or not hasattr(given, "__len__") or np.ndim(given) == 0
    several: tuple[Any, ...] = (given,) if single else tuple(given)
    if not several:
        raise HookError(f"{who}: {axis}: empty; None means all")
    if axis in _WHOLE:
        numbers = tuple(_whole(value) for value in several)
        if None in numbers:
            wrong = several[numbers.index(None)]
            raise HookError(f"{who}: {axis} {wrong!r}: not a whole number")
        several = numbers
    return several[0] if single else several


def chosen_of(which: Which) -> tuple[Any, ...] | None:
    """One value or several as a tuple; None stays None, which means all."""
    if which is None:
        return None
    if isinstance(which, int | str):
        return (which,)
    return tuple(which)


def _whole(value: Any) -> int | None:
    """A whole number of Python, numpy or torch as Python's; None for anything else."""
    if isinstance(value, bool) or (
        isinstance(value, Tensor) and (value.ndim > 0 or value.dtype == torch.bool)
    ):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
