"""Evaluations by lm-eval that are killed and continue, and those that several processes share."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval_worker import answered

import satlens
from satlens.errors import AnalysisError, DataError
from satlens.interop.lm_eval import SatlensLM

CHECKPOINT = str(Path(satlens.__file__).parent / "zoo" / "satformer")
WORKER = Path(__file__).parent / "lm_eval_worker.py"


def start(responses="-", kill_after=0, **environment):
    """A process of its own on the same questions as :func:`answered`."""
    return subprocess.Popen(
        [sys.executable, WORKER, CHECKPOINT, str(responses), str(kill_after)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def as_json(value):
    return json.loads(json.dumps(value))


@pytest.fixture(scope="module")
def expected():
    torch.set_num_threads(1)
    return as_json(answered(SatlensLM(CHECKPOINT, progress=lambda *_: None)))


def test_a_killed_evaluation_continues_to_the_same_bits(expected, tmp_path):
    process = start(tmp_path, kill_after=17)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (file,) = tmp_path.glob("*.jsonl")
    n_kept = len(file.read_text().splitlines()) - 1
    assert 17 <= n_kept < expected["counts"]["requests"]
    with file.open("a") as torn:
        torn.write('{"answer": [-1.5, fal')
    lm = SatlensLM(CHECKPOINT, responses=tmp_path, progress=lambda *_: None)
    read = []
    lm.model.embed.register_forward_pre_hook(lambda _, args: read.append(len(args[0])))
    # Hooks that a caller adds are refused where answers are kept, those of parts too.
    with pytest.raises(AnalysisError, match="responses: the model carries hooks"):
        answered(lm)
    lm.model.embed._forward_pre_hooks.clear()
    assert as_json(answered(lm)) == expected
    kept = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert len({each["request"] for each in kept}) == len(kept) == expected["counts"]["requests"]


def test_two_processes_find_what_one_does(expected):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    processes = [start(RANK=str(rank), **shared) for rank in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    found = json.loads(outputs[0])
    assert outputs[1] == "" and found["counts"] == expected["counts"]
    for ours, others in zip(found["answers"], expected["answers"], strict=True):
        for (value, greedy), (other, other_greedy) in zip(ours, others, strict=True):
            assert value == pytest.approx(other, abs=1e-5) and greedy == other_greedy


# -- the files of answers --------------------------------------------------------------------------

PAIR = Instance("loglikelihood", {}, ("the cat", " sat"), 0, ("made_up", 0, 1))
PROMPT = Instance("generate_until", {}, ("the cat", {"max_gen_toks": 3}), 0, ("made_up", 1, 1))


@pytest.fixture
def model(build, tokenizer):
    made = build("satformer", d_vocab=260)
    made.tokenizer = tokenizer
    return made


def ask(model, folder, **options):
    lm = SatlensLM(model=model, responses=folder, progress=lambda *_: None, **options)
    return lm.loglikelihood([PAIR]), lm.generate_until([PROMPT])


def test_known_answers_are_not_asked_again(model, tmp_path, monkeypatch):
    first = ask(model, tmp_path)
    monkeypatch.setattr(type(model), "forward", None)  # any pass would raise
    assert ask(model, tmp_path) == first


def test_one_folder_keeps_models_and_settings_apart(model, tmp_path):
    ask(model, tmp_path)
    closed = ask(model, tmp_path, intervene=satlens.ZeroGate())
    assert closed == ask(model, None, intervene=satlens.ZeroGate()) != ask(model, tmp_path)
    ask(model, tmp_path, truncation="skip")
    with torch.no_grad():
        model.unembed.weight[5, 3] += 1
    assert ask(model, tmp_path) == ask(model, None)
    headers = [json.loads(f.read_text().splitlines()[0]) for f in tmp_path.glob("*.jsonl")]
    assert len(headers) == 4
    assert len({header["identity"]["weights"] for header in headers}) == 2


@pytest.mark.parametrize(
    ("line", "damage", "message"),
    [(2, "not JSON\n", "line 3: not an answer"), (0, "{}\n", "line 1: not what this evaluation")],
)
def test_a_damaged_file_is_named(line, damage, message, model, tmp_path):
    ask(model, tmp_path)
    (file,) = tmp_path.glob("*.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:line], damage, *lines[line + 1 :]]))
    with pytest.raises(DataError, match=rf"^{file}: {message}"):
        ask(model, tmp_path)


def test_half_a_header_begins_anew(model, tmp_path):
    first = ask(model, tmp_path)
    (file,) = tmp_path.glob("*.jsonl")
    whole = file.read_bytes()
    file.write_bytes(whole[:40])
    assert ask(model, tmp_path) == first
    assert file.read_bytes() == whole
