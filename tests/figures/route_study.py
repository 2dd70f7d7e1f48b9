"""A study of routes with its controls: mock tables, arms not named after variants."""

from __future__ import annotations

import json
from pathlib import Path

import mock_tables as mock
import numpy as np
import pandas as pd

from satlens.analysis.result import Result
from satlens.analysis.stats import seed_comparison

ARMS = {
    "plain": "transformer",
    "parent": "attnres",
    "split": "rd-attnres",
    "mixed": "rd-attnres-average",
    "even": "rd-attnres-frozen-v",
    "delta": "delta-attnres",
}
SEEDS = {"plain": 6, "parent": 6, "split": 6, "mixed": 2, "even": 2, "delta": 1}
CONTRASTS = [
    ("parent", "plain"),
    ("split", "parent"),
    ("mixed", "parent"),
    ("even", "parent"),
    ("split", "mixed"),
    ("split", "even"),
    ("delta", "plain"),
]
TOKENS = (0, 1000, 2000, 4000)
N_LAYERS = 4
ANALYSED = 3
"""Seeds whose routes are analysed."""
SOURCE = {"checkpoint": {"sha256": "ab" * 32}, "data": {"sha256": "d" * 64}, "command": "none"}


def losses(seed: int = 0) -> dict[tuple[str, int], np.ndarray]:
    """(arm, seed) -> validation loss at each of ``TOKENS``; arms of a seed move together."""
    rng = np.random.default_rng(seed)
    common = 0.05 * rng.standard_normal((6, len(TOKENS)))
    return {
        (arm, k): 5 - 0.02 * i - 0.3 * np.arange(len(TOKENS)) + common[k] + own
        for i, arm in enumerate(ARMS)
        for k in range(SEEDS[arm])
        for own in [0.01 * rng.standard_normal(len(TOKENS))]
    }


def comparison(found: dict[tuple[str, int], np.ndarray]) -> pd.DataFrame:
    """Final differences with both intervals over seeds, as the analysis has them."""
    pairs = {
        (a, b): tuple(found[a, k][-1] - found[b, k][-1] for k in range(min(SEEDS[a], SEEDS[b])))
        for a, b in CONTRASTS
    }
    table = mock.comparison(pairs)
    ends = [seed_comparison(np.array(d), np.zeros(len(d))).percentile for d in pairs.values()]
    table["difference_percentile"] = table["difference"]
    table["difference_percentile_low"] = [float(each.low) for each in ends]
    table["difference_percentile_high"] = [float(each.high) for each in ends]
    return table.assign(n_seeds=[len(d) for d in pairs.values()])


def curves(found: dict[tuple[str, int], np.ndarray]) -> pd.DataFrame:
    rows = [
        {"arm": arm, "seed": k, "step": step, "tokens": tokens, "val_loss": line[step]}
        for (arm, k), line in found.items()
        for step, tokens in enumerate(TOKENS)
    ]
    return mock.counted(pd.DataFrame(rows))


def weights(arm: str, seed: int) -> pd.DataFrame:
    """Routes that differ between seeds; the values of ``even`` read every source alike."""
    table = mock.route_weights(N_LAYERS, arm in ("split", "mixed", "even"), seed)
    table["weight_init"] = 1 / table.groupby("site")["weight"].transform("size")
    if arm == "even":
        table.loc[table["role"] == "v", "weight"] = table["weight_init"]
    return table[table["sublayer"] != "out"] if arm == "delta" else table


def write(root: Path) -> Path:
    """The whole study under ``root``."""
    root.mkdir(parents=True)
    arms = {arm: {"variant": variant, "seeds": SEEDS[arm]} for arm, variant in ARMS.items()}
    (root / "plan.json").write_text(
        json.dumps({"recipe": {"name": "routes", "seeds": 6, "arms": arms}})
    )
    found = losses()
    save_comparison(root, comparison(found))
    keys = ("seed", "step", "tokens")
    Result("curves", curves(found), SOURCE, keys=keys).save(root / "results", figures=False)
    for arm in ARMS:
        for seed in range(min(SEEDS[arm], ANALYSED) if arm != "plain" else 0):
            of_seed = weights(arm, seed)
            part = Result("route_weights", of_seed, SOURCE)
            result = Result("sparsity", mock.routes(of_seed), SOURCE, parts=(part,))
            result.save(root / "results" / f"{arm}-seed{seed}", figures=False)
    for seed in range(ANALYSED):
        save_divergence(root, "split", seed, mock.divergence(N_LAYERS, 0.15 + 0.02 * seed))
    return root


def save_comparison(root: Path, table: pd.DataFrame) -> None:
    result = Result("comparison", table, SOURCE, {"noise_floor": 0.01})
    result.save(root / "results", figures=False)


def save_divergence(
    root: Path, arm: str, seed: int, table: pd.DataFrame, over: str = "sources"
) -> None:
    summary = {**mock.divergence_summary(), "over": over}
    result = Result("divergence", table.assign(js_mean_init=0.0), SOURCE, summary)
    result.save(root / "results" / f"{arm}-seed{seed}", figures=False)
