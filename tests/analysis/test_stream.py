"""The pass: batches, order, processes, kills and other people's hooks change nothing."""

from __future__ import annotations

import gc
import re
import tracemalloc

import numpy as np
import pytest
import torch
from planted import documents, tags_of, tiny

from satlens.analysis.ablation import ablate
from satlens.analysis.categories import categories
from satlens.analysis.divergence import divergence
from satlens.analysis.engine.accumulators import GroupSums, load_state, save_state
from satlens.analysis.engine.inputs import open_windows
from satlens.analysis.engine.reducers import GateStatistics, RouteStatistics
from satlens.analysis.engine.stream import depth_of, n_groups, run
from satlens.analysis.evaluation import evaluate
from satlens.analysis.routes import routes as effective_routes
from satlens.analysis.sparsity import sparsity
from satlens.errors import AnalysisError, HookError

FAST = {"n_resamples": 99}


@pytest.fixture(scope="module")
def docs():
    return documents(d_vocab=32)


def analyses(docs):
    """Name -> (model, analysis) for everything that makes passes."""
    gates, routes = tiny("satformer"), tiny("rd-attnres")
    other = tiny("rd-attnres", seed=5)
    signed, streams = tiny("muddformer-prepost"), tiny("hyperconnections")
    tags = tags_of(docs)
    return {
        "evaluate": lambda **o: evaluate(gates, docs, **FAST, **o),
        "sparsity gates": lambda **o: sparsity(gates, docs, **FAST, **o),
        "sparsity routes": lambda **o: sparsity(routes, docs, **FAST, **o),
        "categories": lambda **o: categories(gates, docs, tags=tags, **FAST, **o),
        "divergence": lambda **o: divergence(routes, docs, **FAST, **o),
        "sparsity of signed routes": lambda **o: sparsity(signed, docs, **FAST, **o),
        "routes": lambda **o: effective_routes(signed, docs, **FAST, **o),
        "divergence over sublayers": lambda **o: divergence(
            streams, docs, over="sublayers", **FAST, **o
        ),
        "divergence of two": lambda **o: divergence(routes, docs, other=other, **FAST, **o),
        "ablate gates": lambda **o: ablate(gates, docs, scope="layer", **FAST, **o),
        "ablate routes": lambda **o: ablate(routes, docs, scope=("model", "site"), **FAST, **o),
    }


NAMES = list(analyses(documents(d_vocab=32)))


def tables(result):
    return {r.name: r.table for r in (result, *result.parts)}


@pytest.mark.parametrize("name", NAMES)
def test_batch_size_changes_nothing(docs, name):
    analysis = analyses(docs)[name]
    expected = tables(analysis(batch_size=1))
    for batch_size in (3, 8):
        for key, table in tables(analysis(batch_size=batch_size)).items():
            for column in expected[key].select_dtypes("number"):
                if re.fullmatch(r"p|p_.*", column):
                    continue  # p counts sign patterns: a step function of the differences
                found, wanted = (
                    t[column].to_numpy(float, na_value=np.nan) for t in (table, expected[key])
                )
                scale = np.nanmax(np.abs(wanted), initial=1e-6)
                np.testing.assert_allclose(
                    found, wanted, rtol=1e-5, atol=1e-5 * max(scale, 1.0), err_msg=column
                )


class KilledError(Exception):
    """Stands for a signal in the middle of a pass."""


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_analysis_resumes_to_the_same_bits(docs, name, tmp_path):
    analysis = analyses(docs)[name]
    expected = tables(analysis(batch_size=1))
    seen = []

    def record(label, done, total):
        seen.append((label, done, total))

    analysis(batch_size=1, progress=record)
    in_all = sum(1 for _, done, _ in seen if done)
    kill_at, calls = int(0.6 * in_all), 0
    before = []

    def kill(label, done, total):
        nonlocal calls
        before.append((label, done))
        calls += done > 0
        if calls == kill_at:
            raise KilledError

    with pytest.raises(KilledError):
        analysis(batch_size=1, progress=kill, resume_dir=tmp_path)
    after = []
    resumed = analysis(
        batch_size=1,
        progress=lambda label, done, total: after.append((label, done)),
        resume_dir=tmp_path,
    )
    for key, table in tables(resumed).items():
        assert table.equals(expected[key])
    starts = dict(reversed(after))  # the first report of each pass
    forwards = sum(done > starts[label] for label, done in after)
    assert calls + forwards <= 1.5 * in_all
    again = []
    analysis(
        batch_size=1,
        progress=lambda label, done, total: again.append((done, total)),
        resume_dir=tmp_path,
    )
    assert all(done == total for done, total in again)


def test_a_state_serves_only_what_it_was_made_by(docs, tmp_path):
    model = tiny("satformer")
    expected = evaluate(model, docs, **FAST).table
    evaluate(model, docs, resume_dir=tmp_path, **FAST)
    with torch.no_grad():
        model.blocks[0].mlp.down.weight.mul_(2)
    changed = evaluate(model, docs, resume_dir=tmp_path, **FAST).table
    assert not changed["nll"].equals(expected["nll"])
    assert changed.equals(evaluate(model, docs, **FAST).table)
    assert len(list(tmp_path.glob("*.npz"))) == 2


def test_a_damaged_state_is_started_again(docs, tmp_path, caplog):
    model = tiny("satformer")
    expected = evaluate(model, docs, resume_dir=tmp_path, **FAST).table
    (state,) = tmp_path.glob("*.npz")
    state.write_bytes(state.read_bytes()[:100])
    assert evaluate(model, docs, resume_dir=tmp_path, **FAST).table.equals(expected)
    assert "damaged resume state" in caplog.text


def test_a_state_serves_only_the_code_that_made_it(docs, tmp_path, monkeypatch):
    model = tiny("satformer")
    evaluate(model, docs, resume_dir=tmp_path, **FAST)
    monkeypatch.setattr("satlens.analysis.engine.stream.source_sha256", lambda *names: "other code")
    evaluate(model, docs, resume_dir=tmp_path, **FAST)
    monkeypatch.setattr("satlens.__version__", "0.0.0")
    evaluate(model, docs, resume_dir=tmp_path, **FAST)
    assert len(list(tmp_path.glob("*.npz"))) == 3


def test_resume_refuses_hooks_on_the_other_checkpoint(docs, tmp_path):
    model, other = tiny("attnres"), tiny("attnres", seed=9)
    other.add_hook(other.sites[3].hook, lambda x, hook: x)
    with pytest.raises(AnalysisError, match="resume_dir"):
        divergence(model, docs, other=other, resume_dir=tmp_path, **FAST)
    divergence(model, docs, other=other, **FAST)


def test_resume_refuses_a_model_with_hooks(docs, tmp_path):
    model = tiny("satformer")
    model.add_hook("blocks.1.attn.hook_v_gate", lambda x, hook: x * 0)
    with pytest.raises(AnalysisError, match="resume_dir"):
        evaluate(model, docs, resume_dir=tmp_path)
    evaluate(model, docs, **FAST)


@pytest.mark.parametrize("n_processes", [2, 3])
def test_parts_merge_to_the_same_bits(docs, n_processes):
    model = tiny("rd-attnres", value_residual="satformer")
    windows = open_windows(model, docs, batch_size=2)

    def reducers():
        gates, routes = ([s for s in model.sites if s.kind == k] for k in ("gate", "route"))
        groups = n_groups(windows)
        return [GateStatistics(gates, groups, (0.01,)), RouteStatistics(routes, groups)]

    whole = reducers()
    run(model, windows, whole)
    parts = [reducers() for _ in range(n_processes)]
    for index, part in enumerate(parts):
        run(model, windows, part, first=index, step=n_processes)
    for index, reducer in enumerate(whole):
        for name, accumulator in parts[0][index].accumulators.items():
            for part in parts[1:]:
                accumulator.merge(part[index].accumulators[name])
        for name in ("n", "entropy", "weight", "total", "squares", "share"):
            if f"{name}.total" in reducer.sums.arrays():
                assert np.array_equal(parts[0][index].sums[name], reducer.sums[name]), name
    ours, theirs = parts[0][0].values.histogram, whole[0].values.histogram
    assert np.array_equal(ours.counts, theirs.counts)


def test_sums_do_not_depend_on_order():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((500, 3)) * 10.0 ** rng.integers(-8, 8, (500, 1))
    groups = rng.integers(0, 7, 500)
    found = []
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(500)
        sums = GroupSums(7, {"x": (3,)})
        for batch in np.array_split(order, 50 + seed):
            # One row at a time within a group, as batches of single rows give them.
            for row in batch:
                sums.add(groups[[row]], x=rows[[row]])
        found.append(sums["x"])
    for other in found[1:]:
        assert np.array_equal(found[0], other)


def test_state_round_trip(tmp_path):
    sums = GroupSums(3, {"x": (2,), "n": ()})
    sums.add(np.array([0, 2, 0]), x=np.ones((3, 2)) / 3, n=np.ones(3))
    save_state(tmp_path / "a.npz", {"sums": sums}, 5)
    other = GroupSums(3, {"x": (2,), "n": ()})
    assert load_state(tmp_path / "a.npz", {"sums": other}) == 5
    assert np.array_equal(other["x"], sums["x"])
    assert load_state(tmp_path / "a.npz", {"sums": GroupSums(4, {"x": (2,), "n": ()})}) == 0
    assert load_state(tmp_path / "b.npz", {"sums": other}) == 0


def test_no_layer_above_the_last_hook_and_no_logits(docs):
    model = tiny("satformer", last_k=2)
    ran = []
    for name in ("blocks.1.hook_mlp_out", "blocks.2.hook_mlp_out", "hook_logits"):
        model.add_hook(name, lambda x, hook: ran.append(hook.name))
    windows = open_windows(model, docs)
    first_gate = [site for site in model.sites if site.layer == 1]
    run(model, windows, [GateStatistics(first_gate, n_groups(windows), ())])
    assert set(ran) == {"blocks.1.hook_mlp_out"}
    assert depth_of(model, "hook_embed") == 0
    with pytest.raises(HookError, match="did you mean"):
        depth_of(model, "blocks.1.attn.hook_v_gat")


def test_a_users_hook_survives_and_counts(docs):
    model = tiny("satformer")
    clean = sparsity(model, docs, baseline=False, **FAST).table
    model.add_hook("blocks.1.attn.hook_v_gate", lambda x, hook: torch.zeros_like(x))
    for _ in range(2):
        table = sparsity(model, docs, baseline=False, **FAST).table
        assert table["zero_fraction"][:2].tolist() == [1, 1]
        assert table["mean"][:2].tolist() == [0, 0]
    model.reset_hooks()
    assert sparsity(model, docs, baseline=False, **FAST).table.equals(clean)


def test_the_models_mode_and_gradients_are_left_alone(docs):
    model = tiny("satformer").train()
    sparsity(model, docs, baseline=False, **FAST)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_special_tokens_are_excluded_and_counted(docs):
    model = tiny("satformer")
    windows = open_windows(model, docs)
    windows_special = type(windows)(windows.documents, 16, 8, frozenset({0, 5}))
    sites = model.sites
    reducers = [GateStatistics(sites, n_groups(windows), ()) for _ in range(2)]
    run(model, windows, reducers[:1])
    run(model, windows_special, reducers[1:])
    special = sum(
        int(np.isin(d.tokens[:-1], [0, 5])[np.arange(len(d.tokens) - 1) % 16 != 0].sum())
        for d in docs
    )
    n = [reducer.sums["n"].sum(axis=0)[0] for reducer in reducers]
    assert n[0] - n[1] == special > 0


def test_memory_does_not_grow(docs):
    analysis = analyses(docs)
    for name in ("evaluate", "divergence"):
        analysis[name]()
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(10):
            for name in ("evaluate", "divergence"):
                analysis[name]()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[-1] - sizes[2] < 200_000
