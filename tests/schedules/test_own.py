"""Schedules that users bring, in each form: as an object, or as the function of a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.inside import Constraints, F, UserCodeError, find_user_schedule, in_flight, sizes_of

from stagewright.schedules import Schedule, ScheduleError, build, check

SIZES = {"num_ranks": 3, "num_microbatches": 4}

MINE = '''
from stagewright.schedules import Schedule, build
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

def undeclared():
    return Schedule(name="x", placement=((0, 1), (0, 1)), programs=table.programs, num_microbatches=1)

def weights_first():
    return Schedule.from_json(build("zb-h1", num_ranks=1, num_microbatches=1).to_json().replace("0I0 0W0", "0W0 0I0"))

def outside():
    return Schedule.from_json(build("gpipe", num_ranks=1, num_microbatches=1).to_json().replace("0B0", "0B0 0F7"))

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
    "nothing": (
        ScheduleError,
        r"(?s)of_mine\.py:nothing: nothing may run next, after 0 of 24 .*rank 0, after nothing",
    ),
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
    "undeclared": (ScheduleError, r"of_mine\.py:undeclared: .*owner"),
    "weights_first": (ScheduleError, r"(?s)rank 0 at position 1 \(0F0 \[0W0\] 0I0\).*move 0I0 before 0W0"),
    "outside": (ScheduleError, r"outside: 0F7 on rank 0, position 2: microbatches are numbered 0\.\.0"),
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
