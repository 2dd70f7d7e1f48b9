"""Recorded activations of a pass, and what they decompose into on any stream.

Decompositions that have no meaning on a stream are refused instead of returning numbers.

Shapes: B batch, T position, D model width, H query heads, E head width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities.slice import Slice

from satlens.errors import HookError
from satlens.models.decomposition import (
    HeadOutputs,
    head_outputs,
    parts_of_read,
    read_at,
    require,
    roles_at,
    scale_point,
)
from satlens.models.lens import lens_of_cache
from satlens.models.reads import component_hooks


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
            HookError: no such layer, role or mode, activations that are missing, by name.
        """
        if mode not in ("all", "mlp", "attn"):
            raise HookError(f"mode: must be all, mlp or attn, got {mode!r}")
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
        W_O = self.model.blocks[layer].attn.W_O.detach().to(parts.rest)
        return HeadOutputs(*(torch.einsum("...he,hed->...hd", z, W_O) for z in parts))

    def apply_ln_to_stack(
        self,
        residual_stack: Tensor,
        layer: int | None = None,
        mlp_input: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """A stack over the cached scale of a read's norm, as in TransformerLens.

        Raises:
            HookError: a read of several roles, each with a scale of its own.
        """
        roles = roles_at(self.model, layer, mlp_input)
        if len(roles) > 1:
            raise HookError(
                f"apply_ln_to_stack: the attention of layer {layer} reads in the roles "
                f"{', '.join(roles)}, each normalised on its own; use decompose_resid({layer}, "
                "apply_ln=True, role=...)"
            )
        return super().apply_ln_to_stack(residual_stack, layer, mlp_input, *args, **kwargs)

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
