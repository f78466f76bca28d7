"""Steps that others measured (tests/data/measured_steps), each as the plan that it ran, and its seconds as predicted.

Nothing is fitted to the rows. `MACHINES` and the fields of `Step` say what is known of machines and runtimes; rows that
a profile from formulas cannot say are in `read()[1]` with the reason.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from stagewright.partition import Cluster, GivenStage, Plan, evaluate
from support.inside import MEGATRON_CORE, NANOTRON, DeviceModel, Runtime, Transformer, TransformerSource, fit_calibrate

_DATA = Path(__file__).parents[1] / "data" / "measured_steps"


class Machine(NamedTuple):
    """Device, devices that NVLink joins [in jobs: of the 72 of a rack they take 64], GB/s of one over it and out of it,
    in each direction. NVIDIA's data sheets: ConnectX-7 of 400 Gbit/s for each GPU, ConnectX-8 of 800 from B300 on."""

    device: str
    node: int
    nvlink: float
    net: float


MACHINES = {
    "H100": Machine("H100-80GB", 8, 450, 50),
    "H200": Machine("H200-141GB", 8, 450, 50),
    "B200": Machine("B200-180GB", 8, 900, 50),
    "B300": Machine("B300-288GB", 8, 900, 100),
    "GB200": Machine("GB200-186GB", 64, 900, 50),
    "GB300": Machine("GB300-288GB", 64, 900, 100),
}
LLAMA: dict[str, Any] = {"kv_heads": 8, "vocabulary": 128256, "length": 8192, "style": "llama", "head": "untied"}
COMMON: dict[str, Any] = {"attention": "flash", "split": "sequence"}
SHAPES: dict[str, dict[str, Any]] = {
    "GPT-3 175B": {"layers": 96, "hidden": 12288, "heads": 96, "vocabulary": 51200, "length": 2048},
    "Llama 8B": LLAMA | {"layers": 32, "hidden": 4096, "heads": 32, "mlp_ratio": 3.5},
    "Llama 70B": LLAMA | {"layers": 80, "hidden": 8192, "heads": 64, "mlp_ratio": 3.5},
    "Llama 405B": LLAMA | {"layers": 126, "hidden": 16384, "heads": 128, "mlp_ratio": 3.25},
}
_LLAMA2: dict[str, Any] = {"vocabulary": 131072, "length": 4096, "style": "llama", "gradients": "float32"}
SHAPES |= {
    "1.34": _LLAMA2 | {"layers": 16, "hidden": 2048, "heads": 32},
    "3.57": _LLAMA2 | {"layers": 28, "hidden": 3072, "heads": 32, "mlp_ratio": 8192 / 3072},
    "8.86": _LLAMA2 | {"layers": 32, "hidden": 4096, "heads": 32, "mlp_ratio": 3.5, "head": "untied"},
    "80.0": _LLAMA2 | {"layers": 80, "hidden": 8192, "heads": 64, "mlp_ratio": 3.5, "head": "untied"},
}
# A step of NCCL's rings: hwLat of its src/graph/tuning.cc, with protocol LL128 over NVLink and InfiniBand. Over EFA,
# which nanotron's nodes (AWS p5) have, what all-reduces of 32 MB to 8 GB over 2 to 32 of these nodes show, least
# squares of logarithms (crazyguitar/aws-gpu-communication-benchmark at fd167f9, data/nccl_all_reduce.csv).
NVLINK_HOP, NET_HOP, EFA_HOP = "1.9us", "4us", "22us"
PEAK = 989.5e12  # of an H100, which nanotron's MFU is of (nanotron/logging and docs/benchmark: H100, bf16)
PRECISIONS = {"BF16": "16-bit", "FP8": "fp8", "MXFP8": "fp8", "NVFP4": "fp4", "fp8": "fp8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A measured step and the plan that it ran; seconds of a step, sequences of a batch."""

    file: str
    name: str
    machine: str
    model: Transformer
    devices: int
    batch: int
    microbatch_size: int
    tensor: int
    pipeline: int
    chunks: int = 1
    context: int = 1
    is_sharded: bool = True  # the optimizer's state
    seconds: float

    @property
    def replicas(self) -> int:
        return self.devices // (self.tensor * self.pipeline * self.context)

    @property
    def cuts(self) -> list[int]:
        """Ends of the stages among embedding, layers and head. Megatron's hold equally many, with embedding and head
        among them where that divides; nanotron's equally many parameters."""
        layers, number = self.model.layers, self.pipeline * self.chunks
        if self.file == "nanotron":
            parts = [0.0, *(float(self.model.layer_parameters(1)) for _ in range(layers))]
            whole = sum(parts) + self.model.vocabulary * self.model.hidden
            sums = [sum(parts[: at + 1]) for at in range(layers + 1)]
            return [0, *(1 + sum(each < whole * k / number for each in sums) for k in range(1, number)), layers + 2]
        if not (layers + 2) % number and layers % number:
            return [(layers + 2) // number * at for at in range(number + 1)]
        return [0, *(1 + round(layers * at / number) for at in range(1, number)), layers + 2]

    @property
    def runtime(self) -> Runtime:
        """v3.1 of MLPerf attends by FlashAttention-2 and has no weights in 8 bits (training_results_v3.1 at f33f944,
        NVIDIA's Dockerfile and custom.yaml; v4.0's has fp8_params). With MXFP8 they are gathered in 16 bits
        (Megatron-Bridge at 067f987, docs/performance-guide.md: "for per-tensor FP8 scaling recipes")."""
        if self.file == "nanotron":
            return NANOTRON
        if self.name.startswith("v3.1"):
            return MEGATRON_CORE._replace(gathers_bytes=False, keeps_bytes=False, attention=NANOTRON.attention)
        return MEGATRON_CORE._replace(gathers_bytes="MXFP8" not in self.name, scales_blocks="MXFP8" in self.name)

    @property
    def cluster(self) -> Cluster:
        """Megatron's messages overlap under the interleaved schedule alone (`overlap_p2p_comm`), nanotron's never."""
        machine, node = MACHINES[self.machine], min(MACHINES[self.machine].node, self.devices)
        sizes, links = [f"{node}"], [f"nvlink={machine.nvlink}GB/s@{NVLINK_HOP}"]
        if self.devices > node:
            sizes.insert(0, f"{self.devices // node}")
            links.append(f"net={machine.net}GB/s@{EFA_HOP if self.file == 'nanotron' else NET_HOP}")
        found = Cluster.parse(f"{'x'.join(sizes)}:{','.join(links)}")
        sends = "blocking" if self.file == "nanotron" or self.chunks == 1 else "beside"
        return replace(found, levels=tuple(replace(level, sends=sends) for level in found.levels))

    @property
    def device(self) -> DeviceModel:
        device = DeviceModel.preset(MACHINES[self.machine].device)
        is_eager = self.file == "nanotron"  # torch alone, without Transformer Engine's few large kernels
        return replace(device, kernel_seconds=DeviceModel.preset("DGX-A100").kernel_seconds) if is_eager else device


def evaluated(step: Step, device: DeviceModel | None = None) -> Plan:
    device = device or step.device
    source = TransformerSource(
        transformer=step.model, device=device, cluster=step.cluster, context=step.context, runtime=step.runtime
    )
    names = ["embedding", *(f"layer{at}" for at in range(step.model.layers)), "head"]
    wide = step.devices // step.pipeline
    shards = step.replicas if step.is_sharded else 1
    return evaluate(
        source,
        device.reached(step.cluster),
        [
            GivenStage(
                names[a:b],
                range(at % step.pipeline * wide, (at % step.pipeline + 1) * wide),
                step.tensor * step.context,
                optimizer_shards=shards,
            )
            for at, (a, b) in enumerate(pairwise(step.cuts))
        ],
        num_microbatches=step.batch // step.microbatch_size,
        schedule="interleaved" if step.chunks > 1 else "1f1b",
        microbatch_size=step.microbatch_size,
    )


def off(step: Step, device: DeviceModel | None = None) -> float:
    return (evaluated(step, device).simulated_step_time or 0.0) / step.seconds - 1


def calibrated(step: Step, *others: Step) -> DeviceModel:
    """The step's device with what these others of its machine show, as `plan --calibrate` finds it."""
    found = fit_calibrate(lambda each, device: (1 + off(each, device)) * each.seconds, others, step.device)
    return found.constants


def _rows(name: str) -> list[dict[str, str]]:
    with (_DATA / f"{name}_half.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


_SIZES = {
    "gpus": "devices", "gbs": "batch", "mbs": "microbatch_size", "tp": "tensor", "pp": "pipeline", "vp": "chunks",
    "cp": "context",
}  # fmt: skip


def _sizes(row: dict[str, str]) -> dict[str, Any]:
    return {name: int(row[key]) if row[key].isdecimal() else 1 for key, name in _SIZES.items() if key in row}


def _mlperf() -> Iterator[Step | tuple[str, str]]:
    for row in _rows("mlperf_steps"):
        machine = next(each for each in ("GB200", "GB300", "B200", "H200", "H100") if each in row["accelerator"])
        shape = "GPT-3 175B" if row["model"].startswith("GPT-3") else "Llama 405B"
        precision: Any = "fp4" if row["precision"].startswith("fp4") else row["precision"]
        yield Step(
            file="mlperf",
            name=f"{row['round']} {row['system']}",
            machine=machine,
            model=Transformer(**COMMON, **SHAPES[shape], precision=precision),
            seconds=float(row["step_s_median"]),
            **_sizes(row),
        )


def _nanotron() -> Iterator[Step | tuple[str, str]]:
    for row in _rows("nanotron_plans"):
        model = Transformer(**COMMON, **SHAPES[row["model_billion"]])
        sizes = _sizes(row)
        yield Step(
            file="nanotron",
            name=f"{row['model_billion']} on {row['gpus']}",
            machine="H100",
            model=model,
            batch=256,
            is_sharded=row["zero"] == "1",
            seconds=model.flops(batch_size=256) / (float(row["mfu_percent"]) / 100 * PEAK * sizes["devices"]),
            **sizes,
        )


_COLUMNS = ("gpus", "gbs", "mbs", "seq", "fsdp", "tp", "pp", "cp", "vp", "ep")
_MOVED = ("gpus", "precision", "gbs", "mbs", "seq", "fsdp", "tp", "pp", "cp", "vp")  # of the rows of 25.09
_WIDER = "its attention is wider than its hidden size"
_OTHERS = {
    "Qwen3": _WIDER,
    "GPT OSS": _WIDER,
    "DeepSeek": "latent attention, first layers without experts",
    "Kimi": "latent attention, first layers without experts",
    "Nemotron": "state-space layers",
}


def _second(text: str) -> str:
    """Of "64 (0)" what is in brackets."""
    return text.partition("(")[2].rstrip(")") or text


def _bridge() -> Iterator[Step | tuple[str, str]]:
    for row in _rows("megatron_bridge"):
        if row["system"] == "Model":  # a line of columns
            continue
        if row["model"].startswith("System: "):
            row |= {name: _second(row[old]) for name, old in zip(_COLUMNS, _MOVED, strict=True)} | {
                "model": row["system"],
                "system": row["model"].removeprefix("System: "),
                "precision": "MXFP8" if "(" in row["tokens_per_s_gpu"] else "FP8",
            }
            tokens = float(_second(row["tokens_per_s_gpu"]))
            row["step_s"] = str(int(row["gbs"]) * int(row["seq"]) / tokens / int(row["gpus"]))
        sizes = {name: int(row[name]) if row[name].isdecimal() else 1 for name in ("tp", "pp", "cp", "vp")}
        plan = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        machine = row["system"].removeprefix("DGX-")
        name = f"{row['release'].split()[0]} {row['model']} {machine}x{row['gpus']} {row['precision']} {plan}"
        shape = {"LLAMA3_8B": "Llama 8B", "LLAMA3_70B": "Llama 70B", "LLAMA3.1_405B": "Llama 405B"}.get(row["model"])
        if shape is None:
            yield name, next(reason for other, reason in _OTHERS.items() if row["model"].startswith(other))
        elif row["section"].startswith("LoRA"):
            yield name, "most weights are frozen"
        elif row["fsdp"] not in ("0", "") or (shape == "Llama 70B" and sizes["tp"] * sizes["pp"] == 1):
            yield name, "fully sharded, whether the table says so or not: it does not fit otherwise"
        else:
            length, precision = int(row["seq"]), PRECISIONS[row["precision"]]
            options: Any = SHAPES[shape] | {"length": length, "precision": precision}
            yield Step(
                file="bridge",
                name=name,
                machine=machine,
                model=Transformer(**COMMON, **options),
                seconds=float(row["step_s"]),
                **_sizes(row),
            )


@cache
def read() -> tuple[tuple[Step, ...], tuple[tuple[str, str], ...]]:
    """The steps that can be priced, and the names of the others with the reason."""
    every = [*_mlperf(), *_nanotron(), *_bridge()]
    return tuple(each for each in every if isinstance(each, Step)), tuple(
        each for each in every if not isinstance(each, Step)
    )
