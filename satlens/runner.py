"""Steps keyed by the hash of their inputs: run what is missing or stale, in parallel, resumably.

A step is a named action with JSON parameters, the steps it needs and the files it writes, all
under one folder. Its key hashes the action, the parameters, the satlens version and the contents
of what it needs. A step is up to date when its record has that key and its outputs still hash to
what was recorded; otherwise it and everything downstream of it runs again. An interrupted step
keeps its partial files and continues from them. Imports no torch: checking a finished study is
quick.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from satlens import __version__
from satlens.errors import SatlensError
from satlens.locking import locked

RECORDS = ".steps"
Report = Callable[[float, str], None]
"""Progress of a step: fraction done in [0, 1] and a short message."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One unit of work of a study."""

    id: str
    """Unique, path-like: ``train/satformer/seed0``."""
    action: str
    """``module:function``, called as ``function(root, params, report)``."""
    params: dict[str, Any] = field(default_factory=dict)
    """JSON-ready arguments; part of the key."""
    needs: tuple[str, ...] = ()
    """Steps whose outputs it reads."""
    outputs: tuple[str, ...] = ()
    """Files and folders it writes, relative to the study's folder."""
    weight: float = 1.0
    """Rough cost, for the order of work and the estimate of what is left."""


class Display(Protocol):
    """Where the runner shows what it does."""

    def start(self, step: Step) -> None: ...
    def progress(self, step: Step, fraction: float, message: str) -> None: ...
    def finish(self, step: Step, seconds: float, left: float | None) -> None: ...


def run_steps(root: Path, steps: list[Step], workers: int, display: Display) -> list[str]:
    """Bring every step up to date.

    Args:
        root: the study's folder.
        steps: in an order where each follows what it needs.
        workers: processes, one thread each.

    Returns:
        ids of the steps that ran, in order of completion.

    Raises:
        SatlensError: a step failed (its own message, after the running ones have finished), or
            another process is running steps of this folder.
    """
    with locked(_lock(root), str(root)):
        return _run_steps(root, steps, workers, display)


def _run_steps(root: Path, steps: list[Step], workers: int, display: Display) -> list[str]:
    ran: list[str] = []
    todo = _stale(root, steps)
    if not todo:
        return ran
    started = time.monotonic()
    # Records of everything downstream are void from now on, also if this run is killed.
    pending = {step.id: step for step in steps if step.id in todo}
    total, done = sum(s.weight for s in pending.values()), 0.0
    running: dict[Future[None], tuple[Step, float]] = {}
    failure: BaseException | None = None
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=initialise_worker) as pool:
        while pending or running:
            if failure is None:
                for step in _ready(pending, running, workers):
                    del pending[step.id]
                    _begin(root, step, steps)
                    future = pool.submit(_execute, str(root), step)
                    running[future] = (step, time.monotonic())
                    display.start(step)
            if not running:
                break
            finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for step, _ in running.values():
                display.progress(step, *_read_progress(root, step))
            for future in finished:
                step, since = running.pop(future)
                error = future.exception()
                if error is not None:
                    failure = failure or _explained(step, error)
                    continue
                _complete(root, step)
                ran.append(step.id)
                done += step.weight
                left = (time.monotonic() - started) * (total - done) / done
                display.finish(step, time.monotonic() - since, left)
    if failure is not None:
        raise failure
    return ran


def run_step(root: Path, steps: list[Step], step_id: str, report: Report | None = None) -> bool:
    """Bring one step up to date in this process, with the record that :func:`run_steps` writes.

    Several processes may do so at once, on different steps, also on different machines that share
    the study's folder. Call :func:`use_one_thread` first, before torch is imported.

    Args:
        steps: all of the study, in an order where each follows what it needs.
        report: told of its progress.

    Returns:
        whether it ran: False where it was up to date.

    Raises:
        SatlensError: no such step; a step that it needs is not up to date; the step failed, or a
            signal ended it early (then the same call continues it); another process runs this
            step, or all of them.
    """
    by_id = {step.id: step for step in steps}
    if step_id not in by_id:
        raise SatlensError(f"step {step_id}: the plan in {root} has no such step")
    step = by_id[step_id]
    with (
        locked(_lock(root), str(root), shared=True),
        locked(_lock(root, step), f"{root}: step {step_id}"),
    ):
        return _run_step(root, steps, step, report)


def _run_step(root: Path, steps: list[Step], step: Step, report: Report | None) -> bool:
    by_id = {each.id: each for each in steps}
    step_id, wanted = step.id, _with_all_needs(by_id, step.id)
    stale = _stale(root, [each for each in steps if each.id in wanted])
    if not stale:
        return False
    missing = [need for need in step.needs if need in stale]
    if missing:
        raise SatlensError(f"step {step_id}: needs {missing[0]}, which is not up to date")
    _begin(root, step, steps)
    try:
        _execute(str(root), step, report)
    except (SatlensError, SystemExit) as error:
        raise _explained(step, error) from error
    _complete(root, step)
    return True


def _with_all_needs(by_id: dict[str, Step], step_id: str) -> set[str]:
    """A step and everything upstream of it."""
    found: set[str] = set()
    waiting = [step_id]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += by_id[each].needs
    return found


def stale_steps(root: Path, steps: list[Step]) -> list[str]:
    """Ids of the steps that :func:`run_steps` would run."""
    todo = _stale(root, steps)
    return [step.id for step in steps if step.id in todo]


# -- what is up to date ---------------------------------------------------------------------------


def _stale(root: Path, steps: list[Step]) -> set[str]:
    hashes: dict[str, str] = {}
    stale: set[str] = set()
    for step in steps:
        record = _record(root, step)
        fresh = (
            record.get("state") == "done"
            and not stale.intersection(step.needs)
            and record.get("key") == _key(step, steps, hashes)
            and record.get("outputs") == _hash_outputs(root, step)
        )
        if fresh:
            hashes[step.id] = json.dumps(record["outputs"], sort_keys=True)
        else:
            stale.add(step.id)
    return stale


def _key(step: Step, steps: list[Step], hashes: dict[str, str]) -> str:
    inputs = {need: hashes[need] for need in step.needs}
    parts = [step.action, step.params, __version__, inputs]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _current_hashes(root: Path, step: Step, steps: list[Step]) -> dict[str, str]:
    by_id = {s.id: s for s in steps}
    return {
        need: json.dumps(_record(root, by_id[need])["outputs"], sort_keys=True)
        for need in step.needs
    }


def _hash_outputs(root: Path, step: Step) -> dict[str, str] | None:
    hashes = {}
    for output in step.outputs:
        path = root / output
        if not path.exists():
            return None
        hashes[output] = hash_path(path)
    return hashes


def hash_path(path: Path) -> str:
    """sha256 of a file, or of the names and contents of a folder."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for child in sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(f"{child.relative_to(path).as_posix()}\0{hash_path(child)}\n".encode())
    return digest.hexdigest()


# -- records --------------------------------------------------------------------------------------


def _record_path(root: Path, step: Step, suffix: str = ".json") -> Path:
    return root / RECORDS / (step.id.replace("/", "__") + suffix)


def _record(root: Path, step: Step) -> dict[str, Any]:
    try:
        return json.loads(_record_path(root, step).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def _lock(root: Path, step: Step | None = None) -> Path:
    """Lock file of all steps of a folder, or of one."""
    (root / RECORDS).mkdir(parents=True, exist_ok=True)
    return root / RECORDS / "lock" if step is None else _record_path(root, step, ".lock")


def _write_record(root: Path, step: Step, record: dict[str, Any]) -> None:
    path = _record_path(root, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1, sort_keys=True))
    os.replace(temporary, path)


def _begin(root: Path, step: Step, steps: list[Step]) -> None:
    """Keep the partial files of an interrupted run of the same inputs; clear any others."""
    key = _key(step, steps, _current_hashes(root, step, steps))
    record = _record(root, step)
    if record.get("state") != "running" or record.get("key") != key:
        for output in step.outputs:
            path = root / output
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.rmtree(scratch(root, step.id), ignore_errors=True)
    _write_record(root, step, {"state": "running", "key": key})


def _complete(root: Path, step: Step) -> None:
    outputs = _hash_outputs(root, step)
    if outputs is None:
        missing = [o for o in step.outputs if not (root / o).exists()]
        raise SatlensError(f"step {step.id}: did not write {', '.join(missing)}")
    key = _record(root, step)["key"]
    _write_record(root, step, {"state": "done", "key": key, "outputs": outputs})
    _record_path(root, step, ".progress").unlink(missing_ok=True)
    shutil.rmtree(scratch(root, step.id), ignore_errors=True)


def scratch(root: Path, step_id: str) -> Path:
    """Folder for what an interrupted step continues from; gone once it is done."""
    return root / RECORDS / "scratch" / step_id.replace("/", "__")


# -- execution ------------------------------------------------------------------------------------


def _ready(pending: dict[str, Step], running: Iterable[Any], workers: int) -> list[Step]:
    busy = [step for step, _ in running.values()]  # type: ignore[attr-defined]
    waiting_for = {*pending, *(s.id for s in busy)}
    ready = [s for s in pending.values() if not waiting_for.intersection(s.needs)]
    ready.sort(key=lambda s: -s.weight)
    return ready[: max(0, workers - len(busy))]


def use_one_thread() -> None:
    """One thread in this process, for the same bits everywhere; libraries read it when imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        os.environ[name] = "false" if name.startswith("TOK") else "1"


def initialise_worker() -> None:
    """One thread a process; end with the parent, even when it is killed."""
    use_one_thread()
    started_by = multiprocessing.parent_process()
    parent = os.getppid() if started_by is None else started_by.pid
    if os.getppid() != parent:  # it was killed while this process started
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _execute(root: str, step: Step, shown: Report | None = None) -> None:
    module, name = step.action.split(":")
    action = getattr(import_module(module), name)
    action(Path(root), step.params, shown or _reporter(Path(root), step))


def _reporter(root: Path, step: Step) -> Report:
    """Leaves progress where the parent process reads it."""
    path = _record_path(root, step, ".progress")
    last = 0.0

    def report(fraction: float, message: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 0.5:
            last = now
            path.write_text(json.dumps([min(max(fraction, 0.0), 1.0), message]))

    return report


def _read_progress(root: Path, step: Step) -> tuple[float, str]:
    try:
        fraction, message = json.loads(_record_path(root, step, ".progress").read_text())
        return float(fraction), str(message)
    except (FileNotFoundError, ValueError):  # not started, or caught in the middle of a write
        return 0.0, ""


def _explained(step: Step, error: BaseException) -> BaseException:
    if isinstance(error, BrokenProcessPool):
        return SatlensError(f"step {step.id}: its process was killed (out of memory?); run again")
    if isinstance(error, SystemExit):  # a signal: the step has saved what it continues from
        return SatlensError(f"step {step.id}: interrupted; the same command continues it")
    if isinstance(error, SatlensError):
        return type(error)(f"step {step.id}: {error}")
    return error
