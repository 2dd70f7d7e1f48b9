"""What analyses cost: time of a pass, memory of a batch, memory over a corpus, an ablation sweep.

    python benchmarks/analyses.py passes          # every analysis and all together, by time
    python benchmarks/analyses.py memory          # a batch against caching everything
    python benchmarks/analyses.py corpus          # resident memory over 10 million tokens
    python benchmarks/analyses.py sweep           # a layer x head sweep against full forwards

Passes are compared with a bare forward without the unembedding: all run in a fresh order each
round, on one thread; a ratio is the median over rounds of paired ratios of processor time, with
quartiles, and the bare forward against itself shows what the machine cannot resolve. Models have
random weights and documents random tokens with random tags.
"""

from __future__ import annotations

import gc
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import typer

import satlens
from satlens.analysis.ablation import ablate
from satlens.analysis.categories import TokenCategories
from satlens.analysis.divergence import Divergence
from satlens.analysis.engine.descriptive import Descriptive, Inputs, inputs_of
from satlens.analysis.engine.stream import Observed, Reducer, group_of, measuring, run
from satlens.analysis.routes import EffectiveRouting
from satlens.analysis.sparsity import Sparsity
from satlens.data.categories import UPOS, make_categories
from satlens.data.dataset import DocumentTokens
from satlens.data.tags import DocumentTags, Tags
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.initialise import family

VARIANTS = ("satformer", "rd-attnres", "muddformer")
BARE, CONTROL = "bare forward", "bare forward (again)"
EVERYTHING, CACHED = "everything", "run_with_cache + the same"

app = typer.Typer(add_completion=False, help=__doc__)
Names = Annotated[list[str] | None, typer.Argument(help="Names of variants.")]


class Case(NamedTuple):
    """A model and its data, as an analysis gets them."""

    model: Decoder
    inputs: Inputs
    analyses: list[Descriptive]


# -- models and data -------------------------------------------------------------------------------


def random_model(variant: str, seed: int = 0, **sizes: int) -> Decoder:
    """A model whose routes and gates differ between tokens, as after training."""
    model = satlens.build(variant, **sizes)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if family(name) == "routes" and not name.endswith(("gamma", "bias")):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(noise * (0.5 if "query" in name else 0.02))
    return model


def random_documents(n: int, length: int, d_vocab: int) -> list[DocumentTokens]:
    """Documents of ``length`` targets each."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, d_vocab, (n, length + 1)).astype(np.uint16)
    return [DocumentTokens(f"d{k}", None, row, "") for k, row in enumerate(tokens)]


def random_tags(documents: Sequence[DocumentTokens]) -> Tags:
    """A random part of speech for every token; finer labels take no memory."""
    rng, groups = np.random.default_rng(1), make_categories()
    tagged = []
    for document in documents:
        n = len(document.tokens)
        upos = rng.integers(1, len(UPOS), n).astype(np.int8)
        none = np.broadcast_to(np.array("none"), n)
        word = np.arange(n, dtype=np.int32) // 2
        category = groups.of_upos[upos]
        tagged.append(
            DocumentTags(
                id=document.id,
                upos=upos,
                tag=none,
                dep=none,
                entity=none,
                word=word,
                category=category,
            )
        )
    return Tags(documents=tagged, categories=groups, tagger="random 1")


def case_of(model: Decoder, documents: list[DocumentTokens], batch_size: int) -> Case:
    """Every descriptive analysis that the model has sites for."""
    tags = random_tags(documents)
    every = [
        Sparsity(),
        EffectiveRouting(),
        Divergence(),
        TokenCategories(tags=tags, drivers=False),
    ]
    analyses = [analysis for analysis in every if has_sites(analysis, model)]
    inputs = inputs_of(model, documents, analyses, batch_size=batch_size)
    for analysis in analyses:
        analysis.prepare(inputs)
    return Case(model, inputs, analyses)


def has_sites(analysis: Descriptive, model: Decoder) -> bool:
    try:
        analysis.check(model)
    except AnalysisError:
        return False
    return True


# -- what is measured ------------------------------------------------------------------------------


def bare_forward(case: Case) -> None:
    """The pass without an analysis, up to what the unembedding would receive."""
    model = case.model
    with measuring(model):
        for batch in case.inputs.windows:
            snapshot = model(batch.tokens, stop_at_layer=model.cfg.n_layers)
            model.stream.finish(model, snapshot.state, False)


def reducers_of(case: Case, analyses: Sequence[Descriptive]) -> list[Reducer]:
    return [r for analysis in analyses for r in analysis.reducers(case.model, case.inputs)]


def cached_pass(case: Case, reducers: Sequence[Reducer]) -> None:
    """The same statistics from a cache of every hook point."""
    windows = case.inputs.windows
    with measuring(case.model):
        for batch in windows:
            cache = case.model.run_with_cache(batch.tokens)[1].cache_dict
            groups = group_of(batch.document.numpy(), windows.n_documents)
            shared: dict[Any, Any] = {}
            for reducer in reducers:
                own = {
                    name: cache[name] if keep is None else keep(cache[name])
                    for name, keep in reducer.hooks.items()
                }
                reducer.update(Observed(own, batch, groups, None, shared))


def arms_of(case: Case) -> dict[str, Callable[[], None]]:
    """What is timed, by name."""
    model, windows = case.model, case.inputs.windows
    alone = {analysis.name: reducers_of(case, [analysis]) for analysis in case.analyses}
    every = reducers_of(case, case.analyses)
    arms: dict[str, Callable[[], None]] = {name: lambda: bare_forward(case) for name in RULERS}
    for name, reducers in (*alone.items(), (EVERYTHING, every)):
        arms[name] = lambda reducers=reducers: run(model, windows, reducers)
    return arms | {CACHED: lambda: cached_pass(case, every)}


RULERS = (BARE, CONTROL)


def processor_times(arms: dict[str, Callable[[], None]], rounds: int) -> dict[str, np.ndarray]:
    """Processor seconds of each arm, one a round."""
    for arm in arms.values():
        arm()
    times: dict[str, list[float]] = {name: [] for name in arms}
    rng = np.random.default_rng(0)
    gc.disable()
    for _ in range(rounds):
        for name in rng.permutation(list(arms)):
            start = time.process_time()
            arms[name]()
            times[name].append(time.process_time() - start)
        gc.collect()
    gc.enable()
    return {name: np.array(taken) for name, taken in times.items()}


def ratio(top: np.ndarray, bottom: np.ndarray) -> str:
    low, middle, high = np.quantile(top / bottom, (0.25, 0.5, 0.75))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


# -- memory ----------------------------------------------------------------------------------------


def status(field: str) -> int:
    """Bytes of a field of this process's status: VmRSS is resident, VmHWM the most so far."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def peaks(case: Case, arm: Callable[[], None]) -> tuple[int, int]:
    """Peak resident bytes of a bare forward, then of an arm, in a process of its own."""

    def measured(sender: Any) -> None:
        bare_forward(case)
        before = status("VmHWM")
        arm()
        sender.send((before, status("VmHWM")))

    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=measured, args=(sender,))
    process.start()
    found = receiver.recv()
    process.join()
    return found


# -- commands --------------------------------------------------------------------------------------


def cases(
    variants: list[str] | None, batch_size: int, n_batches: int, **sizes: int
) -> Iterator[tuple[str, Case]]:
    torch.set_num_threads(1)
    for variant in variants or VARIANTS:
        model = random_model(variant, **sizes)
        n, length = batch_size * n_batches, sizes["n_ctx"]
        yield variant, case_of(model, random_documents(n, length, sizes["d_vocab"]), batch_size)


SIZES = {"n_layers": 8, "d_model": 256, "n_heads": 4, "n_ctx": 256, "d_vocab": 2048}


@app.command()
def passes(variants: Names = None, rounds: int = 11, n_batches: int = 3) -> None:
    """Time of each analysis and of all in one pass, as ratios."""
    for variant, case in cases(variants, 8, n_batches, **SIZES):
        times = processor_times(arms_of(case), rounds)
        rows = {
            name: {
                "/ bare forward": ratio(taken, times[BARE]),
                "/ everything": ratio(taken, times[EVERYTHING]) if name == CACHED else "",
            }
            for name, taken in times.items()
        }
        print(f"\n{variant}\n{pd.DataFrame(rows).T.drop(BARE).to_string()}", flush=True)


@app.command()
def memory(variants: Names = None) -> None:
    """Peak memory above a bare forward's: all analyses in one pass, and from a full cache."""
    for variant, case in cases(variants, 8, 2, **SIZES):
        # What libraries load when they are first used is no part of it.
        for arm in arms_of(case_of(case.model, random_documents(8, 16, 2048), 8)).values():
            arm()
        arms, taken = arms_of(case), {}
        for name in (EVERYTHING, CACHED):
            before, after = peaks(case, arms[name])
            taken[name] = max(after - before, 1)
        shown = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in taken.items())
        print(f"{variant}: {shown}; {taken[CACHED] / taken[EVERYTHING]:.1f} times", flush=True)


@app.command()
def corpus(variant: str = "satformer", n_tokens: int = 10_000_000, batch_size: int = 64) -> None:
    """Resident memory while all analyses pass over many tokens with a small model."""
    torch.set_num_threads(1)
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 2, "n_ctx": 128, "d_vocab": 512}
    model = random_model(variant, **sizes)
    case = case_of(model, random_documents(n_tokens // 512, 512, 512), batch_size)
    found: list[tuple[int, int]] = []

    def watch(label: str, done: int, total: int) -> None:
        if done and done % max(1, total // 10) == 0:
            found.append((done * batch_size * sizes["n_ctx"], status("VmRSS")))
            print(f"{found[-1][0]:>10} tokens  {found[-1][1] / 1e6:.1f} MB", flush=True)

    run(model, case.inputs.windows, reducers_of(case, case.analyses), progress=watch)
    print(f"from the first tenth to the last: {(found[-1][1] - found[0][1]) / 1e6:+.1f} MB")


@app.command()
def sweep(variant: str = "satformer", rounds: int = 5, n_batches: int = 2) -> None:
    """A zero (or uniform) sweep of every site, against as many full forwards and one more."""
    ((_, case),) = cases([variant], 8, n_batches, **SIZES)
    model, windows = case.model, case.inputs.windows
    gated = any(site.kind == "gate" for site in model.sites)
    kind, scope = ("zero", "head") if gated else ("uniform", "site")

    def forward() -> None:
        with measuring(model):
            for batch in windows:
                model(batch.tokens, return_type="loss", targets=batch.targets, loss_per_token=True)

    def ablation() -> int:
        found = ablate(model, case.inputs.data, kinds=kind, scope=scope, n_resamples=9)
        return len(found.table)

    n_sites = ablation()
    times = processor_times({"sweep": lambda: (ablation(), None)[1], "forward": forward}, rounds)
    full = (n_sites + 1) * times["forward"]
    print(f"{variant}: {n_sites} sites, sweep / (sites + 1) full forwards: ", end="")
    print(ratio(times["sweep"], full))


if __name__ == "__main__":
    app()
