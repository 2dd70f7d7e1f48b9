"""The logit lens: what the model would say if its stream stood still from a layer on.

At each block border the state goes through the model's own ending: its output read, where it has
one, over the sources there are by then, the final norm and the unembedding. On a residual stream
that is ``ln_final(resid_pre) W_U``; on the others it is what their final norm would receive, not
one of their sums taken for a residual. What each stream's ending does with a state from halfway
is said in :meth:`satlens.models.block.DepthStream.standing_still`.

Shapes: B batch, T position, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from satlens.errors import HookError
from satlens.models.attention import ForwardContext, chosen_attention
from satlens.models.block import DepthStream, Snapshot, State
from satlens.models.layers import at_least_fp32
from satlens.models.reads import component_hooks

# How far, relative to its largest entry, a replayed final read may be from the recorded one.
REPLAY_TOLERANCE = 1e-4


class LogitLens:
    """``logit_lens`` of a decoder."""

    if TYPE_CHECKING:
        cfg: Any
        stream: type[DepthStream]
        embed: nn.Embedding
        unembed: Any
        hook_logits: Any
        __call__: Callable[..., Any]
        _check: Callable[[Any], Tensor]

    def logit_lens(
        self,
        tokens: Tensor | str | list[str],
        layers: Sequence[int] | int | None = None,
        *,
        documents: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits at block borders, in one pass over the blocks.

        Hooks and interventions act as in a forward pass; those on the final norm, its read or the
        logits act at every border.

        Args:
            tokens: (B, T) ids, or text.
            layers: borders: l is before layer l, n_layers the end; all by default.
            documents: as in a forward pass.
            attention_mask: as in a forward pass.

        Returns:
            (len(layers), B, T, V) in fp32; without the first axis for a single number. At the end
            they are the model's logits to the bit.

        Raises:
            HookError: a layer that is not there.
            DataError: as a forward pass.
        """
        wanted, tokens = _borders(self.cfg.n_layers, layers), self._check(tokens)
        masks = {"documents": documents, "attention_mask": attention_mask}
        by_layer: dict[int, Tensor] = {}
        snapshot: Snapshot | None = None
        for layer in range(max(wanted) + 1):
            snapshot = self(tokens, start_at=snapshot, stop_at_layer=layer, **masks)
            if layer in wanted:
                assert snapshot is not None
                by_layer[layer] = logits_of(self, snapshot.state)
        return _stacked(by_layer, wanted, layers)


def logits_of(model: Any, state: State) -> Tensor:
    """Logits of a state at a block border, (B, T, V) in fp32."""
    ended = model.stream.standing_still(model.cfg, state)
    x = model.stream.finish(model, ended, chosen_attention() == "eager")
    return at_least_fp32(model.hook_logits(model.unembed(x, model.embed.weight)))


def lens_of_cache(
    model: Any, cache: Mapping[str, Tensor], layers: Sequence[int] | int | None
) -> Tensor:
    """Logits at block borders of a pass whose sublayer outputs were recorded.

    The stream is replayed from them: it depends on nothing else. Recorded and replayed final read
    are compared, which tells a pass that edits of reads or routes acted on.

    Args:
        model: the decoder that the activations are of.
        cache: (B, T, ...) activations of ``hook_embed``, every ``hook_attn_out`` and
            ``hook_mlp_out``, and ``hook_out_read``.
        layers: as in :meth:`LogitLens.logit_lens`.

    Raises:
        HookError: a layer that is not there, an activation that is missing or cut to one position,
            a pass under edits that do not act now.
    """
    n_layers = model.cfg.n_layers
    wanted = _borders(n_layers, layers)
    needed = (*component_hooks(n_layers), "hook_out_read")
    for name in needed:
        if name not in cache:
            raise HookError(f"logit_lens: {name} is not in this cache")
        if cache[name].ndim != 3:
            raise HookError(f"logit_lens: {name} is cut to one position; keep a slice of positions")
    cache = {name: cache[name].to(model.device) for name in needed}
    by_layer: dict[int, Tensor] = {}
    seen: list[Tensor] = []
    with torch.no_grad():
        for layer, state in enumerate(_replayed(model, cache)):
            if layer in wanted or layer == n_layers:
                # The last read that is seen is the one at the end.
                look = model.hook_out_read.register_forward_hook(lambda *io: seen.append(io[2]))
                try:
                    by_layer[layer] = logits_of(model, state)
                finally:
                    look.remove()
    recorded = at_least_fp32(cache["hook_out_read"])
    if (at_least_fp32(seen[-1]) - recorded).abs().max() > REPLAY_TOLERANCE * recorded.abs().max():
        raise HookError(
            "logit_lens: this cache is of a pass under edits of reads or routes, which its "
            "activations do not tell; call model.logit_lens(tokens) under the same edits"
        )
    return _stacked(by_layer, wanted, layers)


def _replayed(model: Any, cache: Mapping[str, Tensor]) -> Iterator[State]:
    """The state at each block border, from what each sublayer added."""
    implementation = chosen_attention()
    none = torch.empty(0)
    context = ForwardContext(none, none, None, None, implementation, None)  # reads ask for eager
    state = model.stream.begin(cache["hook_embed"])
    yield state
    for layer, block in enumerate(model.blocks):
        state, _ = block.read_attn(state, context)
        state = block.write_attn(state, cache[f"blocks.{layer}.hook_attn_out"])
        state, _ = block.read_mlp(state, context)
        state = block.write_mlp(state, cache[f"blocks.{layer}.hook_mlp_out"])
        yield state


def _borders(n_layers: int, layers: Sequence[int] | int | None) -> list[int]:
    if layers is None:
        return list(range(n_layers + 1))
    wanted = [layers] if isinstance(layers, int) else list(layers)
    for layer in wanted:
        if not 0 <= layer <= n_layers:
            raise HookError(f"layers: {layer} is outside of 0 to {n_layers}, which is the end")
    if not wanted:
        raise HookError("layers: an empty list asks for nothing")
    return wanted


def _stacked(
    by_layer: dict[int, Tensor], wanted: list[int], layers: Sequence[int] | int | None
) -> Tensor:
    if isinstance(layers, int):
        return by_layer[layers]
    return torch.stack([by_layer[layer] for layer in wanted])
