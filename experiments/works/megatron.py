"""Megatron-LM's published trainings on A100s. No torch.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC'21, arXiv
2104.04473): nodes of eight devices, eight cards of 200 Gbit/s each. What is predicted of them is one step
(`trainings.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...partition.formulas.device_model import DeviceModel
from .device_fit import fit_trainings
from .trainings import MeasuredTraining

_TABLE_1 = Path(__file__).parent / "data" / "megatron_table1.json"
DEVICE = "A100-80GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(MeasuredTraining):
    """A line of Table 1; its seconds are computed from the published rate.

    Arguments:
        billion_parameters: as printed.
        teraflops_published: of each device.
    """

    billion_parameters: float
    teraflops_published: int


@cache
def table() -> tuple[Run, ...]:
    """Table 1, smallest model first."""
    runs = json.loads(_TABLE_1.read_text(encoding="utf-8"))["runs"]
    return tuple(Run(teraflops_published=run.pop("teraflops"), **run) for run in runs)


def fitted(runs: Sequence[Run], constants: Sequence[str] = ("matrix_efficiency",)) -> DeviceModel:
    """The device with the constants that fit these runs best."""
    return fit_trainings(DeviceModel.preset(DEVICE), runs, constants=constants)
