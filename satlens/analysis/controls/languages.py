"""Synthetic languages of known entropy, in which it is known what has to be remembered.

memory
    A topic, then noise and questions; every answer is the topic. The current token says what kind
    comes next, so the answers alone need history.
forgetful
    The same with answers drawn anew: nothing in the history helps. The null of ``memory``.
recall
    Pairs of a key and a value, then keys drawn among them, each with its value.
induction
    A random string of random length, repeated over and over.

Letters: B sequences, T tokens of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from satlens.data.dataset import DocumentTokens


@dataclass(frozen=True, kw_only=True)
class Language:
    """Sequences of one length and their entropy."""

    name: str
    d_vocab: int
    length: int
    """T."""
    floor: float
    """Nats a token of the best possible model, over all tokens but the first."""
    draw: Callable[[np.random.Generator, int], np.ndarray]
    """Sequences (B, T)."""


# -- memory ----------------------------------------------------------------------------------------

N_TOPICS, N_NOISE, N_QUESTIONS = 16, 14, 7
_ASK, _BEGIN = N_TOPICS + N_NOISE, N_TOPICS + N_NOISE + 1


def _asked(topics: np.ndarray, noise: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """begin, topic, then (noise, ask, answer) for each question: (B, 2 + 3 questions)."""
    ask = np.full_like(noise, _ASK)
    body = np.stack([N_TOPICS + noise, ask, answers], axis=2).reshape(len(noise), -1)
    begin = np.full((len(noise), 1), _BEGIN)
    return np.concatenate([begin, topics[:, None], body], axis=1)


def _draw_memory(rng: np.random.Generator, n: int) -> np.ndarray:
    topics = rng.integers(0, N_TOPICS, n)
    noise = rng.integers(0, N_NOISE, (n, N_QUESTIONS))
    return _asked(topics, noise, np.repeat(topics[:, None], N_QUESTIONS, axis=1))


def _draw_forgetful(rng: np.random.Generator, n: int) -> np.ndarray:
    topics = rng.integers(0, N_TOPICS, n)
    noise = rng.integers(0, N_NOISE, (n, N_QUESTIONS))
    return _asked(topics, noise, rng.integers(0, N_TOPICS, noise.shape))


def balanced_memory(n_backgrounds: int = 4, seed: int = 1) -> np.ndarray:
    """Sequences of ``memory`` with every topic over the same noise, (16 backgrounds, T).

    Without history a prediction is the same for all topics, and these occur equally often: whatever
    it is, its mean loss on the answers is at least log 16.
    """
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, N_NOISE, (n_backgrounds, N_QUESTIONS))
    topics = np.tile(np.arange(N_TOPICS), n_backgrounds)
    noise = noise.repeat(N_TOPICS, axis=0)
    return _asked(topics, noise, np.repeat(topics[:, None], N_QUESTIONS, axis=1))


def is_topic(tokens: np.ndarray) -> np.ndarray:
    """Which tokens of ``memory`` are topics, as the subject or as an answer."""
    return tokens < N_TOPICS


_SCORED = 1 + 3 * N_QUESTIONS
_NOISE_NATS = math.log(N_TOPICS) + N_QUESTIONS * math.log(N_NOISE)

MEMORY = Language(
    name="memory",
    d_vocab=_BEGIN + 1,
    length=_SCORED + 1,
    floor=_NOISE_NATS / _SCORED,
    draw=_draw_memory,
)
FORGETFUL = Language(
    name="forgetful",
    d_vocab=_BEGIN + 1,
    length=_SCORED + 1,
    floor=(_NOISE_NATS + N_QUESTIONS * math.log(N_TOPICS)) / _SCORED,
    draw=_draw_forgetful,
)

# -- recall ----------------------------------------------------------------------------------------

N_KEYS, N_VALUES, N_PAIRS, N_ASKED = 16, 16, 5, 10


def _draw_recall(rng: np.random.Generator, n: int) -> np.ndarray:
    keys = rng.permuted(np.tile(np.arange(N_KEYS), (n, 1)), axis=1)[:, :N_PAIRS]
    values = N_KEYS + rng.integers(0, N_VALUES, (n, N_PAIRS))
    told = np.stack([keys, values], axis=2)
    asked = told[np.arange(n)[:, None], rng.integers(0, N_PAIRS, (n, N_ASKED))]
    return np.concatenate([told, asked], axis=1).reshape(n, -1)


def log_falling(n: int, k: int) -> float:
    """log of n (n - 1) ... (n - k + 1): the ways to draw k of n in order."""
    return math.lgamma(n + 1) - math.lgamma(n - k + 1)


RECALL = Language(
    name="recall",
    d_vocab=N_KEYS + N_VALUES,
    length=2 * (N_PAIRS + N_ASKED),
    # The first key is not scored.
    floor=(
        log_falling(N_KEYS, N_PAIRS)
        - math.log(N_KEYS)
        + N_PAIRS * math.log(N_VALUES)
        + N_ASKED * math.log(N_PAIRS)
    )
    / (2 * (N_PAIRS + N_ASKED) - 1),
    draw=_draw_recall,
)

# -- induction -------------------------------------------------------------------------------------

N_SYMBOLS, PERIODS, _LENGTH = 16, range(4, 17), 33


def _draw_induction(rng: np.random.Generator, n: int) -> np.ndarray:
    periods = rng.integers(PERIODS.start, PERIODS.stop, n)
    return np.stack([np.resize(rng.permutation(N_SYMBOLS)[:p], _LENGTH) for p in periods])


INDUCTION = Language(
    name="induction",
    d_vocab=N_SYMBOLS,
    length=_LENGTH,
    # A sequence tells its period and its string; the first symbol is not scored.
    floor=(
        math.log(len(PERIODS))
        + float(np.mean([log_falling(N_SYMBOLS, p) for p in PERIODS]))
        - math.log(N_SYMBOLS)
    )
    / (_LENGTH - 1),
    draw=_draw_induction,
)


def as_documents(sequences: Sequence[np.ndarray] | np.ndarray) -> list[DocumentTokens]:
    """A document a sequence."""
    return [DocumentTokens(f"s{k}", None, np.asarray(row), "") for k, row in enumerate(sequences)]
