"""TransformerLens hook points on satlens models, with their traps closed.

What differs from a bare ``HookedRootModule``: a selector that matches nothing is an error with
near names; caches own their memory and never remove hooks that somebody else added; a compiled
model runs hooked passes eagerly instead of ignoring the hooks. What the points are is in
:mod:`satlens.hook_table`, what a cache decomposes in :mod:`satlens.activation_cache`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from satlens.activation_cache import SatlensCache
from satlens.errors import HookError
from satlens.hook_table import describe_hook
from satlens.models.layers import ReadOnly

Selector = str | Sequence[str] | Callable[[str], bool] | None
Hook = tuple[str | Sequence[str] | Callable[[str], bool], Callable[..., Any]]


class HookedModel(HookedRootModule):
    """Base of satlens models: named, live hook points and honest capture."""

    device: torch.device
    hook_dict: dict[str, HookPoint]
    mod_dict: dict[str, torch.nn.Module]

    @property
    def cfg(self) -> Any:
        """What the model is, and where: TransformerLens' tools ask for ``cfg.device``."""
        cfg = self._cfg
        if cfg.device != self.device and not torch.compiler.is_compiling():
            cfg = self._cfg = cfg.on(self.device)
        return cfg

    @cfg.setter
    def cfg(self, cfg: Any) -> None:
        self._cfg = cfg

    def hook_names(self, selector: Selector = None) -> list[str]:
        """Hook point names that a selector matches, in order of definition.

        Args:
            selector: a name, a list of names, a predicate on names, or None for all.

        Raises:
            HookError: nothing matches, or a named point does not exist (near names are given).
        """
        if selector is None:
            return list(self.hook_dict)
        if callable(selector):
            names = [name for name in self.hook_dict if selector(name)]
            if not names:
                raise HookError("names_filter: the predicate matches no hook point of this model")
            return names
        wanted = [selector] if isinstance(selector, str) else list(selector)
        if not wanted:
            raise HookError("names_filter: an empty list matches no hook point")
        for name in wanted:
            if name not in self.hook_dict:
                raise HookError(self._unknown(name))
        return wanted

    def _unknown(self, name: str) -> str:
        residual = re.fullmatch(r"(blocks\.\d+\.)hook_resid_(pre|mid|post)", name)
        if residual and any(n.startswith(residual[1]) for n in self.hook_dict):
            reads = [n for n in self.hook_dict if n.startswith(residual[1]) and n.endswith("_read")]
            reads += [n for n in self.hook_dict if n.startswith(f"{residual[1]}hook_attn_read_")]
            reads = ", ".join(sorted(set(reads)))
            return (
                f"{name}: a {self.cfg.stream.kind} stream has no single residual; "
                f"what its sublayers read is at {reads}"
            )
        near = difflib.get_close_matches(name, self.hook_dict, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        return f"{name}: this model has no such hook point{hint}"

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Iterable[Hook] = (),
        bwd_hooks: Iterable[Hook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[HookedModel]:
        """Temporary hooks, removed at the end even when one of them raises.

        A compiled model runs without compilation inside the context: compiled code ignores hooks.
        """
        forward = [(name, fn) for sel, fn in fwd_hooks for name in self.hook_names(sel)]
        backward = [(name, fn) for sel, fn in bwd_hooks for name in self.hook_names(sel)]
        with (
            _uncompiled(),
            super().hooks(forward, backward, reset_hooks_end, clear_contexts),  # type: ignore[arg-type]
        ):
            yield self

    def run_with_hooks(  # type: ignore[override]
        self,
        *args: Any,
        fwd_hooks: Iterable[Hook] = (),
        bwd_hooks: Iterable[Hook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **kwargs: Any,
    ) -> Any:
        """One forward pass with hooks ``(name or selector, fn(tensor, hook))``.

        Raises:
            HookError: an unknown name; backward hooks that would be gone before a backward pass.
        """
        backward = list(bwd_hooks)
        if backward and reset_hooks_end:
            raise HookError(
                "bwd_hooks: they would be removed before any backward pass; run the forward and "
                "the backward inside `with model.hooks(bwd_hooks=...)`"
            )
        with self.hooks(fwd_hooks, backward, reset_hooks_end, clear_contexts):
            return self(*args, **kwargs)

    def run_with_cache(  # type: ignore[override]
        self,
        *args: Any,
        names_filter: Selector = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: int | slice | tuple[int, ...] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, SatlensCache]:
        """One forward pass and a copy of the selected activations.

        Args:
            names_filter: see :meth:`hook_names`; None caches everything, which is large.
            device: where the cache lives.
            remove_batch_dim: drop the batch axis of a batch of one.
            incl_bwd: call backward on the output (a scalar loss) and cache gradients too.
            pos_slice: positions to keep, on the position axis of every activation.

        Raises:
            HookError: a selector that matches nothing; a batch that cannot be dropped; gradients
                of a pass with a cache.
        """
        if incl_bwd and kwargs.get("past") is not None:
            raise HookError("incl_bwd: a pass with a cache carries no gradients")
        names = self.hook_names(names_filter)
        cache: dict[str, Tensor] = {}

        def save(tensor: Tensor, hook: HookPoint, suffix: str = "") -> None:
            kept = _positions(tensor.detach(), str(hook.name), pos_slice)
            kept = kept.to(device) if device is not None else kept
            if remove_batch_dim:
                if kept.shape[0] != 1:
                    raise HookError(f"remove_batch_dim: the batch has {kept.shape[0]} rows")
                kept = kept[0]
            shares = kept.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            cache[f"{hook.name}{suffix}"] = kept.clone() if shares else kept

        forward = [(name, ReadOnly(save)) for name in names]
        backward = [(name, partial(save, suffix="_grad")) for name in names] if incl_bwd else []
        with self.hooks(forward, backward, reset_hooks_end, clear_contexts):
            output = self(*args, **kwargs)
            if incl_bwd:
                output.backward()
        return output, SatlensCache(cache, self, has_batch_dim=not remove_batch_dim)

    def editing_hooks(self) -> tuple[tuple[str, Any], ...]:
        """(module, hook) of every forward hook that may change what the model computes.

        A hook is itself, or its attribute ``hook_identity`` where it has one, so that the same
        intervention installed twice is recognised.
        """
        found = []
        for name, module in self.mod_dict.items():
            if not module._forward_hooks and not module._forward_pre_hooks:
                continue
            given = {h.hook.id: h.user_hook for h in getattr(module, "fwd_hooks", ())}
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, registered in hooks.items():
                    hook = given.get(key, registered)
                    if not isinstance(hook, ReadOnly):
                        found.append((name, getattr(hook, "hook_identity", hook)))
        return tuple(found)

    def hook_table(self) -> str:
        """Every hook point with its shape and equation, as text."""
        rows = [(name, *describe_hook(name)) for name in self.hook_dict]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        return "\n".join(f"{n:<{widths[0]}}  {s:<{widths[1]}}  {e}" for n, s, e in rows)


def _uncompiled() -> Any:
    return torch.compiler.set_stance("force_eager")


def position_axis(name: str) -> int:
    """Axis of the (query) position in a cached activation."""
    return 2 if name.endswith(("hook_attn_scores", "hook_pattern")) else 1


def _positions(tensor: Tensor, name: str, pos: int | slice | tuple[int, ...] | None) -> Tensor:
    if pos is None:
        return tensor
    axis = position_axis(name)
    if isinstance(pos, int):
        return tensor.select(axis, pos)
    if isinstance(pos, slice):
        index = (slice(None),) * axis + (pos,)
        return tensor[index]
    return tensor.index_select(axis, torch.tensor(pos, device=tensor.device))
