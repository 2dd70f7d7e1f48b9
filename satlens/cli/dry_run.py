"""What a dry run shows, and the table of shipped configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

GB = 1e9


def facts_text(facts: dict[str, Any]) -> str:
    """Facts of :func:`satlens.training.describe`, a line each."""
    several = facts["processes"] > 1
    where = f", each of {facts['processes']} processes" if several else ""
    rows = [
        ("architecture", facts["variant"]),
        ("parameters", f"{facts['n_parameters']:,}"),
        ("tokens a step", f"{facts['tokens_per_step']:,}"),
        ("steps", f"{facts['n_steps']:,} ({facts['warmup_steps']:,} of warm-up)"),
        ("tokens", f"{facts['tokens']:,}"),
        ("FLOPs", f"{facts['flops']:.3g} ({facts['flops_per_token']:.4g} a token)"),
        ("time", _time(facts)),
        (f"memory{where}", _memory(facts)),
    ]
    if facts["milestones"]:
        kept = [f"{tokens:,} (step {step:,})" for step, tokens in facts["milestones"].items()]
        rows.append(("milestones", ", ".join(kept)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _time(facts: dict[str, Any]) -> str:
    assumed = f"{facts['gpu']} at MFU {facts['mfu']:g}"
    text = f"{_number(facts['gpu_hours'])} GPU hours ({assumed})"
    return text if facts["processes"] == 1 else f"{text}, {_number(facts['hours'])} h in all"


def _memory(facts: dict[str, Any]) -> str:
    parts = [f"{_number(facts['state_bytes'] / GB)} GB weights, gradients and optimiser"]
    if facts["gathered_bytes"]:
        parts.append(f"{_number(facts['gathered_bytes'] / GB)} GB gathered")
    if "activation_bytes" not in facts:
        return " + ".join(parts)
    mine, other = facts["activation_bytes"], facts["other_activation_bytes"]
    kind = "with" if mine > other else "without"
    parts.append(f"{_number(mine / GB)} GB activations")
    total = f"{_number(facts['total_bytes'] / GB)} GB = {' + '.join(parts)}"
    return f"{total} ({_number(other / GB)} {kind} train.gradient_checkpointing)"


def table_of(names: Sequence[str], facts: Sequence[dict[str, Any]]) -> str:
    """A line a configuration; no time on a GPU for recipes that are meant for CPUs."""
    first = facts[0]
    head = [
        "configuration",
        "parameters",
        "tokens a step",
        "steps",
        "FLOPs",
        f"{first['gpu']} hours",
        "state GB",
    ]
    measured = "activation_bytes" in first
    if measured:
        head += ["activations GB", "checkpointed GB"]
    rows = [head]
    for name, each in zip(names, facts, strict=True):
        row = [
            name,
            f"{each['n_parameters']:,}",
            f"{each['tokens_per_step']:,}",
            f"{each['n_steps']:,}",
            f"{each['flops']:.2e}",
            "-" if each["device"] == "cpu" else _number(each["gpu_hours"]),
            _number(each["state_bytes"] / GB),
        ]
        if measured:
            pair = each["activation_bytes"], each["other_activation_bytes"]
            row += [_number(bytes_ / GB) for bytes_ in (max(pair), min(pair))]
        rows.append(row)
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    note = (
        f"hours of one GPU at MFU {first['mfu']:g}; state: weights, gradients and optimiser of one "
        "process without fsdp"
    )
    return "\n".join([*lines, note])


def _number(value: float) -> str:
    """Three digits, never as a power of ten where people would not write one."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.1e}"
