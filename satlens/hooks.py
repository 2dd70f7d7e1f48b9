"""TransformerLens hook points on satlens models, with their traps closed.

What differs from a bare ``HookedRootModule``: a selector that matches nothing is an error with
near names; caches own their memory and never remove hooks that somebody else added; a compiled
model runs hooked passes eagerly instead of ignoring the hooks; decompositions that have no
meaning on a stream are refused instead of returning numbers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint

from satlens.errors import HookError

Selector = str | Sequence[str] | Callable[[str], bool] | None
Hook = tuple[str | Sequence[str] | Callable[[str], bool], Callable[..., Any]]


class HookedModel(HookedRootModule):
    """Base of satlens models: named, live hook points and honest capture."""

    cfg: Any
    hook_dict: dict[str, HookPoint]

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
            HookError: a selector that matches nothing; a batch that cannot be dropped.
        """
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

        forward = [(name, save) for name in names]
        backward = [(name, partial(save, suffix="_grad")) for name in names] if incl_bwd else []
        with self.hooks(forward, backward, reset_hooks_end, clear_contexts):
            output = self(*args, **kwargs)
            if incl_bwd:
                output.backward()
        return output, SatlensCache(cache, self, has_batch_dim=not remove_batch_dim)

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


class SatlensCache(ActivationCache):
    """A TransformerLens cache that refuses decompositions its stream gives no meaning to."""

    def __init__(self, cache_dict: dict[str, Tensor], model: Any, has_batch_dim: bool = True):
        super().__init__(cache_dict, model, has_batch_dim=has_batch_dim)

    @property
    def nbytes(self) -> int:
        """Bytes held by the cache."""
        return sum(t.numel() * t.element_size() for t in self.cache_dict.values())

    def _needs_residual(self, what: str) -> None:
        cfg: Any = self.model.cfg
        kind = cfg.stream.kind
        if kind != "residual":
            raise HookError(
                f"{what}: a {kind} stream has no single residual, so its parts do not sum to one; "
                "use the read hooks and the route weights of model.sites"
            )

    def decompose_resid(self, *args: Any, **kwargs: Any) -> Any:
        """Parts of the residual stream; refused where there is none."""
        self._needs_residual("decompose_resid")
        return super().decompose_resid(*args, **kwargs)

    def accumulated_resid(self, *args: Any, **kwargs: Any) -> Any:
        """The residual stream after each layer; refused where there is none."""
        self._needs_residual("accumulated_resid")
        return super().accumulated_resid(*args, **kwargs)

    def logit_lens(self, **kwargs: Any) -> NoReturn:
        """Made for TransformerLens' own model classes: always refused, with what to call instead.

        Raises:
            HookError: always.
        """
        self._needs_residual("logit_lens")
        raise HookError(
            "logit_lens: needs a TransformerLens bridge; the same logits are "
            "cache.accumulated_resid(apply_ln=True) @ model.W_U"
        )

    def get_full_resid_decomposition(self, *args: Any, **kwargs: Any) -> Any:
        """Heads and neurons as parts of the residual; refused where there is none."""
        self._needs_residual("get_full_resid_decomposition")
        return super().get_full_resid_decomposition(*args, **kwargs)

    def stack_neuron_results(self, *args: Any, **kwargs: Any) -> Any:
        """Each neuron's addition to the residual; refused where there is none."""
        self._needs_residual("stack_neuron_results")
        widths = self.model.cfg.d_mlp
        if not isinstance(widths, int) or not widths:
            raise HookError(
                f"stack_neuron_results: needs MLPs of one width, this model's d_mlp is {widths}; "
                "decompose_resid and expand_neurons=False need none"
            )
        return super().stack_neuron_results(*args, **kwargs)

    def stack_head_results(self, *args: Any, **kwargs: Any) -> Any:
        """Each head's addition to the residual; refused where there is none."""
        self._needs_residual("stack_head_results")
        return super().stack_head_results(*args, **kwargs)


# -- the hook table -------------------------------------------------------------------------------

_TABLE: tuple[tuple[str, str, str], ...] = (
    (r"hook_embed", "B T D", "x_0 = W_E[token]"),
    (r"hook_v_first", "B T K E", "V_1 for all consumers"),
    (r"hook_resid_(pre|mid|post)", "B T D", "the residual stream before, inside, after the layer"),
    (r"hook_(attn_read(_qk|_v)?|mlp_read|out_read)", "B T D", "what the read delivers, un-normed"),
    (r"hook_(attn_out|mlp_out)", "B T D", "what the sublayer adds"),
    (r"(ln1|ln1_v|ln2|ln_final)\.hook_scale", "B T 1", "sqrt(mean(x^2) + eps)"),
    (r"(ln1|ln1_v|ln2|ln_final)\.hook_normalized", "B T D", "x / scale"),
    (r"attn\.hook_q", "B T H E", "W_q x, after qk-norm"),
    (r"attn\.hook_k", "B T K E", "W_k x, after qk-norm"),
    (r"attn\.hook_rot_q", "B T H E", "RoPE(q)"),
    (r"attn\.hook_rot_k", "B T K E", "RoPE(k)"),
    (r"attn\.hook_v", "B T K E", "V = W_v x, before mixing (layer 0: V_1)"),
    (r"attn\.hook_v_first", "B T K E", "V_1 as this layer receives it"),
    (r"attn\.hook_v_gate_pre", "B T K", "x W_alpha"),
    (r"attn\.hook_v_gate", "B T K", "weight of V_1: g(x W_alpha), or lambda1"),
    (r"attn\.hook_v_scale", "B T K", "weight of V: 1, or lambda2"),
    (r"attn\.hook_v_mixed", "B T K E", "V' = scale V + gate V_1"),
    (r"attn\.hook_attn_scores", "B H T T", "q k^T / sqrt(E) + mask"),
    (r"attn\.hook_pattern", "B H T T", "softmax(scores)"),
    (r"attn\.hook_z", "B T H E", "pattern V'"),
    (r"hook_route_(attn|qk|v|mlp|out)", "B T n", "softmax over the read's n sources"),
    (r"mlp\.hook_pre", "B T M", "W_gate y"),
    (r"mlp\.hook_pre_linear", "B T M", "W_up y"),
    (r"mlp\.hook_post", "B T M", "silu(W_gate y) * W_up y"),
    (r"hook_logits", "B T V", "W_U ln_final(x)"),
)


def describe_hook(name: str) -> tuple[str, str]:
    """(shape, equation) of a hook point. B batch, T position, D width, H heads, K KV heads, E head
    width, M MLP width, n sources, V vocabulary.

    Raises:
        HookError: the name is in no row of the table.
    """
    local = re.sub(r"^blocks\.\d+\.", "", name)
    for pattern, shape, equation in _TABLE:
        if re.fullmatch(pattern, local):
            return shape, equation
    _not_described(name)


def _not_described(name: str) -> NoReturn:
    raise HookError(f"{name}: this hook point is in no row of the hook table")
