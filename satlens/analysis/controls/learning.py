"""Training small models on synthetic languages, for the controls.

A plain loop with the package's optimiser and schedule; every step draws fresh sequences, so nothing
can be learnt by heart. The same seed gives the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from satlens.analysis.controls.checks import Check, Rule
from satlens.analysis.controls.languages import Language, as_documents
from satlens.analysis.evaluation import evaluate
from satlens.config import TrainConfig
from satlens.data.dataset import DocumentTokens
from satlens.models.build import build
from satlens.models.decoder import Decoder
from satlens.training.optimiser import (
    clip_gradients,
    learning_rate,
    make_optimiser,
    set_learning_rate,
)

BATCH = 32
TEST_SEED = 7
SAMPLING = 0.03
"""Nats: how far the mean loss of a test sample may be below the entropy."""
LEARNT = 0.05
"""Nats a token above the entropy within which a language counts as learnt."""

Silence = Callable[[Decoder, str], None]


def learn(
    language: Language,
    variant: str,
    n_steps: int,
    *,
    lr: float = 5e-3,
    seed: int = 0,
    silence: Silence | None = None,
    **fields: Any,
) -> Decoder:
    """A model of two layers trained on fresh sequences of a language.

    Args:
        silence: called with the model and ``"data"`` before training, with ``"grad"`` before each
            step, to set weights and their gradients to zero.
    """
    length = language.length - 1
    shape = {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_mlp": 64, "n_ctx": length, **fields}
    model = build(variant, seed=seed, d_vocab=language.d_vocab, **shape)
    cfg = TrainConfig(
        tokens=n_steps * BATCH * length, batch_size=BATCH, lr=lr, weight_decay=0.0, seed=seed
    )
    if silence is not None:
        silence(model, "data")
    optimiser, rng = make_optimiser(model, cfg), np.random.default_rng([seed, 1])
    model.train()
    for step in range(n_steps):
        tokens = torch.from_numpy(language.draw(rng, BATCH))
        loss = model(tokens[:, :-1], return_type="loss", targets=tokens[:, 1:])
        loss.backward()
        if silence is not None:
            silence(model, "grad")
        clip_gradients(optimiser, model.parameters(), cfg.clip)
        set_learning_rate(optimiser, learning_rate(step, n_steps, cfg))
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return model.eval()


@torch.no_grad()
def only_through_gates(model: Decoder, field: str) -> None:
    """Zero what layer 0's attention writes and the own values of the layers above."""
    first, *others = [block.attn for block in model.blocks]  # type: ignore[union-attr]
    getattr(first.o.weight, field).zero_()
    for attention in others:
        getattr(attention.qkv.weight, field)[attention.qk_rows :] = 0.0


def held_out(language: Language, n: int = 64) -> list[DocumentTokens]:
    """Sequences that no training saw, up to chance."""
    return as_documents(language.draw(np.random.default_rng(TEST_SEED), n))


def trained_on(model: Decoder, language: Language) -> str:
    """Name of a control."""
    return f"{model.cfg.variant} trained on {language.name}"


def facts_of(model: Decoder, language: Language, docs: list[DocumentTokens]) -> dict[str, Any]:
    """Fields of a check on a trained model."""
    return {
        "control": trained_on(model, language),
        "n_documents": len(docs),
        "n_tokens": sum(len(d.tokens) - 1 for d in docs),
    }


def loss_checks(
    model: Decoder,
    language: Language,
    docs: list[DocumentTokens],
    *,
    learnt: bool = True,
    **options: Any,
) -> Iterator[Check]:
    """The measured loss is no better than the language allows and, if ``learnt``, about as good."""
    cell = evaluate(model, docs, **options).summary["nll"]
    bounds: dict[Rule, float] = {"at least": SAMPLING}
    bounds |= {"at most": LEARNT} if learnt else {}
    for rule, tolerance in bounds.items():
        yield Check(
            analysis="evaluate",
            quantity="nats a token, by the entropy",
            rule=rule,
            planted=language.floor,
            recovered=cell["estimate"],
            low=cell["low"],
            high=cell["high"],
            tolerance=tolerance,
            **facts_of(model, language, docs),
        )


def last_losses(model: Decoder, docs: list[DocumentTokens]) -> np.ndarray:
    """Loss of the last token of each document: of all tokens less that of all but the last.

    Args:
        docs: of one length.
    """
    sums = []
    for cut in (0, 1):
        length = len(docs[0].tokens) - cut
        table = evaluate(model, docs, max_tokens_per_document=length, n_resamples=99).table
        sums.append(table["nll"].to_numpy() * (length - 1))
    return sums[0] - sums[1]
