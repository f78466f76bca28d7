"""A device by what it computes and moves in a second: data-sheet figures and at most three fitted constants.

    matrix products   FLOPs / (peak_flops * efficiency(o))
                      efficiency(o) = matrix_efficiency o / (o + wave_outputs / 2)
    all other layers  bytes read and written / memory_bandwidth
    tensor links      bytes / (bandwidth of the link * link_efficiency)

o is the number of outputs of a product. A device computes them in waves: every multiprocessor makes a tile of them at
once, and the last wave is, on average, half empty. So small microbatches and narrow slices of a tensor cost more a FLOP
than large ones. `fit` finds the constants. With those of the presets and the formulas of `layers.py` Megatron-LM's
Table 1 is predicted within 6% (`tests/partition/test_megatron_table.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import numpy as np
import numpy.typing as npt

from ..strict import fail, number

TILE = 64 * 128  # outputs that a multiprocessor makes at once, where a product has few: larger tiles need more of them
NVLINK_EFFICIENCY = 0.76  # NCCL's sums over 8 A100: 229 of 300 GB/s (vTrain's measurements)
# constant: (least, greatest, where a fit starts, how far it typically moves)
_FITTED = {
    "matrix_efficiency": (0.01, 1.0, 0.5, 0.1),
    "wave_outputs": (0.0, 1e9, 3e6, 1e6),
    "link_efficiency": (0.05, 1.0, 0.8, 0.1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """One kind of device.

    Arguments:
        name: becomes the profile's device.
        peak_flops: of dense 16-bit matrix products [FLOP/s].
        memory_bandwidth: reading and writing together [bytes/s].
        memory_bytes: of the device [bytes].
        link_bandwidth: to its neighbours in the node, each direction [bytes/s]; a Cluster says it better.
        matrix_efficiency: the part of the peak that very wide models reach (0 to 1).
        wave_outputs: of a matrix product that all multiprocessors make at once; 0: every size is as efficient.
        link_efficiency: the part of a link's bandwidth that tensor-parallel sums reach (0 to 1).

    Raises ValueError for a figure that is no finite number above 0 or an efficiency above 1.

    >>> [round(DeviceModel.preset("A100-80GB").efficiency(outputs), 2) for outputs in (1e6, 1e7, 1e9)]
    [0.46, 0.64, 0.66]
    """

    name: str
    peak_flops: float
    memory_bandwidth: float
    memory_bytes: float
    link_bandwidth: float
    matrix_efficiency: float = 0.64
    wave_outputs: float = 0.0
    link_efficiency: float = 1.0

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        for figure in ("peak_flops", "memory_bandwidth", "memory_bytes", "link_bandwidth"):
            object.__setattr__(self, figure, number(f"{where}: {figure}", getattr(self, figure), positive=True))
        for constant in _FITTED:
            positive = constant != "wave_outputs"
            value = number(f"{where}: {constant}", getattr(self, constant), positive=positive)
            if positive and value > 1:
                fail(
                    f"{where}: {constant}", value, "a number above 0 and at most 1 (a part of the data sheet's figure)"
                )
            object.__setattr__(self, constant, value)

    @classmethod
    def preset(cls, name: str) -> DeviceModel:
        """A device by name, from `PRESETS`; ValueError with the nearest names for any other."""
        by_name = {each.name.lower(): each for each in PRESETS}
        if name.lower() not in by_name:
            near = get_close_matches(name.lower(), by_name, n=1, cutoff=0.3)
            hint = f"; did you mean {by_name[near[0]].name!r}?" if near else ""
            known = ", ".join(each.name for each in PRESETS)
            raise ValueError(
                f"unknown device {name!r}: expected one of {known}, or a DeviceModel(...) of your own{hint}"
            )
        return by_name[name.lower()]

    def efficiency(self, outputs: float) -> float:
        """The part of the peak that a matrix product with so many outputs reaches."""
        return self.matrix_efficiency * outputs / (outputs + self.wave_outputs / 2)

    def matrix_seconds(self, flops: float, *, outputs: float) -> float:
        """Seconds of a matrix product."""
        return flops / (self.peak_flops * self.efficiency(outputs))

    def memory_seconds(self, num_bytes: float) -> float:
        """Seconds of kernels that wait for the memory; `num_bytes` as read and written together."""
        return num_bytes / self.memory_bandwidth

    def fit(
        self,
        measured: Sequence[float],
        predict: Callable[[DeviceModel], Sequence[float]],
        *,
        constants: Sequence[str] = ("matrix_efficiency",),
    ) -> DeviceModel:
        """The same device with the constants that make the sum of squares of log(predicted / measured) least.

        Arguments:
            measured: of each run [s].
            predict: what a device model says of the same runs [s]; called some ten times a constant.
            constants: which to fit, of matrix_efficiency, wave_outputs, link_efficiency; the others keep their value.

        Raises ValueError for another constant, or for fewer runs than constants.

        >>> device = DeviceModel.preset("A100-80GB")
        >>> fitted = device.fit([2.0], lambda model: [model.matrix_seconds(312e12, outputs=1e12)])
        >>> round(fitted.matrix_efficiency, 5)
        0.5
        """
        from scipy.optimize import least_squares  # type: ignore[import-untyped]

        goal = np.array([number(f"measured[{i}]", seconds, positive=True) for i, seconds in enumerate(measured)])
        unknown = [each for each in constants if each not in _FITTED]
        if unknown or not constants or len(set(constants)) < len(constants):
            fail("constants", tuple(constants), f"some of {', '.join(_FITTED)}, each once")
        if len(goal) < len(constants):
            fail("measured", tuple(measured), f"at least {len(constants)} runs for {len(constants)} constants")
        low, high, start, scale = (np.array(column) for column in zip(*(_FITTED[c] for c in constants), strict=True))

        def with_values(values: Sequence[float]) -> DeviceModel:
            return replace(self, **{c: float(v) for c, v in zip(constants, values, strict=True)})  # type: ignore[arg-type]

        def errors(values: Sequence[float]) -> npt.NDArray[np.float64]:
            predicted = np.array(predict(with_values(values)), dtype=np.float64)
            if predicted.shape != goal.shape:
                fail("predict", predicted.tolist(), f"{len(goal)} numbers of seconds, one a measured run")
            logs: npt.NDArray[np.float64] = np.log(predicted / goal)
            return logs

        return with_values(least_squares(errors, start, bounds=(low, high), x_scale=scale).x)


def _sxm(
    name: str, *, multiprocessors: int, teraflops: float, gigabytes_a_second: float, gigabytes: float, nvlink: float
) -> DeviceModel:
    """Data-sheet units to ours; NVLink is sold as both directions together."""
    return DeviceModel(
        name=name,
        peak_flops=teraflops * 1e12,
        memory_bandwidth=gigabytes_a_second * 1e9,
        memory_bytes=gigabytes * 1e9,
        link_bandwidth=nvlink * 1e9 / 2,
        matrix_efficiency=0.664,
        wave_outputs=multiprocessors * TILE,
        link_efficiency=NVLINK_EFFICIENCY,
    )


PRESETS = (
    _sxm("V100-16GB", multiprocessors=80, teraflops=125, gigabytes_a_second=900, gigabytes=16, nvlink=300),
    _sxm("V100-32GB", multiprocessors=80, teraflops=125, gigabytes_a_second=900, gigabytes=32, nvlink=300),
    _sxm("A100-40GB", multiprocessors=108, teraflops=312, gigabytes_a_second=1555, gigabytes=40, nvlink=600),
    _sxm("A100-80GB", multiprocessors=108, teraflops=312, gigabytes_a_second=2039, gigabytes=80, nvlink=600),
    _sxm("H100-80GB", multiprocessors=132, teraflops=989.4, gigabytes_a_second=3350, gigabytes=80, nvlink=900),
    _sxm("H200-141GB", multiprocessors=132, teraflops=989.4, gigabytes_a_second=4800, gigabytes=141, nvlink=900),
)
"""SXM modules, 16-bit matrix products without sparsity. NVIDIA's data sheets: V100 (January 2020), A100 (June 2021),
H100 (2023; half of the figure with sparsity), H200 (2024). The efficiency was fitted to Megatron-LM's Table 1, thus to
the A100 80 GB; for the others it is an assumption, and `fit` takes measurements."""
