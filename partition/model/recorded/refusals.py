"""Refusals of what a recording cannot take; and checks of values: code that raises where a flag comes out otherwise.

if labels.max() >= count: raise ...      assert x.isfinite().all()      torch._check_tensor_all(mask)
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from types import FrameType

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ..source_line import is_ours, line_of, module_at

_BETWEEN = ("TO_BOOL", "EXTENDED_ARG", "CACHE")  # a flag and the jump that takes it


class RefusedError(Exception):
    """The user's code does what cannot be recorded; `expected` in its place, or what is expected of all such code.
    `unit`: the call of a unit that has to be opened for it, by name."""

    def __init__(self, reason: str, *, expected: str | None = None, unit: str | None = None) -> None:
        super().__init__(reason)
        self.expected, self.unit = expected, unit


def check_now() -> tuple[bool, str] | None:
    """Value that a flag must have, which the user's code reads now and else raises an error, and the line in the
    innermost module; None where that code continues either way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    flag = None if frame is None else _passing(frame)
    while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
        frame = frame.f_back
    return None if flag is None else (flag, line_of(frame))


def _passing(frame: FrameType) -> bool | None:
    if frame.f_code is torch._check_tensor_all_with.__code__:
        return True
    code = [*dis.get_instructions(frame.f_code)]
    at = next(i for i, each in enumerate(code) if each.offset == frame.f_lasti)
    if "_IF_" not in code[at].opname:
        at = next(i for i in range(at + 1, len(code)) if code[i].opname not in _BETWEEN)
    if not code[at].opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    jumps_on = code[at].opname.endswith("IF_TRUE")
    taken, falls = _raises(code, _place(code, code[at].argval)), _raises(code, at + 1)
    return None if taken == falls else jumps_on == falls


def _raises(code: Sequence[dis.Instruction], at: int) -> bool:
    """Whether code ends in an error from there on, whichever way it goes; a loop does not."""
    for i in range(at, len(code)):
        name = code[i].opname
        if name in ("RAISE_VARARGS", "RERAISE"):
            return True
        if "JUMP" in name:
            target = _place(code, code[i].argval)
            return target > i and _raises(code, target) and ("_IF_" not in name or _raises(code, i + 1))
        if name.startswith(("RETURN", "YIELD", "FOR_ITER", "SEND")):
            return False
    return False


def _place(code: Sequence[dis.Instruction], offset: int) -> int:
    return next(i for i, each in enumerate(code) if each.offset == offset)


def refuse_function(function: object, name: str) -> None:
    """RefusedError for one that no stage could call between modules."""
    if function in (torch.Tensor.backward, torch.autograd.grad):
        what = f"the forward runs a backward ({name})"
        raise RefusedError(what, expected="all that it goes through in a module of its own, which runs as it is")
    if name == "_pack_padded_sequence":
        raise RefusedError("the code between the modules packs sequences by their lengths, which are values")


def refuse_packed(path: str, arguments: Sequence[object]) -> None:
    if any(isinstance(each, PackedSequence) for each in arguments):
        raise RefusedError(f"{module_at(path)} takes a PackedSequence, whose sizes are values")


def refuse_distribution(output: object) -> None:
    """RefusedError for one that a loss would compute with, unless the model returns its own loss."""
    leaves = pytree.tree_leaves(output)
    for leaf in leaves if all(x.dim() for x in leaves if isinstance(x, torch.Tensor)) else ():
        if isinstance(leaf, torch.distributions.Distribution):
            what = f"the model returns a {type(leaf).__name__}, which no message carries"
            raise RefusedError(what, expected="what it is made of as tensors, and the distribution made in loss_fn")
