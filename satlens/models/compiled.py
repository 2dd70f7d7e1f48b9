"""Compilation in place: of what a module computes, without what prepares and watches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from satlens.models.layers import is_hooked


class CompiledInside(nn.Module):
    """A module whose ``forward`` does its work in :meth:`compute`, which alone is compiled.

    What ``forward`` prepares (checks, tables, masks) and the module's own hooks, such as those of
    FSDP, run as they are: compiled code is one graph. While a hook point inside is hooked, so does
    all of it: compiled code ignores hooks. Names and state dicts do not change; copies and pickles
    are not compiled.
    """

    _compiled: tuple[Callable[..., Any], list[HookPoint]] | None = None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile :meth:`compute` from its next call on.

        Arguments are those of :func:`torch.compile`.
        """
        points = [module for module in self.modules() if isinstance(module, HookPoint)]
        self._compiled = torch.compile(self.compute, *args, **kwargs), points

    @property
    def computed(self) -> Callable[..., Any]:
        """:meth:`compute`, compiled where it is and may be."""
        if self._compiled is None:
            return self.compute
        compiled, points = self._compiled
        return self.compute if is_hooked(*points) else compiled

    def compute(self, *args: Any) -> Any:
        """The work of ``forward``."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_compiled", None)
        return state
