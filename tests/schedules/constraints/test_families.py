"""Each family that is a rule, regenerated from rules: its order is its table's."""

from __future__ import annotations

import pytest

from stagewright.schedules import FAMILIES, Costs, build

from .rules_of_families import IN_RULES, in_rules

# (P, M, V): multiples of P and remainders, fewer than P, one of each.
SIZES = [(4, 8, 2), (4, 6, 2), (4, 4, 3), (3, 7, 2), (4, 3, 2), (6, 2, 2), (2, 5, 3), (1, 3, 2), (3, 1, 2)]


@pytest.mark.thorough(but=["1f1b", "chimera", "hanayo", "pipedream", "2bw"])
@pytest.mark.parametrize("name", IN_RULES)
def test_a_family_follows_from_its_rules(name: str) -> None:
    for P, M, V in SIZES:
        if (name == "2bw" and M < P - 1) or (name == "chimera" and P % 2) or (name == "hanayo" and V % 2):
            continue
        options = {"num_chunks": V} if FAMILIES[name].takes_chunks and name != "seq1f1b" else {}
        options |= {"num_batches": 3} if FAMILIES[name].rule.is_asynchronous else {}
        table = build(name, num_ranks=P, num_microbatches=M, **options)
        solved = in_rules(table).solve(Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0))
        assert solved.programs == table.programs, (name, P, M, V)
        assert solved == table, (name, P, M, V)
