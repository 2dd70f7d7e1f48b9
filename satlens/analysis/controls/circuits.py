"""Controls of what V_1 carries: direct attributions, circuits, patterns and patched edges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from satlens.analysis.circuits import circuits
from satlens.analysis.controls.checks import Check, Reader
from satlens.analysis.controls.planted import D_VOCAB, FIRST_NORM, GATE, OWN_NORM, copier
from satlens.analysis.controls.priced import (
    HEADS,
    N_CLASSES,
    OWN_WRITE,
    WRITES,
    priced,
    priced_documents,
    states,
    unembedding,
)
from satlens.analysis.patching import patch_v_first

WRITER = "V_1 writes known logits"
COPIER = "V_1 is the token"
EVEN = np.array([[GATE, 0.0, 2.0, 0.1]] * 2)
"""Gates of the heads of ``priced``, the same for both classes."""
PRECISE = 1e-6
"""Tolerance in logits of means of fp32 models."""
HALF = 8
"""Tokens that are repeated in a context of 16."""


def circuits_checks(**options: Any) -> Iterator[Check]:
    """Attributions in closed form; heads that attend evenly are neither kind of pattern head."""
    docs = priced_documents()
    found = circuits(priced(EVEN, window_size=None), docs, n_induction=8, **options)
    read = Reader("circuits", WRITER, found)
    following = np.concatenate([d.tokens[1:][np.arange(len(d.tokens) - 1) % 16 != 0] for d in docs])
    scale = math.sqrt((states(EVEN)[0] ** 2).mean())
    about = unembedding() - unembedding().mean(axis=0)

    def said(axis: int, size: float) -> float:
        return float(about[following, axis].mean()) * size / scale + 0.0

    for head, name in enumerate(HEADS):
        at: dict[str, Any] = {"layer": 1, "head": head}
        size = EVEN[0, head] * FIRST_NORM * WRITES[head]
        planted = said(N_CLASSES + head, size)
        tolerance = PRECISE if planted else 0.0
        quantity = f"direct attribution of V_1, {name} head"
        yield read.check(quantity, planted, "dla_v_first", tolerance=tolerance, **at)
    at = {"layer": 1, "head": 0}
    planted = said(N_CLASSES + len(HEADS), OWN_NORM * OWN_WRITE)
    yield read.check("direct attribution of the rest", planted, "dla_rest", tolerance=PRECISE, **at)
    # All tokens have one V_1, which raises one of them the most.
    yield read.check("copying", 1 / D_VOCAB, "copying", **at)
    keys = np.arange(1, 2 * HALF)
    even = {"induction": (1 / keys[HALF:]).mean(), "previous_token": (1 / keys[1:]).mean()}
    for score, planted in even.items():
        yield read.check(f"{score} score of even attention", float(planted), score, **at)
        effect = f"{score}_gate_effect"
        yield read.check(f"effect of gates on the {score} score", 0, effect, **at)
    for sign, share in ((1.0, 1.0), (-1.0, 0.0)):
        name = COPIER if sign > 0 else f"minus {COPIER}"
        read = Reader("circuits", name, circuits(copier(sign), docs, n_induction=8, **options))
        at = {"layer": 1, "head": 0}
        yield read.check("copying", share, "copying", **at)
        yield read.check("sign of eigenvalues", sign, "copying_eigenvalues", **at)


def patching_checks() -> Iterator[Check]:
    """The one edge that differs between two runs carries what the closed form says; others none."""
    clean, corrupted, place = np.arange(12), np.arange(12), 5
    corrupted[place] = 14
    right, wrong = int(clean[place]), int(corrupted[place])

    def metric(logits: torch.Tensor) -> torch.Tensor:
        last = logits[0, -1].double()
        return last[right] - last[wrong]

    rows = (torch.from_numpy(tokens)[None] for tokens in (clean, corrupted))
    effect = patch_v_first(copier(), *rows, metric=metric).effect[0, 0].numpy()

    def difference(seen: np.ndarray) -> float:
        """The metric where layer 1 receives V_1 of these tokens."""
        axes = math.sqrt(D_VOCAB) * np.eye(D_VOCAB)
        x = axes[corrupted[-1]] + GATE * axes[seen].mean(axis=0)
        logits = x / math.sqrt((x**2).mean())
        return float(logits[right] - logits[wrong])

    planted = difference(clean) - difference(corrupted)
    others = float(np.abs(np.delete(effect, place)).max())
    facts: dict[str, Any] = {"analysis": "patch_v_first", "control": COPIER, "rule": "equal"}
    facts |= {"n_documents": 1, "n_tokens": len(clean)}
    yield Check(
        quantity="the edge that differs",
        planted=planted,
        recovered=float(effect[place]),
        tolerance=PRECISE,
        **facts,
    )
    yield Check(quantity="largest of the others", planted=0.0, recovered=others, **facts)
