"""What a reader of results should know about a checkpoint before trusting a comparison with it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from satlens.config import (
    AttnResStream,
    DeltaStream,
    GatedValueResidual,
    ModelConfig,
    MuddStream,
    RoleDecoupledStream,
)
from satlens.models.initialise import family
from satlens.models.presets import PRESETS

_DEEP = 24
"""Depth from which plain MUDD is reported to diverge (arXiv 2502.12170)."""


def unusual_config(cfg: ModelConfig, layout: str) -> Iterator[str]:
    """What the configuration alone tells."""
    heads, kv_heads = cfg.n_heads, cfg.n_key_value_heads
    if kv_heads != heads:
        rivals = "; its published rivals of this size have full attention" * _is_scale(cfg, layout)
        yield f"{kv_heads} KV heads for {heads} query heads{rivals}"
    if cfg.n_heads * (cfg.d_head or 0) != cfg.d_model:
        yield f"heads are {cfg.d_head} wide: {heads} of them do not make d_model={cfg.d_model}"
    empty = [layer for layer in range(cfg.n_layers) if not cfg.d_mlp_of(layer)]
    if empty:
        yield f"zero-width MLPs, which add nothing: layers {_listed(empty)}"
    widths = sorted({cfg.d_mlp_of(layer) for layer in range(cfg.n_layers)})
    if len(widths) > 1:
        yield f"MLP widths differ by layer, {widths[0]} to {widths[-1]}"
    if cfg.window_size is not None:
        yield f"sliding window of {cfg.window_size} tokens in every layer"
    if cfg.qk_norm and cfg.qk_norm_eps != cfg.norm_eps:
        yield f"qk-norm has eps {cfg.qk_norm_eps:g}, every other norm {cfg.norm_eps:g}"
    plain = sorted(set(range(1, cfg.n_layers)) - set(cfg.value_layers))
    if cfg.value_layers and plain:
        yield f"values of layers {_listed(plain)} are not mixed with V_1"
    dead = dead_parameters(cfg)
    if dead:
        yield f"no gradient reaches {_listed(dead)}"
    plain_mudd = isinstance(cfg.stream, MuddStream) and not cfg.stream.pre_post_norm
    if plain_mudd and cfg.n_layers >= _DEEP:
        yield f"plain MUDD at {cfg.n_layers} layers, which can diverge without PrePostDANorm"
    if layout == "hf_llama":
        yield (
            "a ResFormer in identity mode has exactly these files: "
            "if it is one, say value_residual='identity'"
        )
    if layout == "attnres_community" and isinstance(cfg.stream, RoleDecoupledStream):
        yield "the public code of this mode does not hand the value route's mixture to the values"


def unusual_weights(
    cfg: ModelConfig, state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> Iterator[str]:
    """What the weights tell: ours by name, and the file's own."""
    dtypes = Counter(str(t.dtype).removeprefix("torch.") for t in tensors.values())
    if len(dtypes) > 1:
        counts = ", ".join(f"{n} {name}" for name, n in sorted(dtypes.items()))
        yield f"tensors of several dtypes: {counts}"
    yield from _half_scalars(cfg, state)
    start = [name for name, tensor in state.items() if _at_start(name, tensor)]
    if start:
        yield f"depth weights still at their start, as if untrained: {_listed(start)}"
    closed = [n for n, t in state.items() if n.endswith("alpha.weight") and not t.any()]
    if closed and isinstance(cfg.value_residual, GatedValueResidual):
        forever = ", so closed for good under relu" * (cfg.value_residual.gate == "relu")
        yield f"gate projections that are all zero{forever}: {_listed(closed)}"
    if cfg.tied_embeddings and any(n in tensors for n in ("lm_head.weight", "output.weight")):
        yield "the tied embedding table is stored twice"
    table, head = state["embed.weight"], state.get("unembed.weight")
    if head is not None and torch.equal(head, table):
        yield "untied, but the unembedding equals the embedding table"


def unusual_vocabulary(cfg: ModelConfig, n_tokens: int | None) -> Iterator[str]:
    """What the tokenizer tells; None where there is none."""
    if n_tokens is None:
        yield "no tokenizer.json: analyses need token ids instead of text"
    elif n_tokens < cfg.d_vocab:
        yield f"padded vocabulary: {cfg.d_vocab - n_tokens} of {cfg.d_vocab} rows have no token"


def dead_parameters(cfg: ModelConfig) -> list[str]:
    """Parameters that no gradient reaches, whatever the data and the weights."""
    patterns = []
    stream = cfg.stream
    if isinstance(stream, AttnResStream | RoleDecoupledStream | DeltaStream):
        # A softmax over the embedding alone is one, whatever the query.
        patterns.append(r"blocks\.0\.attn_read\..*")
    if isinstance(stream, RoleDecoupledStream) and stream.control in ("tied", "frozen_v"):
        patterns.append(r"blocks\.\d+\.attn_read\.query_v")
    for layer in range(cfg.n_layers):
        if not cfg.d_mlp_of(layer):
            # What only such an MLP reads, and what weighs its output.
            read_by_mlp = r"ln2\..*|mlp_read\..*|mlp_hc\.(static_beta|dynamic_beta|beta_scale)"
            patterns.append(rf"blocks\.{layer}\.({read_by_mlp})")
    if not patterns:
        return []
    from satlens.models.decoder import Decoder

    with torch.device("meta"):
        names = [name for name, _ in Decoder(cfg, seed=None).named_parameters()]
    return [name for name in names if re.fullmatch("|".join(patterns), name)]


def _is_scale(cfg: ModelConfig, layout: str) -> bool:
    """Whether it has a published scale of the SATFormer repository but for its KV heads."""
    if layout != "satformer_repo":
        return False
    fields = ("d_model", "n_layers", "n_heads")
    scales = [PRESETS[f"transformer-{size}"] for size in ("small", "medium", "large", "xl")]
    return any(all(scale[f] == getattr(cfg, f) for f in fields) for scale in scales)


def _half_scalars(cfg: ModelConfig, state: Mapping[str, Tensor]) -> Iterator[str]:
    """Updates smaller than half a unit in the last place leave a bf16 number as it was."""
    half = (torch.bfloat16, torch.float16)
    stored = [n for n, t in state.items() if family(n) == "scalars" and t.dtype in half]
    if stored:
        yield (
            f"static weights stored in half precision, where small updates are lost: "
            f"{_listed(stored)}"
        )
    scale = state.get("shared_lambda.scale")
    if scale is not None and bool((scale == cfg.n_layers).all()):
        yield f"shared_lambda.scale is exactly its start, {cfg.n_layers}: frozen or untrained"


def _at_start(name: str, tensor: Tensor) -> bool:
    """Whether a depth weight has the value it starts from, which training would have moved."""
    if re.search(r"_read\.(query(_v)?|w2\.weight)$", name):
        return not tensor.any() and not re.match(r"blocks\.0\.attn_read\.", name)
    if name.endswith(".depth_weights"):
        return bool((tensor[:-1] == 0).all()) and bool((tensor[-1] == 1).all())
    if re.search(r"_hc\.dynamic_(alpha|beta)$", name):
        return not tensor.any()
    return False


def _listed(names: Iterable[object], most: int = 3) -> str:
    shown = [str(name) for name in names]
    rest = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {rest} more" if rest > 0 else "")
