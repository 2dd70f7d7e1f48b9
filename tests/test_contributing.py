"""CONTRIBUTING.md's worked example, followed step by step in a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import satlens

PACKAGE = Path(satlens.__file__).parent
TESTS = Path(__file__).parent
GUIDE = TESTS.parent / "CONTRIBUTING.md"

CHECK = """
import torch
import satlens
from satlens.models.presets import PRESETS
from satlens.training.optimiser import make_optimiser

sizes = {"n_layers": 3, "d_model": 16, "n_heads": 2, "d_vocab": 29, "n_ctx": 16}
echo, plain = (satlens.build(name, **sizes) for name in ("echo", "transformer"))
tokens = torch.randint(0, 29, (6, 12), generator=torch.Generator().manual_seed(0))
assert "tiny-echo" in PRESETS
with torch.no_grad():
    assert torch.equal(echo(tokens), plain(tokens))
    echo.blocks[1].echo.fill_(0.5)
    assert not torch.equal(echo(tokens), plain(tokens))
undecayed = [g for g in make_optimiser(echo, satlens.TrainConfig()).param_groups
             if any(p is echo.blocks[1].echo for p in g["params"])]
assert [g["weight_decay"] for g in undecayed] == [0]
echo(tokens, return_type="loss").backward()
assert all(block.echo.grad != 0 for block in echo.blocks)
sites = [site.name for site in echo.sites]
found = satlens.sparsity(echo, tokens, n_resamples=50, baseline=False)
assert found.table["site"].tolist() == sites
assert found.table["mass_embedding"].tolist() == [0, 0.5, 0]
found.figure()
found = satlens.ablate(echo, tokens, scope="site", n_resamples=50)
damage = found.table.set_index(["kind", "site"])["dnll"]
assert set(found.table["kind"]) == {"zero", "uniform"}  # a static weight is its own mean
assert (damage["zero"] != 0).tolist() == [False, True, False]
assert (damage["uniform"] == 0).all()  # and one source has all of a read's weight
found = satlens.routes(echo, tokens, n_resamples=50, baseline=False)
read = found.table[found.table["site"] == "L1.attn.read"]
assert read["coefficient"].tolist() == [1.5, 1, 1]
"""


@pytest.fixture(scope="module")
def echo_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as it is after steps 1 to 3."""
    root = tmp_path_factory.mktemp("echo")
    shutil.copytree(PACKAGE, root / "satlens", ignore=shutil.ignore_patterns("__pycache__"))
    guide = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"^   ```python\n(.*?)^   ```", guide, re.MULTILINE | re.DOTALL)
    config, stream = (textwrap.dedent(block) for block in blocks)
    assert "class EchoStream" in config
    lines = dict(re.findall(r"^   \| `([A-Z]+)` in `[\w/.]+` \| `(.+?)`", guide, re.MULTILINE))
    models = root / "satlens" / "models"
    (models / "streams" / "echo.py").write_text(stream, encoding="utf-8")

    def edit(file: Path, before: str, after: str) -> None:
        text = file.read_text(encoding="utf-8")
        assert text.count(before) == 1, (file, before)
        file.write_text(text.replace(before, after), encoding="utf-8")

    union = "Stream = (\n    ResidualStream\n"
    edit(root / "satlens" / "config.py", union, f"{config}\n\n{union}    | EchoStream\n")
    streams = models / "streams" / "__init__.py"
    head = "STREAMS: dict[str, type[DepthStream]] = {\n"
    imported = "from satlens.models.streams.echo import Echo\n"
    edit(streams, head, f"{imported}{head}{lines['STREAMS']}\n")
    presets = models / "presets.py"
    head = "VARIANTS: dict[str, dict[str, Any]] = {\n"
    edit(presets, head, f"{head}{lines['VARIANTS']}\n")
    edit(presets, "    AttnResStream,\n", "    AttnResStream,\n    EchoStream,\n")
    head = "FAMILIES: tuple[tuple[str, Family], ...] = (\n"
    edit(models / "initialise.py", head, f"{head}{lines['FAMILIES']}\n")
    return root


def run(arguments: list[str], root: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_it_computes_trains_and_is_analysed(echo_package: Path) -> None:
    (echo_package / "check.py").write_text(CHECK, encoding="utf-8")
    run(["check.py"], echo_package)


def test_its_hook_points_pass_the_hook_tests(echo_package: Path) -> None:
    shutil.copy(TESTS / "test_hooks.py", echo_package)
    pytest_options = ["-q", "-p", "no:cacheprovider", "-k", "echo"]
    run(["-m", "pytest", *pytest_options, "test_hooks.py"], echo_package)
