"""Activation patching where values come from two layers: what ``transformer_lens.patching`` lacks.

Every helper of ``transformer_lens.patching`` but the direct-path ones runs on satlens models, with
K heads for keys and values. What it patches in a model with a value residual, V' = scale V +
gate V_1:

* ``v`` is a layer's own value V, before mixing. Layer 0's own value is V_1, so patching it there
  reaches every later layer that has a gate.
* ``resid_pre`` is the residual alone. V_1 was made before and goes on flowing around it, so a
  patch at any layer but the first restores less than all: at no position does it give the clean
  run's logits. :func:`get_act_patch_resid_pre_and_v_first` patches both.

Streams without a single residual have no ``resid_*`` points: those helpers end with an error that
names the hook points of the reads.

Shapes: B batch, T position, L layers, K KV heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from satlens.hooks import Hook
from satlens.models.decoder import Decoder

Metric = Callable[[Tensor], Tensor]
"""Logits (B, T, V) -> one number."""
HeadPoint = Literal["v_mixed", "v_first", "v_gate", "v"]


def residual_and_v_first_hooks(
    model: Decoder, clean_cache: Mapping[str, Tensor], layer: int, positions: Any = slice(None)
) -> list[Hook]:
    """Hooks that put the clean run's residual before a layer, and its V_1, in place.

    They replace all that passes a block border: V_1 as this layer and those above receive it, not
    as the layers below did. Before layer 0, V_1 is still to come and follows from the residual.

    Args:
        clean_cache: ``blocks.{layer}.hook_resid_pre`` and, with a value residual, ``hook_v_first``
            of the clean run.
        layer: which border.
        positions: of the tokens that are patched: an index or a slice.

    Raises:
        HookError: a stream without a residual, a layer that is not there, an activation that is
            not in the cache.
    """
    resid = f"blocks.{layer}.hook_resid_pre"
    model.hook_names(resid)
    hooks: list[Hook] = [(resid, partial(_patch, clean=clean_cache[resid], where=positions))]
    mixing = [k for k in model.cfg.value_layers if k >= layer] if layer else []
    points = [f"blocks.{k}.attn.hook_v_first" for k in mixing]
    if points:
        v_first = clean_cache["hook_v_first"]
        hooks.append((points, partial(_patch, clean=v_first, where=positions)))
    return hooks


def get_act_patch_resid_pre_and_v_first(
    model: Decoder,
    corrupted_tokens: Tensor,
    clean_cache: Mapping[str, Tensor],
    patching_metric: Metric,
) -> Tensor:
    """The metric after patching residual and V_1 together, for each layer and position, (L, T).

    TransformerLens' ``get_act_patch_resid_pre`` leaves V_1 of the corrupted run flowing; this is
    the same sweep over all that passes a block border. Patched at all positions it gives the clean
    run, at any layer.

    Args:
        corrupted_tokens: (B, T) ids.
        clean_cache: of the clean run: every ``hook_resid_pre`` and ``hook_v_first``.
        patching_metric: logits (B, T, V) -> one number.

    Raises:
        HookError: as :func:`residual_and_v_first_hooks`.
    """
    n_layers, n_positions = model.cfg.n_layers, corrupted_tokens.shape[1]
    results = torch.zeros(n_layers, n_positions, device=model.device)
    with torch.no_grad():
        for layer in range(n_layers):
            for pos in range(n_positions):
                hooks = residual_and_v_first_hooks(model, clean_cache, layer, pos)
                logits = model.run_with_hooks(corrupted_tokens, fwd_hooks=hooks)
                results[layer, pos] = patching_metric(logits)
    return results


def get_act_patch_kv_head(
    model: Decoder,
    corrupted_tokens: Tensor,
    clean_cache: Mapping[str, Tensor],
    patching_metric: Metric,
    point: HeadPoint = "v_mixed",
) -> Tensor:
    """The metric after patching one KV head of a point of the value path, at all positions, (L, K).

    Args:
        corrupted_tokens: (B, T) ids.
        clean_cache: of the clean run, with that point of every layer that has it.
        patching_metric: logits (B, T, V) -> one number.
        point: ``v_mixed`` is what attention uses; ``v_first`` and ``v_gate`` are V_1 and its weight
            as one layer receives them; ``v`` is the layer's own value.

    Returns:
        NaN where a layer has no such point.

    Raises:
        HookError: no layer has it, or it is not in the cache.
    """
    names = [f"blocks.{layer}.attn.hook_{point}" for layer in range(model.cfg.n_layers)]
    if not any(name in model.hook_dict for name in names):
        model.hook_names(names[-1])  # says what is there instead
    n_heads = model.cfg.n_key_value_heads
    results = torch.full((len(names), n_heads), torch.nan, device=model.device)
    with torch.no_grad():
        for layer, name in enumerate(names):
            for head in range(n_heads) if name in model.hook_dict else ():
                where = (slice(None), head)
                patch = partial(_patch, clean=clean_cache[name], where=where)
                logits = model.run_with_hooks(corrupted_tokens, fwd_hooks=[(name, patch)])
                results[layer, head] = patching_metric(logits)
    return results


def _patch(tensor: Tensor, hook: Any, *, clean: Tensor, where: Any) -> Tensor:
    """The running tensor with the clean one at some places of its second axis and on."""
    patched = tensor.clone()
    index = (slice(None), *where) if isinstance(where, tuple) else (slice(None), where)
    patched[index] = clean.to(tensor.dtype)[index]
    return patched
