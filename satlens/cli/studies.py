"""Studies: a recipe from corpus to report."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from satlens.cli.options import app, one_process, writable
from satlens.errors import SatlensError


@app.command()
def reproduce(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe (tiny) or a YAML file.")],
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Repeatable: an arm of the recipe, or all; more extend a study."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Paired seeds of every arm; more extend a study.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Training tokens of every run.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Training time, turned once into equal token budgets for all arms."),
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(help="Folder of text files, or JSONL(.gz), a document a line.")
    ] = None,
    cluster_field: Annotated[
        str | None, typer.Option(help="JSONL field of a document's larger work, or id-prefix.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the study; default runs/<recipe>.", callback=writable),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes, one thread each; default: the CPUs.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu (default) or cuda.")] = None,
    snakefile: Annotated[
        bool, typer.Option("--snakefile", help="Run nothing: write the plan for Snakemake.")
    ] = False,
) -> None:
    """Run a whole study: prepare, train, measure, draw, report. A rerun does what is missing."""
    from satlens import study
    from satlens.display import StudyDisplay

    one_process("reproduce")
    chosen = study.load_recipe(recipe)
    root = out or Path("runs") / chosen.name
    n_workers = workers or _cpus()
    plan = study.make_plan(
        chosen,
        root,
        arch=tuple(arch or ()),
        seeds=seeds,
        tokens=tokens,
        minutes=minutes,
        corpus=corpus,
        cluster_field=cluster_field,
        device=device,
        workers=n_workers,
    )
    if seeds is not None and (planned := len(plan.seed_numbers)) > seeds:
        print(f"{root}: its plan has {planned} seeds already", file=sys.stderr)
    if arch and (more := [arm for arm in plan.arms if arm not in arch and "all" not in arch]):
        print(f"{root}: its plan has further arms already: {', '.join(more)}", file=sys.stderr)
    if snakefile:
        path, n_left = study.export_snakefile(plan, root)
        print(f"{path}: {n_left} steps to run; there: snakemake --cores {n_workers}")
        return
    ran = study.run_study(plan, root, n_workers, StudyDisplay)
    if not ran:
        print(f"{root}: everything is up to date")
    print(f"report: {root / 'report.html'}")


def _cpus() -> int:
    """Processors that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable is not None else os.cpu_count() or 1


@app.command(hidden=True)
def step(
    run: Annotated[Path, typer.Argument(help="Folder of a study (runs/tiny).")],
    name: Annotated[str, typer.Argument(help="Step of its plan (train/satformer/seed0).")],
) -> None:
    """Run one step of a study, as the Snakefile of ``satlens reproduce --snakefile`` does."""
    from satlens.runner import run_step, use_one_thread

    one_process("step")
    use_one_thread()
    from satlens import study
    from satlens.display import progress_bar

    steps = study.study_steps(study.load_plan(run))
    with progress_bar() as bar:

        def shown(fraction: float, message: str = "") -> None:
            if bar is not None:
                bar(name, round(100 * fraction), 100)

        ran = run_step(run, steps, name, shown)
    print(f"{name}: {'done' if ran else 'up to date'}", file=sys.stderr)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="A study (runs/tiny) or the --out folder of an analysis; several are compared.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page; default RUN/report.html, of several ./report.html."),
    ] = None,
) -> None:
    """Write the HTML page of a run, or of several side by side, from their tables."""
    from satlens.report import build_report

    print(build_report(runs, out))


@app.command()
def figures(
    run: Annotated[Path, typer.Argument(help="Folder of a study (runs/satformer).")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the files; default RUN/figures.", callback=writable),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Repeatable: a figure; default: all with tables.")
    ] = None,
) -> None:
    """Draw the figures of the papers from a study's tables: PDF, PNG, plotted values, sidecar."""
    from satlens.display import progress_bar
    from satlens.report.paper_figures import draw_figures

    with progress_bar() as progress:
        drawn = draw_figures(run, out, only=tuple(only or ()), progress=progress)
    for figure in drawn:
        where = figure.files[0].with_suffix("") if figure.files else f"not drawn: {figure.reason}"
        print(f"{figure.name}: {where}{'.{pdf,png,csv,json}' if figure.files else ''}")
    failed = [figure for figure in drawn if figure.error is not None]
    if failed:
        names = ", ".join(figure.name for figure in failed)
        raise SatlensError(f"{run}: scripts that failed: {names}") from failed[0].error


@app.command()
def findings(
    studies: Annotated[list[Path], typer.Argument(help="Folders of studies (studies/satformer).")],
    out: Annotated[
        Path, typer.Option(help="The page; the claims ledger goes beside it as ledger.csv.")
    ] = Path("findings.md"),
) -> None:
    """Write what studies found, and the claims ledger, as Markdown from their tables."""
    from satlens.report.findings import write_findings

    for path in write_findings(studies, out):
        print(path)
