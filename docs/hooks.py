"""Pages that `mkdocs` builds beside docs/: README.md as the first page, CONTRIBUTING.md, CHANGELOG.md, and the results.

Links stay those of the repository, so that they lead somewhere in both places: here they are turned into the site's.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing/index.md", "CHANGELOG.md": "changelog.md"}
RESULTS = "experiments/results"
NAMED = re.compile(r"(?<=[ (])docs/([\w/-]+)\.md")  # in docstrings, as a reader of the source finds the page
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)]*)?\)")


def on_startup(**_: Any) -> None:
    """A folder with the package alone: the reference is read from source, and the root of a clone holds .venv, too."""
    package = ROOT / "build" / "package" / "stagewright"
    package.mkdir(parents=True, exist_ok=True)
    for part in [ROOT / "__init__.py", *(file.parent for file in ROOT.glob("*/__init__.py"))]:
        link = package / part.name
        if not link.is_symlink():
            link.symlink_to(part)


class Doctests(Preprocessor):
    """Docstrings as Markdown: a doctest is code, and no quote in quotes; a page that is named is a link."""

    def run(self, lines: list[str]) -> list[str]:
        made: list[str] = []
        lines = [NAMED.sub(r"[\1](\1.md)", line) for line in lines]
        is_fenced = is_doctest = False
        for line in lines:
            is_fenced ^= line.lstrip().startswith("```")
            if not is_fenced and not is_doctest and line.startswith(">>> "):
                made.append("```pycon")
                is_doctest = True
            elif is_doctest and not line.strip():
                made.append("```")
                is_doctest = False
            made.append(line)
        return [*made, "```"] if is_doctest else made


class DoctestExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.preprocessors.register(Doctests(md), "doctests", priority=60)


def on_config(config: Any) -> Any:
    config["markdown_extensions"].append(DoctestExtension())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Pages and pictures that lie elsewhere in the repository."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for path in sorted((ROOT / RESULTS).rglob("*")):
        if path.name == "README.md" or path.suffix == ".png":
            files.append(File.generated(config, in_site(path.relative_to(ROOT).as_posix()), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Links between files of the repository, as links between pages of the site."""
    uri = page.file.src_uri
    folder = posixpath.dirname(in_repository(uri))
    raw = config["repo_url"].replace("github.com", "raw.githubusercontent.com") + "/main/"

    def led(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if target.startswith(raw):
            target = posixpath.relpath(target.removeprefix(raw), folder or ".")
        if not target or "://" in target:
            return f"]({target}{anchor})"
        file = posixpath.normpath(posixpath.join(folder, target))
        if (ROOT / file / "README.md").exists():
            file = posixpath.join(file, "README.md")
        site = in_site(file)
        if not (ROOT / "docs" / site).exists() and site == file:  # source code
            return f"]({config['repo_url']}/blob/main/{file})"
        return f"]({posixpath.relpath(site, posixpath.dirname(uri) or '.')}{anchor})"

    return LINK.sub(led, markdown)


def in_site(file: str) -> str:
    """The page of the site that a file of the repository is, or the file itself."""
    if file.startswith(f"{RESULTS}/"):
        return f"results/{file.removeprefix(f'{RESULTS}/')}"
    return PAGES.get(file, file.removeprefix("docs/"))


def in_repository(page: str) -> str:
    """Inverse of `in_site`."""
    sources = {site: source for source, site in PAGES.items()}
    if page.startswith("results/"):
        return f"{RESULTS}/{page.removeprefix('results/')}"
    return sources.get(page, f"docs/{page}")
