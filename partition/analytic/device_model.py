"""A device by what it computes and moves in a second: data-sheet figures, and the parts of them that are reached.

    matrix products   FLOPs / (peak_flops * efficiency(o))
                      efficiency(o) = matrix_efficiency o / (o + wave_outputs / 2)
                      in 8 and 4 bits of fp8_flops and fp4_flops, times fp8_efficiency and fp4_efficiency
    all other layers  bytes read and written / (memory_bandwidth * memory_efficiency)
    the host          kernels * kernel_seconds, where that is longer than what the device takes; action_seconds around
                      each F, B, I and W (`stage_cost`): the schedule's own code, and the start of its messages
    tensor sums       hop_seconds for each of the 2 (n-1) messages of a ring, besides their bytes over what is reached
                      of the links: bandwidth * link_efficiency within a node, as below between nodes
    other nodes       bandwidth * network_efficiency; times partial_efficiency where several, but not all devices of a
                      node sum with other nodes: their rings share network cards (`Level.partial_reduce`)

o is the number of outputs of a product. A device computes them in waves: every multiprocessor makes a tile of them at
once, and the last wave is, on average, half empty. So small microbatches and narrow slices of a tensor cost more a FLOP
than large ones. `fit.py` finds the constants. With those of the presets and the formulas of
`layers.py` Megatron-LM's Table 1 is predicted within 6% (`tests/partition/test_published_trainings.py`); fitted to half
of the trainings that vTrain's authors measured it predicts the other half (docs/concepts/cost-model.md).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from ..cluster import Cluster, Level
from ..strict import check_figures, fail, parse_object, read_text

_JSON_VERSION = 1
TILE = 64 * 128  # outputs that a multiprocessor makes at once, where a product has few: larger tiles need more of them
LARGE_TILE = 128 * 256
FP8_TERAFLOPS_A_WATT = 2.35  # that Blackwell sustains at its power limit, see `PRESETS`
FP4_SPEED = 1.81  # over FP8's, in Transformer Engine, see `PRESETS`
NVLINK_EFFICIENCY = 0.76  # NCCL's sums over 8 A100: 229 of 300 GB/s (vTrain's measurements)


CONSTANTS = (
    "matrix_efficiency",
    "wave_outputs",
    "link_efficiency",
    "memory_efficiency",
    "kernel_seconds",
    "hop_seconds",
    "network_efficiency",
    "partial_efficiency",
)
_SHEET = ("peak_flops", "memory_bandwidth", "memory_bytes", "link_bandwidth")
_POSITIVE = (*_SHEET, "fp8_flops", "fp4_flops", "fp8_efficiency", "fp4_efficiency")
_MAY_BE_ZERO = ("wave_outputs", "kernel_seconds", "hop_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """One kind of device.

    Arguments:
        name: becomes the profile's device.
        peak_flops: of dense 16-bit matrix products [FLOP/s].
        fp8_flops, fp4_flops: of those in 8 and 4 bits; None: it has none [FLOP/s].
        memory_bandwidth: reading and writing together [bytes/s].
        memory_bytes: of the device [bytes].
        link_bandwidth: to its neighbours in the node, each direction [bytes/s]; a Cluster says it better.
        matrix_efficiency: the part of the peak that very wide models reach (0 to 1).
        wave_outputs: of a matrix product that all multiprocessors make at once; 0: every size is as efficient.
        link_efficiency: the part of a link's bandwidth that tensor-parallel sums reach (0 to 1).
        memory_efficiency: the part of the memory's bandwidth that kernels reach which wait for it (0 to 1).
        kernel_seconds: of the host for one kernel: Python, autograd, launch [s].
        hop_seconds: of each of the 2 (n-1) messages, one after the other, of a tensor-parallel sum over n devices,
            in addition to its bytes: start, and the wait for a slower neighbour [s].
        network_efficiency: the part of the network's bandwidth that messages and sums between nodes reach (0 to 1).
        partial_efficiency: of that, the part that sums reach of which a node has several devices, but not all (0 to 1).
        fp8_efficiency, fp4_efficiency: of products in 8 and 4 bits, over that of those in 16.
        action_seconds: of the runtime around each F, B, I and W, besides its kernels and messages [s].

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
    memory_efficiency: float = 1.0
    kernel_seconds: float = 0.0
    hop_seconds: float = 0.0
    network_efficiency: float = 1.0
    partial_efficiency: float = 1.0
    fp8_flops: float | None = None
    fp4_flops: float | None = None
    fp8_efficiency: float = 1.0
    fp4_efficiency: float = 1.0
    action_seconds: float = 0.0

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        for constant in CONSTANTS:
            value = getattr(self, constant)
            if constant not in _MAY_BE_ZERO and not (isinstance(value, int | float) and 0 < value <= 1):
                expected = "a number above 0 and at most 1 (a part of the data sheet's figure)"
                fail(f"{where}: {constant}", value, expected)
        check_figures(self, where, positive=_POSITIVE)
        for narrow in ("fp8_flops", "fp4_flops"):
            if (getattr(self, narrow) or self.peak_flops) < self.peak_flops:
                fail(f"{where}: {narrow}", getattr(self, narrow), f"FLOP/s, at least peak_flops={self.peak_flops:g}")

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

    def matrix_seconds(self, flops: float, *, outputs: float, precision: str = "16-bit") -> float:
        """Seconds of a matrix product."""
        peak, narrow = self.peak_flops, 1.0
        if precision != "16-bit":
            peak, narrow = getattr(self, f"{precision}_flops"), getattr(self, f"{precision}_efficiency")
        if peak is None:
            fail(f"precision on {self.name!r}", precision, f"16-bit, or a device with {precision}_flops")
        return flops / (peak * narrow * self.efficiency(outputs))

    def memory_seconds(self, num_bytes: float) -> float:
        """Seconds of kernels that wait for the memory; `num_bytes` as read and written together."""
        return num_bytes / (self.memory_bandwidth * self.memory_efficiency)

    def reached(self, cluster: Cluster) -> Cluster:
        """The cluster with the bandwidths between nodes that are reached; links inside a node stay as they are.

        >>> device = replace(DeviceModel.preset("A100-80GB"), network_efficiency=0.5)
        >>> device.reached(Cluster.parse("4x8:nvlink=300GB/s,net=12GB/s")).levels[1].bandwidth
        6000000000.0
        """
        node, *network = cluster.levels
        shared = self.partial_efficiency if cluster.rings == "levels" else 1.0  # one flat ring shares no cards
        levels = (_part(each, self.network_efficiency) for each in network)
        network = [replace(each, partial_reduce=each.partial_reduce * shared) for each in levels]
        return replace(cluster, levels=(node, *network))

    def summed(self, cluster: Cluster) -> Cluster:
        """The cluster as tensor-parallel sums see it: with what they reach of the links, and the start of each message.

        >>> device = replace(DeviceModel.preset("A100-80GB"), link_efficiency=0.5, hop_seconds=1e-6)
        >>> device.summed(Cluster.parse("4x8:nvlink=300GB/s,net=12GB/s")).ring_bandwidths
        (150000000000.0, 12000000000.0)
        """
        node, *network = self.reached(cluster).levels
        levels = (self._summing(level) for level in (_part(node, self.link_efficiency), *network))
        return replace(cluster, levels=tuple(levels))

    def _summing(self, level: Level) -> Level:
        step = level.reduce_latency
        return replace(
            level,
            latency=level.latency + self.hop_seconds,
            reduce_latency=None if step is None else step + self.hop_seconds,
        )

    def to_json(self) -> str:
        """One JSON object with a version; `from_json` reads it."""
        return json.dumps({"version": _JSON_VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, *, source: str = "device") -> DeviceModel:
        """Read `to_json`'s form; a constant that is missing keeps its default. ValueError names source and field."""
        record = parse_object(text, source=source)
        record.version(_JSON_VERSION)
        defaults = {each.name: each.default for each in fields(cls)}
        given = {each: record.take(each, "a finite number", default=defaults[each]) for each in CONSTANTS}
        return record.made(cls, given, positive=_POSITIVE)

    @classmethod
    def load(cls, path: str | Path) -> DeviceModel:
        """Read a JSON file."""
        return cls.from_json(read_text(path), source=str(path))


def _part(level: Level, part: float) -> Level:
    reduced = level.reduce_bandwidth and level.reduce_bandwidth * part
    return replace(level, bandwidth=level.bandwidth * part, reduce_bandwidth=reduced)


def _sxm(
    name: str,
    *,
    multiprocessors: int,
    teraflops: float,
    gigabytes_a_second: float,
    gigabytes: float,
    nvlink: float,
    **reached: float,
) -> DeviceModel:
    """Data-sheet units to ours; NVLink is sold as both directions together."""
    usual = {
        "matrix_efficiency": 0.664,
        "wave_outputs": multiprocessors * TILE,
        "link_efficiency": NVLINK_EFFICIENCY,
    }
    return DeviceModel(
        name=name,
        peak_flops=teraflops * 1e12,
        memory_bandwidth=gigabytes_a_second * 1e9,
        memory_bytes=gigabytes * 1e9,
        link_bandwidth=nvlink * 1e9 / 2,
        **usual | reached,
    )


_a100 = partial(_sxm, multiprocessors=108, teraflops=312, nvlink=600)
_hopper = partial(
    _sxm,
    multiprocessors=132,
    teraflops=989.4,
    nvlink=900,
    matrix_efficiency=0.7,
    wave_outputs=132 * LARGE_TILE,
    link_efficiency=0.81,
    memory_efficiency=0.81,
    network_efficiency=0.92,
    fp8_flops=2 * 989.4e12,
)


def _blackwell(
    name: str,
    *,
    multiprocessors: int,
    teraflops: float,
    fp4_teraflops: float,
    gigabytes: float,
    matrix_efficiency: float,
    watts: float,
) -> DeviceModel:
    """`watts`: its power limit."""
    sustained = FP8_TERAFLOPS_A_WATT * watts / matrix_efficiency
    return _sxm(
        name,
        multiprocessors=multiprocessors,
        teraflops=teraflops,
        gigabytes_a_second=8000,
        gigabytes=gigabytes,
        nvlink=1800,
        matrix_efficiency=matrix_efficiency,
        wave_outputs=multiprocessors * LARGE_TILE,
        link_efficiency=0.75,
        memory_efficiency=0.67,
        network_efficiency=0.92,
        fp8_flops=2 * teraflops * 1e12,
        fp8_efficiency=round(sustained / (2 * teraflops), 3),
        fp4_flops=fp4_teraflops * 1e12,
        fp4_efficiency=round(FP4_SPEED * sustained / fp4_teraflops, 3),
    )


_OF_EIGHT: dict[str, Any] = {"multiprocessors": 148, "teraflops": 2250, "matrix_efficiency": 0.634, "watts": 1000}
_OF_A_RACK: dict[str, Any] = {"multiprocessors": 152, "teraflops": 2500}
PRESETS = (
    _sxm("V100-16GB", multiprocessors=80, teraflops=125, gigabytes_a_second=900, gigabytes=16, nvlink=300),
    _sxm("V100-32GB", multiprocessors=80, teraflops=125, gigabytes_a_second=900, gigabytes=32, nvlink=300),
    _a100("A100-40GB", gigabytes_a_second=1555, gigabytes=40),
    _a100("A100-80GB", gigabytes_a_second=2039, gigabytes=80),
    _hopper("H100-80GB", gigabytes_a_second=3350, gigabytes=80, fp8_efficiency=0.883),
    _hopper("H200-141GB", gigabytes_a_second=4800, gigabytes=141, fp8_efficiency=0.914),
    _blackwell("B200-180GB", gigabytes=180, fp4_teraflops=9000, **_OF_EIGHT),
    _blackwell("B300-288GB", gigabytes=288, fp4_teraflops=13500, **_OF_EIGHT),
    _blackwell("GB200-186GB", gigabytes=186, fp4_teraflops=10000, matrix_efficiency=0.594, watts=1200, **_OF_A_RACK),
    _blackwell("GB300-288GB", gigabytes=288, fp4_teraflops=15000, matrix_efficiency=0.693, watts=1400, **_OF_A_RACK),
    _a100(
        "DGX-A100",
        gigabytes_a_second=2039,
        gigabytes=80,
        matrix_efficiency=0.841,
        wave_outputs=6.68e6,
        link_efficiency=0.758,
        memory_efficiency=0.727,
        kernel_seconds=4e-5,
        hop_seconds=6.44e-6,
        network_efficiency=0.83,
        partial_efficiency=0.291,
    ),
)
"""SXM modules, matrix products without sparsity. NVIDIA's data sheets: V100 (January 2020), A100 (June 2021), H100
(2023; half of the figure with sparsity), H200 (2024), DGX B200 and B300 (2025, over eight), GB200 and GB300 NVL72
(2025, over 72); those of 2025 as copies of others have them.

Up to A100 the efficiency is what Megatron-LM's Table 1 shows of the A100 80 GB; for the V100 that is an assumption.
From H100 on it is what others measured of products alone (Bekman, github.com/stas00/ml-engineering at 744d01e1, compute
and network):

    matrix_efficiency     what a whole node sustains at its power limit, 699 of 989 TFLOP/s on an H200 and 1426 of 2250
                          on a B200, taken for H100 and B300, too; for the GB200 the best that it reaches for a moment,
                          1822 of 2500, times what the B200 keeps of that; the GB300 in proportion to its 1400 W
    fp8_efficiency        of Hopper the best of 8 bits over the best of 16, each a part of its data sheet's; Blackwell
                          sustains 2.35 TFLOP/s for each W of its limit (1000, GB200 1200, GB300 1400): 2820 on a GB200,
                          the middle of three published tables (the others: 2695, 2907), and 3309 on a GB300, products
                          of 16384 after 10,000 others (Azure's AI-benchmarking-guide, of the fork egmsft
                          ND_GB200_v6_results.md at 0682f76 and ND_GB300_v6_results.md at 18e80a2)
    fp4_efficiency        1.81 times the 8-bit figure, 5093 over 2814 TFLOP/s: Transformer Engine's products of a layer,
                          cast before, on a B300 (docs/examples/gemm_profiling at d0067d0da). Of size 16384 a GB200
                          reaches 5604, a GB300 8640 (Azure)
    link_efficiency       rings of NCCL over eight: 362 of 450 GB/s on H200, 677 of 900 on B200
    network_efficiency    what NCCL counts of a ring's bandwidth with protocol LL128 (src/graph/tuning.cc)
    wave_outputs          tiles of 128 x 256, the most efficient ones (arXiv 2401.14489)
    memory_efficiency     halfway between norms by cuDNN (NVIDIA's cudnn-frontend at 3929da2, benchmark/norms: Llama's,
                          77% of an H200, 72% of a GB200) and casts: the time of those products with them, less cast
                          before (86% of an H200, 62% of a B300). A copy reaches 90%

DGX-A100, A100 80 GB in nodes of eight with four network cards, is a device to begin a fit of others' measurements with.
Of its constants

    link_efficiency       is fitted to NCCL's sums over the eight A100 of a node, by themselves (`fit_sums`)
    kernel_seconds        is what vTrain's trainings within one node show, small models that wait for the host: with
                          4e-5 they are 8.9% off. Of the 55 on several nodes one alone waits for it (hidden=3072, T=8,
                          microbatches of two), as if for 1.1e-4, which doubles all those within one node
    the other six         are fitted to those 55 (`fit_device`), all of them: what halves of them say of the others is
                          held out in `tests/partition/test_published_trainings.py`
"""
