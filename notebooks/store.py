"""Run notebooks and store what they show.

    python notebooks/store.py                               # every notebook beside this file
    python notebooks/store.py notebooks/02_gates.ipynb

What is stored is what a rerun repeats: no times, no versions, cells numbered in order. A cell that
fails ends the command and leaves its notebook as it was.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def store(path: Path) -> float:
    """Execute a notebook in place; returns the seconds that it took."""
    notebook = nbformat.read(path, as_version=4)
    start = time.monotonic()
    # One thread: sums of several are not the same to the last digit on every machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", coalesce_streams=True)
    client.execute(cwd=str(path.parent), env=environment)
    seconds = time.monotonic() - start
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02d}", nbformat.from_dict({})
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
    return seconds


if __name__ == "__main__":
    chosen = [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb"))
    for notebook_path in chosen:
        print(f"{notebook_path.name}: {store(notebook_path):.0f} s", flush=True)
