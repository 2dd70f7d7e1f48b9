"""What is said about sources taken away, components taken out and changed predictions."""

from __future__ import annotations

import mock_tables as mock

from satlens.report import words


def test_sources_of_the_model_and_of_layers():
    table = mock.ablation_of_sources()
    found = words.ablation(table, {}, "model")
    assert found[0].startswith(
        "model: taking the sources embedding away from every read raises the held-out NLL by 0.500 "
    )
    assert "; the most likely next token changes in 10 % (KL 0.500 nats)" in found[0]
    (grid,) = [sentence for sentence in found if "one layer at a time" in sentence]
    assert "it costs in 24 of 27 families of sources by layer (embedding in layer 1, " in grid
    assert "and others)" in grid
    assert "the largest effect is +4.0000 nats/token in embedding in the output read" in grid
    assert "In the other 3 none is established." in grid


def test_components_of_reads():
    grid, *_ = words.ablation(mock.ablation_of_components(1), {}, "model")
    assert grid.startswith("One component of one read at a time, taken out: it costs in ")
    assert "(L0.attn in L0.mlp, embed in the output read, " in grid
    assert "the largest effect is +0.0200 nats/token in L0.mlp in the output read" in grid


def test_effects_are_kept_apart_by_source():
    effects = words.ablation_effects(mock.ablation_of_sources())
    assert list(effects) == [
        ("route", f"mask {source}") for source in ("embedding", "blocks", "partial")
    ]
    said = {words.describe(*key) for key in effects}
    assert "taking the sources partial away from every read" in said


def test_tables_without_the_predictions_say_nothing_of_them():
    (sentence, *_) = words.ablation(mock.ablation({"zero": 0.2}), {}, "model")
    assert "most likely" not in sentence
