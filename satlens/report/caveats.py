"""What a reader of the numbers has to know, next to the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from satlens.report.effects import NATS, Finding, plain


def _caveat(text: str) -> Finding:
    return Finding(text, "caveat")


def scale(recipe: Mapping[str, Any], n_parameters: list[int]) -> list[Finding]:
    """What this study is too small or too narrow to say."""
    tokens = recipe.get("train", {}).get("tokens")
    size = f"{min(n_parameters) / 1e6:.1f} M parameters" if n_parameters else "models this small"
    budget = f" on {tokens / 1e6:.1f} M tokens each" if tokens else ""
    found = [
        _caveat(
            f"Scale: {size}{budget}. SATFormer's paper trains 128 M to 1.3 B parameters on 5 to 30 "
            "billion tokens of web text, RD-AttnRes' 120 M and 343 M on 2 billion. What holds here "
            "need not hold there, nor the reverse."
        ),
        _caveat(
            "The recipe decides: the size and even the sign of a difference between arms depend on "
            "initialisation and learning rate, and a badly conditioned baseline hands a variant an "
            "artificial win. The recipe is listed above."
        ),
    ]
    if recipe.get("corpus") == "sotu":
        found.append(
            _caveat(
                "One genre: the corpus is presidential messages to the United States Congress "
                "(1790 to 2026; American Presidency Project, UC Santa Barbara). Conclusions are "
                "about "
                "this genre."
            )
        )
    return found


_INTERVALS = _caveat(
    "Intervals speak about other documents read by the same checkpoint, not about other seeds."
)
GATES = [
    _caveat(
        "A ReLU gate that was never trained is exactly zero half of the time: a zero fraction "
        "means something only beside its value at initialisation."
    ),
    _caveat(
        "Heads that never open on the data (dead) can be most of the zeros; they are counted apart."
    ),
    _INTERVALS,
]
ROUTES = [
    _caveat(
        "A weight is not a use: sources differ in size and direction, and a heavily weighted one "
        "may "
        "be removed at little cost. What removing costs is under the ablations."
    ),
    _INTERVALS,
]
SIGNED = _caveat(
    "Signed weights have no entropy and are no shares: read them beside the sizes of the states "
    "they multiply (shares of norms). States and streams are mixtures themselves; of what "
    "sublayers a read consists is under the effective routes."
)
EFFECTIVE = [
    _caveat(
        "Coefficients are exact for the recorded weights; they do not say what would happen under "
        "other weights, nor what the read is used for."
    ),
    _caveat(
        "Shares are of the sizes of components before they are added; components can cancel, and a "
        "large one may point where nothing reads."
    ),
    _INTERVALS,
]
CATEGORIES = [
    _caveat(
        "Category, token frequency and position are confounded: content words are rarer. The "
        "adjusted contrast holds frequency and position fixed; read it beside the raw one."
    ),
    _caveat(
        "Tags come from an automatic tagger for modern English; it makes errors, and more of them "
        "on old prose."
    ),
]


def divergence(bounds: Sequence[str]) -> list[Finding]:
    """``bounds`` are the largest divergences there are, in the units of the results."""
    largest = " or ".join(bounds) or "log 2"
    return [
        _caveat(
            f"Jensen-Shannon divergence, at most {largest}; the divergence itself, not its square "
            "root. Before training the roles of a read have the same routes: 0 is the baseline."
        ),
        _caveat(
            "The divergence of the mean routes is never larger than the mean divergence per token, "
            "and is biased upwards on few tokens."
        ),
        _caveat(
            "That two routes differ does not say that the difference is used: see the ablations."
        ),
    ]


ABLATION = [
    _caveat(
        "Ablation damage is not usefulness: a model that hardly beats its baseline can lose a nat "
        "when its gates are zeroed, because the rest was trained to rely on them. What the arm "
        "gains over its trained baseline stands beside the damage."
    ),
    _caveat("Shuffling gives a token the gate of a later one, so that condition is not causal."),
]


CLAIMS = _caveat(
    "The papers publish no thresholds, so the statistics, margins and verdicts here are ours. A "
    "claim that does not hold in models this small may hold at the papers' scale."
)
ATTRIBUTION = [
    _caveat(
        "Removing a source changes what all later layers compute, and the rest was trained with "
        "it: cost is damage to this model, not what the source would be worth to another."
    ),
    _caveat(
        "What one backward pass predicts holds for small changes; its agreement with exact removal "
        "is measured, not assumed."
    ),
    _INTERVALS,
]
CIRCUITS = [
    _caveat(
        "Direct attribution holds the final norm and the weights of every read fixed; what later "
        "sublayers make of a head's output is not in it."
    ),
    _INTERVALS,
]
TASKS = [
    _caveat(
        "A score is about these questions asked with this prompt. Hash and version of every prompt "
        "are in the table of protocols; scores under other prompts are other measurements."
    ),
    _caveat(
        "A model that does not score above chance has nothing that an intervention could take "
        "away: no difference there says nothing about what gates or routes are for."
    ),
    _caveat(
        "Intervals resample passages with all of their questions: they speak about other passages, "
        "not about other seeds."
    ),
]
MQAR = _caveat(
    "MQAR asks for the partner of a word in a list of word pairs, by choice among the partners in "
    "the list: who does not look the word up scores chance. Models trained on other text have seen "
    "no such lists, so a score at chance is no failure and says little about retrieval from text."
)


def arms(floor: float) -> list[Finding]:
    """``floor`` in nats a token is what two trainings differ by for no reason."""
    return [
        _caveat(
            "Paired seeds share initial weights, data order, schedule and evaluation tokens. "
            f"Differences below about {plain(floor, 2)} {NATS} between single runs are taken to "
            "mean nothing: a change of the learning rate by 0.1 % moved the loss by about 0.01 in "
            "a similar recipe on other text, not in this study."
        ),
    ]


def few_clusters(n: int, least: int) -> Finding:
    """``n`` clusters are fewer than the ``least`` that a bootstrap should have."""
    return _caveat(
        f"Intervals over clusters of documents rest on {n} clusters, fewer than {least} (few in "
        "the table): a bootstrap over so few tends to be too narrow."
    )


TOKENS = [
    _caveat(
        "Single tokens are examples, chosen by where a document begins and not by what they show. "
        "What holds for tokens in general is in the other sections."
    ),
    _caveat(
        "An intervention changes what later tokens read too, not only what the token itself does."
    ),
]
