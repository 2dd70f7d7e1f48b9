"""Several runs as one: the arms of each stand side by side, named after their run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from satlens.errors import DataError
from satlens.report.collect import Missing, Run, collect


def collect_all(roots: Sequence[str | Path]) -> Run:
    """One run as it is, or several as one whose arms are ``<run>/<arm>``.

    Arms of plain folders have no second name: they are called as their folder is.

    Raises:
        DataError: as :func:`satlens.report.collect.collect`; a folder given twice.
    """
    if len(roots) == 1:
        return collect(roots[0])
    paths = [Path(root) for root in roots]
    return _merged({label: collect(path, label) for label, path in _labels(paths).items()})


def _labels(paths: Sequence[Path]) -> dict[str, Path]:
    """The name of every folder, with as many folders above as tell it from the others."""
    full = [path.resolve() for path in paths]
    for path, times in Counter(full).items():
        if times > 1:
            raise DataError(f"{path.name}: this run is given twice")
    length = 1
    while len({path.parts[-length:] for path in full}) < len(full):
        length += 1
    names = Counter(path.name for path in full)
    return {
        "/".join(whole.parts[-length:]) if names[whole.name] > 1 else whole.name: path
        for whole, path in zip(full, paths, strict=True)
    }


def _merged(runs: dict[str, Run]) -> Run:
    whole = Run(Path(), runs=runs)
    for label, run in runs.items():
        names = {arm: arm if run.is_plain else f"{label}/{arm}" for arm in run.arms}
        for arm, name in names.items():
            whole.arms.append(name)
            whole.origins[name] = (run, arm)
            whole.variants[name] = run.variant(arm)
            whole.seeds[name] = run.seeds.get(arm, [])
            for seed in whole.seeds[name]:
                whole.folders[name, seed] = run.folder(arm, seed)
        for (arm, seed, kind), result in run.results.items():
            whole.results[names[arm], seed, kind] = result
        for (arm, seed), record in run.training.items():
            whole.training[names[arm], seed] = record
        whole.missing += [_named(each, names, label) for each in run.missing]
        whole.others |= run.others
    return whole


def _named(missing: Missing, names: dict[str, str], label: str) -> Missing:
    """What is missing, under the names of the whole."""
    if missing.arm is None:
        return missing._replace(name=f"{missing.name} of {label}")
    return missing._replace(arm=names.get(missing.arm, missing.arm))
