"""A preparation that is stopped goes on from what is done and ends with the same bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from listed import Failing, Listed, contents, documents

from satlens.data import jobs, partial, pieces, stages
from satlens.data.partial import partial as hold
from satlens.data.prepare import prepare
from satlens.errors import DataError

pytestmark = pytest.mark.usefixtures("without_fsync")
DOCUMENTS = documents(60)
SOURCE = Listed(DOCUMENTS, 13)
SMALL = {"vocab_size": 270, "shard_tokens": 2000}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Every byte of an undisturbed preparation."""
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare(SOURCE, out, **SMALL)
    return contents(out)


class Stop:
    """Ends the process (as KeyboardInterrupt) before the nth step that changes files."""

    STEPS = (
        (jobs, "write_json"),
        (partial, "write_json"),
        (os, "replace"),
        (os, "rename"),
        (pieces, "_sync"),
        (os, "unlink"),
        (os, "rmdir"),
    )

    def __init__(self, patch, number):
        self.left = number
        for owner, name in self.STEPS:
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, step):
        def counted(*arguments, **options):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return step(*arguments, **options)

        return counted


def stopped_before_step(number, out, whole, overwrite):
    """Whether there was such a step; afterwards the same call gives the same bytes."""
    source = Listed(DOCUMENTS, 31)  # larger pieces, the same bytes
    if overwrite:
        out.mkdir(parents=True)
        (out / "old").write_text("old")
        (out / "manifest.json").write_text('{"format": "satlens-data"}')
    with pytest.MonkeyPatch.context() as patch:
        Stop(patch, number)
        try:
            prepare(source, out, overwrite=overwrite, **SMALL)
            stopped = False
        except KeyboardInterrupt:
            assert not out.exists() or {p.name for p in out.iterdir()} in (
                {"old", "manifest.json"},
                {*whole},
            )
            stopped = True
    hidden = out.parent / ".out.partial"
    finished = out.exists() and {p.name for p in out.iterdir()} == {*whole}
    if finished and hidden.exists() and overwrite:
        shutil.rmtree(out)  # what the hidden folder still holds must not be taken for all of it
    left = {path.name for path in hidden.iterdir()} if hidden.exists() else set()
    if finished and hidden.exists() and left <= {"lock", "alive"} and not overwrite:
        with pytest.raises(DataError, match="exists already"):
            prepare(source, out, **SMALL)
    if stopped and (hidden.exists() or not out.exists()):
        prepare(source, out, overwrite=overwrite, **SMALL)
    assert contents(out) == whole
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    return stopped


@pytest.mark.parametrize(
    ("overwrite", "stride"),
    [
        (False, 7),
        (True, 7),
        pytest.param(False, 1, marks=pytest.mark.slow),
        pytest.param(True, 1, marks=pytest.mark.slow),
    ],
)
def test_stopped_before_any_step(tmp_path, whole, overwrite, stride):
    first, last = 1 + overwrite, 200
    for number in range(first, last, stride):
        if not stopped_before_step(number, tmp_path / str(number) / "out", whole, overwrite):
            last = number
            break
    assert 60 < last < 200
    for number in range(last - stride, last):
        stopped_before_step(number, tmp_path / f"end{number}" / "out", whole, overwrite)


def read_counts(patch):
    """Counts the reads of each piece."""
    reads = dict.fromkeys(range(len(SOURCE.pieces)), 0)
    read = Listed.read

    def counted(self, piece):
        reads[piece.index] += 1
        return read(self, piece)

    patch.setattr(Listed, "read", counted)
    return reads


def stop_at(patch, number):
    """End the first run when piece ``number`` is to be tokenised."""
    encode = stages.encode_piece

    def stopping(tick, source, piece, options):
        if piece.index == number:
            raise KeyboardInterrupt
        return encode(tick, source, piece, options)

    patch.setattr(stages, "encode_piece", stopping)


def stopped(patch, out, **options):
    with patch.context() as inner:
        stop_at(inner, 3)
        with pytest.raises(KeyboardInterrupt):
            prepare(SOURCE, out, **{**SMALL, **options})


def test_only_what_is_missing_is_read_again(tmp_path, monkeypatch, whole):
    stopped(monkeypatch, tmp_path / "out")
    reads, notes, calls = read_counts(monkeypatch), [], []
    prepare(
        SOURCE,
        tmp_path / "out",
        note=notes.append,
        progress=lambda *call: calls.append(call),
        **SMALL,
    )
    assert reads == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}
    assert notes == [
        f"{tmp_path / 'out'}: goes on from an interrupted preparation (8 parts are done)"
    ]
    assert next(call for call in calls if call[0] == "tokenise") == ("tokenise", 39, 60)
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize(
    ("change", "named"),
    [({"vocab_size": 280}, "vocab_size"), ({"shard_tokens": 500}, "shard_tokens"), ({}, "source")],
)
def test_other_options_or_another_source_begin_anew(tmp_path, monkeypatch, change, named):
    stopped(monkeypatch, tmp_path / "out")
    source = SOURCE if change else Listed(documents(60, seed=1), 13)
    notes = []
    prepare(source, tmp_path / "out", note=notes.append, **{**SMALL, **change})
    (note,) = notes
    assert note.endswith(f"begins anew: changed since it was interrupted: {named}")
    prepare(source, tmp_path / "fresh", **{**SMALL, **change})
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_damaged_record_is_done_again(tmp_path, monkeypatch, whole):
    stopped(monkeypatch, tmp_path / "out")
    (tmp_path / ".out.partial" / "tokens" / "00001.json").write_text("{")
    prepare(SOURCE, tmp_path / "out", **SMALL)
    assert contents(tmp_path / "out") == whole


# -- faults ----------------------------------------------------------------------------------------


def test_bad_input_leaves_nothing(tmp_path):
    bad = Failing(DOCUMENTS, 13, {2, 4}, DataError("part"))
    with pytest.raises(DataError, match="part 2"):
        prepare(bad, tmp_path / "out", **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_first_fault_of_the_corpus_is_named_by_any_number_of_workers(tmp_path):
    bad = Failing(DOCUMENTS, 5, {3, 4, 9}, DataError("part"))
    with pytest.raises(DataError, match="part 3"):
        prepare(bad, tmp_path / "out", workers=2, **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_source_that_cannot_be_reached_keeps_what_is_done(tmp_path, whole):
    bad = Failing(DOCUMENTS, 13, {3}, ConnectionError("no route to host"))
    with pytest.raises(DataError, match=r"part3: cannot be read \(no route to host 3\)"):
        prepare(bad, tmp_path / "out", **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    prepare(SOURCE, tmp_path / "out", **SMALL)
    assert contents(tmp_path / "out") == whole


def test_full_disk_names_the_folder_and_goes_on(tmp_path, monkeypatch, whole):
    written = 0

    def full(self, document, tokens, add=pieces._SplitPart.add):
        nonlocal written
        written += 1
        if written > 30:
            raise OSError(28, "No space left on device")
        add(self, document, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(pieces._SplitPart, "add", full)
        with pytest.raises(DataError) as caught:
            prepare(SOURCE, tmp_path / "out", **SMALL)
    assert str(caught.value) == (
        f"{tmp_path / 'out'}: cannot be written (No space left on device); what is done lies in "
        ".out.partial, the same command goes on from it"
    )
    assert not (tmp_path / "out").exists()
    reads = read_counts(monkeypatch)
    prepare(SOURCE, tmp_path / "out", **SMALL)
    assert reads == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}
    assert contents(tmp_path / "out") == whole


def test_killed_worker(tmp_path):
    bad = Failing(DOCUMENTS, 13, {3}, "die")
    with pytest.raises(DataError, match=r"out: a worker process was killed \(out of memory\?\)"):
        prepare(bad, tmp_path / "out", workers=2, **SMALL)
    assert not (tmp_path / "out").exists()


def test_second_of_two_writers_is_refused(tmp_path, whole):
    out = tmp_path / "out"
    with hold(out), pytest.raises(DataError, match=f"process {os.getpid()} is writing"):
        prepare(SOURCE, out, **SMALL)
    prepare(SOURCE, out, **SMALL)
    assert contents(out) == whole


def test_what_appears_meanwhile_is_kept(tmp_path, monkeypatch):
    out = tmp_path / "out"

    def appear(complete=stages.complete, **facts):
        out.mkdir()
        (out / "mine").write_text("mine")
        return complete(**facts)

    monkeypatch.setattr(stages, "complete", appear)
    with pytest.raises(DataError, match="cannot be written"):
        prepare(SOURCE, out, **SMALL)
    assert contents(out) == {"mine": b"mine"}
    with pytest.raises(DataError, match="exists already"):
        prepare(SOURCE, out, **SMALL)
    assert (tmp_path / ".out.partial").is_dir()


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of JSON Lines files, each a piece, that takes a while to tokenise."""
    folder = tmp_path_factory.mktemp("corpus") / "jsonl"
    folder.mkdir()
    for piece in range(12):
        with (folder / f"{piece:02d}.jsonl").open("w") as stream:
            for k, document in enumerate(documents(120, seed=piece)):
                record = {"id": f"{piece}-{k}", "text": " ".join([document.text] * 12)}
                stream.write(json.dumps(record) + "\n")
    return folder


def start(folder, out, workers):
    """``satlens prepare`` in a process group of its own, as a shell starts it."""
    arguments = [folder, out, "--vocab-size", 400, "--workers", workers]
    code = "from satlens.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "prepare", *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def children(pid):
    """Processes whose parent is ``pid``."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


def stop_when(process, out, pattern, number, to_group=False):
    """Send a signal as soon as a new part exists; returns what it said, and its children."""
    deadline = time.monotonic() + 60
    before = len(list(out.parent.glob(f".{out.name}.partial/{pattern}")))
    while len(list(out.parent.glob(f".{out.name}.partial/{pattern}"))) == before:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    left = children(process.pid)
    (os.killpg if to_group else os.kill)(process.pid, number)
    said = process.communicate(timeout=60)[1]
    return said, left


def gone(pids):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_killed_and_interrupted_from_the_shell(folder, tmp_path):
    out = tmp_path / "out"
    said, left = stop_when(process := start(folder, out, 2), out, "tokens/*.json", signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and left
    first = {path.name for path in (tmp_path / ".out.partial" / "tokens").glob("*.json")}
    said, left = stop_when(
        process := start(folder, out, 2), out, "tokens/*.json", signal.SIGINT, to_group=True
    )
    assert process.returncode == 130
    assert "goes on from an interrupted preparation" in said
    assert said.endswith(f"{out}: stopped; the same command goes on from what is done\n")
    assert "Traceback" not in said
    assert gone(left)
    assert not out.exists()
    done = {path.name for path in (tmp_path / ".out.partial" / "tokens").glob("*.json")}
    assert first <= done
    prepare(folder, out, vocab_size=400)
    prepare(folder, tmp_path / "whole", vocab_size=400)
    assert contents(out) == contents(tmp_path / "whole")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", "whole"]


@pytest.mark.slow
def test_killed_at_twenty_random_moments(folder, tmp_path):
    prepare(folder, tmp_path / "whole", vocab_size=400)
    draw, out = random.Random(3), tmp_path / "out"
    kinds = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    for number in range(20):
        process = start(folder, out, 1 + number % 3)
        time.sleep(draw.uniform(0.5, 6))
        process.send_signal(kinds[number % 3])
        process.communicate(timeout=60)
        if out.exists():
            assert contents(out) == contents(tmp_path / "whole")
            shutil.rmtree(out)
    prepare(folder, out, vocab_size=400)
    assert contents(out) == contents(tmp_path / "whole")
