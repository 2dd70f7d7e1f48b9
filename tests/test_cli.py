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
    monkeypatch.setattr("satlens.training.plan.activation_bytes", _measured)
    command = (
        "train", "--variant", "satformer-small",
        "--set", "train.tokens=8388608", "--set", "train.batch_size=8", "--dry-run",
    )  # fmt: skip
    code, stdout, _ = satlens_cli(monkeypatch, capsys, *command, "--json")
    facts = json.loads(stdout)
    assert code == 0
    assert facts["n_parameters"] == 128_496_256
    assert (facts["tokens_per_step"], facts["n_steps"]) == (8 * 4096, 256)
    assert facts["model"]["value_residual"]["kind"] == "gated"
    code, stdout, _ = satlens_cli(monkeypatch, capsys, *command)
    assert code == 0
    assert re.search(r"^parameters +128,496,256$", stdout, re.MULTILINE)
    assert "5.06 GB = 2.06 GB weights, gradients and optimiser + 3 GB activations (1 with" in stdout
    assert not (tmp_path / "run").exists()


def _measured(*arguments, checkpointing, **options):
    return 1_000_000_000 if checkpointing else 3_000_000_000


def test_recipes_need_no_data_to_be_looked_at(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("satlens.training.plan.activation_bytes", _measured)
    address = "rd-attnres-s/rd-attnres"
    command = ("train", "--config", address, "--seed", "2026", "--dry-run", "--json")
    code, stdout, _ = satlens_cli(monkeypatch, capsys, *command)
    facts = json.loads(stdout)
    assert code == 0
    assert (facts["n_steps"], facts["warmup_steps"]) == (61_036, 1_221)
    assert (facts["train"]["seed"], facts["train"]["n_threads"]) == (2026, None)
    code, stdout, _ = satlens_cli(
        monkeypatch, capsys, "config", "show", address, "--set", "model.stream.block_size=4",
        "--set", "train.strategy=fsdp", "--processes", "2",
    )  # fmt: skip
    assert code == 0
    assert "block_size: 4" in stdout and "strategy: fsdp" in stdout
    assert re.search(r"^memory, each of 2 processes +4\.\d+ GB = 0\.958 GB", stdout, re.MULTILINE)
    code, stdout, _ = satlens_cli(monkeypatch, capsys, "config", "list", "rd-attnres-s", "zoo")
    lines = stdout.splitlines()
    assert code == 0
    assert len(lines) == 1 + 5 + 9 + 1
    assert lines[1].split()[:4] == ["rd-attnres-s/attnres", "119,791,296", "32,768", "61,036"]
    code, stdout, _ = satlens_cli(monkeypatch, capsys, "config", "list", "zoo", "--json")
    assert json.loads(stdout)["zoo/satformer"]["n_steps"] == 1200


def test_configurations_are_compared_field_by_field(monkeypatch, capsys):
    def diff(*arguments):
        return satlens_cli(monkeypatch, capsys, "config", "diff", *arguments)[:2]

    same = "rd-attnres-s/rd-attnres"
    assert diff(same, same) == (0, "")
    assert diff("rd-attnres-s/rd-attnres-tied", same) == (
        1,
        'model.stream.control: "tied" | "none"\n',
    )
    code, stdout = diff("satformer-small/satformer", "satformer-medium/satformer", "--json")
    assert code == 1
    fields = json.loads(stdout)
    assert fields["train.lr"] == [0.002, 0.0015]
    assert fields["model.n_layers"] == [11, 18]


def test_a_pair_is_trained_side_by_side_and_its_runs_are_configurations(
    tmp_path, monkeypatch, capsys
):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "name: mine\ntitle: t\nvocab_size: 300\nseeds: [7, 8]\n"
        "model: {n_layers: 2, d_model: 16, n_heads: 2, n_ctx: 16}\n"
        "train: {tokens: 256, batch_size: 2, eval_tokens: 64, precision: fp32}\n"
        "arms:\n  plain: {variant: transformer}\n  gated: {variant: satformer}\n"
        "  wide: {variant: transformer, fields: {d_mlp: 96}, optional: true}\n"
    )
    corpus = tmp_path / "corpus.jsonl"
    generator = np.random.default_rng(2)
    words = "a red fox saw the blue bird and ran".split()
    rows = [{"id": f"d{k}", "text": " ".join(generator.choice(words, 60))} for k in range(40)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, out = tmp_path / "data", tmp_path / "runs"
    assert satlens_cli(monkeypatch, capsys, "prepare", corpus, data, "--vocab-size", 300)[0] == 0
    pair = ("train", data, out, "--config", recipe, "--pair")
    code, stdout, stderr = satlens_cli(monkeypatch, capsys, *pair, "--resume", "must")
    assert (code, stdout) == (1, "")
    assert "resume must" in stderr
    # Every arm's folder is looked at before the first arm trains.
    begun = out / "gated" / "run.json"
    begun.parent.mkdir(parents=True)
    begun.write_text('{"format": "satlens-run", "version": 1, "model": {}, "train": {}}')
    code, stdout, stderr = satlens_cli(monkeypatch, capsys, *pair)
    assert (code, stdout) == (1, "")
    assert "gated/run.json: model." in stderr
    assert not (out / "plain").exists()
    shutil.rmtree(begun.parent)
    code, stdout, stderr = satlens_cli(monkeypatch, capsys, *pair)
    assert code == 0, stderr
    assert stdout.split() == [str(out / name / "final") for name in ("plain", "gated")]
    code, stdout, _ = satlens_cli(
        monkeypatch, capsys, "config", "diff", out / "gated", f"{recipe}/gated"
    )
    assert (code, stdout) == (0, "")
    record = json.loads((out / "gated/run.json").read_text())
    assert record["train"]["seed"] == 7
    three = ("train", "--pair", "--config", recipe, "--config", f"{recipe}/wide", "--dry-run")
    code, _, stderr = satlens_cli(monkeypatch, capsys, *three)
    assert code == 1
    assert stderr.startswith("satlens: error: wide: model.d_mlp: 96, but plain has 64; paired arms")
    monkeypatch.setattr("satlens.training.plan.activation_bytes", _measured)
    code, stdout, _ = satlens_cli(monkeypatch, capsys, *three, "--differ", "d_mlp", "--json")
    assert code == 0
    assert [each["name"] for each in json.loads(stdout)] == ["plain", "gated", "wide"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "tiny/satformer"), "train: DATA and OUT are needed, but for a dry run"),
        (("--config", "tiny"), "tiny: has several arms: tiny/transformer, tiny/resformer"),
        (("--config", "tiny/mudd"), "tiny/mudd: no arm 'mudd'; tiny has transformer, "),
        (("--config", "tinny/satformer"), "tinny: no such recipe; there are "),
        (("--config", "tiny/satformer", "--variant", "satformer"), "--variant: goes with no --con"),
        (("--config", "tiny/satformer", "--pair"), "--pair: satformer: a pair needs at least two"),
        (("--variant", "satformer", "--variant", "attnres"), "several go with --pair"),
        (
            ("--pair", "--variant", "attnres", "--variant", "attnres"),
            "--pair: attnres: given twice",
        ),
        (("--differ", "lr"), "--differ: goes with --pair"),
        (("--config", "tiny/satformer", "--json"), "--json, --processes: go with --dry-run"),
        (("--seed", "1", "--set", "train.seed=2"), "--seed: given by --set train.seed too"),
        (("--set", "train.lr=[", "--dry-run"), "--set train.lr=[: not a YAML value"),
        (("--set", "train.strateg=fsdp"), "unknown field 'strateg' (did you mean 'strategy'?)"),
        (("--config", "tiny/attnres", "--set", "model.stream.blok_size=2"), "blok_size"),
        (("--dry-run", "--gpu", "H1000"), "gpu: 'H1000' is none of A100"),
        (("--dry-run", "--processes", "3"), "grad_accum: 3 processes do not share out 1"),
    ],
)
def test_what_cannot_be_trained_is_one_line(arguments, message, monkeypatch, capsys):
    code, stdout, stderr = satlens_cli(monkeypatch, capsys, "train", *arguments)
    assert (code, stdout) == (1, "")
    assert stderr.startswith("satlens: error: ") and message in stderr
    assert len(stderr.splitlines()) == 1


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
    code, stdout, stderr = satlens_cli(monkeypatch, capsys, "train", data, "--dry-run", "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["model"]["d_vocab"] == 300  # the data's
    code, _, stderr = satlens_cli(monkeypatch, capsys, "train", corpus, "--dry-run")
    assert (code, "manifest.json: cannot be read" in stderr) == (1, True)
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
