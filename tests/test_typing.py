"""What a type checker says of a user's script, from an editable install of a clone whose folder has any name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import stagewright

ROOT = Path(stagewright.__file__).parent
SCRIPT = """
import torch
import stagewright as sw

model = torch.nn.Linear(2, 2)
pipe = sw.PipelineModule(model, schedule=sw.Auto(trials=2, search="joint", seconds=5), mesh={"pipe": 2})
loss: float | None = pipe.train_step(torch.ones(4, 2), torch.ones(4, 2)).loss
pipe.predict(torch.ones(4, 2)).argmax(dim=1)
pipe.eval_step(torch.ones(4, 2)).output.argmax(dim=1)
ranks: int = sw.schedules.build("1f1b", num_ranks=2, num_microbatches=2).num_ranks
sw.PipelineModule(model, schedul="1f1b")  # wrong
sw.PipelineModule(model, mesh=2)  # wrong
sw.Mesh(pip=2)  # wrong
sw.Auto(trial=2)  # wrong
sw.Precision(dtyp="bf16")  # wrong
sw.PipelinModule(model)  # wrong
sw.schedules.biuld("1f1b", num_ranks=2, num_microbatches=2)  # wrong
pipe.train_stp(torch.ones(4, 2))  # wrong
words: str = pipe.eval_step(torch.ones(4, 2)).loss  # wrong
"""
# As this project checks itself: what transformers declares is no matter of the examples.
SETTINGS = """
[mypy]
strict = True
[mypy-transformers.*]
follow_imports = skip
"""


def installed(folder: Path) -> Path:
    """A Python that a clone is installed into, editable; all else it takes from this one."""
    clone = folder / "any name"
    clone.mkdir()
    for part in ROOT.iterdir():
        if part.name not in ("build", ".ci", ".git", ".venv") and not part.name.endswith(".egg-info"):
            (clone / part.name).symlink_to(part)
    shutil.copytree(ROOT / ".ci", clone / ".ci")
    build = f"import sys; sys.path.insert(0, '.ci'); import editable; editable.build_editable({str(folder)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build], cwd=clone, check=True, capture_output=True)
    venv.create(folder / "venv", symlinks=True)
    (site,) = folder.glob("venv/lib/*/site-packages")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv" / "bin" / "python"


@pytest.mark.thorough
def test_mypy_reads_an_editable_install_and_knows_what_a_script_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "MYPYPATH"):  # which lead to this clone
        monkeypatch.delenv(name, raising=False)
    pytest.importorskip("setuptools")
    python = installed(tmp_path)
    scripts = tmp_path / "scripts"
    shutil.copytree(ROOT / "examples", scripts, ignore=shutil.ignore_patterns("__pycache__", "launch"))
    (scripts / "script.py").write_text(SCRIPT)
    (scripts / "mypy.ini").write_text(SETTINGS)
    checked = [sys.executable, "-m", "mypy", "--python-executable", str(python), "--cache-dir", os.devnull]
    done = subprocess.run([*checked, "."], cwd=scripts, capture_output=True, text=True, check=False)
    said = {line for line in done.stdout.splitlines() if ": error:" in line}
    wrong = {number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# wrong")}
    found = {int(match[1]) for line in said if (match := re.match(r"script\.py:(\d+):", line))}
    assert found == wrong, done.stdout + done.stderr
    assert {line for line in said if not line.startswith("script.py:")} == set()
    program = "import stagewright; print(stagewright.__file__)"
    where = subprocess.run([python, "-c", program], cwd=scripts, check=True, capture_output=True, text=True)
    assert Path(where.stdout.strip()) == tmp_path / "any name" / "__init__.py"  # no link's path
