"""A study whose arms have routes: mock tables of three seeds, arms not named after variants."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import mock_tables as mock
import numpy as np
import pandas as pd

from satlens.analysis.result import Result

ARMS = {
    "dense": "denseformer",
    "mudd": "muddformer",
    "hyper": "hyperconnections",
    "satformer": "satformer",
    "rd": "rd-attnres",
}
ANALYSES = {
    "dense": ["sparsity", "routes"],
    "mudd": ["sparsity", "routes"],
    "hyper": ["sparsity", "routes"],
    "satformer": ["attribution"],
    "rd": ["routes", "attribution"],
}
N_LAYERS = 4


def provenance(arm: str, seed: int) -> dict:
    return {
        "checkpoint": {"sha256": f"{seed}" * 64, "variant": ARMS.get(arm, arm)},
        "data": {"sha256": "d" * 64, "split": "test"},
        "seed": seed,
        "command": "satlens reproduce maps",
        "code": {"commit": "c" * 40, "dirty": False},
        "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
    }


def save(
    root: Path, arm: str, seed: int, name: str, table, summary=None, parts=(), keys=()
) -> None:
    source = provenance(arm, seed)
    made = [Result(part, rows, source, keys=cols) for part, rows, cols in parts]
    result = Result(name, table, source, summary or {}, keys=keys, parts=tuple(made))
    result.save(root / "results" / f"{arm}-seed{seed}", figures=False)


def dense_weights(seed: int, n_layers: int = N_LAYERS) -> pd.DataFrame:
    """One on the newest state, less on older ones, some of them negative in some seeds."""
    rng = np.random.default_rng(seed)
    rows = []
    for layer in range(n_layers):
        names = ["embed", *(f"state ..{2 * j + 1}" for j in range(layer + 1))]
        for index, name in enumerate(names):
            newest = float(index == layer + 1)
            place = (f"L{layer}.depth.route", layer, "depth", "shared", name, index)
            rows.append((*place, newest + 0.1 * rng.normal(), newest))
    columns = ["site", "layer", "sublayer", "role", "source", "source_index"]
    return mock.counted(pd.DataFrame(rows, columns=[*columns, "weight", "weight_init"]))


def weights_of(arm: str, seed: int) -> pd.DataFrame:
    if arm == "dense":
        return dense_weights(seed)
    kind = {"mudd": "states", "hyper": "streams"}[arm]
    return mock.signed_route_weights(kind, N_LAYERS, seed).assign(weight_init=0.0)


def write(root: Path, seeds: int = 3, arms: Sequence[str] = tuple(ARMS)) -> Path:
    """The study under ``root``, all of it or some arms."""
    root.mkdir(parents=True)
    planned = {arm: {"variant": ARMS[arm], "analyses": ANALYSES[arm]} for arm in arms}
    recipe = {"name": "maps", "seeds": seeds, "arms": planned}
    (root / "plan.json").write_text(json.dumps({"recipe": recipe}))
    for seed in range(seeds):
        for arm in arms:
            for name in ANALYSES[arm]:
                WRITE[name](root, arm, seed)
    return root


def write_sparsity(root: Path, arm: str, seed: int) -> None:
    weights = weights_of(arm, seed)
    part = ("route_weights", weights, ("source_index",))
    save(root, arm, seed, "sparsity", mock.signed_routes(weights), parts=[part])


def write_routes(root: Path, arm: str, seed: int) -> None:
    roles = {"mudd": "qkvr", "rd": "qv"}.get(arm, "")
    table = mock.effective_routes(N_LAYERS, roles, seed)
    if arm == "rd":
        table = table.replace({"role": {"q": "qk"}})
    reads = ("routes_reads", mock.effective_reads(table), ())
    save(root, arm, seed, "routes", table, parts=[reads], keys=("component_index",))


def write_attribution(root: Path, arm: str, seed: int) -> None:
    kind = "gate" if arm == "satformer" else "route"
    table, summary = mock.attribution(kind, seed=seed), mock.attribution_summary(kind)
    save(root, arm, seed, "attribution", table, summary)


WRITE = {"sparsity": write_sparsity, "routes": write_routes, "attribution": write_attribution}
