"""Configurations: which ship with satlens, what one is, and in what two differ."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from satlens.cli.options import app, one_process
from satlens.cli.training import Gpu, Json, Mfu, Processes, Set, overrides

config_app = typer.Typer(
    help="Recipes and runs as configurations: list, show, diff.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(config_app, name="config")

Address = Annotated[
    str,
    typer.Argument(help="RECIPE/ARM (satformer-small/satformer, mine.yaml/arm) or a run's folder."),
]


@config_app.command("list")
def list_(
    recipes: Annotated[
        list[str] | None, typer.Argument(help="Recipes (shipped or YAML); default: all shipped.")
    ] = None,
    activations: Annotated[
        bool,
        typer.Option("--activations", help="Measure activation memory too: seconds a line."),
    ] = False,
    gpu: Gpu = "H100 SXM",
    mfu: Mfu = 0.4,
    as_json: Json = False,
) -> None:
    """Every arm of the recipes: parameters, tokens a step, steps, FLOPs, time and memory."""
    from satlens.cli.dry_run import table_of
    from satlens.display import progress_bar
    from satlens.study.addresses import configurations, shipped_recipes
    from satlens.study.recipe import load_recipe
    from satlens.training import describe

    one_process("config")
    addresses = [
        f"{name}/{arm}" for name in recipes or shipped_recipes() for arm in load_recipe(name).arms
    ]
    found = {}
    with progress_bar(quiet=as_json) as progress:
        for done, address in enumerate(addresses):
            (each,) = configurations(address)
            found[address] = {
                "device": each.device,
                **describe(each.model, each.train, gpu=gpu, mfu=mfu, activations=activations),
            }
            if progress is not None:
                progress("configurations", done + 1, len(addresses))
    print(json.dumps(found) if as_json else table_of(list(found), list(found.values())))


@config_app.command()
def show(
    address: Address,
    set_: Set = None,
    seed: Annotated[int | None, typer.Option(help="Seed; default: the recipe's first.")] = None,
    processes: Processes = None,
    gpu: Gpu = "H100 SXM",
    mfu: Mfu = 0.4,
    as_json: Json = False,
) -> None:
    """One configuration, every field spelt out, and what training it takes."""
    import yaml

    from satlens.cli.dry_run import facts_text
    from satlens.config import to_dict
    from satlens.study.addresses import configured
    from satlens.training import describe

    one_process("config")
    fields = overrides(set_ or [])
    each = configured(address, seed=seed, model=fields["model"], train=fields["train"])
    facts = describe(
        each.model, each.train, processes=processes or 1, gpu=gpu, mfu=mfu, activations=True
    )
    resolved = {"model": to_dict(each.model), "train": to_dict(each.train)}
    resolved = json.loads(json.dumps(resolved))  # tuples as lists
    if as_json:
        print(json.dumps({"name": each.name, **facts, **resolved}))
        return
    print(yaml.safe_dump(resolved, sort_keys=False, default_flow_style=None, width=100))
    print(facts_text(facts))


@config_app.command()
def diff(first: Address, second: Address, as_json: Json = False) -> None:
    """Fields in which two configurations differ; exit status 1 where there are any."""
    from satlens.study.addresses import config_differences, configured

    one_process("config")
    found = config_differences(configured(first), configured(second))
    if as_json:
        print(json.dumps({name: [one, other] for name, one, other in found}))
    else:
        for name, one, other in found:
            print(f"{name}: {json.dumps(one)} | {json.dumps(other)}")
    if found:
        raise typer.Exit(1)
