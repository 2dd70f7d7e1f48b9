"""Steps keyed by the hash of their inputs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from satlens.errors import DataError, SatlensError
from satlens.runner import Step, run_step, run_steps, stale_steps


class Silent:
    def start(self, step): ...
    def progress(self, step, fraction, message): ...
    def finish(self, step, seconds, left): ...


def write(name: str, text: str, *needs: str) -> Step:
    return Step(
        id=name,
        action="runner_actions:write",
        params={"out": f"{name}.txt", "text": text, "inputs": [f"{n}.txt" for n in needs]},
        needs=needs,
        outputs=(f"{name}.txt",),
    )


def diamond(text: str = "a") -> list[Step]:
    """a -> b, a -> c, (b, c) -> d, and e apart."""
    return [
        write("a", text),
        write("b", "b", "a"),
        write("c", "c", "a"),
        write("d", "d", "b", "c"),
        write("e", "e"),
    ]


def run(root: Path, steps: list[Step]) -> set[str]:
    return set(run_steps(root, steps, 2, Silent()))


def test_runs_once_and_reruns_exactly_what_depends_on_a_change(tmp_path):
    assert run(tmp_path, diamond()) == {"a", "b", "c", "d", "e"}
    assert (tmp_path / "d.txt").read_text() == "abacd"
    assert run(tmp_path, diamond()) == set()

    (tmp_path / "b.txt").write_text("altered")
    assert stale_steps(tmp_path, diamond()) == ["b", "d"]
    assert run(tmp_path, diamond()) == {"b", "d"}
    assert (tmp_path / "d.txt").read_text() == "abacd"

    (tmp_path / "a.txt").unlink()
    assert run(tmp_path, diamond()) == {"a", "b", "c", "d"}

    assert run(tmp_path, diamond("A")) == {"a", "b", "c", "d"}
    assert (tmp_path / "d.txt").read_text() == "AbAcd"
    assert run(tmp_path, diamond("A")) == set()


def test_a_failing_step_names_itself_and_keeps_what_others_did(tmp_path):
    steps = [*diamond(), Step(id="bad", action="runner_actions:fail", outputs=("bad.txt",))]
    with pytest.raises(DataError, match=r"step bad: shard\.bin: token count"):
        run(tmp_path, steps)
    remaining = stale_steps(tmp_path, steps)
    assert "bad" in remaining
    assert len(remaining) < len(steps)


def test_a_killed_worker_is_reported(tmp_path):
    with pytest.raises(SatlensError, match="step x: its process was killed"):
        run(tmp_path, [Step(id="x", action="runner_actions:die", outputs=("x.txt",))])


def test_an_interrupted_step_continues_from_its_partial_files_only_for_equal_inputs(tmp_path):
    def step(version: int) -> list[Step]:
        return [
            Step(
                id="x",
                action="runner_actions:accumulate",
                params={"out": "x.txt", "version": version},
                outputs=("x.txt",),
            )
        ]

    with pytest.raises(DataError, match="interrupted"):
        run(tmp_path, step(1))
    with pytest.raises(DataError, match="interrupted"):  # other inputs: the partial file is cleared
        run(tmp_path, step(2))
    assert run(tmp_path, step(2)) == {"x"}
    assert (tmp_path / "x.txt").read_text() == "half whole"


def test_workers_end_with_a_killed_parent(tmp_path):
    code = (
        "from pathlib import Path; from test_runner import *\n"
        "if __name__ == '__main__':\n"
        f"    run(Path({str(tmp_path)!r}),"
        " [Step(id='s', action='runner_actions:slow', outputs=('s',))])\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    here = str(Path(__file__).parent)
    parent = subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": here})
    pid_file = tmp_path / "pid"
    deadline = time.monotonic() + 30
    while not pid_file.exists() or not pid_file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worker = int(pid_file.read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while time.monotonic() < deadline:
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the worker outlived its parent")


def test_the_folder_of_a_step_is_cleared_whole_when_its_inputs_changed(tmp_path):
    def step(version: int) -> list[Step]:
        params = {"out": "run/final.txt", "version": version}
        return [
            Step(id="x", action="runner_actions:resume", params=params, outputs=("run",)),
        ]

    with pytest.raises(DataError, match="interrupted"):
        run(tmp_path, step(1))
    assert (tmp_path / "run" / "resume").exists()
    with pytest.raises(DataError, match="interrupted"):
        run(tmp_path, step(2))
    assert run(tmp_path, step(2)) == {"x"}


def test_steps_run_one_by_one_leave_the_files_and_records_of_a_run_of_all(tmp_path):
    both = {name: tmp_path / name for name in ("one", "all")}
    for root in both.values():
        root.mkdir()
    run(both["all"], diamond())
    for name in ("e", "a", "c", "b", "d"):
        assert run_step(both["one"], diamond(), name)
        assert not run_step(both["one"], diamond(), name)
    assert run(both["one"], diamond()) == set()
    written = [
        {
            path.relative_to(root): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file() and not path.name.endswith("lock")
        }
        for root in both.values()
    ]
    for files in written:
        del files[Path("calls.log")]
    assert written[0] == written[1]


def test_a_single_step_is_refused_where_what_it_needs_is_not_up_to_date(tmp_path):
    with pytest.raises(SatlensError, match=r"step z: the plan in .* has no such step"):
        run_step(tmp_path, diamond(), "z")
    with pytest.raises(SatlensError, match="step b: needs a, which is not up to date"):
        run_step(tmp_path, diamond(), "b")
    run(tmp_path, diamond())
    (tmp_path / "a.txt").write_text("altered")
    with pytest.raises(SatlensError, match="step d: needs b, which is not up to date"):
        run_step(tmp_path, diamond(), "d")
    assert run_step(tmp_path, diamond("A"), "a")
    assert run_step(tmp_path, diamond("A"), "b")


def test_a_single_step_that_a_signal_ended_is_an_error_and_continues(tmp_path):
    step = Step(id="x", action="runner_actions:stop", outputs=("x.txt",))
    with pytest.raises(SatlensError, match="step x: interrupted; the same command continues it"):
        run_step(tmp_path, [step], "x")

    def resumed(version: int) -> Step:
        params = {"out": "x.txt", "version": version}
        return Step(id="x", action="runner_actions:accumulate", params=params, outputs=("x.txt",))

    with pytest.raises(DataError, match="step x: interrupted"):
        run_step(tmp_path, [resumed(1)], "x")
    assert run_step(tmp_path, [resumed(1)], "x")
    assert (tmp_path / "x.txt").read_text() == "half whole"


def test_two_processes_do_not_run_the_same_steps(tmp_path):
    from satlens.locking import locked

    (tmp_path / ".steps").mkdir()
    with locked(tmp_path / ".steps/lock", "here"), pytest.raises(SatlensError, match="is writing"):
        run(tmp_path, diamond())
    with locked(tmp_path / ".steps/lock", "here", shared=True):
        with pytest.raises(SatlensError, match="is writing this run"):
            run(tmp_path, diamond())
        assert run_step(tmp_path, diamond(), "a")
    with locked(tmp_path / ".steps/e.lock", "here"):
        assert run_step(tmp_path, diamond(), "b")
        with pytest.raises(SatlensError, match=f"step e: process {os.getpid()} is writing"):
            run_step(tmp_path, diamond(), "e")
    assert run(tmp_path, diamond()) == {"c", "d", "e"}
