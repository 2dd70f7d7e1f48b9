"""What the papers report: numbers with their unit and scale, each quoted once and here only.

Numbers that a paper gives for a quantity that this package measures in the same unit stand in
``by_scale`` as well, so that a table can say on which side of them an interval lies. Memory does
not: the papers' is what a device holds in training, with parameters, optimizer and workspace; that
of this package is what activations keep for the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper whose claims are looked at."""

    name: str
    arxiv: str
    trained: str = ""
    """Scale of its trainings, where a number is quoted."""

    @property
    def source(self) -> str:
        """As tables name it."""
        return f"{self.name}, arXiv {self.arxiv}"


RESFORMER = Paper(name="ResFormer", arxiv="2410.17897")
SATFORMER = Paper(
    name="SATFormer",
    arxiv="2605.03953",
    trained="128 M to 1.3 B parameters, 5 to 30 B tokens of FineWeb-Edu, one seed",
)
DENSEFORMER = Paper(name="DenseFormer", arxiv="2402.02622")
MUDDFORMER = Paper(name="MUDDFormer", arxiv="2502.12170")
HYPERCONNECTIONS = Paper(name="Hyper-Connections", arxiv="2409.19606")
ATTNRES = Paper(name="Attention Residuals", arxiv="2603.15031")
RD_ATTNRES = Paper(
    name="RD-AttnRes",
    arxiv="2608.01075",
    trained="120 M (S) and 343 M (M) parameters, 2 B tokens, five seeds",
)
DELTA = Paper(name="Delta Attention Residuals", arxiv="2605.18855")
MASS_AND_CAUSE = Paper(name="Mass and cause", arxiv="2606.13168")

NOT_QUOTED = "no number quoted here"


@dataclass(frozen=True, kw_only=True)
class Published:
    """One number of a paper, or several of one kind."""

    text: str = NOT_QUOTED
    """As the paper has it, with its unit."""
    scale: str = ""
    """Parameters and tokens that it was measured at."""
    by_scale: Mapping[str, float] = field(default_factory=dict)
    """The same in the unit of our quantity, by the paper's name of the scale (empty where there is
    one only); nothing where the two are not of one kind."""


NOTHING = Published()
_RD_SCALES = RD_ATTNRES.trained
_MUDD_THERE = (
    "about 760 M parameters; their MUDDFormer has norms around each mixture and feed-forward "
    "widths that differ by layer, the one here has neither"
)

SATFORMER_LOSS = Published(
    text="below ResFormer at every scale; the values are not public", scale=SATFORMER.trained
)
SATFORMER_STRUCTURE = Published(scale=SATFORMER.trained)
SATFORMER_RETRIEVAL = Published(
    text="mean of the retrieval suite 29.86, ResFormer about 1.5 less, MUDDFormer 29.855",
)
SATFORMER_ZERO_SHOT = Published(
    text="zero-shot mean 0.67 above ResFormer", scale="1.3 B parameters, 30 B tokens, one seed"
)
SATFORMER_OVER_HC_SPEED = Published(
    text="throughput 1.75 times that of Hyper-Connections",
    scale="about 760 M parameters",
    by_scale={"": 1.75},
)
SATFORMER_OVER_MUDD_SPEED = Published(
    text="throughput 1.82 times that of MUDDFormer",
    scale=_MUDD_THERE,
    by_scale={"": 1.82},
)
SATFORMER_OVER_HC_MEMORY = Published(
    text="memory 31 % below Hyper-Connections", scale="about 760 M parameters"
)
SATFORMER_OVER_MUDD_MEMORY = Published(text="memory 5 % below MUDDFormer", scale=_MUDD_THERE)
RD_LOSS = Published(
    text="\N{MINUS SIGN}0.0301 (S) and \N{MINUS SIGN}0.0247 (M) nats/token, lower in 10 of 10 runs",
    scale=_RD_SCALES,
    by_scale={"S": -0.0301, "M": -0.0247},
)
RD_GAP = Published(
    text="\N{MINUS SIGN}0.065 nats/token at 0.25 B tokens, \N{MINUS SIGN}0.0301 (S) and "
    "\N{MINUS SIGN}0.0247 (M) at 2 B",
    scale=_RD_SCALES,
)
RD_DIVERGENCE = Published(
    text="0.218 \N{PLUS-MINUS SIGN} 0.015 (S) and 0.215 \N{PLUS-MINUS SIGN} 0.028 (M) nats; "
    "whether per token or of the mean routes is not stated",
    scale=_RD_SCALES,
    by_scale={"S": 0.218, "M": 0.215},
)
RD_SPEED = Published(
    text="throughput 10.1 % (S) and 8.9 % (M) below the parent",
    scale=_RD_SCALES,
    by_scale={"S": 0.899, "M": 0.911},
)
RD_MEMORY = Published(
    text="memory from 16.01 to 17.65 GB (S) and from 21.02 to 23.13 GB (M)",
    scale=_RD_SCALES,
)
MASS = Published(text="weight and cost disagree")
