"""Effective routes of a corpus against the cache and closed forms; what does not add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted import documents, tiny

from satlens.analysis.depth import effective
from satlens.analysis.depth.effective import EffectiveRoutes
from satlens.analysis.engine import rows
from satlens.analysis.engine.inputs import open_windows
from satlens.analysis.engine.stream import n_groups, run
from satlens.analysis.interventions.gates import intervene
from satlens.analysis.interventions.routes import UniformRoute
from satlens.analysis.result import Result
from satlens.analysis.routes import routes
from satlens.analysis.stats import ratio_interval
from satlens.errors import AnalysisError
from satlens.models.reads import component_hooks, component_names, reads_of

FAST = {"n_resamples": 99}
N_CTX = 16
EVERY_KIND = [
    "satformer",
    "attnres",
    "rd-attnres",
    "delta-attnres",
    "denseformer",
    "muddformer",
    "muddformer-prepost",
    "hyperconnections",
]


@pytest.fixture(scope="module")
def docs():
    return documents(d_vocab=32)


@torch.no_grad()
def unfolded(model, document):
    """Read -> coefficients (tokens, M[, D]) and contributions (tokens, M, D) of one document."""
    n_layers, found = model.cfg.n_layers, {}
    for start in range(0, len(document.tokens) - 1, N_CTX):
        piece = torch.from_numpy(document.tokens[start : start + N_CTX + 1][:-1])[None]
        cache = model.run_with_cache(piece)[1].cache_dict
        delta = torch.stack([cache[hook][0] for hook in component_hooks(n_layers)], 1).double()
        recorded = {name: cache[name] for name in model.stream.unfolded_from(model.cfg)}
        for hook, c in model.stream.unfold(model, recorded):
            c = c[0].expand(len(delta), *c.shape[2:])
            parts = delta * (c if c.ndim == 3 else c[..., None])
            found.setdefault(hook, []).append((c[1:], parts[1:]))
    return {hook: [torch.cat(p).numpy() for p in zip(*x, strict=True)] for hook, x in found.items()}


@pytest.mark.parametrize("name", EVERY_KIND)
def test_statistics_against_the_cache(docs, name):
    model = tiny(name)
    result = routes(model, docs, baseline=False, **FAST)
    table = result.table.set_index(["site", "component"])
    by_read = result.part("routes_reads").table.set_index("site")
    of_documents = [unfolded(model, document) for document in docs]
    names = component_names(3)
    for read in reads_of(model.hook_dict, 3):
        pieces = [found[read.hook] for found in of_documents]
        c, parts = (np.concatenate(p) for p in zip(*pieces, strict=True))
        c = c if c.ndim == 2 else c.mean(-1)
        norms = np.linalg.norm(parts, axis=-1)
        share = norms / norms.sum(1, keepdims=True)
        signed = share * np.sign(c)
        expected = {
            "coefficient": c.mean(0),
            "coefficient_absolute": np.abs(c).mean(0),
            "share": share.mean(0),
            "signed_share": signed.mean(0),
            "token_variance": c.var(0),
        }
        present = names[: read.n_components]
        assert list(table.loc[read.name].index) == present
        rows = table.loc[read.name].loc[present]
        for stat, values in expected.items():
            wanted = values[: read.n_components]
            np.testing.assert_allclose(rows[stat], wanted, rtol=1e-4, atol=1e-7, err_msg=stat)
        assert (rows["n_tokens"] == len(c)).all()
        positive = np.where(share > 0, share, 1)
        entropy = -(positive * np.log(positive)).sum(1)
        row = by_read.loc[read.name]
        assert row["effective_components"] == pytest.approx(np.exp(entropy).mean(), rel=1e-5)
        negative = (share * (c < 0)).sum(1).mean()
        assert row["negative_share"] == pytest.approx(negative, rel=1e-5, abs=1e-9)
        assert row["identity_error"] < 1e-6
    assert result.summary["identity"]["max_error"] == by_read["identity_error"].max()


def test_intervals_are_over_documents(docs):
    model = tiny("muddformer")
    row = routes(model, docs, baseline=False, **FAST).table.set_index(["site", "component"])
    row = row.loc[("L2.attn.read_v", "L0.mlp")]
    values = [unfolded(model, document)["blocks.2.hook_attn_read_v"][0][:, 2] for document in docs]
    expected = ratio_interval(
        np.array([v.sum() for v in values]), np.array([len(v) for v in values]), **FAST
    )
    for end in ("low", "high"):
        found = row[f"coefficient_{end}"]
        assert found == pytest.approx(float(getattr(expected, end)), rel=1e-5)


# -- closed forms ----------------------------------------------------------------------------------


def coefficients(result, site, stat="coefficient"):
    rows = result.table[result.table["site"] == site]
    return dict(zip(rows["component"], rows[stat], strict=True))


def test_a_residual_stream_has_ones(docs):
    result = routes(tiny("transformer"), docs, **FAST)
    for column in ("coefficient", "coefficient_absolute", "coefficient_init"):
        assert (result.table[column] == 1).all()
    assert (result.table["token_variance"] == 0).all()
    assert result.table["flags"].str.contains("static").all()
    assert result.summary["static"]
    assert not result.summary["signed"]
    assert len(result.table) == sum(range(1, 8))


def test_static_rows_multiply(docs):
    """Y_1 = X_1 / 4 + 2 X_0, Y_2 = -X_2 + X_0, with X_2 = Y_1 + both outputs of layer 1."""
    model = tiny("denseformer", n_layers=2)
    with torch.no_grad():
        model.blocks[0].depth_weights.copy_(torch.tensor([2.0, 0.25]))
        model.blocks[1].depth_weights.copy_(torch.tensor([1.0, 0.0, -1.0]))
    result = routes(model, docs, **FAST)
    first = {"embed": 2.25, "L0.attn": 0.25, "L0.mlp": 0.25}
    assert coefficients(result, "L1.attn.read") == first
    assert coefficients(result, "L1.mlp.read") == {**first, "L1.attn": 1.0}
    last = {"embed": -1.25, "L0.attn": -0.25, "L0.mlp": -0.25, "L1.attn": -1.0, "L1.mlp": -1.0}
    assert coefficients(result, "out") == last
    assert coefficients(result, "out", "coefficient_init") == dict.fromkeys(last, 1.0)
    signed = coefficients(result, "out", "signed_share")
    assert sum(signed.values()) == pytest.approx(-1)
    reads = result.part("routes_reads").table.set_index("site")
    assert reads["negative_share"]["out"] == pytest.approx(1)
    assert reads["negative_share"]["L1.mlp.read"] == 0


@pytest.mark.parametrize("name", ["attnres", "delta-attnres"])
def test_before_training_block_sums_weigh_alike(docs, name):
    result = routes(tiny(name, block_size=2), docs, **FAST)
    before = coefficients(result, "L2.attn.read", "coefficient_init")
    base = 1 if name == "delta-attnres" else 0
    assert before == pytest.approx(dict.fromkeys(component_names(2), base + 1 / 3))
    assert coefficients(result, "L2.attn.read") != before


def test_what_an_intervention_leaves_is_what_unfolds(docs):
    model = tiny("rd-attnres")
    with intervene(model, UniformRoute(layer=2, role="v")):
        result = routes(model, docs, baseline=False, **FAST)
    uniform = coefficients(result, "L2.attn.read_v")
    assert uniform == pytest.approx(dict.fromkeys(uniform, 0.5))
    assert result.summary["identity"]["max_error"] < 1e-6


# -- what does not add up --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["transformer", "hyperconnections"])
def test_a_read_that_is_edited_is_refused(docs, name):
    model = tiny(name)
    model.add_hook("blocks.2.hook_mlp_read", lambda x, hook: x * 1.001)
    with pytest.raises(AnalysisError, match=r"routes: blocks\.2\.hook_mlp_read: its components"):
        routes(model, docs, **FAST)


@pytest.mark.parametrize("name", ["rd-attnres", "muddformer-prepost"])
def test_an_edit_of_one_token_is_seen(docs, name):
    """With hooks on the model every token is checked, without them one position in 64."""
    model = tiny(name)
    (hook, *_) = [read.hook for read in reads_of(model.hook_dict, 3) if read.layer == 2]

    def edit(x, hook):
        x[-1, 9] *= 1.001

    assert effective.EffectiveRoutes(model, 1).unfolder.checked.step == effective.CHECKED_EVERY
    model.add_hook(hook, edit)
    with pytest.raises(AnalysisError, match=hook.replace(".", r"\.")):
        routes(model, docs, **FAST)


def test_what_is_checked(docs):
    """The error is relative to the root mean square of the reads that were checked."""
    model = tiny("attnres")
    windows = open_windows(model, docs)
    reducer = EffectiveRoutes(model, n_groups(windows))
    run(model, windows, [reducer])
    n_windows = sum(-(-(len(d.tokens) - 1) // N_CTX) for d in docs if len(d.tokens) > 2)
    n_short = sum((len(d.tokens) - 1) % N_CTX == 1 for d in docs)
    assert (reducer.checks["n"][0] == n_windows - n_short).all()
    errors = reducer.identity_errors()
    assert (errors < 1e-6).all()
    assert (errors > 0).any()


def test_half_precision_is_measured_by_its_own_rounding(docs):
    result = routes(tiny("attnres").to(torch.bfloat16), docs, **FAST)
    identity = result.summary["identity"]
    assert identity["max_error"] <= identity["tolerance"] == pytest.approx(2**-5)
    assert any("bfloat16" in note for note in result.notes)
    assert not any("channel_mean" in note for note in result.notes)


def test_tokens_without_a_value_are_counted(docs):
    model = tiny("attnres")

    def break_some(weights, hook):
        weights[:, 3] = float("nan")

    model.add_hook("hook_route_out", break_some)
    result = routes(model, docs, baseline=False, **FAST)
    reads = result.part("routes_reads").table.set_index("site")
    assert reads["n_undefined"]["out"] == result.summary["n_undefined"] > 0
    assert reads["n_tokens"]["out"] + reads["n_undefined"]["out"] == reads["n_tokens"].max()
    assert np.isfinite(result.table["coefficient"]).all()


# -- the pass --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["muddformer-prepost", "hyperconnections"])
def test_how_many_tokens_unfold_at_once_changes_nothing(docs, name, monkeypatch):
    options = {"baseline": False, "max_tokens_per_document": 14, **FAST}
    expected = routes(tiny(name), docs, **options).table
    monkeypatch.setattr(rows, "SOME_BYTES", 200_000)
    found = routes(tiny(name), docs, **options).table
    for column in expected.select_dtypes("number"):
        a, b = (t[column].to_numpy(float) for t in (found, expected))
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=column)


@pytest.mark.parametrize("name", ["muddformer-prepost", "attnres"])
def test_fewer_windows_at_once_change_nothing(docs, name, monkeypatch):
    """Batches shrink to what may be captured; one window is the least."""
    model = tiny(name)
    assert effective.windows_at_once(model, 8) == 8
    expected = routes(model, docs, baseline=False, **FAST).table
    # Whole components or those of one position, reads of one position, norms of components.
    whole, reads = (7 * N_CTX, 16) if "mudd" in name else (7, 7)
    window = 4 * ((whole + reads) * model.cfg.d_model + 7 * N_CTX)
    for most, n_windows in ((window * 3 - 1, 2), (1, 1)):
        monkeypatch.setattr(effective, "CAPTURED_BYTES", most)
        assert effective.windows_at_once(model, 8) == n_windows
        assert effective.windows_at_once(model, 0) == 0
        found = routes(model, docs, baseline=False, **FAST).table
        for column in expected.select_dtypes("number"):
            a, b = (t[column].to_numpy(float) for t in (found, expected))
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=column)


def test_only_what_is_needed_is_captured(docs):
    for name in ("transformer", "muddformer-prepost"):
        model = tiny(name)
        reducer = EffectiveRoutes(model, 1)
        needed = {*component_hooks(3), *model.stream.unfolded_from(model.cfg)}
        needed |= {read.hook for read in reads_of(model.hook_dict, 3)}
        assert set(reducer.hooks) == needed


@pytest.mark.parametrize("name", ["rd-attnres", "muddformer-prepost"])
def test_parts_merge_to_the_same_bits(docs, name):
    model = tiny(name)
    windows = open_windows(model, docs, batch_size=2)
    whole, *parts = (EffectiveRoutes(model, n_groups(windows)) for _ in range(3))
    run(model, windows, [whole])
    for index, part in enumerate(parts):
        run(model, windows, [part], first=index, step=2)
    for key, accumulator in parts[0].accumulators.items():
        accumulator.merge(parts[1].accumulators[key])
    for key in ("coefficient", "share", "signed_share", "n", "effective", "negative"):
        assert np.array_equal(parts[0].sums[key], whole.sums[key]), key
    for key in ("n", "squares"):
        assert np.array_equal(parts[0].checks[key], whole.checks[key]), key
    assert np.array_equal(parts[0].identity_errors(), whole.identity_errors())
    assert np.array_equal(parts[0].per_channel, whole.per_channel)


def test_a_finished_pass_is_resumed_with_all_it_knew(docs, tmp_path):
    model = tiny("muddformer-prepost")
    first = routes(model, docs, resume_dir=tmp_path, **FAST)
    again = routes(model, docs, resume_dir=tmp_path, **FAST)
    assert again.table.equals(first.table)
    assert again.table["flags"].str.contains("channel_mean").all()
    assert sum("channel_mean" in note for note in again.notes) == 1
    assert again.summary == first.summary


def test_the_result_as_files_and_its_summary(docs, tmp_path):
    model = tiny("muddformer")
    result = routes(model, docs, **FAST)
    result.save(tmp_path)
    loaded = Result.load(tmp_path, "routes")
    assert loaded.table.equals(result.table)
    assert loaded.part("routes_reads").table.equals(result.part("routes_reads").table)
    assert (tmp_path / "routes.png").stat().st_size > 5_000
    columns = list(result.table)
    assert columns[:6] == ["site", "layer", "sublayer", "role", "component", "component_index"]
    assert columns[6:9] == ["coefficient", "coefficient_low", "coefficient_high"]
    assert columns[-3:] == ["n_documents", "n_tokens", "flags"]
    summary = result.summary
    assert summary["signed"]
    assert not summary["static"]
    assert summary["n_reads"] == 4 * 3 + 3 + 1
    n_windows = sum(-(-(len(d.tokens) - 1) // N_CTX) for d in docs)
    assert summary["first_token"]["n"] == n_windows
    assert 0 < summary["first_token"]["embedding_share"] < 1
    assert summary["overall_init"]["negative_share"] == 0
    assert result.provenance["checkpoint"]["variant"] == "muddformer"
