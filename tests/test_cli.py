"""The command line: the same numbers as Python, files complete or absent, errors in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import satlens
from satlens.analysis.result import Result
from satlens.cli import main

GOLDEN = Path(__file__).parent / "golden"
SATFORMER = GOLDEN / "satformer-repo-satformer-gqa"
RD = GOLDEN / "rd-attnres-decoupled"
MUDD = GOLDEN / "satformer-repo-muddformer-gqa"


@pytest.fixture
def ids(tmp_path):
    """Twelve documents of token ids for the golden models."""
    path = tmp_path / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 61, (12, 40)))
    return str(path)


def satlens_cli(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    monkeypatch.setattr("sys.argv", ["satlens", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("verb", "folder"),
    [
        ("eval", SATFORMER),
        ("sparsity", SATFORMER),
        ("sparsity", RD),
        ("divergence", RD),
        ("routes", RD),
        ("routes", MUDD),
        ("circuits", SATFORMER),
        ("ablate", SATFORMER),
        ("ablate", RD),
        ("attribute", RD),
    ],
)
def test_each_analysis_of_a_golden_folder_equals_the_same_from_python(
    verb, folder, ids, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    code, stdout, stderr = satlens_cli(
        monkeypatch, capsys, verb, folder, "--data", ids, "--out", out, "--json"
    )
    assert code == 0, stderr
    names = {"eval": "evaluation", "ablate": "ablation", "attribute": "attribution"}
    name = names.get(verb, verb)
    saved = Result.load(out, name)
    assert json.loads(stdout) == saved.summary
    function = {"eval": "evaluate"}.get(verb, verb)
    again = getattr(satlens, function)(satlens.load(folder), ids)
    assert again.to_frame().equals(saved.to_frame())
    assert (out / f"{name}.png").stat().st_size > 5_000
    assert saved.provenance["checkpoint"]["sha256"]
    assert saved.provenance["data"]["sha256"]


def test_the_table_is_printed_without_json(ids, monkeypatch, capsys):
    code, stdout, _ = satlens_cli(monkeypatch, capsys, "sparsity", SATFORMER, "--data", ids)
    assert code == 0
    assert "zero_fraction" in stdout
    assert "note:" in stdout


def test_errors_are_one_line_with_a_non_zero_exit_and_no_output(ids, tmp_path, monkeypatch, capsys):
    pickle = tmp_path / "pickle"
    shutil.copytree(SATFORMER, pickle)
    (pickle / "model.safetensors").write_bytes(b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00.")
    short = tmp_path / "short"
    shutil.copytree(SATFORMER, short)
    whole = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(whole[:-10])
    big = str(tmp_path / "big.npy")
    np.save(big, np.full((9, 5), 61))
    cases = [
        (("sparsity", GOLDEN / "resformer-release-baseline", "--data", ids), "no "),
        (("divergence", SATFORMER, "--data", ids), "divergence"),
        (("categories", SATFORMER, "--data", ids), "tokenizer"),
        (("sparsity", SATFORMER, "--data", "some text"), "tokenizer"),
        (("sparsity", SATFORMER, "--data", big), "61"),
        (("sparsity", pickle, "--data", ids), r"model\.safetensors"),
        (("sparsity", short, "--data", ids), r"model\.safetensors"),
        (("sparsity", tmp_path / "absent", "--data", ids), "absent"),
        (("ablate", SATFORMER, "--data", ids, "--kind", "zerro"), "zerro"),
        (("ablate", SATFORMER, "--data", ids, "--kind", "uniform"), "uniform"),
        (("ablate", SATFORMER, "--data", ids, "--by", "upos"), "tokenizer"),
        (("attribute", SATFORMER, "--data", ids, "--exact", "most"), "exact: 'most' is not one of"),
        (("divergence", RD, "--data", ids, "--over", "depth"), "over: 'depth' is not one of"),
        (("train", tmp_path, tmp_path / "run", "--set", "model.n_layer=2"), "n_layers"),
        (("train", tmp_path, tmp_path / "run", "--set", "n_layers=2"), "--set"),
        (("train", tmp_path / "no-data", tmp_path / "run"), "no-data"),
        (("compare", "a", "--data", ids), "ARM=FOLDER"),
        (("reproduce", "tinny"), "tinny"),
        (("prepare", tmp_path / "absent.txt", tmp_path / "data"), r"absent\.txt"),
    ]
    for arguments, message in cases:
        out = tmp_path / "must-not-exist"
        extra = ("--out", out) if arguments[0] in ("sparsity", "divergence", "ablate") else ()
        code, stdout, stderr = satlens_cli(monkeypatch, capsys, *arguments, *extra)
        assert code == 1, (arguments, stderr)
        lines = stderr.strip().splitlines()
        assert len(lines) == 1, (arguments, stderr)
        assert lines[0].startswith("satlens: error: "), stderr
        assert re.search(message, lines[0]), (arguments, stderr)
        assert not stdout
        assert not out.exists()


def test_a_dry_run_prints_the_resolved_configs_and_counts(tmp_path, monkeypatch, capsys):
    code, stdout, _ = satlens_cli(
        monkeypatch, capsys, "train", tmp_path, tmp_path / "run", "--variant", "satformer-small",
        "--set", "train.tokens=8388608", "--set", "train.batch_size=8", "--dry-run",
    )  # fmt: skip
    facts = json.loads(stdout)
    assert code == 0
    assert facts["n_parameters"] == 128_496_256
    assert (facts["tokens_per_step"], facts["n_steps"]) == (8 * 4096, 256)
    assert facts["model"]["value_residual"]["kind"] == "gated"
    assert not (tmp_path / "run").exists()


def test_prepare_train_eval_from_the_shell(tmp_path, monkeypatch, capsys):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    words = "the red fox saw a blue bird and ran over old hills to rest".split()
    generator = np.random.default_rng(1)
    for k in range(60):
        (corpus / f"{k:02}.txt").write_text(" ".join(generator.choice(words, 120)))
    data, run = tmp_path / "data", tmp_path / "run"
    code, stdout, stderr = satlens_cli(
        monkeypatch, capsys, "prepare", corpus, data, "--vocab-size", 300
    )
    assert code == 0, stderr
    assert [line.split()[0] for line in stdout.splitlines()] == ["train", "val", "pool", "test"]
    settings = (
        "model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.n_ctx=16",
        "model.d_vocab=300", "train.tokens=512", "train.eval_tokens=64", "train.precision=fp32",
    )  # fmt: skip
    options = [part for setting in settings for part in ("--set", setting)]
    code, stdout, stderr = satlens_cli(
        monkeypatch, capsys, "train", data, run, "--variant", "satformer", *options
    )
    assert code == 0, stderr
    final = Path(stdout.strip())
    trained = load_file(final / "model.safetensors")
    model = satlens.load(final)
    assert all((trained[name] == tensor).all() for name, tensor in model.state_dict().items())
    code, stdout, stderr = satlens_cli(
        monkeypatch, capsys, "categories", final, "--data", data, "--tagger", "wordlist",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0, stderr
    assert "wordlist" in json.dumps(Result.load(tmp_path / "out", "categories").provenance)
    code, _, stderr = satlens_cli(monkeypatch, capsys, "eval", SATFORMER, "--data", data)
    assert code == 1
    assert "outside the vocabulary of 61" in stderr


def test_the_version_needs_no_verb(monkeypatch, capsys):
    assert satlens_cli(monkeypatch, capsys, "--version")[:2] == (0, f"{satlens.__version__}\n")


def test_a_terminal_shows_estimates_with_their_intervals_and_the_parts(ids, monkeypatch, capsys):
    code, stdout, _ = satlens_cli(monkeypatch, capsys, "eval", SATFORMER, "--data", ids)
    assert code == 0
    assert re.search(r"^nll: \d\.\d+ \[\d\.\d+, \d\.\d+\]$", stdout, re.MULTILINE)
    _, stdout, _ = satlens_cli(monkeypatch, capsys, "sparsity", RD, "--data", ids)
    assert "route_weights" in stdout
    assert max(map(len, stdout.splitlines())) < 260


def test_a_study_says_that_its_plan_holds_more_than_was_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("satlens.study.run_study", lambda *arguments: [])

    def reproduce(*options):
        command = ("reproduce", "tiny", "--out", tmp_path, "--workers", "1", *options)
        code, _, stderr = satlens_cli(monkeypatch, capsys, *command)
        assert code == 0, stderr
        return stderr.strip()

    assert reproduce("--arch", "attnres", "--arch", "satformer", "--seeds", "2") == ""
    assert reproduce() == reproduce("--arch", "satformer", "--arch", "attnres") == ""
    further = f"{tmp_path}: its plan has further arms already: attnres"
    assert reproduce("--arch", "satformer") == further
    assert reproduce("--seeds", "1") == f"{tmp_path}: its plan has 2 seeds already"
    assert reproduce("--arch", "all") == ""


def test_an_out_that_cannot_be_written_is_refused_before_the_work(
    ids, tmp_path, monkeypatch, capsys
):
    def worked(*arguments, **options):
        pytest.fail("the analysis ran")

    monkeypatch.setattr("satlens.sparsity", worked)
    file = tmp_path / "file"
    file.write_text("")
    for out in (file, file / "below"):
        command = ("sparsity", SATFORMER, "--data", ids, "--out", out)
        code, _, stderr = satlens_cli(monkeypatch, capsys, *command)
        assert (code, stderr.strip()) == (1, f"satlens: error: --out {out}: {file} is not a folder")
    monkeypatch.setattr("os.access", lambda *arguments: False)
    command = ("sparsity", SATFORMER, "--data", ids, "--out", tmp_path / "new" / "below")
    code, _, stderr = satlens_cli(monkeypatch, capsys, *command)
    assert code == 1
    assert stderr.strip().endswith(f"below: {tmp_path} cannot be written to")


def test_a_study_is_exported_and_its_steps_run_one_by_one(tmp_path, monkeypatch, capsys):
    root = tmp_path / "study"
    options = ("--arch", "transformer", "--seeds", "1", "--out", root, "--snakefile")
    code, stdout, stderr = satlens_cli(monkeypatch, capsys, "reproduce", "tiny", *options)
    assert code == 0, stderr
    assert f"{root / 'Snakefile'}: 7 steps to run" in stdout
    assert not (root / "data").exists()
    for step, message in (("trian", "no such step"), ("curves", "needs train/transformer/seed0")):
        code, _, stderr = satlens_cli(monkeypatch, capsys, "step", root, step)
        assert code == 1
        assert message in stderr
        assert len(stderr.splitlines()) == 1
    code, _, stderr = satlens_cli(monkeypatch, capsys, "step", tmp_path, "data")
    assert code == 1
    assert "plan.json: no such plan; satlens reproduce writes one" in stderr
