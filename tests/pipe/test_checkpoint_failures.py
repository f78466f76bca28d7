"""Saves that cannot be done: told, alike on all ranks, without harm to the run and to what was saved before."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from support.small import X, Y, layers, make

from stagewright.pipe import PipelineModule


def trained(steps: int) -> PipelineModule:
    torch.manual_seed(0)
    pipe = make(model=layers())
    for _ in range(steps):
        pipe.train_step(X, Y)
    return pipe


def test_a_full_disk_is_told_and_the_next_save_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = trained(1)
    first = pipe.save(tmp_path).path
    assert first is not None
    pipe.train_step(X, Y)
    flush, is_full = os.fsync, True

    def fsync(file: int) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(file)

    monkeypatch.setattr(os, "fsync", fsync)
    before = sorted(tmp_path.rglob("*"))
    with pytest.warns(UserWarning, match=r"no checkpoint was saved in .*: rank 0: .*No space left on device\. Those"):
        result = pipe.save(tmp_path)
    assert (result.path, result.is_mistake) == (None, False)
    assert sorted(tmp_path.rglob("*")) == before  # its space is given back
    is_full = False
    pipe.train_step(X, Y)
    third = pipe.save(tmp_path)
    assert third.path is not None
    assert third.problem == ""
    again = trained(0)
    again.load(tmp_path)
    assert again.num_steps == 3
