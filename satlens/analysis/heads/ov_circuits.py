"""The OV circuit of V_1: which tokens' first values raise which next tokens, from weights alone.

Layer 0 reads the embedding and nothing else, so V_1 is a function of the token; head h of layer n
that attends to a token v with an open gate writes V_1[v] W_O to the stream, and that is worth

    C[v, y] = V_1[v] W_O[n, h] diag(w) (W_U[:, y] - mean over vocabulary)

in the logit of y, per unit of attention, of the gate, of the coefficient in the output read and of
the inverse scale of the final norm, whose weight is w. C is taken over the tokens that occur in the
data: rows of the embedding and unembedding that no text reaches say nothing about the model.

Shapes: V vocabulary, N tokens that occur, S of them tried as sources, K KV heads, E head width, D
model width.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.engine.stream import measuring
from satlens.models.decoder import Decoder
from satlens.models.layers import at_least_fp32

MAX_SOURCES = 2048
"""Tokens tried at most as the source of a circuit, evenly spread over those that occur."""

_ROWS = 4096  # tokens run through layer 0 at once
_ELEMENTS = 2**24  # numbers of a circuit held at once


class Circuit(NamedTuple):
    """The V_1 circuit of one head."""

    copying: float
    """Share of the tokens tried whose own logit is raised, and raised the most of all."""
    copying_eigenvalues: float
    """Sum of the eigenvalues of C by the sum of their sizes, in [-1, 1]: 1 where all are positive
    (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"); NaN where all are
    zero."""
    sources: np.ndarray
    """Tokens tried that raise some logit the most, (k,), the largest first."""
    outputs: np.ndarray
    """The token whose logit each raises the most, (k,)."""
    values: np.ndarray
    """By how much, (k,)."""


@torch.no_grad()
def first_values(model: Decoder, tokens: np.ndarray) -> Tensor:
    """V_1 of some tokens, (N,) -> (N, K, E), at least fp32."""
    found: list[Tensor] = []
    ids = torch.from_numpy(tokens).to(model.device)[:, None]

    def note(tensor: Tensor, hook: object) -> None:
        found.append(at_least_fp32(tensor[:, 0]).clone())

    with measuring(model), model.hooks([("hook_v_first", note)]):
        for rows in ids.split(_ROWS):
            model(rows, stop_at_layer=1)
    return torch.cat(found)


def tried(n: int) -> np.ndarray:
    """Which of N tokens are tried as sources, (S,) places in order."""
    return np.linspace(0, n - 1, min(n, MAX_SOURCES)).round().astype(np.int64)


@torch.no_grad()
def circuit_of(
    model: Decoder, tokens: np.ndarray, values: Tensor, layer: int, head: int, top_k: int
) -> Circuit:
    """The V_1 circuit of one query head.

    Args:
        tokens: that occur, (N,); the circuit is over them.
        values: V_1 of each, from :func:`first_values`.
        layer: one that adds V_1 to its values.
        top_k: how many sources to name.
    """
    own = values[:, head // (model.cfg.n_heads // model.cfg.n_key_value_heads)]
    to_logits = _to_logits(model, tokens, layer, head)
    sources = torch.from_numpy(tried(len(tokens))).to(own.device)
    best, outputs = [], []
    for part in sources.split(max(1, _ELEMENTS // len(tokens))):
        top = (own[part] @ to_logits).max(1)
        best.append(top.values)
        outputs.append(top.indices)
    value, output = torch.cat(best), torch.cat(outputs)
    copied = (output == sources) & (value > 0)
    value, place = value.topk(min(top_k, len(value)))
    return Circuit(
        copying=float(copied.double().mean()),
        copying_eigenvalues=_positive_share(to_logits.double() @ own.double()),
        sources=tokens[sources[place].cpu().numpy()],
        outputs=tokens[output[place].cpu().numpy()],
        values=value.double().cpu().numpy(),
    )


def _to_logits(model: Decoder, tokens: np.ndarray, layer: int, head: int) -> Tensor:
    """W_O diag(w) times the columns of W_U that occur less the mean of all, (E, N)."""
    W_O = at_least_fp32(model.blocks[layer].attn.W_O[head])
    W_U = at_least_fp32(model.W_U)
    columns = W_U[:, torch.from_numpy(tokens).to(W_U.device)] - W_U.mean(1, keepdim=True)
    return (W_O * at_least_fp32(model.ln_final.weight)) @ columns


def _positive_share(product: Tensor) -> float:
    """sum lambda / sum |lambda| of X M from M X (E, E), which has the same nonzero eigenvalues."""
    eigenvalues = np.linalg.eigvals(product.cpu().numpy())
    size = np.abs(eigenvalues).sum()
    return float(eigenvalues.sum().real / size) if size > 0 else float("nan")
