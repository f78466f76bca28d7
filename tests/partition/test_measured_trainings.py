"""A device model fitted to trainings that the model itself made, and each of its constants by itself.

Files of measured sums and of devices: what is read from them, and which are refused.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.inside import (
    LAYER_KERNELS,
    DeviceModel,
    Head,
    MeasuredSum,
    TransformerSource,
    fit_device,
    fit_sums,
    read_sums,
    transformer_profile,
)
from support.inside import simulated_simulated as simulated_plan
from support.trainings import SHOWN, MeasuredTraining, estimated, fit_measured

from stagewright.partition import Cluster, Plan, Profile, plan


def training(
    tensor: int, data: int, pipeline: int, size: int, *, hidden: int = 3072, layers: int = 32
) -> MeasuredTraining:
    batch = 16 * data * size
    return MeasuredTraining(
        heads=hidden // 96,
        hidden=hidden,
        layers=layers,
        tensor=tensor,
        pipeline=pipeline,
        chunks=1,
        data=data,
        microbatch_size=size,
        num_microbatches=16,
        batch_size=batch,
        num_devices=tensor * data * pipeline,
        network=12.5e9,
        seconds=1.0,
    )


# Each constant has trainings that need it: the host (8 ways, one sequence), partly used nodes (T = 4), network (T = 8),
# sums alone (T = 8 on one node).
SYNTHETIC = [
    training(1, 64, 1, 4),
    training(2, 16, 2, 2),
    training(4, 32, 1, 2),
    training(8, 8, 1, 1),
    training(8, 8, 1, 8),
    training(8, 32, 1, 2, hidden=6144),
    training(8, 4, 4, 2, hidden=6144),
    training(4, 16, 2, 4, hidden=6144),
    training(1, 16, 8, 2, hidden=1536),
    training(8, 1, 1, 4, hidden=6144),
]


def measured_on(device: DeviceModel, trainings: Sequence[MeasuredTraining]) -> list[MeasuredTraining]:
    return [replace(each, seconds=estimated(each, device)) for each in trainings]


TYPICAL = replace(
    DeviceModel.preset("A100-80GB"),
    matrix_efficiency=0.8,
    wave_outputs=108 * 128 * 256,  # multiprocessors, each with the largest tile of cuBLAS
    link_efficiency=0.758,
    memory_efficiency=0.75,
    kernel_seconds=1e-4,
    hop_seconds=6e-6,
    network_efficiency=0.85,
    partial_efficiency=0.3,
)
OTHER = replace(
    TYPICAL,
    matrix_efficiency=0.7,
    wave_outputs=6e6,
    memory_efficiency=0.9,
    kernel_seconds=1.5e-4,
    hop_seconds=1e-5,
    network_efficiency=0.7,
    partial_efficiency=0.5,
)


@pytest.mark.thorough
def test_constants_are_recovered_from_trainings_that_the_model_made() -> None:
    """One run of ten took half as long again: it moves the others by little."""
    rows = measured_on(OTHER, SYNTHETIC)
    found = fit_device(
        TYPICAL,
        [row.seconds for row in rows],
        lambda model: [estimated(row, model) for row in rows],
        constants=SHOWN,
        noise=0.001,  # the rows have none; more of it pulls constants towards what they were
    )
    for constant in SHOWN:
        assert getattr(found, constant) == pytest.approx(getattr(OTHER, constant), rel=0.05), constant
    rows[2] = replace(rows[2], seconds=1.5 * rows[2].seconds)
    found = fit_measured(TYPICAL, rows)
    off = [estimated(row, found) / row.seconds - 1 for row in rows]
    assert off[2] < -0.25
    assert max(abs(each) for each in off[:2] + off[3:]) < 0.04, [f"{each:+.1%}" for each in off]


def test_a_constant_that_no_training_shows_stays() -> None:
    rows = measured_on(OTHER, [SYNTHETIC[0]])  # one tensor rank: nothing is summed over a link; the device is busy
    found = fit_measured(TYPICAL, rows, constants=("matrix_efficiency", "hop_seconds", "kernel_seconds"))
    assert found.hop_seconds == pytest.approx(TYPICAL.hop_seconds, rel=1e-6)
    assert found.kernel_seconds == pytest.approx(TYPICAL.kernel_seconds, rel=1e-2)
    assert found.matrix_efficiency != pytest.approx(TYPICAL.matrix_efficiency, rel=1e-3)
    with pytest.raises(ValueError, match=r"kernel_seconds: 0\.0: expected a value above 0 to begin with"):
        fit_measured(DeviceModel.preset("A100-80GB"), rows)


def test_seconds_of_the_host_and_of_sums() -> None:
    """On a device that computes and moves in no time, a layer takes its kernels; a sum
    of two has two messages, one of 16 on two nodes 28 within and 2 between them; F and B have two sums each."""
    fast = {"peak_flops": 1e30, "memory_bandwidth": 1e30, "link_bandwidth": 1e30}
    device = DeviceModel(name="fast", memory_bytes=1e12, kernel_seconds=1e-5, **fast)
    model = SYNTHETIC[0].model
    layer = transformer_profile(model, microbatch_size=1, tensor=2, device=device).nodes[1]
    forward, inward, weights = (1e-5 * kernels for kernels in LAYER_KERNELS)
    assert layer.forward_seconds == pytest.approx(forward)
    assert layer.backward_seconds == pytest.approx(inward + weights)
    slow = replace(device, hop_seconds=1.0)
    nodes = Cluster.parse("2x8:nvlink=1e30B/s,net=1e30B/s")
    for tensor, cluster, messages in ((2, None, 2), (8, None, 14), (16, nodes, 30)):
        layer = transformer_profile(model, microbatch_size=1, tensor=tensor, device=slow, cluster=cluster).nodes[1]
        assert layer.forward_seconds == pytest.approx(2.0 * messages)
        assert layer.backward_seconds == pytest.approx(2.0 * messages)
    alone = transformer_profile(model, microbatch_size=1, tensor=1, device=slow).nodes[1]
    assert alone.forward_seconds == pytest.approx(forward)
    copies = DeviceModel(**{**fast, "name": "fast", "memory_bytes": 1e12, "memory_bandwidth": 1e12})
    half = replace(copies, memory_efficiency=0.5)
    assert half.memory_seconds(1e12) == 2 * copies.memory_seconds(1e12) == 2.0


def test_links_and_network_have_efficiencies_of_their_own() -> None:
    """A sum over 16 devices of two nodes: 2 * 7/8 of its bytes over NVLink, 2 * 1/2 of an eighth over the network."""
    fast = DeviceModel(name="fast", peak_flops=1e30, memory_bandwidth=1e30, link_bandwidth=1e30, memory_bytes=1e12)
    model, cluster = SYNTHETIC[0].model, Cluster.parse("2x8:nvlink=100GB/s,net=1GB/s")
    num_bytes = 2 * model.length * model.hidden
    for links, network in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5)):
        device = replace(fast, link_efficiency=links, network_efficiency=network)
        layer = transformer_profile(model, microbatch_size=1, tensor=16, device=device, cluster=cluster).nodes[1]
        seconds = num_bytes * (1.75 / (100e9 * links) + 0.125 / (1e9 * network))
        assert layer.forward_seconds == pytest.approx(2 * seconds)


def test_a_plan_has_the_sum_of_the_tied_embedding_where_its_ends_stand_apart() -> None:
    """As a training's formula says it, whatever links the two stages have; the plan's file keeps it."""
    model = SYNTHETIC[0].model
    device = replace(TYPICAL, partial_efficiency=0.5)
    cluster = Cluster.parse("2x4:nvlink=300GB/s,net=10GB/s@1us")

    def planned(head: Head, pipeline: int, tensor: int) -> Plan:
        shape = replace(model, head=head)
        source = TransformerSource(transformer=shape, device=device, cluster=cluster)
        sizes = {"pipeline_sizes": (pipeline,), "tensor_sizes": (tensor,), "data_sizes": (8 // pipeline // tensor,)}
        return plan(source, cluster, global_batch=16, schedules="1f1b", microbatch_sizes=(1,), **sizes)  # type: ignore[arg-type]

    shared = 2.0 * model.vocabulary * model.hidden
    for pipeline, tensor in ((2, 1), (4, 2), (8, 1)):
        found, apart = planned("tied", pipeline, tensor), planned("untied", pipeline, tensor)
        ((stages, seconds),) = found.costs.tied
        assert stages == (0, pipeline - 1)
        two, eight = shared / tensor / 10e9, shared * 2 * 7 / 8 / 4 / 10e9  # the latter also has four replicas
        assert seconds == pytest.approx(2 * 1e-6 + (two if found.replicas[0] == 1 else eight))
        assert apart.costs.tied == ()
        more = found.simulated_step_time - apart.simulated_step_time
        if found.replicas[0] == 1:
            assert more == pytest.approx(seconds)
        else:  # in place of sums over the replicas of each stage
            assert abs(more) <= seconds
        again = Plan.from_json(found.to_json())
        assert again == found
        assert simulated_plan(again).timeline.batch_seconds == pytest.approx(found.simulated_step_time)
    assert planned("tied", 1, 2).costs.tied == ()
    profile = TransformerSource(transformer=model, device=device).profile(microbatch_size=1)
    assert Profile.from_json(profile.to_json()) == profile
    for wrong in ((("embedding", "tail"), 1.0), (("head", "head"), 1.0), ("head", 1.0)):
        with pytest.raises(
            ValueError, match=r"tied: .* expected pairs of two or more of the profile's nodes, and bytes"
        ):
            replace(profile, tied=(wrong,))
    with pytest.raises(ValueError, match=r"tied=\(0, 99\): expected stages below 8"):
        replace(found, costs=replace(found.costs, tied=(((0, 99), 1.0),)))


def test_sums_measured_by_themselves_give_bandwidth_and_start() -> None:
    device = DeviceModel.preset("A100-80GB")
    sums = [
        MeasuredSum(num_bytes=size, seconds=7e-5 + 1.75 * size / (0.5 * device.link_bandwidth))
        for size in (1e6, 35e6, 68e6, 1e9)
    ]
    found = fit_sums(device, sums, num_devices=8)
    assert (found.link_efficiency, found.hop_seconds) == (pytest.approx(0.5), pytest.approx(5e-6))
    with pytest.raises(ValueError, match="expected seconds that 300 GB/s allow"):
        fit_sums(device, [each._replace(seconds=each.seconds / 2) for each in sums], num_devices=8)
    with pytest.raises(ValueError, match="expected some of at least two sizes"):
        fit_sums(device, sums[:1], num_devices=8)


SUMS = "size(B),count,time(ns)"


def test_a_file_of_sums_with_a_byte_order_mark_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    path.write_text(
        f"\ufeff# measured by others\n{SUMS}\n\n2e6,1,5000\n# the small ones\n1024,1,2000\n", encoding="utf-8"
    )
    small, large = MeasuredSum(num_bytes=1024, seconds=2e-6), MeasuredSum(num_bytes=2e6, seconds=5e-6)
    assert read_sums(path) == (small, large)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r": empty: expected a line of columns \(size\(B\),time\(ns\)\)"),
        (SUMS, r": no measurement: expected a line each below the columns"),
        ("# a\nsize,count\n1,2", r", line 2: no column 'size\(B\)', 'time\(ns\)': expected size\(B\),time\(ns\)"),
        (f"{SUMS}\n1,2", r", line 2: 2: expected 3 cells, one per column: size\(B\),count,time\(ns\)"),
        (f"{SUMS}\n\n1,2,nan", r", line 3: column time\(ns\): 'nan': expected a finite number above 0"),
    ],
)
def test_files_that_are_none_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"sums.csv{message}") as error:
        read_sums(path)
    assert str(error.value).count("sums.csv") == 1


def test_a_device_as_a_file(tmp_path: Path) -> None:
    device = replace(DeviceModel.preset("DGX-A100"), memory_efficiency=0.75, kernel_seconds=1e-4)
    path = tmp_path / "a100.json"
    path.write_text(device.to_json(), encoding="utf-8")
    assert DeviceModel.load(path) == device
    for old, new, message in (
        ('"memory_efficiency": 0.75', '"memory_efficiency": 1.5', r"memory_efficiency: 1.5: expected a number above 0"),
        ('"memory_efficiency": 0.75', '"memory_efficiency": -1', "memory_efficiency: -1: expected a number above 0"),
        ('"memory_efficiency": 0.75', '"memory_efficiency": NaN', r"memory_efficiency: nan: expected a number above 0"),
        ('"memory_efficiency": 0.75', '"memory_efficiency": true', "memory_efficiency: True: expected a finite number"),
        ('"kernel_seconds": 0.0001', '"kernel_seconds": -1', "-1: expected a finite number of at least 0"),
        ('"kernel_seconds": 0.0001', '"kernel_seconds": null', r"kernel_seconds: None: expected a finite number"),
        ('"kernel_seconds"', '"kernel"', r"unknown field kernel: expected only"),
        ('"peak_flops": 312000000000000.0', '"peak_flops": "fast"', r"peak_flops: 'fast': expected a finite number"),
    ):
        path.write_text(device.to_json().replace(old, new), encoding="utf-8")
        assert old in device.to_json()
        with pytest.raises(ValueError, match=f"a100.json.*{message}"):
            DeviceModel.load(path)
