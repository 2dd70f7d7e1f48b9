"""Models whose every weight is set by hand, so that what they do is known in closed form.

The vocabulary has two classes, even and odd ids. A blank model embeds class c as sqrt(D) e_c and
adds nothing, so every norm gives back the embedding; each model below plants one thing in it.

Letters: D model width, E head width, K heads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from satlens.data.categories import UPOS, make_categories
from satlens.data.dataset import DocumentTokens
from satlens.data.tags import DocumentTags, Tags
from satlens.models.build import build
from satlens.models.decoder import Decoder

N_CLASSES = 2
D_VOCAB = 16
CATEGORIES = ("semantic", "functional")
"""Categories that stand for class 0 and class 1."""
LENGTHS = (40, 23, 9, 31, 64, 12, 50, 17, 33, 28)

GATE = 0.7
"""What the planted gate opens to on class 0."""
FIRST_NORM, OWN_NORM = 3.0, 4.0
"""||V_1|| and ||V_n|| of every token and head of the planted gates."""
PULL = 1.3
"""Logit of the embedding over the running sum, in the planted value route on class 0."""
BRINGS = 2.0
"""Norm of what layer 0's attention adds in the models of planted routes."""


# -- data ------------------------------------------------------------------------------------------


def token_class(tokens: Any) -> np.ndarray:
    """Even tokens are of class 0, odd ones of class 1."""
    return np.asarray(tokens) % N_CLASSES


def documents(
    lengths: Sequence[int] = LENGTHS, d_vocab: int = D_VOCAB, seed: int = 0
) -> list[DocumentTokens]:
    """Documents of these lengths with tokens drawn uniformly."""
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, d_vocab, n) for n in lengths]
    return [DocumentTokens(f"d{k}", None, tokens, "") for k, tokens in enumerate(drawn)]


def tags_of(docs: Sequence[DocumentTokens], names: tuple[str, str] = CATEGORIES) -> Tags:
    """Tags whose category is the class of the token: 0 the first name, 1 the second."""
    return tags_from(docs, [token_class(document.tokens) for document in docs], names)


def tags_from(
    docs: Sequence[DocumentTokens],
    sides: Sequence[np.ndarray],
    names: tuple[str, str] = CATEGORIES,
) -> Tags:
    """Tags with the first of two categories where a side (n,) is 0 and the second where it is 1."""
    groups = make_categories()
    codes = np.array([groups.names.index(name) for name in names], dtype=np.int8)
    upos = np.array([UPOS.index("NOUN"), UPOS.index("DET")], dtype=np.int8)
    tagged = []
    for document, side in zip(docs, sides, strict=True):
        n = len(document.tokens)
        none = np.full(n, "none")
        tagged.append(
            DocumentTags(
                id=document.id,
                upos=upos[side],
                tag=none,
                dep=none,
                entity=none,
                word=np.arange(n, dtype=np.int32) // 2,
                category=codes[side],
            )
        )
    return Tags(documents=tagged, categories=groups, tagger="planted 1")


def counted(docs: Sequence[DocumentTokens], n_ctx: int = 16) -> np.ndarray:
    """The input tokens that statistics count: no first of a window, no last of a document."""
    kept = [d.tokens[:-1][np.arange(len(d.tokens) - 1) % n_ctx != 0] for d in docs]
    return np.concatenate(kept)


# -- models ----------------------------------------------------------------------------------------


@torch.no_grad()
def blank(name: str, **fields: Any) -> Decoder:
    """A model whose sublayers add nothing and whose embedding is sqrt(D) times a unit vector."""
    model = build(name, tied_embeddings=False, **fields)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.zero_()
    kind = torch.from_numpy(token_class(np.arange(model.cfg.d_vocab)))
    rows = math.sqrt(model.cfg.d_model) * torch.eye(N_CLASSES)[kind]
    model.embed.weight[:, :N_CLASSES] = rows
    return model


@torch.no_grad()
def write_values(model: Decoder, layer: int, head: int, dimension: int, norm: float) -> None:
    """Let one dimension of a head's values be ``norm`` for every token of a blank model."""
    cfg = model.cfg
    row = (cfg.n_heads + cfg.n_key_value_heads + head) * cfg.d_head + dimension
    attention: Any = model.blocks[layer].attn
    attention.qkv.weight[row, :N_CLASSES] = norm / math.sqrt(cfg.d_model)


@torch.no_grad()
def gated(n_ctx: int = 16) -> Decoder:
    """SATFormer: in layer 1 head 0 opens by GATE on tokens of class 0 alone; head 1 is idle.

    ||V_1|| = 3 and ||V_n|| = 4 for every token and head.
    """
    model = blank(
        "satformer", n_layers=2, d_model=8, n_heads=2, d_vocab=D_VOCAB, n_ctx=n_ctx, norm_eps=0.0
    )
    attention: Any = model.blocks[1].attn
    alpha = attention.values.alpha.weight
    alpha[0, 0] = GATE / math.sqrt(8)
    alpha[1, :N_CLASSES] = -1.0
    for layer, norm in ((0, FIRST_NORM), (1, OWN_NORM)):
        for head in range(2):
            write_values(model, layer, head, 0, norm)
    return model


@torch.no_grad()
def write_constant(model: Decoder, layer: int) -> Decoder:
    """Let the attention of a layer add BRINGS e_3 to every token, whatever it attends to."""
    write_values(model, layer, 0, 0, 1.0)
    attention: Any = model.blocks[layer].attn
    attention.o.weight[3, 0] = BRINGS
    return model


@torch.no_grad()
def routed(n_ctx: int = 16, control: str = "none") -> Decoder:
    """RD-AttnRes of two layers whose value route in layer 1 prefers the embedding on class 0.

    Layer 1 reads the embedding, of norm sqrt(8), and a running sum of norm BRINGS that layer 0's
    attention wrote. Its qk route is uniform; its value route is softmax(PULL, 0) on tokens of
    class 0 and uniform on the others. Under the control ``tied`` both are the latter.
    """
    shape = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_vocab": D_VOCAB, "n_ctx": n_ctx}
    model = blank("rd-attnres", control=control, **shape)
    # Sources are normed with epsilon before queries meet them.
    scale = math.sqrt(1 + model.cfg.norm_eps)
    read: Any = model.blocks[1].attn_read
    query = read.query if read.query_v is None else read.query_v
    query[0] = PULL / math.sqrt(8) * scale
    return write_constant(model, 0)


STATE_WEIGHTS = ((0.25, -0.5), (0.6, -0.3, 0.5))
"""Weights of X_0, X_1 (, X_2) after layers 0 and 1 of the planted DenseFormer."""


@torch.no_grad()
def weighed(n_ctx: int = 16) -> Decoder:
    """DenseFormer of two layers with the weights STATE_WEIGHTS.

    Layer 0's attention adds BRINGS e_3; every other sublayer adds nothing.
    """
    model = blank("denseformer", n_layers=2, d_model=8, n_heads=2, d_vocab=D_VOCAB, n_ctx=n_ctx)
    for block, weights in zip(model.blocks, STATE_WEIGHTS, strict=True):
        block.depth_weights.copy_(torch.tensor(weights))  # type: ignore[operator]
    return write_constant(model, 0)


@torch.no_grad()
def bigram(d_vocab: int = D_VOCAB, seed: int = 0) -> tuple[Decoder, np.ndarray]:
    """A model of P(next | token) for a random table, exact; with log P (V, V)."""
    rng = np.random.default_rng(seed)
    log_p = np.log(rng.dirichlet(np.full(d_vocab, 0.5), size=d_vocab).clip(1e-6))
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    model = build(
        "transformer",
        n_layers=1,
        d_model=d_vocab,
        n_heads=2,
        d_vocab=d_vocab,
        n_ctx=16,
        norm_eps=0.0,
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.zero_()
    model.embed.weight.copy_(math.sqrt(d_vocab) * torch.eye(d_vocab))
    weight: Any = model.unembed.weight
    weight.copy_(torch.from_numpy(log_p.T / math.sqrt(d_vocab)))
    return model, log_p


@torch.no_grad()
def copier(sign: float = 1.0) -> Decoder:
    """SATFormer of one head whose V_1 is the token itself, written to the logits with a sign.

    Tokens are axes: x = 4 e_token, V_1 = x, the gate is GATE for all, attention is even, and layer
    1 adds sign GATE mean(V_1) to the state that the unembedding, the identity, reads.
    """
    shape = {"n_layers": 2, "d_model": D_VOCAB, "n_heads": 1, "d_vocab": D_VOCAB, "n_ctx": 16}
    model = blank("satformer", norm_eps=0.0, **shape)
    axes = torch.eye(D_VOCAB)
    model.embed.weight.copy_(math.sqrt(D_VOCAB) * axes)
    first, second = (block.attn for block in model.blocks)  # type: ignore[union-attr]
    first.qkv.weight[first.qk_rows :] = axes
    second.values.alpha.weight.fill_(GATE / math.sqrt(D_VOCAB))
    second.o.weight.copy_(sign * axes)
    unembedding: Any = model.unembed.weight
    unembedding.copy_(axes)
    return model
