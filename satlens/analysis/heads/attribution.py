"""What one pass adds up about heads: the direct logit attribution of their V_1 part and the rest.

Attention is linear in values, so a head's output z is what it takes from V_1 plus what it takes
from the layer's own values (:func:`satlens.models.decomposition.head_outputs`). The output read is
linear in the sublayers' outputs once its weights are fixed, and the final norm is once its scale
is, so each part has an exact share of every logit:

    logit of y from part u = sum_d  c_d (u W_O)_d  w_d / scale  (W_U[d, y] - mean over vocabulary)

with c the effective coefficient of the attention's output in the output read, w and scale the final
norm's weight and scale. Over the embedding, all heads and all MLPs these add up to the logit of y
minus the mean logit of its token.

Shapes: B rows, T positions, N layers that mix V_1, L layers, H query heads, E head width, D model
width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.engine.accumulators import Accumulator, GroupSums
from satlens.analysis.engine.stream import Observed, Transform, kept_tokens
from satlens.data.windows import IGNORE
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.decomposition import head_outputs, parts_of_read, read_at
from satlens.models.layers import at_least_fp32
from satlens.models.reads import component_hooks

_SCALE = "ln_final.hook_scale"
_OF_TOKENS = ("n", "total", "first_n", "first_total", "first_v_first")


class HeadAttribution:
    """Direct logit attribution of every head, to the token that comes next.

    Args:
        model: the model that is run, whose stream unfolds its weights.
        n_groups: document groups.
    """

    needs_nll = False

    def __init__(self, model: Decoder, n_groups: int) -> None:
        cfg = model.cfg
        self.model = model
        self.layers = list(cfg.value_layers)
        self.read = read_at(model, cfg.n_layers, False, None)
        self.components = component_hooks(cfg.n_layers)
        self.weights = model.stream.unfolded_from(cfg)
        self.outputs = [f"blocks.{layer}.hook_attn_out" for layer in range(cfg.n_layers)]
        self._running: dict[str, Tensor] = {}
        self.hooks = self._points()
        by_head = (cfg.n_layers, cfg.n_heads)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_OF_TOKENS, ())
        names = ("v_first", "rest", "v_first_size", "rest_size")
        self.sums = GroupSums(n_groups, shapes | dict.fromkeys(names, by_head))
        # A vector of the model's width for every head: one group, no interval.
        self.written = GroupSums(1, {"v_first": (len(self.layers), cfg.n_heads, cfg.d_model)})
        self.accumulators: Mapping[str, Accumulator] = {
            "sums": self.sums,
            "written": self.written,
        }
        self.identity: dict[str, Any] = {"reducer": "head attribution", "groups": n_groups}

    # -- capture ------------------------------------------------------------------------------

    def _points(self) -> dict[str, Transform | None]:
        """A layer's heads are split as soon as they ran, so one pattern exists at a time."""
        points: dict[str, Transform | None] = dict.fromkeys((*self.weights, _SCALE, self.read.hook))
        points |= dict.fromkeys(self.components, _first_row)
        for layer in range(self.model.cfg.n_layers):
            at = f"blocks.{layer}.attn.hook_"
            points[f"{at}z"] = None
            if layer in self.layers:
                for name in ("v_first", "v_gate", "pattern"):
                    points[at + name] = partial(self._note, at + name)
                points[f"{at}z"] = partial(self._split, layer)
        return points

    def _note(self, hook: str, tensor: Tensor) -> Tensor:
        self._running[hook] = tensor
        return tensor.new_empty(0)

    def _split(self, layer: int, z: Tensor) -> Tensor:
        """(B, T, H, E) -> (2, B, T, H, E): the V_1 part and the rest."""
        self._running[f"blocks.{layer}.attn.hook_z"] = z
        parts = head_outputs(self.model, self._running, layer, "circuits")
        self._running.clear()
        return torch.stack(parts)

    # -- a batch ------------------------------------------------------------------------------

    def update(self, seen: Observed) -> None:
        """Add one batch.

        Raises:
            AnalysisError: the output read is not the sum of its unfolded components.
        """
        captured, batch = seen.captured, seen.batch
        self._require_identity(captured)
        scored = batch.targets != IGNORE
        kept, starts = (kept_tokens(batch) & scored), (batch.valid & batch.first & scored)
        normed = at_least_fp32(self.model.ln_final.weight) / captured[_SCALE]
        carried = self._carried(captured, normed)
        towards = self._towards(batch.targets)
        read = at_least_fp32(captured[self.read.hook])
        total = (read * normed * towards).sum(-1).double()
        rows, written, first = self._of_layers(captured, carried, towards, kept, starts)
        self.sums.add(
            seen.groups,
            **rows,
            n=kept.sum(1),
            total=(total * kept).sum(1),
            first_n=starts.sum(1),
            first_total=(total * starts).sum(1),
            first_v_first=first,
        )
        self.written.add(np.zeros(1, dtype=np.int64), v_first=written[None])

    def _carried(self, captured: Mapping[str, Tensor], normed: Tensor) -> Tensor:
        """How each channel of each attention's output counts in the final norm's output.

        (L, B, T, D). Coefficients are the same in both directions, one a channel at most, so what
        takes a component to the read takes a weighing of the read back to the component.
        """
        back = {name: captured[name] for name in self.weights} | dict.fromkeys(self.outputs, normed)
        chosen = [self.components.index(hook) for hook in self.outputs]
        return parts_of_read(self.model, back, self.read, chosen, "circuits")

    def _towards(self, targets: Tensor) -> Tensor:
        """W_U of each next token minus the mean over the vocabulary, (B, T, D)."""
        unembedding = at_least_fp32(self.model.W_U).t()
        return unembedding[targets.clamp_min(0)] - unembedding.mean(0)

    def _of_layers(
        self,
        captured: Mapping[str, Tensor],
        carried: Tensor,
        towards: Tensor,
        kept: Tensor,
        starts: Tensor,
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Sums of each row (B, L, H), what V_1 parts write (N, H, D), and of first tokens (B,)."""
        found: dict[str, list[Tensor]] = {name: [] for name in ("v_first", "rest")}
        written, first = [], towards.new_zeros(len(towards), dtype=torch.float64)
        for layer, back in enumerate(carried):
            z = at_least_fp32(captured[f"blocks.{layer}.attn.hook_z"])
            mixes = layer in self.layers
            v_first, rest = z if mixes else (torch.zeros_like(z), z)
            W_O = at_least_fp32(self.model.blocks[layer].attn.o.weight)  # (D, H E)
            along = ((back * towards) @ W_O).view_as(rest)
            for name, part in (("v_first", v_first), ("rest", rest)):
                found[name].append(torch.linalg.vecdot(part, along).double())
            if mixes:
                written.append(_written(v_first, back, W_O, kept))
                first += (found["v_first"][-1].sum(-1) * starts).sum(1)
        rows: dict[str, Tensor] = {}
        for name, by_layer in found.items():
            effect = torch.stack(by_layer, 2) * kept[..., None, None]
            rows |= {name: effect.sum(1), f"{name}_size": effect.abs().sum(1)}
        return rows, torch.stack(written), first

    # -- the identity -------------------------------------------------------------------------

    def _require_identity(self, captured: Mapping[str, Tensor]) -> None:
        """The components of the output read add up to it, in the first window of the batch."""
        first = {name: captured[name][:1] for name in self.weights}
        first |= {name: captured[name] for name in self.components}
        everything = list(range(len(self.components)))
        parts = parts_of_read(self.model, first, self.read, everything, "circuits")
        read = at_least_fp32(captured[self.read.hook][:1])
        error = torch.linalg.vector_norm(parts.sum(0) - read, dim=-1).max()
        size = torch.linalg.vector_norm(read, dim=-1).square().mean().sqrt()
        rounding = 4 * torch.finfo(self.model.dtype).eps
        tolerance = max(self.model.stream.unfold_tolerance, rounding)
        if not error <= tolerance * size:
            raise AnalysisError(
                f"circuits: {self.read.hook}: its components miss it by {float(error / size):.1e} "
                f"of its size, more than {tolerance:.0e}; a hook that edits a read is outside of "
                "what unfolds"
            )


def _first_row(tensor: Tensor) -> Tensor:
    return tensor[:1].clone()


def _written(part: Tensor, back: Tensor, W_O: Tensor, kept: Tensor) -> Tensor:
    """Sum over tokens of what each head's part is in the final norm's output, (H, D).

    Args:
        part: (B, T, H, E).
        back: how each channel counts there, (B, T, D).
        W_O: (D, H E).
    """
    counted = (back * kept[..., None]).flatten(0, 1)
    product = counted.t() @ part.flatten(2).flatten(0, 1)
    return (product * W_O).unflatten(1, part.shape[-2:]).sum(-1).t()
