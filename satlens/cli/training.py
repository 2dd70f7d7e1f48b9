"""Training: one model, or several as a pair."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from satlens.cli.options import app, speaks
from satlens.errors import ConfigError

if TYPE_CHECKING:
    from satlens.data.dataset import PreparedDataset
    from satlens.study.addresses import Configured

Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Repeatable: model.FIELD=VALUE or train.FIELD=VALUE."),
]
Processes = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that a dry run assumes; default: those of torchrun."),
]
Gpu = Annotated[str, typer.Option(help="GPU whose peak estimates of time assume.")]
Mfu = Annotated[float, typer.Option(help="Share of that peak which they assume.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


@app.command()
def train(
    data: Annotated[Path | None, typer.Argument(help="Prepared folder (satlens prepare).")] = None,
    out: Annotated[
        Path | None, typer.Argument(help="Folder of the run; a rerun there resumes it.")
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="Variant or preset: satformer, rd-attnres, satformer-small, ...; default "
            "transformer. Repeatable with --pair."
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            help="Model and recipe: RECIPE/ARM (satformer-small/satformer, mine.yaml/arm), or the "
            "folder of a run. Repeatable with --pair; see satlens config list."
        ),
    ] = None,
    pair: Annotated[
        bool,
        typer.Option(
            help="Train several, each in OUT/NAME: all arms of --config RECIPE, or each --config "
            "or --variant given. Refuses what differs beside the architecture."
        ),
    ] = False,
    differ: Annotated[
        list[str] | None, typer.Option(help="Repeatable: a field in which a pair may differ.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; default: the recipe's first.")] = None,
    set_: Set = None,
    dry_run: Annotated[
        bool, typer.Option(help="Print what would run and what it takes, and stop; needs no DATA.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A dry run as JSON, with the resolved configuration.")
    ] = False,
    processes: Processes = None,
    gpu: Gpu = "H100 SXM",
    mfu: Mfu = 0.4,
    resume: Annotated[
        str,
        typer.Option(help="auto, never (refuse a folder with a run) or must (refuse one without)."),
    ] = "auto",
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Event files in OUT/tensorboard too.")
    ] = False,
    wandb: Annotated[
        str | None, typer.Option(help="Weights & Biases project to show the run in too.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ...; default: the recipe's, else cpu.")
    ] = None,
) -> None:
    """Train a model, or a pair; killed and rerun, it continues and ends with the same bits."""
    from satlens.data.dataset import PreparedDataset

    runs, open_vocabulary = _runs(variant or [], config or [], pair, seed, set_ or [])
    if pair:
        _check_pair(runs, differ or [])
    elif differ:
        raise ConfigError("--differ: goes with --pair")
    if dry_run:
        if data is not None:
            dataset = PreparedDataset.open(data, verify=False)
            runs = _with_vocabulary(runs, dataset) if open_vocabulary else runs
        _show(runs, as_json, processes, gpu, mfu)
        return
    if as_json or processes is not None:
        raise ConfigError("--json, --processes: go with --dry-run")
    if data is None or out is None:
        raise ConfigError("train: DATA and OUT are needed, but for a dry run")
    from satlens.processes import first_alone, world
    from satlens.training import check_run
    from satlens.training import train as run
    from satlens.training.trackers import open_trackers

    open_trackers(tensorboard=tensorboard, wandb=wandb)  # refuses what is not installed
    with first_alone():
        dataset = PreparedDataset.open(data, verify=world().rank == 0)
    if open_vocabulary:
        runs = _with_vocabulary(runs, dataset)
    places = [out / each.name if pair else out for each in runs]
    for each, place in zip(runs, places, strict=True):  # all of them before the first trains
        check_run(each.model, each.train, dataset, place, resume)  # type: ignore[arg-type]
    for each, place in zip(runs, places, strict=True):
        final = run(
            each.model,
            each.train,
            dataset,
            place,
            device=device or each.device or "cpu",
            resume=resume,  # type: ignore[arg-type]
            trackers=open_trackers(tensorboard=tensorboard, wandb=wandb),
        )
        if speaks():
            print(final, flush=True)


def _runs(
    variants: Sequence[str],
    addresses: Sequence[str],
    pair: bool,
    seed: int | None,
    settings: Sequence[str],
) -> tuple[list[Configured], bool]:
    """What to train, and whether the vocabulary is the data's, as where nobody states one."""
    from satlens.models.presets import PRESETS
    from satlens.study.addresses import configurations, configured

    if variants and addresses:
        raise ConfigError("--variant: goes with no --config, which names a model")
    if not pair and len(variants) + len(addresses) > 1:
        raise ConfigError("--config, --variant: several go with --pair")
    fields = overrides(settings)
    if seed is not None:
        if "seed" in fields["train"]:
            raise ConfigError("--seed: given by --set train.seed too")
        fields["train"]["seed"] = seed
    if addresses:
        found = configurations if pair else (lambda address, **kw: [configured(address, **kw)])
        runs = []
        for address in addresses:
            runs += found(address, model=fields["model"], train=fields["train"])
        return runs, False
    names = variants or ["transformer"]
    stated = "d_vocab" in fields["model"] or any(name in PRESETS for name in names)
    return [_plain(name, fields) for name in names], not stated


def _with_vocabulary(runs: Sequence[Configured], dataset: PreparedDataset) -> list[Configured]:
    """The same with the vocabulary of the data."""
    changed = dataset.vocab_size
    return [each._replace(model=each.model.with_changes(d_vocab=changed)) for each in runs]


def _plain(variant: str, fields: dict[str, dict[str, Any]]) -> Configured:
    """A variant or preset under the defaults of TrainConfig."""
    from satlens.config import TrainConfig, make
    from satlens.models.presets import config_for
    from satlens.study.addresses import Configured

    cfg = make(TrainConfig, fields["train"], "--set train")
    return Configured(variant, config_for(variant, **fields["model"]), cfg, None, ())


def _check_pair(runs: Sequence[Configured], differ: Sequence[str]) -> None:
    from satlens.training.pairing import ARCHITECTURE, check_paired

    names = [each.name for each in runs]
    if len(names) < 2:
        raise ConfigError(f"--pair: {', '.join(names)}: a pair needs at least two")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(
            f"--pair: {twice[0]}: given twice, and both would be trained in one folder"
        )
    declared = [field for each in runs for field in each.differ]
    check_paired(
        {each.name: (each.model, each.train) for each in runs},
        differ=dict.fromkeys((*ARCHITECTURE, *declared, *differ)),
    )


def _show(
    runs: Sequence[Configured], as_json: bool, processes: int | None, gpu: str, mfu: float
) -> None:
    """The dry run of each: JSON (an object, or a list of several), or lines."""
    from satlens.cli.dry_run import facts_text
    from satlens.cli.options import n_processes
    from satlens.config import to_dict
    from satlens.training import describe

    if not speaks():
        return
    settings = {"processes": processes or n_processes(), "gpu": gpu, "mfu": mfu}
    shown = []
    for each in runs:
        facts = describe(each.model, each.train, **settings, activations=True)
        if as_json:
            configs = {"model": to_dict(each.model), "train": to_dict(each.train)}
            shown.append({"name": each.name, **facts, **configs})
        else:
            print(f"{each.name}\n{facts_text(facts)}\n")
    if as_json:
        json.dump(shown[0] if len(shown) == 1 else shown, sys.stdout)
        print()


def overrides(entries: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``model.n_layers=4`` -> {"model": {"n_layers": 4}, "train": {}}; values are YAML."""
    import yaml

    fields: dict[str, dict[str, Any]] = {"model": {}, "train": {}}
    for entry in entries:
        path, separator, value = entry.partition("=")
        part, dot, name = path.partition(".")
        if not separator or not dot or part not in fields:
            raise ConfigError(f"--set {entry}: expected model.FIELD=VALUE or train.FIELD=VALUE")
        try:
            fields[part][name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {entry}: not a YAML value") from None
    return fields
