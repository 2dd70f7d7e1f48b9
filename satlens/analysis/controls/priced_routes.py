"""A routed model whose every weight has a known price: its losses are a table in closed form.

One layer of Attention Residuals. The output read mixes the embedding with the running sum, which is
BRINGS e_3 for every token; its route, w on the embedding, depends on the class c of the token:

    x_c = w_c sqrt(D) e_c + (1 - w_c) BRINGS e_3
    log p(. | c) = log softmax(U x_c / rms(x_c))

The MLP writes nothing, so what it reads is worth exactly nothing.

Letters: D model width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.special import log_softmax

from satlens.analysis.controls.planted import (
    BRINGS,
    D_VOCAB,
    N_CLASSES,
    PULL,
    blank,
    write_constant,
)
from satlens.analysis.controls.priced import class_documents
from satlens.data.dataset import DocumentTokens
from satlens.models.decoder import Decoder

D_MODEL = 8
UP = 1 / (1 + math.exp(-PULL))
ROUTE = np.array([[UP, 1 - UP], [0.5, 0.5]])
"""(class, source): weights of the output read on the embedding and the running sum."""
TEACHER = np.array([[0.95, 0.05], [0.2, 0.8]])
"""The route of the model that the documents are drawn from."""
MASKED = {"embedding": np.array([[0.0, 1.0]] * 2), "partial": np.array([[1.0, 0.0]] * 2)}
"""The route without a family of sources."""


def unembedding(seed: int = 1) -> np.ndarray:
    """U (V, D): random on the axes in use, zero elsewhere."""
    rows = np.zeros((D_VOCAB, D_MODEL))
    axes = [*range(N_CLASSES), 3]
    rows[:, axes] = 0.5 * np.random.default_rng(seed).standard_normal((D_VOCAB, len(axes)))
    return rows.astype(np.float32).astype(np.float64)


@torch.no_grad()
def priced_route() -> Decoder:
    """The model of this module."""
    shape = {"n_layers": 1, "d_model": D_MODEL, "n_heads": 2, "d_vocab": D_VOCAB, "n_ctx": 16}
    model = write_constant(blank("attnres", **shape), 0)
    read: Any = model.out_read
    # Sources are normed with epsilon before queries meet them.
    read.query[0] = PULL / math.sqrt(D_MODEL) * math.sqrt(1 + model.cfg.norm_eps)
    weight: Any = model.unembed.weight
    weight.copy_(torch.from_numpy(unembedding()))
    return model


def log_probabilities(route: np.ndarray = ROUTE, eps: float = 1e-6) -> np.ndarray:
    """log p(next | class) under a route (2, 2): (2, V)."""
    x = np.zeros((N_CLASSES, D_MODEL))
    x[:, :N_CLASSES] = math.sqrt(D_MODEL) * np.diag(route[:, 0])
    x[:, 3] = route[:, 1] * BRINGS
    rms = np.sqrt((x**2).mean(axis=1, keepdims=True) + eps)
    return log_softmax(x / rms @ unembedding().T, axis=1)


def route_documents() -> list[DocumentTokens]:
    """Documents drawn under TEACHER: the route is worth having, and not yet the best."""
    return class_documents(np.exp(log_probabilities(TEACHER)))
