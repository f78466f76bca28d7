"""Colours: everything that is drawn has one of its own, and shades go from the full hue to a pale one."""

import pytest
from support.inside import palette

from stagewright.schedules import Idle, MessageKind, Op


def test_everything_has_a_colour_of_its_own():
    assert set(palette.OP_HUES) == set(palette.OP_WORDS) == {Op.F, Op.B, Op.I, Op.W, Op.U}
    assert len(set(palette.OP_HUES.values())) == 5
    assert set(palette.MESSAGE_HUES) == set(palette.MESSAGE_WORDS) == set(MessageKind)
    assert len(set(palette.MESSAGE_HUES.values())) == len(MessageKind)
    assert len(set(palette.MESSAGE_WORDS.values())) == len(MessageKind)
    assert tuple(palette.CAUSE_HUES) == Idle._fields
    assert len(set(palette.CAUSE_HUES.values())) == len(Idle._fields)


@pytest.mark.parametrize("op", palette.OP_HUES)
def test_shades_of_chunks_grow_paler(op):
    shades = [sum(palette.box_colour(op, chunk=chunk, num_chunks=4, batch=0)) for chunk in range(4)]
    assert shades == sorted(shades)
    assert len(set(shades)) == 4
    alone, first = (palette.box_colour(op, chunk=0, num_chunks=number, batch=0) for number in (1, 4))
    assert alone == first


@pytest.mark.parametrize("op", palette.OP_HUES)
def test_every_other_batch_is_paler(op):
    full, odd, again, later = (palette.box_colour(op, chunk=0, num_chunks=1, batch=batch) for batch in (0, 1, 4, 7))
    assert again == full
    assert odd == later
    assert all(pale >= colour for pale, colour in zip(odd, full, strict=True))
    assert sum(odd) > sum(full) + 0.3
