"""Models whose every weight is set by hand, so that what they do is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import torch

import satlens
from satlens.data.categories import UPOS, make_categories
from satlens.data.dataset import DocumentTokens
from satlens.data.tags import DocumentTags, Tags
from satlens.models.initialise import family

N_CLASSES = 2


def token_class(tokens):
    """Even tokens are of class 0, odd ones of class 1."""
    return np.asarray(tokens) % N_CLASSES


def documents(lengths=(40, 23, 9, 31, 64, 12, 50, 17, 33, 28), d_vocab=16, seed=0):
    rng = np.random.default_rng(seed)
    return [
        DocumentTokens(f"d{k}", None, rng.integers(0, d_vocab, n), "")
        for k, n in enumerate(lengths)
    ]


def tags_of(docs, names=("semantic", "functional")):
    """Tags whose category is the class of the token: 0 the first name, 1 the second."""
    groups = make_categories()
    codes = np.array([groups.names.index(name) for name in names], dtype=np.int8)
    upos = np.array([UPOS.index("NOUN"), UPOS.index("DET")], dtype=np.int8)
    tagged = []
    for document in docs:
        n, kind = len(document.tokens), token_class(document.tokens)
        none = np.full(n, "none")
        tagged.append(
            DocumentTags(
                id=document.id,
                upos=upos[kind],
                tag=none,
                dep=none,
                entity=none,
                word=np.arange(n, dtype=np.int32) // 2,
                category=codes[kind],
            )
        )
    return Tags(documents=tagged, categories=groups, tagger="planted 1")


@torch.no_grad()
def blank(name, **fields):
    """A model whose sublayers add nothing and whose embedding is sqrt(D) times a unit vector.

    Tokens of class c embed as sqrt(D) e_c, so every norm gives back the embedding.
    """
    model = satlens.build(name, tied_embeddings=False, **fields)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.zero_()
    width = model.cfg.d_model
    kind = torch.from_numpy(token_class(np.arange(model.cfg.d_vocab)))
    model.embed.weight[:, :N_CLASSES] = math.sqrt(width) * torch.eye(N_CLASSES)[kind]
    return model


GATE = 0.7


@torch.no_grad()
def gated(n_ctx=16):
    """SATFormer: in layer 1 head 0 opens by GATE on tokens of class 0 alone; head 1 is idle.

    ||V_1|| = 3 and ||V_n|| = 4 for every token and head.
    """
    model = blank(
        "satformer", n_layers=2, d_model=8, n_heads=2, d_vocab=16, n_ctx=n_ctx, norm_eps=0.0
    )
    root = math.sqrt(8)
    alpha = model.blocks[1].attn.values.alpha.weight
    alpha[0, 0] = GATE / root
    alpha[1, :N_CLASSES] = -1.0
    for layer, norm in ((0, 3.0), (1, 4.0)):
        qkv = model.blocks[layer].attn.qkv.weight
        for head in range(2):
            qkv[16 + 4 * head, :N_CLASSES] = norm / root
    return model


PULL = 1.3


@torch.no_grad()
def routed(n_ctx=16):
    """RD-AttnRes of two layers whose value route in layer 1 prefers the embedding on class 0.

    Layer 1 reads the embedding and an empty running sum. Its qk route is uniform; its value route
    is softmax(PULL, 0) on tokens of class 0 and uniform on the others.
    """
    model = blank("rd-attnres", n_layers=2, d_model=8, n_heads=2, d_vocab=16, n_ctx=n_ctx)
    eps = model.cfg.norm_eps
    model.blocks[1].attn_read.query_v[0] = PULL / math.sqrt(8) * math.sqrt(1 + eps)
    return model


@torch.no_grad()
def bigram(d_vocab=16, seed=0):
    """A model of P(next | token) for a random table, exact; returns it and log P (V, V)."""
    rng = np.random.default_rng(seed)
    log_p = np.log(rng.dirichlet(np.full(d_vocab, 0.5), size=d_vocab).clip(1e-6))
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    model = satlens.build(
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
    model.unembed.weight.copy_(torch.from_numpy(log_p.T / math.sqrt(d_vocab)))
    return model, log_p


def tiny(name, seed=0, **fields):
    """A small random GQA model with gates and routes that do something."""
    shape = {
        "n_layers": 3,
        "d_model": 16,
        "n_heads": 4,
        "n_key_value_heads": 2,
        "d_vocab": 32,
        "n_ctx": 16,
    }
    model = satlens.build(name, **{**shape, **fields})
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if "query" in key or "values.alpha" in key:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(noise * (0.5 if "query" in key else 0.3))
        elif family(key) == "routes" and not key.endswith(("gamma", "bias")):
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        elif parameter.ndim > 1:
            parameter.data.mul_(1.5)
    return model
