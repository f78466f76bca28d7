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


@pytest.mark.parametrize("hue", palette.OP_HUES.values())
def test_shades_of_chunks_grow_paler(hue):
    shades = [sum(palette.shade(hue, chunk=chunk, num_chunks=4)) for chunk in range(4)]
    assert shades == sorted(shades)
    assert len(set(shades)) == 4
    assert palette.shade(hue, chunk=0, num_chunks=1) == palette.shade(hue, chunk=0, num_chunks=4)


@pytest.mark.parametrize("hue", palette.OP_HUES.values())
def test_every_other_batch_is_paler(hue):
    full = palette.shade(hue, chunk=0, num_chunks=1)
    assert palette.batch_shade(full, 0) == palette.batch_shade(full, 4) == full
    assert palette.batch_shade(full, 1) == palette.batch_shade(full, 7)
    assert all(pale >= colour for pale, colour in zip(palette.batch_shade(full, 1), full, strict=True))
    assert sum(palette.batch_shade(full, 1)) > sum(full) + 0.3
