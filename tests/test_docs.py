"""README.md, docs/ and docstrings: every example and command in them is run, or at least read by its command.

Files and names that they mention exist; the pages build as a site, and a link that leads nowhere fails.

examples/: every command in their texts runs as it is printed there, and prints what it says.
"""

import ast
import doctest
import importlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.commands import Done, run_forked
from support.inside import COMMANDS, main

import stagewright
import stagewright.schedules

ROOT = Path(stagewright.__file__).parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SMALLER = {"layers=100": "layers=4", "128x8": "1x8", "1536": "16"}  # a plan for 1,024 devices is made nightly
QUICK = ("schedule", "simulate", "plan")  # commands that need no run before them
NEEDS_FILES = re.compile(r"--profile|--model|--cluster \S+\.json|--check")
FILES = {  # that commands take for granted
    "my_models.py": "def small(): ...",
    "my_data.py": "def digits(): ...",
    "mine.csv": stagewright.schedules.build("gpipe", num_ranks=2, num_microbatches=3).to_csv(),
    "mine.py": "from stagewright.schedules import build\n"
    "def zigzag(): return build('gpipe', num_ranks=2, num_microbatches=3)\n"
    "def few(action, so_far): return action.op != 'F' or so_far.in_flight < 2",
}
OPTIONS = {
    "train": "cli.train.options.TrainOptions",
    "profile": "cli.commands.profile.ProfileOptions",
    "plan --check": "cli.commands.plan_check.CheckOptions",
}


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return [text for language, text in found if language in languages]


def commands(page: Path) -> list[list[str]]:
    """The words of each `stagewright` line in blocks of commands, without what a shell does with its output."""
    lines = [line for text in blocks(page, "sh", "") for line in text.replace("\\\n", " ").splitlines()]
    split = [shlex.split(line.partition(" > ")[0], comments=True) for line in lines if line.startswith("stagewright ")]
    return [words[1:] for words in split]


@pytest.mark.thorough(but=["docs/contributing/extending.md"])
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_examples(page: Path) -> None:
    result = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def daily_and_nightly(words: list[str]) -> list[Any]:
    """A command as it stands; a large one nightly, and on smaller sizes each time."""
    line = " ".join(words)
    if "layers=100" not in line:
        return [words]
    for large, small in SMALLER.items():
        line = line.replace(large, small)
    return [pytest.param(words, marks=pytest.mark.nightly), line.split()]


@pytest.mark.thorough(
    but=[
        "export checkpoints -o model.safetensors",
        "profile --model my_models.py:small --data my_data.py:digits --microbatch 4 --out small.json",
    ]
)
@pytest.mark.parametrize(
    "words", [each for page in PAGES for words in commands(page) for each in daily_and_nightly(words)], ids=" ".join
)
def test_commands(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, line = words[0], " ".join(words)
    assert command in COMMANDS
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in FILES.items():
        Path(name).write_text(text)
    if command in QUICK and not NEEDS_FILES.search(line):
        assert main(words) == 0
    elif (read_by := OPTIONS.get(" ".join(words[:2]), OPTIONS.get(command))) is not None:
        import tyro

        module, _, name = read_by.rpartition(".")
        options = tyro.cli(getattr(importlib.import_module(f"stagewright.{module}"), name), args=words[1:])
        if command != "plan":
            options.check()


def programs(page: Path) -> list[tuple[str, str]]:
    """The Python blocks of a page, each with the module without which it is left out.

    In the page's source a line before the block says what the test does with it:

        <!-- needs: transformers -->        left out where that cannot be imported
        <!-- not run: why it is not -->     left out
    """
    mark = r"(?:^<!-- (needs|not run): ([^\n]*) -->\n)?"
    found = re.findall(mark + r"^```py(?:thon)?\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return [(code, needed if kind == "needs" else "") for kind, needed, code in found if kind != "not run"]


@pytest.fixture
def same_logging() -> Iterator[None]:
    """Levels and handlers that a block sets are taken back."""
    before = [(each, each.level, [*each.handlers]) for each in (logging.getLogger(), logging.getLogger("stagewright"))]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers = handlers


@pytest.mark.thorough(but=["docs/guides/large_models.md", "docs/guides/planning.md", "docs/guides/schedules.md"])
@pytest.mark.usefixtures("same_logging")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it
@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=named)
def test_python_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run as printed, one after the other: with the names that the page itself defines."""
    import torch

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, (code, needed) in enumerate(programs(page)):
        if not needed or importlib.util.find_spec(needed) is not None:
            exec(compile(code, f"<{named(page)}, Python block {number}>", "exec"), names)


def test_get_started_is_the_example() -> None:
    """The blocks of the page in their order are the script, as far as they are run."""
    script = (ROOT / "examples" / "get_started.py").read_text(encoding="utf-8")
    code = script.partition('"""\n')[2]
    printed = [text for text, needed in programs(ROOT / "docs" / "start.md") if not needed]
    assert "".join(printed).split() == code.split()


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"


def modules() -> list[str]:
    """Names of the modules with examples; a `__main__` is a command, not for import."""
    folders = [init.parent for init in ROOT.glob("*/__init__.py")]
    files = [path.relative_to(ROOT) for folder in folders for path in folder.rglob("*.py")]
    files = [path for path in files if ">>>" in (ROOT / path).read_text(encoding="utf-8")]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    return sorted(f"stagewright.{name}" for name in names if not name.endswith("__main__"))


@pytest.mark.thorough(
    but=[
        "stagewright.experiments.works.convergence_report",
        "stagewright.partition.model.linear_loss",
        "stagewright.partition.recompute",
        "stagewright.schedules.liveness",
    ]
)
@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples fail, see the captured output"


PACKAGES = ("cli", "comm", "experiments", "integrations", "partition", "pipe", "schedules", "viz")
FOLDERS = (*PACKAGES, "docs", "examples", "tests")
NAMED_PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MODULES = sorted([*ROOT.glob("*.py"), *(file for folder in PACKAGES for file in (ROOT / folder).rglob("*.py"))])
OF_READERS = {"FILE.py", "file.py", "mine.py", "my_data.py", "my_models.py", "script.py", "train.py"}  # of their own
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w*/]")
FILE = re.compile(r"(?<![\w./*])\w+\.py\b(?!\()")
DOTTED = re.compile(r"(?<![\w./-])stagewright(?:\.[A-Za-z]\w*)+")
OF_SCRIPTS = {"stagewright.extend"}  # of the page's JavaScript


def missing_paths(text: str) -> Iterator[str]:
    for path in PATH.findall(text):
        if not any(ROOT.glob(path.rstrip("/."))):
            yield path


def missing_names(text: str) -> Iterator[str]:
    for name in DOTTED.findall(text):
        if name not in OF_SCRIPTS and not is_name(name):
            yield name


def is_name(dotted: str) -> bool:
    parts = dotted.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@cache
def known_files() -> set[str]:
    return {file.name for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")} | OF_READERS


@pytest.mark.parametrize("page", NAMED_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page: Path) -> None:
    text = re.sub(r"^::: .*$", "", page.read_text(encoding="utf-8"), flags=re.M)  # the site's build finds those
    members = {
        "sw": {*dir(stagewright)},
        "pipe": set(dir(stagewright.PipelineModule)) | {"device", "rank", "schedule", "plan", "optimizers"},
    }
    missing = [
        *missing_paths(text),
        *missing_names(text),
        *(name for name in FILE.findall(text) if name not in known_files()),
    ]
    for prefix, names in members.items():
        missing += [
            f"{prefix}.{name}" for name in re.findall(rf"(?<![\w./]){prefix}\.(\w+)", text) if name not in names
        ]
    assert missing == []


@pytest.mark.thorough
def test_what_docstrings_name_exists() -> None:
    missing = []
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node, clean=False) or ""
                place = f"{module.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                missing += [f"{place}: {name}" for name in (*missing_paths(text), *missing_names(text))]
    assert missing == []


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


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
COMMAND = re.compile(r"(?:^#?\s+|`)((?:torchrun|python) [^`\n]*examples/\w+\.py[^`\n]*)", flags=re.M)

TYPED = "torchrun --nproc-per-node 2 examples/train_gpt.py --steps 40"

# What the output ends with, by example; each says itself what it learns.
LEARNT = {
    "train_gpt": r"step 40: loss [0-3]\.\d+\n(?s:.*)def ",
    "get_started": r"step 100: loss 0\.[0-4](?s:.*)(7[5-9]|8\d|9\d)% of 256 new points",
    "gpt2": r"step 30: loss (0|1\.[0-3])(?s:.*)hgfe>",
    "resnet": r"(9\d|100)% of 192 new pictures",
    "large_model": r"losses 0\.\d+, 0\.\d+; \d+ MiB before the model, 1\d\d of weights",
    "notebook": r"(9\d|100)% of the points are told apart",
}


def lines_of_examples() -> list[tuple[str, str]]:
    return [(file.stem, line) for file in EXAMPLES for line in COMMAND.findall(file.read_text(encoding="utf-8"))]


def test_each_example_says_how_to_run_it() -> None:
    assert {name for name, _ in lines_of_examples()} == {file.stem for file in EXAMPLES} == set(LEARNT)
    assert TYPED in [line for _, line in lines_of_examples()]


@pytest.mark.thorough
@pytest.mark.gloo
@pytest.mark.parametrize("name", [file.stem for file in EXAMPLES])
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands of an example one after the other in an empty folder, as a newcomer types them.

    One of them is typed to the letter; the ranks of the others are forked.
    """
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    if "from transformers" in text and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: make extras")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    for number, line in enumerate(COMMAND.findall(text)):
        done = typed(line) if line == TYPED else forked(line)
        assert done.status == 0, done.stderr[-3000:]
        assert number or re.search(LEARNT[name], done.stdout), done.stdout[-1000:]  # the second goes on from the first


def typed(line: str) -> Done:
    """A line in a shell of its own, from the interpreter's first import on."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(shlex.split(line), env=environment, capture_output=True, text=True, timeout=500, check=False)
    return Done(status=done.returncode, stdout=done.stdout, stderr=done.stderr)


def forked(line: str) -> Done:
    """`python FILE ...` or `torchrun --nproc-per-node N FILE ...`, what each rank says behind the one before it."""
    program, *words = shlex.split(line)
    num_ranks = None
    if program == "torchrun":
        assert words.pop(0) == "--nproc-per-node"
        num_ranks = int(words.pop(0))
    done = run_forked(words, num_ranks=num_ranks)
    return Done(
        status=max(each.status for each in done),
        stdout="".join(each.stdout for each in done),
        stderr="".join(each.stderr for each in done),
    )
