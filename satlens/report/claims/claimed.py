"""The claims of the papers that are looked at, each with the statistic that speaks about it.

The papers give no thresholds: margins are ours. What a claim needs and how it is judged is in
:mod:`satlens.report.claims.verdicts`.
"""

from __future__ import annotations

from satlens.report.claims import measures as of
from satlens.report.claims import published as papers
from satlens.report.claims.verdicts import Claim
from satlens.report.effects import NATS, NOISE_FLOOR

SHARE_MARGIN = 0.01
"""Shares of variance that training raised by less are called unchanged; the papers give no
threshold."""
DIVERGENCE_MARGIN = 0.01
"""Nats: routes closer than this are called equal; the papers give no threshold."""
RANK_MARGIN = 0.5
"""Rank correlations whose size is below it are called weak; the papers give no threshold."""


def _loss(text: str, paper: papers.Paper, variant: str, reference: str, **more: object) -> Claim:
    """A claim that one architecture ends below another."""
    return Claim(
        text=text,
        paper=paper,
        variant=variant,
        quantity=f"held-out loss minus that of {reference}, {NATS}",
        measure=of.against(reference),
        needs="comparison",
        side=-1,
        margin=NOISE_FLOOR,
        unit=NATS,
        **more,  # type: ignore[arg-type]
    )


def _cost(
    text: str, variant: str, reference: str, stat: str, published: papers.Published, side: int
) -> Claim:
    """A claim about what an architecture costs beside another, as a ratio."""
    memory = stat == "memory"
    what, unit = "activations kept for the backward pass", "activations kept by"
    if not memory:
        what, unit = "training tokens a second of processor time", "speed of"
    return Claim(
        text=text,
        paper=papers.RD_ATTNRES if variant == "rd-attnres" else papers.SATFORMER,
        variant=variant,
        quantity=f"{what}, ratio to {reference}",
        measure=(of.memory_against if memory else of.speed_against)(reference),
        needs="bench",
        published=published,
        side=1 if side > 0 else -1,
        at=1.0,
        style="plain",
        unit=f"times the {unit} {reference}",
    )


def _not_run(
    text: str,
    paper: papers.Paper,
    variant: str,
    published: papers.Published,
    quantity: str,
    why: str,
) -> Claim:
    """A claim that takes what this package does not measure or train."""
    return Claim(
        text=text, paper=paper, variant=variant, quantity=quantity, needs=why, published=published
    )


_NO_TASKS = "no model of that size and no data of these tasks is part of this package"
_SAT = papers.SATFORMER_STRUCTURE

_VALUE_RESIDUALS = (
    _loss(
        "static value residuals lower the loss of a Transformer",
        papers.RESFORMER,
        "resformer",
        "transformer",
    ),
    _loss(
        "gated access to V_1 lowers the loss of a Transformer",
        papers.SATFORMER,
        "satformer",
        "transformer",
        published=_SAT,
    ),
    _loss(
        "gated access ends below static value residuals",
        papers.SATFORMER,
        "satformer",
        "resformer",
        published=papers.SATFORMER_LOSS,
    ),
    Claim(
        text="training closes gates, so access grows sparser",
        paper=papers.SATFORMER,
        variant="satformer",
        quantity="zero fraction minus the untrained model's",
        unit="of all gates",
        measure=of.each("sparsity", of.closed_gates),
        needs="sparsity",
        context=of.trained_and_untrained(
            ("gates", "overall", "zero_fraction", "estimate"),
            ("gates", "overall_init", "zero_fraction"),
        ),
        published=_SAT,
    ),
    *(
        Claim(
            text=text,
            paper=papers.SATFORMER,
            variant="satformer",
            quantity=f"share of the variance of gates between {where} minus the untrained model's",
            unit="of the variance of gates, beyond the untrained model",
            measure=of.each("sparsity", of.share_above_untrained(part)),
            needs="sparsity",
            context=of.trained_and_untrained(
                ("gates", "variance_shares", part), ("gates", "variance_shares_init", part)
            ),
            published=_SAT,
            margin=SHARE_MARGIN,
        )
        for text, part, where in (
            ("access depends on depth", "layers", "layers"),
            ("access is specific to heads", "heads", "the heads of a layer"),
        )
    ),
    Claim(
        text="access depends on the category of a token",
        paper=papers.SATFORMER,
        variant="satformer",
        quantity="largest contrast of semantic and functional tokens among heads, frequency and "
        "position fixed",
        unit="in the gate, largest of the heads",
        measure=of.each("categories", of.largest_contrast),
        needs="categories",
        context=of.note(
            "an untrained gate reads its token too, and how far its contrasts go was not measured"
        ),
        published=_SAT,
        style="plain",
    ),
    Claim(
        text="the trained model relies on its gates",
        paper=papers.SATFORMER,
        variant="satformer",
        quantity=f"cost of closing every gate, {NATS}",
        unit=NATS,
        measure=of.each("ablation", of.summary("overall", "gate.zero")),
        needs="ablation",
        published=_SAT,
    ),
    Claim(
        text="which tokens open a gate matters, not only how far it opens",
        paper=papers.SATFORMER,
        variant="satformer",
        quantity=f"cost of each head's mean gate, {NATS}",
        unit=NATS,
        measure=of.each("ablation", of.summary("overall", "gate.mean")),
        needs="ablation",
        published=_SAT,
    ),
)
_ROUTES = (
    *(
        _loss(text, paper, variant, "transformer")
        for text, paper, variant in (
            (
                "static weights over the states of earlier layers lower the loss",
                papers.DENSEFORMER,
                "denseformer",
            ),
            (
                "weights over earlier states that depend on the token lower the loss",
                papers.MUDDFORMER,
                "muddformer",
            ),
            (
                "parallel streams lower the loss of a Transformer",
                papers.HYPERCONNECTIONS,
                "hyperconnections",
            ),
            (
                "a learned mixture over depth lowers the loss of a Transformer",
                papers.ATTNRES,
                "attnres",
            ),
            (
                "a mixture over depth added to the residual stream lowers the loss",
                papers.DELTA,
                "delta-attnres",
            ),
        )
    ),
    _loss(
        "routes of their own for values end below a shared route",
        papers.RD_ATTNRES,
        "rd-attnres",
        "attnres",
        published=papers.RD_LOSS,
    ),
    Claim(
        text="what separate routes gain shrinks along training",
        paper=papers.RD_ATTNRES,
        variant="rd-attnres",
        quantity="validation loss gap to attnres at the end minus that at the first evaluation "
        f"after an eighth of training, {NATS}",
        unit=f"{NATS} of change in the gap",
        measure=of.gap_change("attnres"),
        needs="curves",
        context=of.early_gain("attnres"),
        published=papers.RD_GAP,
    ),
    *(
        Claim(
            text="values are read from elsewhere than queries and keys",
            paper=papers.RD_ATTNRES,
            variant="rd-attnres",
            quantity=f"Jensen-Shannon divergence of the two routes, nats, {how}",
            unit=f"nats {how}",
            measure=of.each("divergence", of.summary(stat)),
            needs="divergence",
            published=papers.RD_DIVERGENCE,
            margin=DIVERGENCE_MARGIN,
            style="plain",
        )
        for stat, how in (("js_token", "per token"), ("js_mean", "of the mean routes"))
    ),
    Claim(
        text="the trained model relies on the separate value route",
        paper=papers.RD_ATTNRES,
        variant="rd-attnres",
        quantity=f"cost of reading values by the other route, {NATS}",
        unit=NATS,
        measure=of.each("ablation", of.summary("overall", "route.tie_v")),
        needs="ablation",
    ),
    *(
        Claim(
            text="the weight that a source carries tells little of what removing it costs",
            paper=papers.MASS_AND_CAUSE,
            variant=variant,
            quantity=f"size of the rank correlation of weight and cost over the {kind}s of "
            f"{variant}",
            unit=f"rank correlation over {kind}s of {variant}, whatever its sign",
            measure=of.each("attribution", of.size(of.summary("by_kind", kind, "mass_dnll"))),
            needs="attribution",
            context=of.signs("attribution", of.summary("by_kind", kind, "mass_dnll")),
            published=papers.MASS,
            side=-1,
            at=RANK_MARGIN,
            style="plain",
        )
        for variant, kind in (("satformer", "gate"), ("attnres", "route"), ("rd-attnres", "route"))
    ),
)
_COSTS = (
    *(
        _cost(text, "satformer", reference, stat, published, side)
        for text, reference, stat, published, side in (
            (
                "gated access trains faster than hyper-connections",
                "hyperconnections",
                "speed",
                papers.SATFORMER_OVER_HC_SPEED,
                1,
            ),
            (
                "gated access trains faster than MUDDFormer",
                "muddformer",
                "speed",
                papers.SATFORMER_OVER_MUDD_SPEED,
                1,
            ),
            (
                "gated access needs less memory than hyper-connections",
                "hyperconnections",
                "memory",
                papers.SATFORMER_OVER_HC_MEMORY,
                -1,
            ),
            (
                "gated access needs less memory than MUDDFormer",
                "muddformer",
                "memory",
                papers.SATFORMER_OVER_MUDD_MEMORY,
                -1,
            ),
        )
    ),
    _cost(
        "separate routes for values cost throughput",
        "rd-attnres",
        "attnres",
        "speed",
        papers.RD_SPEED,
        -1,
    ),
    _cost(
        "separate routes for values cost memory",
        "rd-attnres",
        "attnres",
        "memory",
        papers.RD_MEMORY,
        1,
    ),
)
_ELSEWHERE = (
    _not_run(
        "gated access retrieves better than static value residuals and as well as MUDDFormer",
        papers.SATFORMER,
        "satformer",
        papers.SATFORMER_RETRIEVAL,
        "mean score of the retrieval suite",
        _NO_TASKS,
    ),
    _not_run(
        "gated access does better than static value residuals on zero-shot tasks",
        papers.SATFORMER,
        "satformer",
        papers.SATFORMER_ZERO_SHOT,
        "mean zero-shot score",
        _NO_TASKS,
    ),
    _not_run(
        "the gain of separate routes lasts to 2 B tokens and to 343 M parameters",
        papers.RD_ATTNRES,
        "rd-attnres",
        papers.RD_LOSS,
        f"held-out loss minus that of attnres, {NATS}",
        "takes trainings of 2 B tokens on an accelerator; no run of that length was made",
    ),
)
CLAIMS = (*_VALUE_RESIDUALS, *_ROUTES, *_COSTS, *_ELSEWHERE)
