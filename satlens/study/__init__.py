"""Studies: a recipe (YAML) says which arms are trained and what is measured on them.

    recipe + options -> plan.json (frozen) -> steps -> tables, figures, report under one folder

The folder of a study::

    plan.json                       what runs: corpus, arms, seeds, tokens, recipe
    data/                           the prepared corpus
    train/<arm>/seed<k>/            metrics.jsonl, final/ (the checkpoint), milestones/
    results/<arm>-seed<k>/          one table an analysis (CSV, JSON with provenance, figure)
    results/comparison.*            paired differences between arms
    figures/                        figures of papers, drawn from the tables: satlens figures
    report.html                     what was found, in words, figures and tables
    Snakefile                       the same steps for Snakemake, where asked for: --snakefile
"""

from __future__ import annotations

from satlens.study.addresses import Configured, configurations, configured
from satlens.study.plan import PLAN, load_plan, make_plan
from satlens.study.recipe import (
    Analysis,
    Arm,
    Recipe,
    load_recipe,
    model_config,
    train_config,
)
from satlens.study.snakemake import export_snakefile
from satlens.study.steps import run_study, study_steps

__all__ = [
    "PLAN",
    "Analysis",
    "Arm",
    "Configured",
    "Recipe",
    "configurations",
    "configured",
    "export_snakefile",
    "load_plan",
    "load_recipe",
    "make_plan",
    "model_config",
    "run_study",
    "study_steps",
    "train_config",
]
