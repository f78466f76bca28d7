"""The pages build as a site; a link or an anchor that leads nowhere, or a name that the reference lacks, fails."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stagewright

ROOT = Path(stagewright.__file__).parent
HAS_MKDOCS = importlib.util.find_spec("material") is not None and importlib.util.find_spec("mkdocstrings") is not None
WORDS = 28_200


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_MKDOCS, reason="needs mkdocs-material and mkdocstrings: make extras")
def test_the_site_builds_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "site" / "reference" / "index.html").read_text(encoding="utf-8")
    public = [name for name in stagewright.__all__ if not name.startswith("_")]
    assert [name for name in public if f'id="stagewright.{name}"' not in reference] == []
    for page, figure in {"index.html": "timeline.png", "results/bubbles/index.html": "bubbles.png"}.items():
        text = (tmp_path / "site" / page).read_text(encoding="utf-8")
        (source,) = re.findall(rf'<img[^>]* src="([^"]*{figure})"', text)
        assert (tmp_path / "site" / page).parent.joinpath(source).exists(), f"{page}: {source}"


def test_pages_are_short() -> None:
    pages = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    pages += [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "decisions"]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= WORDS
