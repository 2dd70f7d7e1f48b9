"""The decoder: the whole forward pass of every variant.

    tokens -> embedding -> [ read, attend, write, read, MLP, write ] x L -> read -> norm -> logits

Shapes: B batch, T position, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformer_lens.hook_points import HookPoint

from satlens.config import ModelConfig, NoValueResidual, StaticValueResidual
from satlens.data.tokenizers import decode, encode
from satlens.errors import DataError, HookError
from satlens.hooks import HookedModel
from satlens.models.attention import (
    ForwardContext,
    additive_bias,
    allowed_keys,
    chosen_attention,
    prefers_explicit,
    takes_flex,
)
from satlens.models.block import Snapshot
from satlens.models.cache import KVCache
from satlens.models.compiled import CompiledInside
from satlens.models.flex import block_mask
from satlens.models.generation import Generation
from satlens.models.initialise import initialise
from satlens.models.layers import (
    RMSNorm,
    Unembed,
    at_least_fp32,
    compute_dtype,
    is_hooked,
    rope_table,
)
from satlens.models.lens import LogitLens
from satlens.models.loss import loss_of
from satlens.models.sites import AccessSite
from satlens.models.streams import STREAMS
from satlens.models.values import SharedLambda, value_sites
from satlens.models.weights import DecoderWeights

ReturnType = Literal["logits", "loss", "both"]
RETURN_TYPES = (*get_args(ReturnType), None)


class Decoder(CompiledInside, HookedModel, DecoderWeights, Generation, LogitLens):
    """A decoder-only Transformer of any satlens variant.

    Args:
        cfg: what it is.
        seed: seed of its initial weights; None leaves them uninitialised (to be loaded).
        tokenizer: a ``tokenizers.Tokenizer``, for text in and out.

    Attributes:
        gradient_checkpointing: in training mode, keep only what passes between blocks and run each
            block again in the backward pass. Passes with hooked points run without it: the second
            run would call the hooks twice, or not at all once they are removed.
    """

    gradient_checkpointing: bool = False

    def __init__(self, cfg: ModelConfig, seed: int | None = 0, tokenizer: Any = None) -> None:
        super().__init__()
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.provenance: dict[str, Any] = {}
        self.stream = STREAMS[cfg.stream.kind]
        self.embed = nn.Embedding(cfg.d_vocab, cfg.d_model, _weight=torch.empty(*_table(cfg)))
        self.hook_embed = HookPoint()
        if not isinstance(cfg.value_residual, NoValueResidual) and cfg.value_layers:
            self.hook_v_first = HookPoint()
        residual = cfg.value_residual
        shares = isinstance(residual, StaticValueResidual) and residual.mode == "learnable_plus"
        self.shared_lambda = SharedLambda(cfg.n_layers) if shares and cfg.n_layers > 1 else None
        self.blocks = nn.ModuleList(self.stream.block(cfg, i) for i in range(cfg.n_layers))
        self.out_read = self.stream.output_read(cfg)
        if self.out_read is not None:
            self.hook_route_out = HookPoint()
        self.hook_out_read = HookPoint()
        self.ln_final = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.unembed = Unembed(cfg.d_model, cfg.d_vocab, cfg.tied_embeddings)
        self.hook_logits = HookPoint()
        self.setup()
        if seed is not None and not self.embed.weight.is_meta:
            initialise(self, cfg, seed)

    # -- forward ------------------------------------------------------------------------------

    def forward(
        self,
        tokens: Tensor | str | list[str],
        return_type: ReturnType | None = "logits",
        *,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        attention_mask: Tensor | None = None,
        loss_per_token: bool = False,
        start_at: Snapshot | None = None,
        stop_at_layer: int | None = None,
        past: KVCache | None = None,
    ) -> Any:
        """Run the model.

        Args:
            tokens: (B, T) ids, or text for :meth:`to_tokens`.
            return_type: logits (fp32), loss, both, or None (run, return nothing; the unembedding
                is computed only if hooked).
            targets: (B, T) ids to score at each position, -100 to skip; by default the next
                token, the last position skipped, padding and other documents' tokens skipped.
            documents: (B, T) ids; attention stays within equal ids, -1 marks padding.
            attention_mask: (B, T), 0 marks padding on either side.
            loss_per_token: the loss of each position instead of the mean, 0 where skipped:
                (B, T) with targets, else (B, T - 1).
            start_at: a snapshot of an earlier pass over the same tokens; blocks below are skipped.
            stop_at_layer: run blocks below it only and return the :class:`Snapshot` there.
            past: earlier positions, which the tokens continue and join; see
                :class:`satlens.KVCache`. Everything else given and returned is of the new tokens
                alone, and carries no gradients. Without ``documents`` they continue each row's last
                document.

        Returns:
            logits (B, T, V) in fp32; loss, the mean negative log-likelihood in nats.

        Raises:
            DataError: an unknown return_type, ids of a wrong type or shape or outside the
                vocabulary, a context above n_ctx, texts of unequal length, masks of another shape,
                a cache that the tokens do not continue.
            HookError: a cache that was begun under other hooks; a cache and only some layers; a
                border that is not there, or below the one to start at.
        """
        tokens = self._check(tokens, past)
        if return_type not in RETURN_TYPES:
            raise DataError(f"return_type: must be logits, loss, both or None, got {return_type!r}")
        _check_shape(tokens, documents=documents, attention_mask=attention_mask, targets=targets)
        padding = None if attention_mask is None else attention_mask == 0
        scoring = targets, loss_per_token
        if past is not None:
            if start_at is not None or stop_at_layer is not None:
                raise HookError(
                    "past: a cache needs every layer's keys, so it goes with no start_at and no "
                    "stop_at_layer"
                )
            dtype = compute_dtype(self.embed.weight)
            with torch.no_grad(), past.reading(self, tokens, documents, padding, dtype) as seen:
                context = self._context(tokens, seen, past)
                documents = None if seen is None else seen[:, len(past) :]
                return self.compute(tokens, context, documents, return_type, *scoring)
        if padding is not None:
            documents = torch.zeros_like(tokens) if documents is None else documents
            documents = documents.masked_fill(padding, -1)
        context = self._context(tokens, documents)
        if start_at is None and stop_at_layer is None:
            return self.computed(tokens, context, documents, return_type, *scoring)
        snapshot = self._run_blocks(tokens, context, start_at, stop_at_layer)
        if stop_at_layer is not None:
            return snapshot
        return self._head(snapshot, context, tokens, documents, return_type, *scoring)

    def compute(
        self,
        tokens: Tensor,
        context: ForwardContext,
        documents: Tensor | None,
        return_type: ReturnType | None,
        targets: Tensor | None,
        loss_per_token: bool,
    ) -> Any:
        """All blocks and the head: what :meth:`compile` compiles.

        Passes with a cache, between borders or with hooks stay as they are: they would be compiled
        anew for every length and border, and compiled code ignores hooks.
        """
        snapshot = self._run_blocks(tokens, context, None, None)
        scoring = targets, loss_per_token
        return self._head(snapshot, context, tokens, documents, return_type, *scoring)

    def _head(
        self,
        snapshot: Snapshot,
        context: ForwardContext,
        tokens: Tensor,
        documents: Tensor | None,
        return_type: ReturnType | None,
        targets: Tensor | None,
        loss_per_token: bool,
    ) -> Any:
        """From the last block's state to what was asked for."""
        if return_type is None and not self._head_is_hooked():
            return None
        x = self.stream.finish(self, snapshot.state, context.eager)
        logits = self.hook_logits(self.unembed(x, self.embed.weight))
        if return_type is None:
            return None
        if return_type == "logits":
            return at_least_fp32(logits)
        loss = loss_of(logits, tokens, targets, documents, loss_per_token)
        return loss if return_type == "loss" else (at_least_fp32(logits), loss)

    def _run_blocks(
        self,
        tokens: Tensor,
        context: ForwardContext,
        start_at: Snapshot | None,
        stop_at_layer: int | None,
    ) -> Snapshot:
        if start_at is None:
            x0 = self.hook_embed(self.embed(tokens))
            start_at = Snapshot(0, self.stream.begin(x0), None)
        first, state, v_first = start_at
        last = self.cfg.n_layers if stop_at_layer is None else stop_at_layer
        if not first <= last <= self.cfg.n_layers:
            raise HookError(
                f"stop_at_layer: {last} is outside of {first}, where the pass starts, to "
                f"{self.cfg.n_layers}"
            )
        rerun = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        rerun = rerun and not is_hooked(*self.hook_dict.values())
        for layer in range(first, last):
            block = self.blocks[layer]
            state, v_first = (
                checkpoint(block, state, v_first, context, use_reentrant=False)
                if rerun
                else block(state, v_first, context)
            )
            if layer == 0 and v_first is not None:
                v_first = self.hook_v_first(v_first)
        return Snapshot(last, state, v_first)

    def _context(
        self, tokens: Tensor, documents: Tensor | None, past: KVCache | None = None
    ) -> ForwardContext:
        """Rotary tables, masks and the attention implementation of one pass.

        ``documents`` are of all positions, those of the cache included.
        """
        length, device = tokens.shape[1], tokens.device
        start = 0 if past is None else len(past)
        weight, cfg = self.embed.weight, self.cfg
        dtype = compute_dtype(weight)
        table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        # Room grows by doubling: one table serves many lengths.
        rows = past.room if past is not None and start else length
        cos, sin = rope_table(rows, cfg.d_head, cfg.rope_theta, table_dtype, device)
        if start:
            cos, sin = cos[start : start + length], sin[start : start + length]
        implementation, allowed, blocks = chosen_attention(), None, None
        kernel = implementation, length, cfg.d_head, dtype, device
        if past is None and takes_flex(*kernel) and self._masks(length, documents):
            blocks = block_mask(length, cfg.window_size, documents, device)
        else:
            allowed = allowed_keys(length, cfg.window_size, documents, device, start)
        explicit = implementation == "eager" or (
            implementation == "auto" and prefers_explicit(start + length, dtype, device)
        )
        bias = None
        if explicit:
            group = cfg.n_heads // cfg.n_key_value_heads
            like = torch.empty((), dtype=dtype, device=device)
            bias = additive_bias(allowed, length, cfg.n_key_value_heads, group, like, start)
        shared = None if self.shared_lambda is None else self.shared_lambda()
        return ForwardContext(cos, sin, allowed, bias, implementation, shared, past, blocks)

    def _masks(self, length: int, documents: Tensor | None) -> bool:
        """Whether some query does not see all earlier keys, and no hook asks for the scores."""
        window, layers = self.cfg.window_size, (block.attn for block in self.blocks)
        if documents is None and (window is None or window >= length):
            return False
        return not any(is_hooked(a.hook_attn_scores, a.hook_pattern) for a in layers)

    def _check(self, tokens: Any, past: Any = None) -> Tensor:
        """The ids to run, from ids or text."""
        if past is not None and not isinstance(past, KVCache):
            raise DataError(f"past: expected a satlens.KVCache, got {type(past).__name__}")
        if _is_text(tokens):
            tokens = self.to_tokens(tokens)
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
            found = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise DataError(f"tokens: expected a tensor of int64 ids, or text, got {found}")
        if tokens.ndim != 2 or not tokens.numel():
            raise DataError(f"tokens: expected (batch, position), not empty, got {[*tokens.shape]}")
        start = 0 if past is None else len(past)
        if start + tokens.shape[1] > self.cfg.n_ctx:
            after = f" after {start} in the cache" if start else ""
            raise DataError(
                f"tokens: {tokens.shape[1]} positions{after} exceed n_ctx={self.cfg.n_ctx}"
            )
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = (int(t) for t in torch.aminmax(tokens))
            if low < 0 or high >= self.cfg.d_vocab:
                worst = low if low < 0 else high
                raise DataError(f"tokens: id {worst} is outside d_vocab={self.cfg.d_vocab}")
        return tokens

    def _head_is_hooked(self) -> bool:
        points = [self.hook_out_read, self.hook_logits]
        if self.out_read is not None:
            points.append(self.hook_route_out)
        return self.ln_final.is_hooked() or is_hooked(*points)

    # -- what it is ---------------------------------------------------------------------------

    @property
    def sites(self) -> list[AccessSite]:
        """Every place where a late computation takes something from an early one."""
        return model_sites(self.cfg)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def n_parameters(self) -> int:
        """Parameters, tied ones once."""
        return sum(p.numel() for p in self.parameters())

    # -- text ---------------------------------------------------------------------------------

    def to_tokens(self, text: str | list[str]) -> Tensor:
        """Text, or texts of one length in tokens -> ids (B, T); no BOS or EOS is added.

        Raises:
            DataError: no tokenizer, no text, or texts whose lengths differ: the padding they would
                need is scored like text unless it is masked.
        """
        if not _is_text(text):
            raise DataError(f"text: expected a str or a list of str, got {type(text).__name__}")
        rows = encode(self._tokenizer(), [text] if isinstance(text, str) else text)
        lengths = sorted({len(row) for row in rows})
        if len(lengths) > 1:
            raise DataError(
                f"text: {len(rows)} texts of {lengths[0]} to {lengths[-1]} tokens do not make one "
                "tensor without padding; pass them one by one, or use satlens.evaluate"
            )
        return torch.from_numpy(np.stack(rows).astype(np.int64)).to(self.device)

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token.

        Raises:
            DataError: it is none or several.
        """
        ids = self.to_tokens(text)[0].tolist()
        if len(ids) != 1:
            raise DataError(f"text: {text!r} is {len(ids)} tokens, not one")
        return ids[0]

    def to_str_tokens(self, tokens: str | Tensor) -> list[str]:
        """The text of each token of one sequence."""
        ids = self.to_tokens(tokens)[0] if isinstance(tokens, str) else tokens.flatten()
        return [decode(self._tokenizer(), [int(i)]) for i in ids]

    def to_string(self, tokens: Tensor) -> str:
        """The text of one sequence of ids."""
        return decode(self._tokenizer(), tokens.flatten().tolist())

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise DataError("tokenizer: this checkpoint has no tokenizer.json; pass token ids")
        return self.tokenizer


def model_sites(cfg: ModelConfig) -> list[AccessSite]:
    """Access sites of a configuration: value gates, then the stream's reads."""
    return value_sites(cfg) + STREAMS[cfg.stream.kind].sites(cfg)


def _is_text(value: Any) -> bool:
    """A str, or a list of at least one."""
    several = isinstance(value, list | tuple) and len(value) > 0
    return isinstance(value, str) or (several and all(isinstance(v, str) for v in value))


def _table(cfg: ModelConfig) -> tuple[int, int]:
    return cfg.d_vocab, cfg.d_model


def _check_shape(tokens: Tensor, **given: Tensor | None) -> None:
    """Masks and targets have an entry for each token."""
    for name, value in given.items():
        if value is not None and value.shape != tokens.shape:
            raise DataError(
                f"{name}: expected the shape of tokens {[*tokens.shape]}, got {[*value.shape]}"
            )
