"""Realistic result tables and summaries without models: drawn numbers, the columns of ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

N_DOCUMENTS = 48
ARMS = ("transformer", "resformer", "satformer", "attnres", "rd-attnres")


def counted(table: pd.DataFrame, flags: str = "") -> pd.DataFrame:
    return table.assign(n_documents=N_DOCUMENTS, n_tokens=73_000, flags=flags)


def with_ends(table: pd.DataFrame, stat: str, half: float | np.ndarray) -> pd.DataFrame:
    ends = {f"{stat}_low": table[stat] - half, f"{stat}_high": table[stat] + half}
    return table.assign(**ends)


def cell(estimate: float, half: float = 0.01, flags: str = "") -> dict:
    return {"estimate": estimate, "low": estimate - half, "high": estimate + half, "flags": flags}


def along(table: pd.DataFrame, tokens: tuple[int, ...] = (0, 40_000, 80_000, 600_000)) -> Any:
    """The table at several checkpoints, numbers moving from each to the next."""
    stats = [name for name in table.select_dtypes("float") if name not in ("layer", "head")]
    moved = [
        table.assign(**{name: table[name] * (1 + 0.2 * k) for name in stats}, tokens_seen=count)
        for k, count in enumerate(tokens)
    ]
    return pd.concat(moved, ignore_index=True)


# -- gates and routes ------------------------------------------------------------------------------


def gate_cells(n_layers: int, n_heads: int) -> pd.DataFrame:
    layers = np.repeat(np.arange(1, n_layers), n_heads)
    return pd.DataFrame(
        {
            "site": [f"L{layer}.attn.v" for layer in layers],
            "layer": layers,
            "sublayer": "attn",
            "role": "v",
            "head": np.tile(np.arange(n_heads), n_layers - 1),
            "kind": "gate",
        }
    )


def gates(n_layers: int = 8, n_heads: int = 4, n_dead: int = 2, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    table = gate_cells(n_layers, n_heads)
    n = len(table)
    table["zero_fraction"] = np.clip(0.55 + 0.15 * rng.standard_normal(n), 0.02, 0.98)
    table["mean"] = 0.15 + 0.07 * table["layer"] + 0.1 * rng.random(n)
    table["dead"] = np.arange(n) < n_dead
    table.loc[table["dead"], ["zero_fraction", "mean"]] = [1.0, 0.0]
    table["open_fraction"] = 1 - table["zero_fraction"]
    table["norm_share"] = table["mean"] / (1 + table["mean"])
    for stat in ("zero_fraction", "open_fraction", "mean", "norm_share"):
        table = with_ends(table, stat, np.where(table["dead"], 0, 0.01))
        table[f"{stat}_init"] = 0.5 if "fraction" in stat else 0.2
    return counted(table)


def gate_summary(table: pd.DataFrame, zero: float = 0.56, init: float = 0.5) -> dict:
    dead = table[table["dead"]]
    return {
        "gates": {
            "overall": {
                "zero_fraction": cell(zero),
                "mean": cell(0.4, 0.02),
                "norm_share": cell(0.2),
            },
            "zero_fraction_change": cell(zero - init),
            "overall_init": {"zero_fraction": init, "mean": 0.2},
            "n_heads": len(table),
            "n_dead": len(dead),
            "n_dead_init": 0,
            "dead_heads": [[int(r["layer"]), int(r["head"])] for _, r in dead.iterrows()],
            "share_of_zeros_in_dead_heads": 0.13,
            "variance_shares": {"layers": 0.1, "heads": 0.3, "tokens": 0.6},
            "variance_shares_init": {"layers": 0.0, "heads": 0.1, "tokens": 0.9},
            "static": False,
        }
    }


def sources(sublayer: int, block: int = 4) -> list[str]:
    """Source labels of the read before ``sublayer``."""
    names = ["embed"]
    names += [f"block {b * block}..{b * block + block - 1}" for b in range(sublayer // block)]
    if sublayer % block:
        names.append(f"partial {sublayer - sublayer % block}..{sublayer - 1}")
    return names


def reads(n_layers: int, decoupled: bool) -> list[tuple]:
    found = []
    for layer in range(n_layers):
        for role in ("qk", "v") if decoupled else ("shared",):
            found.append((f"L{layer}.attn.{role}", layer, "attn", role, 2 * layer))
        found.append((f"L{layer}.mlp.shared", layer, "mlp", "shared", 2 * layer + 1))
    return [*found, ("out", n_layers, "out", "shared", 2 * n_layers)]


def route_weights(n_layers: int = 8, decoupled: bool = True, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    rows = []
    for *place, at in reads(n_layers, decoupled):
        names = sources(at)
        mass = rng.dirichlet(np.linspace(3, 1, len(names)))
        rows += [(*place, name, share) for name, share in zip(names, mass, strict=True)]
    columns = ["site", "layer", "sublayer", "role", "source", "weight"]
    return counted(with_ends(pd.DataFrame(rows, columns=columns), "weight", 0.01))


def routes(weights: pd.DataFrame) -> pd.DataFrame:
    """The table of reads that belongs to the weights of their sources."""
    rows = []
    for site, part in weights.groupby("site", sort=False):
        first, w = part.iloc[0], part["weight"].to_numpy()
        rows.append(
            {
                **{key: first[key] for key in ("site", "layer", "sublayer", "role")},
                "head": np.nan,
                "kind": "route",
                "n_sources": len(part),
                "mass_embedding": w[0],
                "effective_sources": np.exp(-(w * np.log(w)).sum()),
                "mass_embedding_init": 1 / len(part),
                "effective_sources_init": float(len(part)),
            }
        )
        assert site == first["site"]
    table = with_ends(
        with_ends(pd.DataFrame(rows), "mass_embedding", 0.01), "effective_sources", 0.1
    )
    return counted(table)


def route_summary(entropy: float = 0.8) -> dict:
    return {
        "routes": {
            "overall": {
                "normalised_entropy": cell(entropy),
                "effective_sources": cell(2.2, 0.1),
                "mass_embedding": cell(0.4),
                "mass_blocks": cell(0.4),
                "mass_partial": cell(0.3),
            },
            "n_undefined": 0,
            "embedding_weight": {"mean": 0.4, "sd_within_read": 0.07},
        }
    }


def signed_route_weights(kind: str, n_layers: int = 8, seed: int = 0) -> pd.DataFrame:
    """Weights of ``states`` (four roles and the output) or of ``streams``."""
    rng = np.random.default_rng(seed)
    rows = []
    for layer in range(n_layers + 1):
        out = layer == n_layers
        if kind == "states":
            names = ["embed", *(f"state ..{2 * j + 1}" for j in range(layer))]
            sublayer = "out" if out else "attn"
            places = [(sublayer, role) for role in ("r" if out else "qkvr")] if layer else []
        else:
            names = [f"stream {i}" for i in range(4)]
            places = [] if out else [("attn", "shared"), ("mlp", "shared")]
        for sublayer, role in places:
            site = f"L{layer}.{sublayer}.route_{role}"
            rows += [
                (site, layer, sublayer, role, name, j, rng.normal()) for j, name in enumerate(names)
            ]
    columns = ["site", "layer", "sublayer", "role", "source", "source_index", "weight"]
    return counted(with_ends(pd.DataFrame(rows, columns=columns), "weight", 0.02))


def signed_routes(weights: pd.DataFrame) -> pd.DataFrame:
    """The table of reads that belongs to signed weights: no entropy, shares by norm."""
    rng = np.random.default_rng(1)
    reads = weights.groupby("site", sort=False).agg(
        layer=("layer", "first"),
        sublayer=("sublayer", "first"),
        role=("role", "first"),
        n_sources=("source", "size"),
        mass_embedding=("weight", "first"),
    )
    reads = reads.reset_index().assign(head=np.nan, kind="route", effective_sources=np.nan)
    if weights["source"].str.startswith("stream").all():
        reads["mass_embedding"] = np.nan
    reads["norm_effective_sources"] = 1 + (reads["n_sources"] - 1) * rng.random(len(reads))
    reads["negative_norm_share"] = rng.random(len(reads))
    for stat in ("mass_embedding", "norm_effective_sources", "negative_norm_share"):
        reads = with_ends(reads, stat, 0.01)
        reads[f"{stat}_init"] = 1.0 if stat.startswith("norm") else 0.0
    return counted(reads, "signed")


def signed_route_summary(embedding: bool = True) -> dict:
    names = ["norm_effective_sources", "mass_states" if embedding else "mass_streams"]
    overall = {name: cell(2.0, 0.1) for name in names}
    overall |= {"negative_norm_share": cell(0.2)}
    empty = {"estimate": None, "low": None, "high": None, "flags": "undefined"}
    overall |= dict.fromkeys(("normalised_entropy", "effective_sources", "mass_blocks"), empty)
    overall["mass_embedding"] = cell(-0.3, 0.05) if embedding else empty
    weight = {"mean": -0.3, "sd_within_read": 0.2} if embedding else {"mean": None}
    counts = {"n_reads": 29, "n_signed": 29, "n_static": 0, "n_undefined": 0}
    return {"routes": {"overall": overall, "embedding_weight": weight, **counts}}


# -- effective routes ------------------------------------------------------------------------------


def effective_routes(n_layers: int = 8, roles: str = "", seed: int = 0) -> pd.DataFrame:
    """Signed coefficients of every component in every read; a role a letter, one without any."""
    rng = np.random.default_rng(seed)
    names = ["embed", *(f"L{layer}.{s}" for layer in range(n_layers) for s in ("attn", "mlp"))]
    rows = []
    for layer in range(n_layers + 1):
        places = [("attn", role) for role in roles or ("shared",)] + [("mlp", "shared")]
        for sublayer, role in places if layer < n_layers else [("out", "shared")]:
            n = 1 + 2 * layer + (sublayer == "mlp")
            c = rng.normal(size=n) * 0.4 + (np.arange(n) == 0)
            share = rng.dirichlet(np.ones(n))
            site = f"L{layer}.{sublayer}.read_{role}"
            flags = "single_component" if n == 1 else ""
            rows += [
                (site, layer, sublayer, role, names[m], m, c[m], share[m], flags) for m in range(n)
            ]
    columns = ["site", "layer", "sublayer", "role", "component", "component_index"]
    table = pd.DataFrame(rows, columns=[*columns, "coefficient", "share", "marks"])
    table["signed_share"] = table["share"] * np.sign(table["coefficient"])
    for stat in ("coefficient", "share", "signed_share"):
        table = with_ends(table, stat, 0.01)
        table[f"{stat}_init"] = 1.0 if stat == "coefficient" else 0.1
    table["coefficient_absolute"] = table["coefficient"].abs()
    table["token_variance"] = 0.01
    return counted(table).assign(flags=table["marks"]).drop(columns="marks")


def effective_reads(table: pd.DataFrame) -> pd.DataFrame:
    """The table of reads that belongs to effective routes."""
    rows = []
    for site, part in table.groupby("site", sort=False):
        w = part["share"].to_numpy()
        first = {key: part.iloc[0][key] for key in ("layer", "sublayer", "role", "flags")}
        entropy = -(w * np.log(w)).sum()
        negative = w[part["coefficient"].to_numpy() < 0].sum()
        rows.append({"site": site, **first, "n_components": len(w)})
        rows[-1] |= {"effective_components": np.exp(entropy), "negative_share": negative}
    reads = pd.DataFrame(rows)
    for stat in ("effective_components", "negative_share"):
        reads = with_ends(reads, stat, 0.01)
        reads[f"{stat}_init"] = 0.0 if stat == "negative_share" else 1.0
    return counted(reads.assign(identity_error=1e-7, n_undefined=0)).assign(flags=reads["flags"])


def effective_summary(signed: bool = True, per_channel: bool = False) -> dict:
    return {
        "overall": {
            "effective_components": cell(5.0, 0.2),
            "negative_share": cell(0.1 if signed else 0.0, 0.02 if signed else 0.0),
            "embedding_share": cell(0.2),
        },
        "overall_init": {
            "effective_components": 8.0,
            "negative_share": 0.0,
            "embedding_share": 0.1,
        },
        "n_reads": 17,
        "n_undefined": 0,
        "static": False,
        "per_channel": per_channel,
        "signed": signed,
        "identity": {"max_error": 3e-7, "tolerance": 1e-5},
        "first_token": {"n": 100, "embedding_share": 0.3},
    }


# -- categories, divergence, ablation --------------------------------------------------------------


def categories(cells: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    names = ("semantic", "functional", "structural", "none")
    table = cells.loc[cells.index.repeat(len(names))].reset_index(drop=True)
    table["category"] = np.tile(names, len(cells))
    table["mean"] = np.where(table["category"] == "none", np.nan, rng.random(len(table)))
    return counted(with_ends(table, "mean", 0.02))


def parts_of_speech(cells: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """A breakdown of more categories than can have a map each."""
    rng = np.random.default_rng(seed)
    names = ("NOUN", "VERB", "ADJ", "ADV", "DET", "ADP", "PRON", "PUNCT")
    table = cells.loc[cells.index.repeat(len(names))].reset_index(drop=True)
    table["by"], table["category"] = "upos", np.tile(names, len(cells))
    table["mean"] = rng.random(len(table))
    return counted(with_ends(table, "mean", 0.02))


def contrasts(cells: pd.DataFrame, delta: np.ndarray, controlled: np.ndarray) -> pd.DataFrame:
    """Contrasts whose intervals are 0.05 wide on each side; p follows from them."""
    table = cells.assign(contrast="semantic - functional")
    for suffix, values in (("", delta), ("_controlled", controlled)):
        table[f"delta{suffix}"] = table[f"delta_document{suffix}"] = values
        table = with_ends(table, f"delta{suffix}", 0.05)
        table[f"p{suffix}_adjusted"] = np.where(np.abs(values) > 0.05, 0.001, 0.6)
        table[f"p{suffix}_min"] = 0.0001
    return counted(table.assign(cliffs_delta=np.sign(delta) * 0.1))


def drivers(cells: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """The token explains most, its category less, its position nothing."""
    rng = np.random.default_rng(seed)
    level = {"token": 0.7, "previous_token": 0.1, "category": 0.3, "position": -0.02, "all": 0.8}
    table = cells.loc[cells.index.repeat(len(level))].reset_index(drop=True)
    table["driver"] = np.tile(list(level), len(cells))
    table["r2"] = table["driver"].map(level) + 0.05 * rng.random(len(table))
    return counted(with_ends(table, "r2", 0.03))


def features(n_layers: int = 8, n_features: int = 64, seed: int = 0) -> pd.DataFrame:
    """Features of V_1 in three groups; the last one is dead."""
    rng = np.random.default_rng(seed)
    groups = np.array(["sae semantic", "sae functional", "sae mixed"])
    one = pd.DataFrame(
        {
            "feature": np.arange(n_features),
            "group": groups[np.arange(n_features) % 3],
            "top_tokens": " the | of",
            "purity": rng.uniform(0.4, 1, n_features),
        }
    )
    table = pd.concat([one.assign(layer=layer) for layer in range(1, n_layers)], ignore_index=True)
    table["mean"] = np.where(table["feature"] == n_features - 1, np.nan, rng.random(len(table)))
    return counted(table)


def divergence(n_layers: int = 8, level: float = 0.2) -> pd.DataFrame:
    layers = np.arange(n_layers)
    table = pd.DataFrame(
        {
            "site": [f"L{layer}.attn" for layer in layers],
            "layer": layers,
            "sublayer": "attn",
            "role": "qk|v",
            "comparison": "attn qk|v",
            "base": "e",
            "js_token": np.where(layers > 0, level * (1 + layers / n_layers), 0.0),
            "js_mean": np.where(layers > 0, level * 0.3, 0.0),
            "js_token_init": 0.0,
            "n_sources": np.where(layers > 0, 2 + layers // 2, 1),
            "n_undefined": 0,
        }
    )
    half = np.where(layers > 0, 0.02, 0.0)
    return counted(with_ends(with_ends(table, "js_token", half), "js_mean", half))


def divergence_summary(level: float = 0.2, half: float = 0.02) -> dict:
    unit = {"unit": "nats", "ceiling": float(np.log(2))}
    return {**unit, "js_token": cell(level, half), "js_mean": cell(0.3 * level, half)}


def circuits(n_layers: int = 8, n_heads: int = 4, n_plain: int = 1, seed: int = 0) -> pd.DataFrame:
    """Heads of a model whose first ``n_plain`` layers mix no V_1."""
    rng = np.random.default_rng(seed)
    layer, head = (axis.ravel() for axis in np.indices((n_layers, n_heads)))
    table = pd.DataFrame({"layer": layer, "head": head, "kv_head": head})
    n, plain = len(table), layer < n_plain
    for stat in ("dla_v_first", "dla_rest", "share"):
        table[stat] = 0.05 * rng.standard_normal(n) if stat != "share" else 0.4 * rng.random(n)
        if stat != "dla_rest":
            table.loc[plain, stat] = np.nan
        table = with_ends(table, stat, 0.01)
    table["copying"] = np.where(plain, np.nan, 0.01)
    table["copying_eigenvalues"] = np.where(plain, np.nan, rng.uniform(-1, 1, n))
    for name in ("induction", "previous_token"):
        table[f"{name}_gate_effect"] = np.where(layer < 2, 0.0, 0.01 * rng.standard_normal(n))
        table[name] = rng.random(n)
        table[f"{name}_gates_off"] = table[name] - table[f"{name}_gate_effect"]
        for case in ("", "_gates_off", "_gate_effect"):
            table = with_ends(table, name + case, 0.005)
    return counted(table)


def ablation(
    totals: dict[str, float],
    n_layers: int = 8,
    n_heads: int = 4,
    half: float = 0.008,
    target: str = "gate",
) -> pd.DataFrame:
    """``totals`` is the effect of each kind on the whole model; late layers have more of it."""
    rows = []
    for kind, total in totals.items():
        rows.append((kind, "model", None, None, total, half))
        share = np.maximum(np.arange(n_layers) - 2.5, 0)
        share = share / max(share.sum(), 1)
        for layer in range(1, n_layers):
            rows.append((kind, "layer", layer, None, total * share[layer], half / 8))
            for head in range(n_heads if target == "gate" else 0):
                part = total * share[layer] / n_heads
                rows.append((kind, "head", layer, head, part, half / 16))
    table = pd.DataFrame(rows, columns=["kind", "scope", "layer", "head", "dnll", "half"])
    table = with_ends(table, "dnll", table["half"])
    table["p_adjusted"] = np.where(table["dnll"].abs() > table["half"], 0.002, 0.7)
    table["p_min"] = 0.0001
    table = table.astype({"layer": "Int64", "head": "Int64"})
    empty = dict.fromkeys(("site", "sublayer", "role", "source", "component"), "")
    return counted(table.assign(target=target, **empty).drop(columns="half"))


def ablation_of_sources(
    names: tuple[str, ...] = ("embedding", "blocks", "partial"), n_layers: int = 8
) -> pd.DataFrame:
    """Sources taken away, from the whole model and from each layer; the output read costs most."""
    whole = pd.DataFrame({"source": names, "scope": "model", "dnll": 0.5})
    by_layer = pd.DataFrame(
        [(layer, name) for layer in range(n_layers + 1) for name in names],
        columns=["layer", "source"],
    ).assign(scope="source")
    by_layer["dnll"] = np.where(by_layer["layer"] == n_layers, 4.0, 0.01 * by_layer["layer"])
    by_layer["sublayer"] = np.where(by_layer["layer"] == n_layers, "out", "")
    table = pd.concat([whole, by_layer], ignore_index=True).fillna({"sublayer": ""})
    return _costs(table.assign(kind="mask", target="route", site="", role="", component=""))


def ablation_of_components(n_layers: int = 3, roles: tuple[str, ...] = ("shared",)) -> pd.DataFrame:
    """Each component out of each read that can have it."""
    names = ["embed", *(f"L{k}.{part}" for k in range(n_layers) for part in ("attn", "mlp"))]
    reads = [
        *((k, "attn", role, 2 * k + 1) for k in range(n_layers) for role in roles),
        *((k, "mlp", "shared", 2 * k + 2) for k in range(n_layers)),
        (n_layers, "out", "shared", 2 * n_layers + 1),
    ]
    rows = [(k, part, role, name) for k, part, role, n in reads for name in names[:n]]
    table = pd.DataFrame(rows, columns=["layer", "sublayer", "role", "component"])
    table["dnll"] = np.linspace(-0.001, 0.02, len(table))
    site = "L" + table["layer"].astype(str) + "." + table["sublayer"] + ".read"
    table["site"] = site.where(table["sublayer"] != "out", "out")
    return _costs(table.assign(kind="remove", target="read", scope="component", source=""))


def _costs(table: pd.DataFrame) -> pd.DataFrame:
    table = with_ends(table.assign(head=None), "dnll", 0.005)
    table["p_adjusted"] = np.where(table["dnll"].abs() > 0.005, 0.002, 0.7)
    table["p_min"], table["kl"], table["top1_change"] = 0.0001, table["dnll"].abs(), 0.1
    return counted(table.astype({"layer": "Int64", "head": "Int64"}))


def ablation_by_category(table: pd.DataFrame) -> pd.DataFrame:
    """An ablation whose cost falls on two categories differently."""
    parts = [
        table.assign(category=name, dnll=table["dnll"] * share)
        for name, share in (("semantic", 1.5), ("functional", 0.5))
    ]
    return with_ends(pd.concat(parts, ignore_index=True), "dnll", 0.005)


def attribution(kind: str = "gate", n: int = 28, seed: int = 0) -> pd.DataFrame:
    """Units that cost what they carry but for the first two, with costs over four orders."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"layer": np.arange(n) // 4 + 1, "kind": kind})
    table["measure"] = "norm_share" if kind == "gate" else "weight"
    table["head"] = pd.array(np.arange(n) % 4 if kind == "gate" else [None] * n, dtype="Int64")
    table["source"] = "" if kind == "gate" else "block 0..3"
    table["sublayer"], table["role"] = "attn", "v" if kind == "gate" else "shared"
    table["site"] = [f"L{layer}.attn.v" for layer in table["layer"]]
    table["mass"] = np.linspace(0.02, 0.98, n)
    table["dnll"] = 10 ** np.linspace(-4, 0, n)
    table.loc[0, "dnll"], table.loc[n - 1, "dnll"] = 1.0, -1e-4
    table["fisher"] = table["dnll"] * rng.uniform(0.5, 1.5, n)
    table["attribution"] = 0.1 * rng.standard_normal(n) * table["dnll"]
    for stat in ("mass", "attribution", "fisher", "dnll"):
        table = with_ends(table, stat, table[stat].abs() / 5)
    table["p_adjusted"], table["rank_difference"] = 0.002, 0.0
    table.loc[[0, n - 1], "rank_difference"] = -1.0, 1.0
    flags = np.where(table["rank_difference"] == 0, "", "disagrees")
    return counted(table).assign(flags=flags)


def attribution_summary(kind: str = "gate") -> dict:
    ranks = ("mass_dnll", "fisher_dnll", "attribution_dnll", "mass_fisher")
    facts = {name: cell(0.5, 0.2) for name in ranks} | {"n_removed": 28, "n_units": 28}
    return {"by_kind": {kind: {**facts, "n_disagree": 2}}}


# -- arms ------------------------------------------------------------------------------------------


def comparison(pairs: dict[tuple[str, str], tuple[float, ...]]) -> pd.DataFrame:
    """Differences of single seeds of each contrast; intervals and sign tests follow from them."""
    from scipy import stats

    rows = []
    for (first, second), seeds in pairs.items():
        n, mean = len(seeds), float(np.mean(seeds))
        half = np.nan
        if n > 1:
            half = stats.t.ppf(0.975, n - 1) * np.std(seeds, ddof=1) / np.sqrt(n)
        up = sum(value > 0 for value in seeds)
        rows.append(
            {
                "first": first,
                "second": second,
                "difference": mean,
                "difference_low": mean - half,
                "difference_high": mean + half,
                **{f"seed_{k}": value for k, value in enumerate(seeds)},
                "sign_p": min(1.0, 2 * stats.binom.cdf(min(up, n - up), n, 0.5)),
                "sign_p_min": 2.0 ** (1 - n),
            }
        )
    return counted(pd.DataFrame(rows))


def curves(arms: tuple[str, ...] = ARMS, seeds: int = 2) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    rows = []
    for number, arm in enumerate(arms):
        for seed in range(seeds):
            for step in range(0, 601, 50):
                loss = 4.25 - 0.02 * number + 3.4 * np.exp(-step / 90)
                loss += 0.006 * rng.standard_normal()
                row = {"arm": arm, "seed": seed, "step": step, "tokens": step * 1024}
                rows.append({**row, "val_loss": loss})
    return counted(pd.DataFrame(rows))


def evaluation(level: float = 4.2, n: int = N_DOCUMENTS) -> tuple[pd.DataFrame, dict]:
    rng = np.random.default_rng(2)
    nll = level + 0.1 * rng.standard_normal(n)
    table = pd.DataFrame({"document": [f"d{i}" for i in range(n)], "nll": nll})
    table = table.assign(cluster="", perplexity=np.exp(nll), n_documents=1, n_tokens=900, flags="")
    perplexity = {"estimate": float(np.exp(level)), "low": None, "high": None}
    return table, {"nll": cell(level, 0.03), "perplexity": perplexity, "n_documents": n}


def bench() -> pd.DataFrame:
    """A transformer, itself again, and two variants."""
    rows = [
        ("transformer", "transformer", 1.0, 1.0),
        ("transformer (again)", "transformer", 1.002, 1.0),
        ("satformer", "transformer", 0.97, 1.001),
        ("rd-attnres", "attnres", 0.95, 1.07),
    ]
    table = pd.DataFrame(rows, columns=["variant", "reference", "speed_ratio", "memory_ratio"])
    return counted(with_ends(table, "speed_ratio", 0.01))


def controls(n_failed: int = 0) -> pd.DataFrame:
    """Checks of every rule, the first ``n_failed`` of them missed."""
    rules = ("equal", "equal", "at least", "at most", "covers")
    rows = [
        {
            "analysis": analysis,
            "control": "gate open on one token class",
            "quantity": f"number {k}",
            "rule": rule,
            "planted": 0.0 if k == 1 else 0.5,
            "recovered": 0.0 if k == 1 else 0.5 + 1e-7 * k,
            "tolerance": 0.0 if k == 1 else 1e-5,
        }
        for analysis in ("sparsity", "divergence", "ablate")
        for k, rule in enumerate(rules)
    ]
    table = pd.DataFrame(rows)
    table["passed"] = np.arange(len(table)) >= n_failed
    table.loc[~table["passed"], "recovered"] += 0.1
    return counted(with_ends(table, "recovered", 0.02))
