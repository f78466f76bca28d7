"""The package as a whole: what importing it costs, which folder may import which, and how its large records show."""

import ast
import graphlib
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import types
import venv
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import stagewright
from stagewright.partition import Cluster, Node, Profile, plan
from stagewright.pipe import EvalResult, PipelineModule, StepResult
from stagewright.schedules import Costs, build, simulate

ROOT = Path(stagewright.__file__).parent
TESTS = Path(__file__).parent

# The arrows of CONTRIBUTING.md: folder -> folders that its files may import.
ARROWS = {
    "schedules": set(),
    "partition": {"schedules"},
    "comm": {"schedules"},
    "viz": {"schedules"},
    "pipe": {"schedules", "partition", "comm"},
    "cli": {"schedules", "partition", "comm", "viz", "pipe"},
    "experiments": {"schedules", "partition", "comm", "viz", "pipe", "cli"},
    "integrations": {"pipe", "partition"},
}
WITHOUT_TORCH = {"schedules", "viz", "partition"}
# Rooms that need torch, in folders that else do not.
TORCH_HALF = {("partition", "deferred"), ("partition", "model"), ("partition", "profiler")}
EXPLORER = ROOT / "viz" / "explorer"
# A plan loads the views when it is shown, against the arrows.
LATE_ARROWS = {("partition/plans/as_schedule.py", "viz")}
FOLDERS_WITHOUT_CIRCLES = ("schedules", "partition", "comm", "viz", "pipe", "cli", "experiments", "integrations")
FILES = sorted(path.relative_to(ROOT) for folder in ARROWS for path in (ROOT / folder).rglob("*.py"))


def imported(source: str, package: tuple[str, ...]) -> set[str]:
    """Dotted names that a file of `package` imports, at any depth of its code, relative ones with a dot.

    `from ..a import b` names `.a.b`, seen from the root of the package: whether b is a module or a function
    can't be told from the text, and the folder is the same.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level > len(package) + 1:
                raise ValueError(f"line {node.lineno}: {'.' * node.level} leads out of the package")
            base = ["", *package[: len(package) + 1 - node.level]] if node.level else []
            names |= {".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names}
    return names


@pytest.mark.thorough
def test_imports_follow_the_arrows():
    faults = [fault for path in FILES for fault in crossing(path)]
    assert not faults, "\n".join(faults)


def crossing(path):
    """Imports of a file that go against the arrows."""
    folder = path.parts[0]
    names = imported((ROOT / path).read_text(encoding="utf-8"), path.parent.parts)
    inside = {name.split(".")[1] for name in names if name.startswith(".")}
    outside = {name.split(".")[0] for name in names if not name.startswith(".")}

    late = {other for file, other in LATE_ARROWS if file == path.as_posix()}
    against = inside - (ARROWS[folder] | {folder, "__version__"} | late)
    if against:
        yield f"{path} imports {sorted(against)}"
    if "stagewright" in outside:
        yield f"{path} imports its own package by name: use relative imports"
    if folder in WITHOUT_TORCH and path.parts[:2] not in TORCH_HALF:
        rooms = TORCH_HALF & {tuple(name.split(".")[1:3]) for name in names if name.startswith(".")}
        if rooms or "torch" in outside:
            yield f"{path} imports torch, or what needs it: {sorted(rooms)}"


def file_of(name):
    """The file behind a dotted name of `imported`: a module, or the package that it is looked up in."""
    parts = name.split(".")[1:]
    for length in range(len(parts), 0, -1):
        for path in (Path(*parts[:length]).with_suffix(".py"), Path(*parts[:length], "__init__.py")):
            if (ROOT / path).is_file():
                return path.as_posix()
    return None


@pytest.mark.thorough(but=["integrations"])
@pytest.mark.parametrize("folder", FOLDERS_WITHOUT_CIRCLES)
def test_no_circle_of_imports_inside_a_folder(folder):
    """Imports inside functions and for types alone count, too."""
    graph = {}
    for path in FILES:
        if path.parts[0] == folder:
            names = imported((ROOT / path).read_text(encoding="utf-8"), path.parent.parts)
            own = {file_of(name) for name in names if name.startswith(".")}
            graph[path.as_posix()] = {other for other in own if other}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_every_folder_of_code_stands_in_the_arrows():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(ARROWS)


def said(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.thorough(but=["stagewright.partition, stagewright.partition.search, stagewright.partition.analytic"])
@pytest.mark.parametrize(
    "modules",
    [
        "stagewright",
        "stagewright.schedules, stagewright.viz",
        "stagewright.partition, stagewright.partition.search, stagewright.partition.analytic",
    ],
)
def test_import_leaves_torch_out(modules):
    program = f"import sys, {modules}; print('torch' in sys.modules)"
    assert said(program) == ["False"]


@pytest.mark.thorough
def test_views_load_when_a_notebook_shows_something():
    folders = ", ".join(f"stagewright.{folder}" for folder in ("schedules", "partition"))
    program = f"""
import sys, types
shown = {{}}
html = types.SimpleNamespace(for_type_by_name=lambda module, name, function: shown.update({{(module, name): function}}))
shell = types.SimpleNamespace(display_formatter=types.SimpleNamespace(formatters={{"text/html": html}}))
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
import {folders}
from stagewright.partition import Plan
from stagewright.schedules import Schedule, Timeline, build
before = "stagewright.viz" in sys.modules
schedule = build("1f1b", num_ranks=2, num_microbatches=2)
page = shown[Schedule.__module__, Schedule.__name__](schedule)
print(before, "stagewright.viz" in sys.modules, "<iframe" in page)
print(set(shown) == {{(kind.__module__, kind.__name__) for kind in (Schedule, Timeline, Plan)}})
"""
    assert said(program) == ["False", "True", "True", "True"]


def test_pipeline_module_loads_on_first_use():
    from stagewright.pipe import PipelineModule

    assert stagewright.PipelineModule is PipelineModule
    with pytest.raises(AttributeError, match="module 'stagewright' has no attribute 'PipelineModul'"):
        _ = stagewright.PipelineModul


@pytest.mark.parametrize("room", ["comm", "partition", "pipe", "schedules", "schedules.custom", "viz"])
def test_a_star_import_takes_what_a_room_offers_and_no_files(room: str) -> None:
    """That of pipe took 20 modules, among them `build` and `run`; that of schedules took nothing."""
    whole, found = importlib.import_module(f"stagewright.{room}"), dict[str, object]()
    exec(f"from stagewright.{room} import *", found)
    taken = {name for name in found if name[0] != "_"}
    assert not any(isinstance(found[name], types.ModuleType) for name in taken)
    written = (Path(whole.__file__ or "").parent / "__init__.py").read_text(encoding="utf-8")
    offered = {*re.findall(r" as (\w+)$", written, re.MULTILINE)} or {*whole._FILE_OF}
    assert offered <= taken <= offered | {"annotations"}
    assert not re.search(r"^__all__ = (?!\[$)", written, re.MULTILINE)  # of which a type checker makes no names at all


@pytest.mark.thorough
def test_all_that_users_catch_or_annotate_is_in_the_package_itself() -> None:
    program = "import sys, stagewright; print(stagewright.ScheduleError.__name__, 'torch' in sys.modules)"
    assert said(program) == ["ScheduleError", "False"]
    listed = {name for name in stagewright.__all__ if name != "__version__"}
    assert all(getattr(stagewright, name).__doc__ for name in listed)
    of_runtime = {name for name in dir(importlib.import_module("stagewright.pipe")) if name[0].isupper()}
    raised = {"PeerLost", "PipelineError", "PipelineTimeout", "RecordingError", "ScheduleError"}
    assert of_runtime | raised <= listed <= set(dir(stagewright))


@pytest.mark.thorough
def test_a_rank_that_trains_by_a_named_schedule_loads_no_planner():
    program = """
import sys, torch, stagewright
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
options = {"loss_fn": torch.nn.functional.mse_loss, "optimizer": torch.optim.SGD, "mesh": {"pipe": 2}}
stagewright.PipelineModule(model, schedule="1f1b", **options).train_step(torch.ones(4, 2), torch.ones(4, 2))
planner = ("search", "solve", "analytic")
print([name for name in sys.modules if name.startswith(tuple(f"stagewright.partition.{room}" for room in planner))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr  # where a busy machine says that building takes long


@pytest.mark.thorough
def test_folders_load_on_first_use_and_are_listed():
    names = {*ARROWS, "PipelineModule", "__version__"}
    program = (
        "import sys, stagewright as sw; before = [name for name in sys.modules if name.startswith('stagewright.')]; "
        "sw.schedules.build('1f1b', num_ranks=2, num_microbatches=2); "
        f"print(before, {names!r} <= set(dir(sw)), 'torch' in sys.modules); "
        f"[getattr(sw, name).__path__ for name in {sorted(ARROWS)}]"
    )
    assert said(program) == ["[]", "True", "False"]


def test_a_step_needs_nothing_of_the_commands_and_they_say_what_to_install():
    hidden = "import sys\nfor name in ('matplotlib', 'rich', 'tyro'): sys.modules[name] = None\n"
    step = """
import torch, stagewright
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
options = {"loss_fn": torch.nn.functional.mse_loss, "optimizer": torch.optim.SGD, "mesh": {"pipe": 2}}
pipe = stagewright.PipelineModule(model, **options)
print(pipe.train_step(torch.ones(4, 2), torch.ones(4, 2)).loss > 0)
from stagewright.cli.main import main
print(main(["simulate", "1f1b", "--ranks", "2", "--microbatches", "4"]))
"""
    run = subprocess.run([sys.executable, "-c", hidden + step], capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["True", "2"], run.stderr
    assert "pip install 'stagewright[cli]'" in run.stderr


def test_version_is_the_installed_one():
    assert stagewright.__version__ == importlib.metadata.version("stagewright")


def test_the_wheel_has_every_package_of_the_tree():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for folder in ARROWS for path in (ROOT / folder).rglob("*.py")}
    assert settings["packages"] == ["stagewright", *sorted(".".join(["stagewright", *f.parts]) for f in folders)]
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)
    data = settings["package-data"]
    for package, patterns in data.items():  # py.typed: type checkers read the package's annotations
        folder = ROOT.joinpath(*package.split(".")[1:])
        assert all(any(folder.glob(pattern)) for pattern in patterns), package
    parts = {path for path in (ROOT / "viz").rglob("*") if path.suffix not in {".py", ".pyc", ""}}
    assert parts == {path for pattern in data["stagewright.viz.explorer"] for path in EXPLORER.glob(pattern)}


def test_names_of_tests_hold_no_addresses(request: pytest.FixtureRequest) -> None:
    """Processes that share out the tests must find the same ones: `ids=str` of a function is another name in each."""
    names = [item.nodeid for item in request.session.items]
    assert not [name for name in names if re.search(r"0x[0-9a-f]{8,}", name)]


def deep_imports(source: str) -> list[str]:
    """Modules below the library's packages that a test imports, or what it imports of them."""
    packages = {"stagewright", *(f"stagewright.{folder}" for folder in ARROWS)}
    deep = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            deep += [alias.name for alias in node.names if alias.name.count(".") > 1]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}": alias.name for alias in node.names}
            modules = {name for name, own in names.items() if node.module in packages and is_module(node.module, own)}
            deep += names if node.module not in packages else modules
    return sorted(name for name in deep if name.startswith("stagewright.") and name not in packages)


def is_module(package: str, name: str) -> bool:
    if file_of(f"{package}.{name}") is None:
        return False  # nor is it looked up: what it needs may not be installed
    return isinstance(getattr(importlib.import_module(package), name, None), types.ModuleType | None)


@pytest.mark.thorough
def test_tests_import_packages_alone_and_the_rest_from_one_place():
    """What moves inside the library changes a line of `support/inside.py`, not twenty files."""
    found = {path.relative_to(TESTS): deep_imports(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names and path != Path("support/inside.py")} == {}


def test_records_and_steps_are_shown_in_a_line() -> None:
    schedule = build("interleaved", num_ranks=2, num_microbatches=4)
    nodes = [Node(name=name, forward_seconds=0.01, backward_seconds=0.02) for name in "ab"]
    profile = Profile(nodes=nodes, microbatch_size=2)
    found = plan(profile, Cluster.from_levels([(1, 1e9)]), global_batch=8, pipeline_sizes=(1,), schedules=("1f1b",))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = PipelineModule(model, mesh={"pipe": 2}, num_microbatches=4)
    streamed = build("2bw", num_ranks=2, num_microbatches=2)
    shown = {
        repr(schedule): "<Schedule interleaved: 2 ranks, 4 stages, 4 microbatches>",
        repr(streamed): "<Schedule 2bw: 2 ranks, 2 stages, 2 microbatches, 8 batches>",
        repr(
            simulate(schedule, Costs(forward=1.0, backward=2.0))
        ): "<Timeline simulated: <Schedule interleaved: 2 ranks, "
        "4 stages, 4 microbatches>, makespan 27.0 s, bubble 11.1%>",
        repr(profile): "<Profile measured: 2 nodes on device, float32, microbatch of 2>",
        repr(found): "<Plan 1f1b, 1 stage on 1 device, 240 ms a batch>",
        repr(pipe): "<PipelineModule Sequential: <Schedule 1f1b: 2 ranks, 2 stages, 4 microbatches>>",
        repr(EvalResult(loss=0.5, output={"logits": torch.zeros(3, 2), "n": 1})): "EvalResult(loss=0.5, "
        "output={'logits': Tensor[3, 2], 'n': 1})",
    }
    assert list(shown) == list(shown.values())
    result = StepResult(loss=0.5, loss_step=3, _timeline=lambda: pytest.fail("not asked for"))
    assert repr(result) == "StepResult(loss=0.5, loss_step=3, grad_norm=None, skipped=False)"
    late = replace(result, loss=None, loss_step=None)
    assert repr(late).startswith("StepResult(loss=None: batches overlap")


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
