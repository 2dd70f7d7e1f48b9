"""What was found, in sentences that follow from the tables and from nothing else.

Every function takes a result table (and its summary) and returns findings, which are strings that
know their kind: ``found`` (the interval excludes zero or the baseline, or a plain description),
``open`` (not established: the interval covers it, there is none, or the seeds disagree) and
``missing``. A table with other numbers gives other sentences, and no sentence speaks of more than
its interval covers.
"""

from __future__ import annotations

from satlens.report.words.ablation import (
    DOWN,
    UP,
    ablation,
    ablation_effects,
    describe,
    is_static,
)
from satlens.report.words.arms import Gain, comparison, difference_of, evaluation
from satlens.report.words.attribution import attribution
from satlens.report.words.categories import categories, categories_across
from satlens.report.words.circuits import circuits
from satlens.report.words.divergence import bound, divergence, divergence_across
from satlens.report.words.drivers import drivers
from satlens.report.words.routes import routes
from satlens.report.words.seeds import across_seeds, missing
from satlens.report.words.sparsity import sparsity, sparsity_effects
from satlens.report.words.tasks import chance_across, difference_effects, has_to_lose, tasks

__all__ = [
    "DOWN",
    "UP",
    "Gain",
    "ablation",
    "ablation_effects",
    "across_seeds",
    "attribution",
    "bound",
    "categories",
    "categories_across",
    "chance_across",
    "circuits",
    "comparison",
    "describe",
    "difference_effects",
    "difference_of",
    "divergence",
    "divergence_across",
    "drivers",
    "evaluation",
    "has_to_lose",
    "is_static",
    "missing",
    "routes",
    "sparsity",
    "sparsity_effects",
    "tasks",
]
