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
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.slice import Slice

from satlens.errors import HookError
from satlens.models.decomposition import (
    HeadOutputs,
    head_outputs,
    parts_of_read,
    read_at,
    require,
    scale_point,
)
from satlens.models.lens import lens_of_cache
from satlens.models.reads import component_hooks

Selector = str | Sequence[str] | Callable[[str], bool] | None
Hook = tuple[str | Sequence[str] | Callable[[str], bool], Callable[..., Any]]


class ReadOnly:
    """A hook that only looks: what ``look`` returns is dropped.

    It may come and go while a cache is in use, where other hooks have to stay.
    """

    def __init__(self, look: Callable[..., Any]) -> None:
        self.look = look

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.look(*args, **kwargs)


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Compiled code would be made anew for every length of a cache.
        if kwargs.get("past") is not None and self._compiled_call_impl is not None:
            with _uncompiled():
                return super().__call__(*args, **kwargs)
        return super().__call__(*args, **kwargs)

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


class MissingActivationError(HookError, KeyError):
    """A cache was asked for what it does not hold."""

    __str__ = Exception.__str__  # KeyError's own quotes the message


class SatlensCache(ActivationCache):
    """A TransformerLens cache that refuses decompositions its stream gives no meaning to."""

    def __init__(self, cache_dict: dict[str, Tensor], model: Any, has_batch_dim: bool = True):
        super().__init__(cache_dict, model, has_batch_dim=has_batch_dim)

    def __getitem__(self, key: Any) -> Tensor:
        """An activation by its name, or by TransformerLens' shorthand.

        Raises:
            MissingActivationError: the model has no such hook point, or it was not recorded.
        """
        try:
            return super().__getitem__(key)
        except KeyError as error:
            model: Any = self.model
            name = str(error.args[0])
            if name in model.hook_dict:
                raise MissingActivationError(f"{name}: was not recorded in this cache") from None
            raise MissingActivationError(model._unknown(name)) from None

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
                "decompose_resid has the parts of each read"
            )

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: Literal["all", "mlp", "attn"] = "all",
        apply_ln: bool = False,
        pos_slice: Any = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
        role: str | None = None,
    ) -> Any:
        """What a sublayer reads, as a stack of what the embedding and each earlier sublayer bring.

        On any stream the parts are the components times their effective routes and add up to the
        read (:meth:`satlens.models.block.DepthStream.unfold`); on a residual stream they are the
        sublayers' outputs themselves, as in TransformerLens.

        Args:
            layer: whose attention reads; None, -1 or n_layers is the final norm's read.
            mlp_input: the layer's MLP read instead.
            mode: parts of all sublayers, of MLPs or of attentions.
            apply_ln: divide by the scale of the norm that follows the read.
            pos_slice: positions to keep, as in TransformerLens.
            incl_embeds: whether the embedding is among the parts.
            return_labels: also return ``embed, 0_attn_out, 0_mlp_out, ...``.
            role: of a read that has several (``qk`` and ``v``; ``q``, ``k``, ``v`` and ``r``).

        Returns:
            (parts, B, T, D), and the labels if they are asked for.

        Raises:
            HookError: no such layer or role, activations that are missing, by name.
        """
        n_layers = self.model.cfg.n_layers
        layer = n_layers if layer in (None, -1) else layer
        read = read_at(self.model, layer, mlp_input, role)
        hooks = component_hooks(n_layers)[: read.n_components]
        labels = ["embed", *(re.sub(r"blocks\.(\d+)\.hook_", r"\1_", hook) for hook in hooks[1:])]
        wanted = ("_attn_out", "_mlp_out") if mode == "all" else (f"_{mode}_out",)
        chosen = [
            m
            for m, label in enumerate(labels)
            if (incl_embeds if label == "embed" else label.endswith(wanted))
        ]
        what = "decompose_resid"
        parts = parts_of_read(self.model, self.cache_dict, read, chosen, what)
        positions = pos_slice if isinstance(pos_slice, Slice) else Slice(pos_slice)
        parts = positions.apply(parts, dim=-2)
        if apply_ln:
            point = scale_point(self.model, read)
            require(self.cache_dict, [point], what)
            parts = parts / positions.apply(self.cache_dict[point], dim=-2)
        return (parts, [labels[m] for m in chosen]) if return_labels else parts

    def decompose_heads(self, layer: int, project: bool = False) -> HeadOutputs:
        """What each head of a layer puts out, split into what comes from V_1 and the rest.

        Attention is linear in values, so the split is exact: the parts add up to ``hook_z``, and
        projected, summed over heads, to ``hook_attn_out``. The V_1 part is zero where no key that
        is attended to has an open gate.

        Args:
            layer: one that adds V_1 to its values; layer 0 makes V_1.
            project: multiply each head with its rows of W_O.

        Returns:
            ``v_first`` and ``rest``, (B, T, H, E) each, or (B, T, H, D) projected.

        Raises:
            HookError: another layer; activations that are missing, by name; cut positions.
        """
        parts = head_outputs(self.model, self.cache_dict, layer, "decompose_heads")
        if not project:
            return parts
        W_O = self.model.blocks[layer].attn.W_O.detach()
        return HeadOutputs(*(torch.einsum("...he,hed->...hd", z, W_O) for z in parts))

    def accumulated_resid(self, *args: Any, **kwargs: Any) -> Any:
        """The residual stream after each layer; refused where there is none."""
        self._needs_residual("accumulated_resid")
        return super().accumulated_resid(*args, **kwargs)

    def logit_lens(self, layers: Sequence[int] | int | None = None) -> Tensor:  # type: ignore[override]
        """Logits if the stream stood still from a layer on, from what each sublayer added.

        On any stream, through the model's own output read, final norm and unembedding
        (:mod:`satlens.models.lens`). The same from tokens, also under edits of reads and routes, is
        ``model.logit_lens(tokens)``.

        Args:
            layers: borders: l is before layer l, n_layers the end; all by default.

        Returns:
            (len(layers), B, T, V) in fp32; without the first axis for a single number.

        Raises:
            HookError: a layer that is not there, activations that are missing, by name, a pass
                that edits of reads or routes acted on.
        """
        if self.has_batch_dim:
            return lens_of_cache(self.model, self.cache_dict, layers)
        batched = {name: tensor[None] for name, tensor in self.cache_dict.items()}
        return lens_of_cache(self.model, batched, layers).squeeze(-3)

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
    (r"hook_(attn|mlp|out)_read(_qk|_[qkvr])?", "B T D", "what the read delivers, un-normed"),
    (r"hook_(attn_out|mlp_out)", "B T D", "what the sublayer adds"),
    (r"(ln1(_[qkv])?|ln2|ln_final)\.hook_scale", "B T 1", "sqrt(mean(x^2) + eps)"),
    (r"(ln1(_[qkv])?|ln2|ln_final)\.hook_normalized", "B T D", "x / scale"),
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
    (r"hook_route_(attn|qk|[qkvr]|mlp|out)", "B T n", "weights of the read's n sources"),
    (r"hook_route_depth", "B T n", "static weights of the n states summed after the layer"),
    (r"(depth|out)_read\.hook_pre_scale", "B T n", "sqrt(mean(x^2) + eps) of the read's n sources"),
    (r"(depth|out)_read\.hook_post_scale", "B T C", "the same of the C ways' mixtures"),
    (r"(attn|mlp)_hc\.hook_alpha", "B T n n+1", "A = S_A + s_a tanh(Norm(H) W_A)"),
    (r"(attn|mlp)_hc\.hook_beta", "B T n", "b = S_b + s_b tanh(Norm(H) w_b)"),
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
