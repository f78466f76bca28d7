"""Colours: everything that is drawn has one of its own, and shades go from the full hue to a pale one."""

from itertools import combinations

import numpy as np
import pytest
from support.inside import palette

from stagewright.schedules import Idle, MemoryPart, MessageKind, Op


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


# Machado, Oliveira, Fernandes 2009, severity 1: linear RGB as it is seen.
SIGHT = {
    "common": np.eye(3),
    "protan": [(0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)],
    "deutan": [(0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)],
    "tritan": [(1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)],
}
TO_XYZ = np.array([(0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505)])


def linear(colour):
    return np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour])


def cielab(colour, sight):
    x, y, z = np.cbrt(TO_XYZ @ np.clip(np.array(SIGHT[sight]) @ linear(colour), 1e-3, 1) / (0.9505, 1, 1.089))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(*hues):
    low, high = sorted(float(TO_XYZ[1] @ linear(palette.rgb(hue))) for hue in hues)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("sight", SIGHT)
def test_idle_causes_are_told_apart_and_are_no_blue_of_a_forward(sight):
    causes = [cielab(palette.rgb(hue), sight) for hue in palette.CAUSE_HUES.values()]
    assert min(np.linalg.norm(a - b) for a, b in combinations(causes, 2)) > 20
    forwards = [cielab(palette.box_colour(Op.F, chunk=c, num_chunks=2, batch=0), sight) for c in range(2)]
    held = cielab(palette.rgb(palette.MEMORY_HUES[MemoryPart.ACTIVATIONS]), sight)
    assert min(np.linalg.norm(a - b) for a in (*causes, held) for b in forwards) > 20


@pytest.mark.parametrize("hue", palette.CAUSE_HUES.values())
def test_idle_causes_show_on_both_grounds(hue):
    assert contrast(hue, "#FFFFFF") > 1.6
    assert contrast(hue, "#1C2129") > 2.3
