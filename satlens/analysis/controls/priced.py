"""A gated model whose every gate has a known price: its losses are a table in closed form.

Each token attends to itself alone (a window of one), so the next token depends on the class c of
the current one. In layer 1 head h adds to the state what its gate lets through of V_1, along an
axis of its own:

    x_c = sqrt(D) e_c + sum_h gate[c, h] FIRST_NORM write_h e_{2+h} + OWN_NORM OWN_WRITE e_6
    log p(. | c) = log softmax(U x_c / rms(x_c))

Four heads: one opens on class 0 and matters, one is idle, one is wide open and read by nobody, one
lets little through that matters a lot. What a gate carries and what it is worth thus disagree.

Letters: D model width, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.special import log_softmax

from satlens.analysis.controls.planted import (
    D_VOCAB,
    FIRST_NORM,
    GATE,
    N_CLASSES,
    OWN_NORM,
    blank,
    token_class,
    write_values,
)
from satlens.data.dataset import DocumentTokens
from satlens.models.decoder import Decoder

HEADS = ("selective", "idle", "loud", "quiet")
GATES = np.array([[GATE, 0.0, 2.0, 0.1], [0.0, 0.0, 2.0, 0.1]])
"""(class, head): what each gate opens to."""
WRITES = np.array([2.0, 2.0, 0.0, 15.0])
"""What each head writes along its axis for a unit of V_1."""
OWN_WRITE = 0.5
"""The same of head 0's own value, along an axis of its own."""
D_MODEL = 16
LENGTHS = (60, 35, 48, 27, 90, 41, 33, 75, 52, 64) * 4
"""Of the documents that prices are measured on."""
_OWN_AXIS = N_CLASSES + len(HEADS)


def unembedding(seed: int = 7) -> np.ndarray:
    """U (V, D): random on the axes in use, zero elsewhere; by this seed both closings that cost
    something also change the most probable token."""
    rows = np.zeros((D_VOCAB, D_MODEL))
    rng = np.random.default_rng(seed)
    rows[:, : _OWN_AXIS + 1] = 0.25 * rng.standard_normal((D_VOCAB, _OWN_AXIS + 1))
    return rows.astype(np.float32).astype(np.float64)


@torch.no_grad()
def priced(gates: np.ndarray = GATES, window_size: int | None = 1, n_ctx: int = 16) -> Decoder:
    """The model of this module, with gates (2, H) that are zero or positive.

    Without a window a token attends to all before it alike, and the closed form holds for gates
    that are the same for both classes.
    """
    model = blank(
        "satformer",
        n_layers=2,
        d_model=D_MODEL,
        n_heads=len(HEADS),
        d_vocab=D_VOCAB,
        n_ctx=n_ctx,
        norm_eps=0.0,
        window_size=window_size,
    )
    attention: Any = model.blocks[1].attn
    alpha, out = attention.values.alpha.weight, attention.o.weight
    for head in range(len(HEADS)):
        write_values(model, 0, head, 0, FIRST_NORM)
        write_values(model, 1, head, 1, OWN_NORM)
        open_by = torch.from_numpy(np.where(gates[:, head] > 0, gates[:, head], -1.0))
        alpha[head, :N_CLASSES] = open_by / math.sqrt(D_MODEL)
        out[N_CLASSES + head, model.cfg.d_head * head] = WRITES[head]
    out[_OWN_AXIS, 1] = OWN_WRITE
    weight: Any = model.unembed.weight
    weight.copy_(torch.from_numpy(unembedding()))
    return model


def states(gates: np.ndarray = GATES) -> np.ndarray:
    """x_c of each class under gates (2, H), before the final norm: (2, D)."""
    x = np.zeros((N_CLASSES, D_MODEL))
    x[:, :N_CLASSES] = math.sqrt(D_MODEL) * np.eye(N_CLASSES)
    x[:, N_CLASSES:_OWN_AXIS] = gates * FIRST_NORM * WRITES
    x[:, _OWN_AXIS] = OWN_NORM * OWN_WRITE
    return x


def log_probabilities(gates: np.ndarray = GATES) -> np.ndarray:
    """log p(next | class) under gates (2, H): (2, V)."""
    x = states(gates)
    rms = np.sqrt((x**2).mean(axis=1, keepdims=True))
    return log_softmax(x / rms @ unembedding().T, axis=1)


def class_documents(
    p: np.ndarray, lengths: Sequence[int] = LENGTHS, seed: int = 0
) -> list[DocumentTokens]:
    """Documents in which the class of a token draws the next one: p (2, V)."""
    rng = np.random.default_rng(seed)
    docs = []
    for k, n in enumerate(lengths):
        tokens = [int(rng.integers(D_VOCAB))]
        while len(tokens) < n:
            tokens.append(int(rng.choice(D_VOCAB, p=p[tokens[-1] % N_CLASSES])))
        docs.append(DocumentTokens(f"p{k}", None, np.array(tokens), ""))
    return docs


def priced_documents(lengths: Sequence[int] = LENGTHS) -> list[DocumentTokens]:
    """Documents drawn from the model with gates half as open again.

    Its gates are therefore worth having, and the loss still has a slope in each.
    """
    return class_documents(np.exp(log_probabilities(1.5 * GATES)), lengths)


class Prices:
    """What weights are worth on some documents, from a table alone (numpy, float64).

    Args:
        docs: documents of the model.
        clean: its weights, such as gates (2, H).
        table: from weights to log p(next | class), (2, V).
    """

    def __init__(
        self,
        docs: Sequence[DocumentTokens],
        clean: np.ndarray = GATES,
        table: Callable[[np.ndarray], np.ndarray] = log_probabilities,
    ) -> None:
        self.current = np.concatenate([token_class(d.tokens[:-1]) for d in docs])
        self.following = np.concatenate([d.tokens[1:] for d in docs])
        self.weights, self.table = clean, table
        self.clean = table(clean)

    @property
    def share(self) -> float:
        """Share of class 0 among the scored tokens' predecessors."""
        return float(np.mean(self.current == 0))

    @property
    def mean(self) -> np.ndarray:
        """Weights averaged over tokens, the same for both classes."""
        mean = self.share * self.weights[0] + (1 - self.share) * self.weights[1]
        return np.stack([mean, mean])

    def losses(self, weights: np.ndarray) -> np.ndarray:
        """Negative log-likelihood of every scored token, in nats."""
        return -self.table(weights)[self.current, self.following]

    def nll(self) -> float:
        """Mean loss of the model as it is."""
        return float(self.losses(self.weights).mean())

    def cost(self, weights: np.ndarray, target_class: int | None = None) -> float:
        """How much these weights raise it, over targets of one class or all."""
        change = self.losses(weights) - self.losses(self.weights)
        if target_class is not None:
            change = change[token_class(self.following) == target_class]
        return float(change.mean())

    def kl(self, weights: np.ndarray) -> float:
        """Mean KL divergence of the edited from the clean next-token distribution, in nats."""
        gap = self.clean - self.table(weights)
        return float((np.exp(self.clean) * gap).sum(axis=1)[self.current].mean())

    def changed(self, weights: np.ndarray) -> float:
        """Share of tokens whose most probable successor changes."""
        moved = self.clean.argmax(axis=1) != self.table(weights).argmax(axis=1)
        return float(moved[self.current].mean())

    def first_order(self, weights: np.ndarray, step: float = 1e-4) -> float:
        """The cost of these weights to first order, by central differences."""
        change = weights - self.weights
        ends = [self.losses(self.weights + sign * step * change).mean() for sign in (1, -1)]
        return float((ends[0] - ends[1]) / (2 * step))


def closed(*heads: int) -> np.ndarray:
    """The gates with some heads closed, all by default: (2, H)."""
    gates = GATES.copy()
    gates[:, list(heads) if heads else slice(None)] = 0.0
    return gates
