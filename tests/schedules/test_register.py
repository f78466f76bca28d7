"""Schedules from outside: by `register`, by an entry point of a package, as a function, or written out by hand."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.inside import (
    Constraints,
    F,
    UserCodeError,
    find_user_schedule,
    in_flight,
    main,
    schedule_registry,
    sizes_of,
)

import stagewright
from stagewright.partition import Cluster, Node, Profile, plan
from stagewright.schedules import FAMILIES, Action, Edge, Op, Schedule, ScheduleError, build, check, family, register


def zigzag(num_ranks: int, num_microbatches: int) -> Schedule:
    return build("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)


def chunky(num_ranks: int, num_microbatches: int, num_chunks: int = 2, late: bool = False) -> Schedule:
    if num_ranks % 2:
        raise ValueError("an even number of ranks, please")
    name = "looped-bfs" if late else "interleaved"
    return build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(schedule_registry, "_ADDED", {})
    yield
    schedule_registry._offered.cache_clear()
    schedule_registry._of_package.cache_clear()


def test_a_registered_schedule_is_one_by_name_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    register("Zig_zag", zigzag)
    made = build("zig-zag", num_ranks=2, num_microbatches=3)
    assert (made.name, made.programs) == ("zig-zag", build("gpipe", num_ranks=2, num_microbatches=3).programs)
    assert "zig-zag" not in FAMILIES  # which searches try unasked
    assert main(["schedule", "zig-zag", "--ranks", "2", "--microbatches", "3"]) == 0
    assert capsys.readouterr().out.strip() == made.grid().strip()
    assert main(["schedule", "zigzak", "--ranks", "2", "--microbatches", "3"]) != 0
    assert "did you mean 'zig-zag'?" in capsys.readouterr().err
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    pipe = stagewright.PipelineModule(model, schedule="zig-zag", num_microbatches=3, mesh={"pipe": 2})
    assert pipe.schedule.programs == made.programs


def test_plans_choose_a_registered_schedule_where_asked_by_name() -> None:
    register("zigzag", zigzag)
    register("chunky", chunky)
    profile = Profile(nodes=[Node(name=name, forward_seconds=1, backward_seconds=2) for name in "abcd"])
    cluster = Cluster.parse("2:net=1GB/s")
    sizes: dict[str, Any] = {"global_batch": 8, "pipeline_sizes": (2,)}
    found = plan(profile, cluster, schedules=["zigzag"], **sizes)
    assert (found.schedule, found.build_schedule().name) == ("zigzag", "zigzag")
    assert found.simulated_step_time == plan(profile, cluster, schedules=["gpipe"], **sizes).simulated_step_time
    looping = plan(profile, cluster, schedules=["chunky"], chunk_sizes=[2], **sizes)
    assert looping.simulated_step_time == pytest.approx(
        plan(profile, cluster, schedules=["interleaved"], chunk_sizes=[2], **sizes).simulated_step_time
    )
    assert {plan(profile, cluster, **sizes).schedule} <= set(FAMILIES)


@pytest.mark.thorough
def test_auto_takes_a_registered_schedule_and_refuses_a_misspelt_one_before_it_measures() -> None:
    register("zigzag", zigzag)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    given: dict[str, Any] = {"loss_fn": torch.nn.functional.mse_loss, "mesh": {"pipe": 2}, "optimizer": torch.optim.SGD}
    with pytest.raises(ValueError, match=r"unknown schedule 'zigzak'.*did you mean 'zigzag'"):
        stagewright.PipelineModule(model, schedule=stagewright.Auto(schedules=["zigzak"]), **given)
    pipe = stagewright.PipelineModule(model, schedule=stagewright.Auto(schedules="zigzag", trials=0), **given)
    assert pipe.train_step(torch.ones(8, 8), torch.ones(8, 8)).loss is not None
    assert pipe.schedule.name == "zigzag"


def test_options_sizes_and_kinds_of_what_is_registered() -> None:
    register("chunky", chunky)
    assert family("chunky").takes_chunks
    assert family("chunky").is_planned
    late = build("chunky", num_ranks=2, num_microbatches=4, late=True)
    assert late.programs == build("looped-bfs", num_ranks=2, num_microbatches=4).programs
    with pytest.raises(ValueError, match="schedule 'chunky' has no option lat: its options are late, num_chunks"):
        build("chunky", num_ranks=2, num_microbatches=4, lat=True)
    register("rules", lambda num_ranks, num_microbatches: Constraints(
        num_ranks=num_ranks, num_microbatches=num_microbatches, rules=[in_flight(at_most=2)]
    ))  # fmt: skip
    assert max(check(build("rules", num_ranks=3, num_microbatches=4)).peak_activations) == 2


def two_ranks(num_ranks: int, num_microbatches: int) -> Schedule:
    return build("gpipe", num_ranks=2, num_microbatches=num_microbatches)


def split_later(num_ranks: int, num_microbatches: int) -> Schedule:
    return build("1f1b" if num_ranks == 2 else "zb-h1", num_ranks=num_ranks, num_microbatches=num_microbatches)


def test_what_is_registered_has_a_name_of_its_own_and_makes_what_was_asked_for() -> None:
    register("two", two_ranks)
    with pytest.raises(ScheduleError, match=r"schedule 'two' .* has num_ranks=2, not 4"):
        build("two", num_ranks=4, num_microbatches=4)
    register("split-later", split_later)
    with pytest.raises(ScheduleError, match="split backwards"):
        build("split-later", num_ranks=4, num_microbatches=4)
    for name in ("1f1b", "DAPPLE", "auto", "mine.py:f", ""):
        with pytest.raises(ValueError, match=r"register\('.*'\): .*expected a"):
            register(name, zigzag)
    register("zigzag", zigzag)
    register("zigzag", zigzag)  # a cell of a notebook that is run again
    with pytest.raises(ValueError, match="there is a schedule of this name"):
        register("ZigZag", chunky)
    for wrong in (lambda action: 0, lambda *sizes: None, lambda **sizes: None, 3):
        with pytest.raises(ValueError, match=r"expected a function such as `def zigzag\(num_ranks"):
            register("mine", wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="returned NoneType: expected a Schedule"):
        register("mine", lambda num_ranks, num_microbatches: None)


def test_build_takes_a_function() -> None:
    assert build(zigzag, num_ranks=2, num_microbatches=3).name == "zigzag"
    assert build(chunky, num_ranks=2, num_microbatches=4, num_chunks=3).num_stages == 6
    with pytest.raises(ValueError, match="expected a function such as"):
        build(3, num_ranks=2, num_microbatches=3)  # type: ignore[arg-type]


def test_schedules_may_be_written_in_lists_and_words() -> None:
    plain = build("1f1b", num_ranks=2, num_microbatches=2)
    sizes: dict[str, Any] = {"name": "1f1b", "num_microbatches": 2, "placement": [[0], [1]]}
    words = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    triples = [[(int(word[0]), word[1], int(word[2])) for word in program] for program in words]
    of_text = [[Action(*triple) for triple in program] for program in triples]  # type: ignore[arg-type]  # op: a str
    for programs in (words, triples, of_text, [" ".join(program) for program in words]):
        made = Schedule(programs=programs, **sizes)  # type: ignore[arg-type]
        assert (made, hash(made)) == (plain, hash(plain))
        assert all(type(action.op) is Op for program in made.programs for action in program)
        assert made.has_backward
    assert Schedule(programs=words, edges=[(0, 1)], **sizes).edges == (Edge(0, 1),)  # type: ignore[arg-type]
    for wrong, what in (
        ({"programs": [["0F0", "0X0"], []]}, r"program of rank 0: .*0X0.*expected actions, such as"),
        ({"programs": [[(0, "F")], []]}, r"program of rank 0: .*expected actions, such as"),
        ({"programs": "0F0 0B0"}, r"programs='0F0 0B0': expected one per rank"),
        ({"programs": words, "placement": [0, 1]}, r"placement=\[0, 1\]: expected the stages of each rank"),
        ({"programs": words, "edges": [0]}, r"edges=\[0\]: expected pairs"),
    ):
        with pytest.raises(ScheduleError, match=what):
            Schedule(**(sizes | wrong))


PACKAGE = """
from stagewright.schedules import build
def make(num_ranks, num_microbatches):
    return build("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
"""


def test_a_package_offers_schedules_by_entry_points(tmp_path: Path) -> None:
    (tmp_path / "offering.py").write_text(PACKAGE)
    info = tmp_path / "offering-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[stagewright.schedules]\nof-package = offering:make\n1F1B = offering:make\n"
        "torn = offering.torn:make\nlost = offering:lost\n"
    )
    program = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from stagewright.cli.main import main
from stagewright.schedules import family, register
print(main(["schedule", "of-package", "--ranks", "2", "--microbatches", "2"]))
print(main(["schedule", "1f1b", "--ranks", "2", "--microbatches", "3"]))
try:
    register("of-package", lambda num_ranks, num_microbatches: None)
except ValueError as error:
    print(error)
for name in ("torn", "lost"):
    try:
        family(name)
    except Exception as error:
        print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "F0 F1" in done.stdout, done.stderr
    assert "rank 0 | F0 F1 .  B0 F2 B1 .  B2" in done.stdout  # a built-in name stays what it is
    assert "register('of-package'): there is a schedule of this name" in done.stdout
    begins = "UserCodeError schedule 'torn': the entry point offering.torn:make of offering cannot be loaded (ModuleNot"
    assert begins in done.stdout
    assert "the entry point offering:lost of offering cannot be loaded (AttributeError: " in done.stdout
    assert done.stdout.count("install what it needs, or uninstall offering") == 2


SIZES = {"num_ranks": 3, "num_microbatches": 4}

MINE = '''
from stagewright.schedules import Schedule
from stagewright.schedules.custom import B, Constraints, F, in_flight, in_order

table = Schedule.from_csv("0F0,,,0B0\\n,1F0,1B0,\\n")

def plain():
    return table

def rules(num_ranks=2, num_microbatches=3):
    one_forward_one_backward = in_flight(at_most=lambda rank: num_ranks - rank)
    return Constraints(num_ranks=num_ranks, num_microbatches=num_microbatches, rules=[one_forward_one_backward])

def key(action):
    return action.op is not F, action.index, action.stage

def few(action, so_far):
    """No more than two in flight."""
    return action.op is not F or so_far.in_flight < 2

def makes_a_filter(num_ranks):
    return few

def nothing(action, so_far):
    return False

def yes(action):
    return True

def clash(num_ranks, num_microbatches):
    return Constraints(num_ranks=num_ranks, num_microbatches=num_microbatches, rules={
        "all forwards first": lambda s, m: F(s, num_microbatches - 1).before(B(s, m)),
        "in order": in_order(F),
        "two in flight": in_flight(at_most=2)})

def typo(num_ranks):
    return Constraints(num_ranks=num_ranks, num_microbatches=4, rules=[lambda s, m: F(s, m + 40).before(B(s, m))])

def number():
    return 3

def deadlock():
    return Schedule.from_csv("0B0,0F0\\n1F0,1B0\\n")

def broken(num_ranks):
    raise RuntimeError("no")
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "of_mine.py"
    path.write_text(MINE)
    monkeypatch.delitem(sys.modules, "_stagewright_file_of_mine", raising=False)
    return path


def built(what: Any, **sizes: int | None) -> Schedule:
    own = find_user_schedule(what, option="schedule=")
    return own.build(sizes or SIZES)


def test_every_form_meets_the_same_checker(mine: Path) -> None:
    one_and_one = build("1f1b", num_ranks=3, num_microbatches=4)
    assert built(f"{mine}:plain").num_ranks == 2  # which has sizes of its own
    assert built(f"{mine}:rules").programs == one_and_one.programs
    assert built(f"{mine}:rules", num_ranks=None).num_microbatches == 3
    assert built(f"{mine}:rules").name == "rules"
    assert check(built(f"{mine}:few")).peak_activations == (2, 2, 1)
    assert built(f"{mine}:makes_a_filter").programs == built(f"{mine}:few").programs
    forwards_first = built(f"{mine}:key")
    assert forwards_first.name == "key"
    assert forwards_first.programs[2][:4] == (F(2, 0), F(2, 1), F(2, 2), F(2, 3))
    assert built(f"{mine}:key", num_ranks=2, num_microbatches=2, num_chunks=2).placement == ((0, 2), (1, 3))
    constraints = Constraints(num_ranks=3, num_microbatches=4, rules=[in_flight(at_most=lambda rank: 3 - rank)])
    assert built(constraints).programs == one_and_one.programs
    assert built(lambda: constraints).programs == one_and_one.programs
    assert built(one_and_one) is one_and_one
    assert sizes_of(one_and_one)["num_ranks"] == 3
    assert find_user_schedule("1f1b", option="schedule=") is None


BAD: dict[str, tuple[type[Exception], str]] = {
    "nothing": (ScheduleError, r"(?s)of_mine\.py:nothing: nothing may run next, after 0 of 24 .*rank 0, after nothing"),
    "clash": (
        ScheduleError,
        r"(?s)3 rules contradict each other.*'two in flight'\s+they clash at.*0F2 may not begin: rank 0 holds 2",
    ),
    "typo": (
        ValueError,
        r"of_mine\.py:typo: rule 'rules\[0\], a lambda' matches no two actions: .*0F40 does not exist",
    ),
    "yes": (ValueError, r"yes\(action\) returns True or False: expected a key, .* or a filter may\(action, so_far\)"),
    "number": (ValueError, r"schedule='.*of_mine\.py:number' returned int: expected a Schedule .*, Constraints, or a"),
    "deadlock": (ScheduleError, r"deadlock: deadlock: a cycle of 2 ranks"),
    "broken": (UserCodeError, r"schedule='.*broken' raised RuntimeError"),
    "missing": (ValueError, r"has no 'missing'"),
}


@pytest.mark.parametrize(("name", "expected"), BAD.items(), ids=BAD.keys())
def test_mistakes_name_the_function(mine: Path, name: str, expected: tuple[type[Exception], str]) -> None:
    kind, message = expected
    with pytest.raises(kind, match=message):
        built(f"{mine}:{name}")


def test_sizes_that_nobody_gives(mine: Path) -> None:
    with pytest.raises(ValueError, match=r"says nothing of sizes: expected --ranks and --microbatches"):
        built(f"{mine}:few", num_ranks=2)
    with pytest.raises(
        ValueError, match=r"clash' needs num_ranks, num_microbatches: expected --ranks --microbatches \("
    ):
        built(f"{mine}:clash", num_ranks=None)
    with pytest.raises(
        ValueError, match=r"of_mine\.py': expected the function in it, as in schedule='.*mine\.py:funct"
    ):
        built(str(mine))
    with pytest.raises(
        ValueError, match=r"schedule=3: expected a name, a Schedule, Constraints, a function, or FILE\.csv"
    ):
        find_user_schedule(3, option="schedule=")  # type: ignore[arg-type]
