"""Pattern scores of heads on repeated random tokens, with gates on and off.

A sequence is n different random tokens, twice. At the second occurrence of a token an induction
head attends to the token after the first one (Olsson et al. 2022); a previous-token head attends
to the position before, anywhere.

Shapes: B rows, T positions, L layers, H query heads, S sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.engine.accumulators import Accumulator, GroupSums
from satlens.analysis.engine.stream import Observed, Progress, Transform, n_groups, run
from satlens.analysis.interventions.gates import ZeroGate, intervene
from satlens.analysis.stats import Interval, ratio_interval
from satlens.data.windows import Windows, as_documents
from satlens.models.decoder import Decoder

SCORES = ("induction", "previous_token")
OTHER_SEQUENCES = "this checkpoint, other random sequences"
LONGEST_HALF = 50
SHORTEST_HALF = 3
"""Below it the position after the first occurrence is the previous one."""


class PatternScores:
    """Mean attention that each head pays to the two places, and the loss on the repetition.

    Args:
        model: the model that is run.
        half: n, tokens before the repetition.
        groups: groups of sequences.
    """

    needs_nll = True

    def __init__(self, model: Decoder, half: int, groups: int) -> None:
        self.half = half
        n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
        self.patterns = [f"blocks.{layer}.attn.hook_pattern" for layer in range(n_layers)]
        self.hooks: dict[str, Transform | None] = dict.fromkeys(
            self.patterns, partial(_scores, half)
        )
        shapes = {"n": (), "nll": (), "scores": (len(SCORES), n_layers, n_heads)}
        self.sums = GroupSums(groups, shapes)
        self.accumulators: Mapping[str, Accumulator] = {"sums": self.sums}
        self.identity: dict[str, Any] = {"reducer": "patterns", "half": half, "groups": groups}

    def update(self, seen: Observed) -> None:
        """Add one batch."""
        assert seen.nll is not None
        scores = torch.stack([seen.captured[hook] for hook in self.patterns], 2)
        nll = seen.nll[:, self.half :].double().mean(1)
        self.sums.add(seen.groups, n=torch.ones_like(nll), nll=nll, scores=scores)


def _scores(half: int, pattern: Tensor) -> Tensor:
    """(B, H, T, T) -> (B, 2, H), means over the queries that have the place."""
    # The diagonal starts at the last query before the repetition.
    after = pattern.diagonal(1 - half, -2, -1)[..., 1:].double().mean(-1)
    before = pattern.diagonal(-1, -2, -1).double().mean(-1)
    return torch.stack((after, before), 1)


def half_length(model: Decoder, n_tokens: int) -> int:
    """n: at most 50 tokens, what fits the context twice, the vocabulary and the window."""
    window = model.cfg.window_size or model.cfg.n_ctx
    return min(LONGEST_HALF, (model.cfg.n_ctx + 1) // 2, n_tokens, window)


def repeated(tokens: np.ndarray, half: int, n: int, seed: int) -> np.ndarray:
    """``n`` sequences of ``half`` different tokens, twice each: (n, 2 half) int64."""
    rng = np.random.default_rng(seed)
    drawn = np.stack([rng.choice(tokens, half, replace=False) for _ in range(n)])
    return np.concatenate((drawn, drawn), axis=1)


class Repetition(NamedTuple):
    """Intervals over sequences with gates on, off and their paired difference, on minus off."""

    scores: dict[str, Interval]
    """``on``, ``off``, ``effect``: (2, L, H) each, in the order of SCORES."""
    nll: dict[str, Interval]
    """The same of the mean loss on the repetition, in nats a token."""
    n_sequences: int
    half: int
    uniform: dict[str, float]
    """What attention spread evenly over the keys in sight would score."""


def measure_repetition(
    model: Decoder,
    tokens: np.ndarray,
    n: int,
    *,
    batch_size: int,
    progress: Progress | None,
    n_resamples: int,
    seed: int,
) -> Repetition:
    """Scores of every head on ``n`` random sequences, and of the same with every gate at zero.

    Args:
        tokens: ids that sequences are drawn from.
    """
    half = half_length(model, len(tokens))
    sequences = as_documents(repeated(tokens, half, n, seed))
    windows = Windows(sequences, model.cfg.n_ctx, batch_size, d_vocab=model.cfg.d_vocab)
    on, off = (PatternScores(model, half, n_groups(windows)) for _ in range(2))
    run(model, windows, [on], progress=progress, label="induction")
    with intervene(model, ZeroGate()):
        run(model, windows, [off], progress=progress, label="induction-off")
    options: dict[str, Any] = {
        "covers": OTHER_SEQUENCES,
        "n_resamples": n_resamples,
        "seed": seed,
    }

    def intervals(name: str) -> dict[str, Interval]:
        sums = {"on": on.sums[name], "off": off.sums[name]}
        sums["effect"] = sums["on"] - sums["off"]
        return {case: ratio_interval(s, on.sums["n"], **options) for case, s in sums.items()}

    return Repetition(
        intervals("scores"), intervals("nll"), len(sequences), half, _uniform(model, half)
    )


def _uniform(model: Decoder, half: int) -> dict[str, float]:
    in_sight = np.arange(1, 2 * half)
    if model.cfg.window_size is not None:
        in_sight = np.minimum(in_sight, model.cfg.window_size)
    means = (np.mean(1 / in_sight[half:]), np.mean(1 / in_sight[1:]))
    return dict(zip(SCORES, map(float, means), strict=True))
