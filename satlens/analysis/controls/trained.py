"""Controls on small models trained on synthetic languages, where it is known what must be found.

In ``memory`` a SATFormer can carry the topic to its answers in one way only: layer 0's attention
writes nothing and layer 1 has no values of its own, so what one token learns of another comes
through V_1 and its gates. Closing the gates has to cost what the topic is worth. ``recall`` and
``induction`` take longer to learn and are for full runs: there the answers, the induction head and
the route by which keys learn of the token before have to be found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from satlens.analysis.ablation import ablate
from satlens.analysis.categories import categories
from satlens.analysis.circuits import circuits
from satlens.analysis.controls.checks import Check, Reader, Rule
from satlens.analysis.controls.languages import (
    FORGETFUL,
    INDUCTION,
    MEMORY,
    N_QUESTIONS,
    N_TOPICS,
    PERIODS,
    RECALL,
    Language,
    as_documents,
    balanced_memory,
    is_topic,
)
from satlens.analysis.controls.learning import (
    LEARNT,
    facts_of,
    held_out,
    last_losses,
    learn,
    loss_checks,
    only_through_gates,
    trained_on,
)
from satlens.analysis.controls.planted import CATEGORIES, tags_from
from satlens.analysis.interventions.gates import intervene
from satlens.analysis.interventions.routes import MaskRoute
from satlens.data.dataset import DocumentTokens
from satlens.models.decoder import Decoder

NOTHING = 0.01
"""Nats a token that gates may be worth where there is nothing to remember."""
ANSWERED = 0.1
"""Nats within which an answer counts as known."""
FOUND, ABSENT = 0.5, 0.2
"""Induction scores of a head that does induction, and of one that does not."""


# -- memory ----------------------------------------------------------------------------------------


def memory_checks(n_steps: int, **options: Any) -> Iterator[Check]:
    """What the gates carry in ``memory`` is found; in ``forgetful`` there is nothing to find."""
    model = learn(MEMORY, "satformer", n_steps, silence=only_through_gates)
    docs = as_documents(balanced_memory())
    yield from loss_checks(model, MEMORY, docs, **options)
    options_of: dict[str, Any] = {"kinds": "zero", "scope": ("model",), **options}
    read = Reader("ablate", trained_on(model, MEMORY), ablate(model, docs, **options_of))
    worth = N_QUESTIONS * math.log(N_TOPICS) / (MEMORY.length - 1)
    at: dict[str, Any] = {"scope": "model", "kind": "zero"}
    bound: dict[str, Any] = {"rule": "at least", "tolerance": LEARNT}
    yield read.check("all gates closed: the topic", worth, "dnll", **bound, **at)
    yield _carriers(model, docs, options)

    model = learn(FORGETFUL, "satformer", n_steps, silence=only_through_gates)
    docs = held_out(FORGETFUL)
    yield from loss_checks(model, FORGETFUL, docs, **options)
    read = Reader("ablate", trained_on(model, FORGETFUL), ablate(model, docs, **options_of))
    yield read.check("all gates closed", 0.0, "dnll", tolerance=NOTHING, **at)


def _carriers(model: Decoder, docs: list[DocumentTokens], options: dict[str, Any]) -> Check:
    """Some head is open on its share of the topics.

    All topics but one have to pass some head, so of H heads one passes at least 15 / 16 / H.
    """
    tags = tags_from(docs, [1 - is_topic(d.tokens).astype(int) for d in docs])
    found = categories(model, docs, tags=tags, **options)
    rows: Any = found.table[found.table["category"] == CATEGORIES[0]]
    widest = rows.loc[rows["open_fraction"].idxmax()]
    read = Reader("categories", trained_on(model, MEMORY), found)
    share = (N_TOPICS - 1) / N_TOPICS / len(rows)
    where = {"layer": widest["layer"], "head": widest["head"], "category": CATEGORIES[0]}
    return read.check(
        "open on topics, widest head", share, "open_fraction", rule="at least", **where
    )


# -- in-context retrieval --------------------------------------------------------------------------


def retrieval_checks(**options: Any) -> Iterator[Check]:
    """Recall of values by key and induction: learnt, and by the means that they need."""
    model = learn(RECALL, "satformer", 1500, d_model=48, n_heads=4)
    yield from _answers(model, RECALL, options)
    model = learn(INDUCTION, "satformer", 1200)
    yield from _answers(model, INDUCTION, options)
    yield _highest_induction(model, INDUCTION, "at least", FOUND, options)
    model = learn(FORGETFUL, "satformer", 300)
    yield _highest_induction(model, FORGETFUL, "at most", ABSENT, options)
    model = learn(INDUCTION, "rd-attnres", 1200)
    yield from _answers(model, INDUCTION, options)
    yield _routed_induction(model)


def _answers(model: Decoder, language: Language, options: dict[str, Any]) -> Iterator[Check]:
    """The last token of a sequence, which its history decides, is predicted."""
    docs = held_out(language)
    yield from loss_checks(model, language, docs, learnt=False, **options)
    yield Check(
        analysis="evaluate",
        quantity="nats of the last answer",
        rule="at most",
        planted=0.0,
        recovered=float(last_losses(model, docs).mean()),
        tolerance=ANSWERED,
        **facts_of(model, language, docs),
    )


def _highest_induction(
    model: Decoder, language: Language, rule: Rule, planted: float, options: dict[str, Any]
) -> Check:
    """The highest induction score of any head."""
    found = circuits(model, held_out(language), **options)
    rows: Any = found.table
    highest = rows.loc[rows["induction"].idxmax()]
    read = Reader("circuits", trained_on(model, language), found)
    at = {"layer": highest["layer"], "head": highest["head"]}
    quantity = "highest induction score"
    return read.check(quantity, planted, "induction", rule=rule, tolerance=0.0, **at)


def _routed_induction(model: Decoder) -> Check:
    """Keys need what layer 0 wrote of the token before.

    Layer 1 reads the embedding and the running sum. Without the sum no key knows what stood before
    it, and at least three symbols are left to choose from.
    """
    docs = held_out(INDUCTION)
    blind = MaskRoute(layer=1, sublayer="attn", role="qk", family="partial")
    with intervene(model, blind):
        losses = last_losses(model, docs)
    return Check(
        analysis="intervene",
        quantity="nats of the last answer, keys without layer 0",
        rule="at least",
        planted=math.log(min(PERIODS) - 1),
        recovered=float(losses.mean()),
        **facts_of(model, INDUCTION, docs),
    )
