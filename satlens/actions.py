"""What the steps of a study do. Each is called in a worker process as (root, params, report)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from satlens.config import ModelConfig, TrainConfig, make
from satlens.runner import Report, scratch

RESULT_OPTIONS = {"split": "test", "batch_size": 8}


def data(root: Path, params: dict[str, Any], report: Report) -> None:
    """Prepare the corpus."""
    from satlens.data.prepare import prepare

    prepare(
        params["corpus"],
        root / "data",
        cluster_field=params["cluster_field"],
        vocab_size=params["vocab_size"],
        tokenizer=params.get("tokenizer"),
        tokenizer_sample=params.get("tokenizer_sample", 1.0),
        overwrite=True,
        progress=_counted(report),
    )


def tags(root: Path, params: dict[str, Any], report: Report) -> None:
    """Tag the test documents and the pool that drivers are fitted on, for every categories step."""
    from satlens.data.dataset import PreparedDataset
    from satlens.data.tags import tag_documents
    from satlens.data.windows import Windows

    dataset = PreparedDataset.open(root / "data")
    for split in ("test", "pool"):
        documents = Windows(dataset.split(split).documents, 1, **params["slice"]).documents
        tag_documents(
            documents,
            dataset.tokenizer,
            tagger=params["tagger"],
            entities=params["entities"],
            cache_dir=root / params["folder"],
            progress=_counted(report),
        )


def train(root: Path, params: dict[str, Any], report: Report) -> None:
    """Train one arm with one seed; an interrupted run continues."""
    from satlens.data.dataset import PreparedDataset
    from satlens.training import train as run

    run(
        make(ModelConfig, params["model"], params["run"]),
        make(TrainConfig, params["train"], params["run"]),
        PreparedDataset.open(root / "data"),
        root / params["run"],
        progress=_TrainProgress(report),
        device=params["device"],
    )


def analyse(root: Path, params: dict[str, Any], report: Report) -> None:
    """One analysis of one checkpoint on the test documents."""
    import satlens

    name = params["analysis"]
    options = {**RESULT_OPTIONS, **params["slice"], **params["options"]}
    if "tags" in params:
        options["cache_dir"] = root / params["tags"]
    model = satlens.load(root / params["checkpoint"], device=params["device"])
    result = analysis_function(name)(
        model,
        root / "data",
        progress=_counted(report),
        resume_dir=scratch(root, f"{params['out']}/{name}"),
        **options,
    )
    result.save(root / params["out"])


def trajectory(root: Path, params: dict[str, Any], report: Report) -> None:
    """Analyses of every checkpoint that a run kept."""
    import satlens

    results = satlens.trajectory(
        root / params["checkpoint"],
        root / "data",
        device=params["device"],
        progress=_counted(report),
        resume_dir=scratch(root, f"{params['out']}/trajectory"),
        **{**RESULT_OPTIONS, **params["slice"], **params["options"]},
    )
    for result in results.values():
        result.save(root / params["out"])


def tasks(root: Path, params: dict[str, Any], report: Report) -> None:
    """Scores of one checkpoint on tasks, with and without the interventions asked for."""
    import satlens

    model = satlens.load(root / params["checkpoint"], device=params["device"])
    satlens.evaluate_tasks(
        {params["label"]: model},
        progress=_counted(report),
        resume_dir=scratch(root, f"{params['out']}/tasks"),
        **params["options"],
    ).save(root / params["out"])


def token_view(root: Path, params: dict[str, Any], report: Report) -> None:
    """Every gate, route and loss of a few test documents, token by token."""
    import satlens

    model = satlens.load(root / params["checkpoint"], device=params["device"])
    satlens.token_view(
        model,
        root / "data",
        progress=_counted(report),
        cache_dir=scratch(root, f"{params['out']}/token_view"),
        **{"split": RESULT_OPTIONS["split"], **params["options"]},
    ).save(root / params["out"])


def analysis_function(name: str) -> Callable[..., Any]:
    """The public function behind the name of a result."""
    import satlens

    verbs = {
        "evaluation": "evaluate",
        "ablation": "ablate",
        "attribution": "attribute",
        "tasks": "evaluate_tasks",
    }
    return getattr(satlens, verbs.get(name, name))


def comparison(root: Path, params: dict[str, Any], report: Report) -> None:
    """Paired differences between the arms on the test documents."""
    import satlens

    runs = {arm: [root / run for run in runs] for arm, runs in params["runs"].items()}
    satlens.compare(
        runs,
        root / "data",
        contrasts=params["contrasts"],
        device=params["device"],
        progress=_counted(report),
        **params["slice"],
        **RESULT_OPTIONS,
    ).save(root / "results")


def curves(root: Path, params: dict[str, Any], report: Report) -> None:
    """Validation loss along training of every run, as one table."""
    from satlens.analysis.curves import curves as collect

    runs = {arm: [root / run for run in runs] for arm, runs in params["runs"].items()}
    collect(runs).save(root / "results")


def bench(root: Path, params: dict[str, Any], report: Report) -> None:
    """What training costs in every architecture of the study."""
    import satlens

    satlens.bench(**params, progress=_counted(report)).save(root / "results")


def figures(root: Path, params: dict[str, Any], report: Report) -> None:
    """Every figure that the study has the tables for."""
    from satlens.report.paper_figures import FOLDER, draw_figures

    (root / FOLDER).mkdir(exist_ok=True)  # also where no script finds its tables
    draw_figures(root, progress=_counted(report))


def report(root: Path, params: dict[str, Any], report: Report) -> None:
    """The HTML page."""
    from satlens.report import build_report

    build_report(root)


def tokens_a_minute(arms: list[tuple[ModelConfig, int]], cfg: TrainConfig, workers: int) -> float:
    """Training tokens a run may have for each minute that all runs together may take.

    Times a few steps of every arm once; with n tokens the runs take sum(n seeds / speed) / workers.

    Args:
        arms: each with its number of seeds.
    """
    from satlens.analysis.efficiency import training_speed

    seconds_a_token = sum(seeds / training_speed(arm, cfg) for arm, seeds in arms)
    return 60 * workers / seconds_a_token


def _counted(report: Report) -> Callable[[str, int, int], None]:
    return lambda stage, done, total: report(done / max(total, 1), stage)


class _TrainProgress:
    """Passes the trainer's progress on to the runner."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def begin(self, title: str, total: int, done: int) -> None:
        self.total, self.shown = total, ""
        self.update(done)

    def update(self, done: int, fields: dict[str, float] | None = None) -> None:
        if fields and "val_loss" in fields:
            self.shown = f"val loss {fields['val_loss']:.3f}"
        self.report(done / self.total, self.shown)

    def note(self, text: str) -> None:
        self.shown = text

    def end(self) -> None:
        self.report(1.0, self.shown)
