"""A small study on disk with the tables that the ledger and the findings read."""

from __future__ import annotations

import json
from pathlib import Path

import mock_tables as mock

from satlens.analysis.result import Result

ARMS = {
    "transformer": {"variant": "transformer"},
    "resformer": {"variant": "resformer"},
    "satformer": {"variant": "satformer"},
    "satformer-tanh": {
        "variant": "satformer",
        "fields": {"value_residual": {"kind": "gated", "gate": "tanh"}},
    },
    "attnres": {"variant": "attnres"},
    "rd-attnres": {"variant": "rd-attnres"},
}
LOWER = (-0.06, -0.05, -0.055, -0.062, -0.058, -0.051)
HIGHER = tuple(-value for value in LOWER)


def save(root: Path, where: str, name: str, table, summary=None, **options) -> None:
    facts = {
        "command": "satlens reproduce mock --out /somewhere/else --seeds 6",
        "code": {"commit": "ab" * 20, "dirty": False},
        "data": {"sha256": "cd" * 32},
        "n_documents": 48,
        "n_tokens": 81_920,
    }
    folder = root / "results" / where
    Result(name, table, facts, summary or {}, **options).save(folder, figures=False)


def compare(root: Path, gated: tuple[float, ...], beside_static: tuple[float, ...]) -> None:
    """The comparison of the gated arm with the transformer and with the static arm."""
    pairs = {
        ("satformer", "transformer"): gated,
        ("satformer", "resformer"): beside_static,
        ("satformer-tanh", "satformer"): (0.02, 0.03),
    }
    arms = [arm for pair in pairs for arm in pair]
    summary = {
        "noise_floor": 0.01,
        "nll": {arm: {str(k): 4.2 + 0.01 * k for k in range(6)} for arm in arms},
        "n_parameters": dict.fromkeys(arms, 2_132_096),
    }
    save(root, "", "comparison", mock.comparison(pairs), summary)


def ablate(root: Path, cost: float, half: float = 0.005, seed: int = 0) -> None:
    """What closing every gate costs one checkpoint."""
    summary = {"overall": {"gate.zero": mock.cell(cost, half)}}
    table = mock.ablation({"zero": cost}, 4, 2, half)
    save(root, f"satformer-seed{seed}", "ablation", table, summary)


def make_study(root: Path, name: str = "mock") -> Path:
    """A study of six arms; the gated one has most of what is measured."""
    recipe = {
        "name": name,
        "title": "A study",
        "corpus": "sotu",
        "vocab_size": 2048,
        "seeds": 6,
        "model": {"n_layers": 4, "d_model": 64, "n_heads": 2, "n_ctx": 128},
        "train": {"tokens": 614_400, "lr": 0.003},
        "arms": ARMS,
    }
    root.mkdir(parents=True)
    (root / "plan.json").write_text(json.dumps({"asked": {}, "recipe": recipe}))
    compare(root, LOWER, HIGHER)
    ablate(root, 0.05)
    ablate(root, 0.03, seed=1)
    gates = mock.gates(4, 2, n_dead=0)
    save(root, "satformer-seed0", "sparsity", gates, mock.gate_summary(gates))
    save(root, "", "bench", mock.bench())
    for seed in (0, 1, 2):
        level = 0.2 + 0.01 * seed
        table, summary = mock.divergence(4, level), mock.divergence_summary(level)
        save(root, f"rd-attnres-seed{seed}", "divergence", table, summary)
    return root


def draw(root: Path, name: str, caption: str = "What is shown.") -> None:
    """A figure of the study, as its files."""
    folder = root / "figures"
    folder.mkdir(exist_ok=True)
    facts = {"title": "A title", "caption": caption, "source": "A paper"}
    (folder / f"{name}.json").write_text(json.dumps(facts))
    for kind in ("png", "pdf", "csv"):
        (folder / f"{name}.{kind}").write_bytes(b"")
