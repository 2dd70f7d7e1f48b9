"""One of several processes that share passes: what it ends with is written for the test."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from planted import documents, tags_of, tiny

from satlens.analysis.ablation import ablate
from satlens.analysis.analyze import analyze
from satlens.analysis.attribution import attribute
from satlens.analysis.divergence import divergence
from satlens.analysis.evaluation import evaluate
from satlens.errors import SatlensError
from satlens.processes import finish, first_alone, joined

KINDS = ("zero", "mean")
FAST = {"n_resamples": 99, "batch_size": 2}


def measured(progress=None, resume_dir=None):
    """Name -> CSV of every table, on ragged documents."""
    docs = documents(d_vocab=32)
    gates = tiny("rd-attnres", value_residual="satformer")
    options = {**FAST, "progress": progress, "resume_dir": resume_dir}
    names = ("sparsity", "routes", "categories", "divergence", "evaluation")
    tags = {"categories": {"tags": tags_of(docs)}}
    found = {
        "both": analyze(gates, docs, names, options=tags, **options),
        "signed": analyze(tiny("muddformer-prepost"), docs, ("sparsity", "routes"), **options),
        "two": {"divergence": divergence(gates, docs, other=tiny("rd-attnres", seed=5), **options)},
        "causes": {
            "ablation": ablate(gates, docs, kinds=KINDS, scope="layer", **options),
            "attribution": attribute(gates, docs, exact="deciles", **options),
        },
        # More processes than batches: some have nothing to add.
        "short": {"evaluation": evaluate(gates, docs[:1], **options)},
    }
    return {
        f"{case}/{table.name}": table.table.to_csv(index=False)
        for case, results in found.items()
        for result in results.values()
        for table in (result, *result.parts)
    }


def main(folder: Path, state: Path) -> None:
    torch.set_num_threads(1)
    with joined() as (rank, size):
        steps: list[tuple[str, int, int]] = []

        def record(label: str, done: int, total: int) -> None:
            steps.append((label, done, total))

        tables = measured(record, state)
        first, steps = steps, []
        again = measured(record, state)
        try:
            evaluate(tiny("satformer", seed=rank), documents(d_vocab=32), **FAST)
            refused = ""
        except SatlensError as error:
            refused = str(error)
        marker = folder / "cache"
        with first_alone():
            found = marker.exists()
            if rank == 0:
                marker.touch()
        content = {
            "size": size,
            "tables": tables,
            "again": again == tables,
            "forwards": sum(done > 0 for _, done, _ in first),
            "repeated": sum(done < total for _, done, total in steps),
            "refused": refused,
            "found_cache": found,
        }
        (folder / f"{rank}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    finish()
