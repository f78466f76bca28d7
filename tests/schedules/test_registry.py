"""build(): names, options, and what does not fit."""

import inspect
from itertools import product
from typing import Any

import pytest
from support.inside import FAMILY_PLACEMENTS, RULES
from support.sizes import fitting

from stagewright.schedules import FAMILIES, Family, Op, build, canonical_name, check, family


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("1F1B", "1f1b"),
        (" GPipe ", "gpipe"),
        ("looped_bfs", "looped-bfs"),
        ("ScheduleInterleaved1F1B", "interleaved"),
        ("PipeDream_2BW", "2bw"),
    ],
)
def test_names(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical
    assert build(name, num_ranks=2, num_microbatches=2).name == canonical


def test_each_name_and_alias_belongs_to_one_family() -> None:
    names = [name for each in FAMILIES.values() for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names))
    assert all(family(name).name == each.name for each in FAMILIES.values() for name in each.aliases)


@pytest.mark.parametrize("each", FAMILIES.values(), ids=FAMILIES)
def test_a_family_says_what_its_builder_does(each: Family) -> None:
    assert set(inspect.signature(each.build).parameters) == {"num_ranks", "num_microbatches", *each.options}
    assert list(each.options) == sorted(each.options)
    assert each.rule is RULES[each.weight_rules[0]]
    options = [{}, *({name: True} for name in ("vertical_sync",) if name in each.options)]
    built = [build(each.name, num_ranks=2, num_microbatches=4, **option) for option in options]
    assert [schedule.weight_rule for schedule in built] == list(each.weight_rules)
    ops = {action.op for program in built[0].programs for action in program}
    assert (Op.I in ops) == each.splits_backward
    assert {len(ranks) for ranks in built[0].owners} == {each.weight_copies}
    known = {name: place(num_ranks=2, num_chunks=built[0].num_stages // 2) for name, place in FAMILY_PLACEMENTS.items()}
    assert known.get(each.placement, ((0, 1), (0, 1))) == built[0].placement
    if not each.takes_chunks:
        assert {len(stages) for stages in built[0].placement} == {each.num_chunks * each.weight_copies}


@pytest.mark.thorough
def test_what_is_full_after_some_rounds_grows_no_more() -> None:
    for each, P in product(FAMILIES.values(), (2, 3, 4)):
        if each.full_after is not None:
            P, _ = fitting(each.name, P, 2 * P)
            rounds = range(each.full_after, each.full_after + 4)
            peaks = {check(build(each.name, num_ranks=P, num_microbatches=n * P)).peak_activations for n in rounds}
            assert len(peaks) == 1, each.name


@pytest.mark.parametrize(("name", "hint"), [("interlaced", "; did you mean 'interleaved'?"), ("zzz", [*FAMILIES][-1])])
def test_unknown_name(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"one of {', '.join(FAMILIES)}") as error:
        build(name, num_ranks=2, num_microbatches=2)
    assert str(error.value).startswith(f"unknown schedule {name!r}")
    assert str(error.value).endswith(hint)


@pytest.mark.parametrize("option", ["num_ranks", "num_microbatches", "num_chunks", "num_slices"])
@pytest.mark.parametrize("wrong", [0, -1, 2.0, "4", True])
def test_sizes_that_are_no_counts(option: str, wrong: object) -> None:
    sizes = {"num_ranks": 2, "num_microbatches": 4, "num_chunks": 2, option: wrong}
    with pytest.raises(ValueError, match=rf"{option}={wrong!r} for schedule 'interleaved': expected a whole number"):
        build("interleaved", **sizes)  # type: ignore[arg-type]


OPTIONS: list[Any] = [
    ("1f1b", {"warmup": 3}, "schedule '1f1b' has no option warmup: its options are replicas"),
    ("gpipe", {"warmup": 3}, "schedule 'gpipe' has no option warmup: its options are none"),
    ("2bw", {"update_every": 1}, "no option update_every: its options are num_batches, replicas, warmup"),
    *(
        (name, {"num_chunks": 2}, rf"num_chunks=2 for schedule '{name}': it has one stage .*\(interleaved, looped")
        for name in ("gpipe", "1f1b", "2bw", "pipedream")
    ),
    *(
        (name, {"num_slices": 2}, rf"num_slices=2 for schedule '{name}': .*\(terapipe, seq1f1b, .*\)")
        for name in ("gpipe", "1f1b", "2bw", "interleaved")
    ),
    *(
        (
            "gis",
            {"num_ranks": 5, "group_size": size},
            rf"group_size={size!r} for num_ranks=5: expected a whole number, at least 3",
        )
        for size in (0, 2, -1, 2.5, True)
    ),
    # Not 5 together, a later one larger than the first, or one smaller than P (which may deadlock).
    *(
        (
            "interleaved",
            {"num_microbatches": 5, "groups": groups},
            r"groups=.*expected sizes of at least 2 that add up to 5",
        )
        for groups in ((), (4,), (3, 3), (2, 3), (1, 4), (4, 1), (6, -1))
    ),
    (
        "chimera",
        {"num_ranks": 3, "num_microbatches": 4},
        "num_ranks=3 for schedule 'chimera': .* an even number of ranks",
    ),
    ("dualpipe", {"num_ranks": 5, "num_microbatches": 10}, "num_ranks=5 for schedule 'dualpipe': .* an even number of"),
    (
        "dualpipe",
        {"num_ranks": 4, "num_microbatches": 6},
        r"num_microbatches=6 .* on 4 ranks: .* expected an even number, at least 8 \(2P\)",
    ),
    (
        "slimpipe",
        {"num_ranks": 4, "num_slices": 3},
        "num_slices=3 for schedule 'slimpipe' on 4 ranks: expected at least 4",
    ),
    ("dualpipe", {"num_ranks": 4, "num_microbatches": 9}, "num_microbatches=9 .* expected an even number"),
    (
        "dualpipe-v",
        {"num_ranks": 4, "num_microbatches": 7},
        r"num_microbatches=7 .* 'dualpipe-v' on 4 ranks: expected at least 8 \(2P\)",
    ),
]


@pytest.mark.parametrize(("name", "options", "message"), OPTIONS)
def test_options_that_do_not_fit(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **{"num_ranks": 2, "num_microbatches": 2, **options})
