"""Files of measured trainings and of devices: what is read from them, and which are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.inside import DeviceModel, read_trainings

HEADER = (
    "Parameters (billion),# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
    "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"
)
ALONE = "3.6,64,512,8,3072,32,30,2048,1,64,1,3566.5"
STAGES = "175,512,1536,6,12288,96,96,2048,8,2,32,62636.8"
LINE = "3.6,64,512,8,3072,32,30,2048,2,32,1,3975.2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"empty: expected a line of columns"),
        (HEADER, r"no measurement: expected a line each"),
        (HEADER.replace("micro batch", "batch") + "\n" + LINE, r"no column 'micro batch': expected # GPUs"),
        (f"{HEADER}\n{LINE},1", r"line 2: 13: expected 12 cells, one a column"),
        (f"{HEADER}\n\n{LINE.replace('3975.2', 'nan')}", r"line 3: iteration time \(ms\): 'nan': expected a finite"),
        (f"{HEADER}\n{LINE.replace(',2,32,1,', ',2,32.0,1,')}", r"data parallelism: '32.0': expected a whole number"),
        (f"{HEADER}\n{LINE.replace(',512,8,', ',512,7,')}", r"global batch: 512: expected a multiple of 224"),
        (f"{HEADER}\n{LINE.replace(',64,512,', ',60,512,')}", r"num_devices: 60: expected 2 x 1 x 32 of them"),
        (f"{HEADER}\n{LINE.replace(',2,32,1,', ',1,32,2,').replace(',30,', ',31,')}", r"layers: 31: expected equally"),
    ],
)
def test_files_that_are_none_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"rows.csv.*{message}") as error:
        read_trainings(path, network=12.5e9)
    assert str(error.value).count("rows.csv") == 1


def test_a_file_of_trainings(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{HEADER}\n{ALONE}\n{STAGES}\n", encoding="utf-8")
    first, last = read_trainings(path, network=12.5e9)
    assert (first.seconds, first.num_microbatches, first.cluster.num_devices) == (3.5665, 1, 64)
    assert (last.hidden, last.pipeline, last.num_microbatches, last.seconds) == (12288, 32, 128, 62.6368)
    assert first.cluster.levels[1].bandwidth == 12.5e9


def test_a_file_with_a_byte_order_mark_and_the_number_of_gpus_in_front(tmp_path: Path) -> None:
    """vTrain's single-node file: its line of columns begins as a comment does."""
    columns, cells = HEADER.split(",")[1:], LINE.split(",")[1:]
    text = "\n".join(["# measured by others", ",".join(columns), "# a comment", ",".join(cells)])
    path = tmp_path / "single.csv"
    path.write_text("\ufeff" + text.replace("# measured by others\n", ""), encoding="utf-8")
    (found,) = read_trainings(path, network=12.5e9)
    assert (found.num_devices, found.tensor, found.seconds) == (64, 2, pytest.approx(3.9752))
    path.write_text(text, encoding="utf-8")
    assert read_trainings(path, network=12.5e9) == (found,)
    path.write_text(text.replace("# layers", "layers"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"single.csv: no column '# layers': expected"):
        read_trainings(path, network=12.5e9)


def test_a_device_as_a_file(tmp_path: Path) -> None:
    device = replace(DeviceModel.preset("DGX-A100"), memory_efficiency=0.75, kernel_seconds=1e-4)
    path = tmp_path / "a100.json"
    path.write_text(device.to_json(), encoding="utf-8")
    assert DeviceModel.load(path) == device
    for old, new, message in (
        ('"memory_efficiency": 0.75', '"memory_efficiency": 1.5', r"memory_efficiency: 1.5: expected a number above 0"),
        (
            '"memory_efficiency": 0.75',
            '"memory_efficiency": -1',
            r"memory_efficiency: -1: expected a number above 0 and",
        ),
        ('"memory_efficiency": 0.75', '"memory_efficiency": NaN', r"memory_efficiency: nan: expected a number above 0"),
        (
            '"memory_efficiency": 0.75',
            '"memory_efficiency": true',
            r"memory_efficiency: True: expected a finite number",
        ),
        (
            '"kernel_seconds": 0.0001',
            '"kernel_seconds": -1',
            r"kernel_seconds: -1: expected a finite number of at least 0",
        ),
        ('"kernel_seconds": 0.0001', '"kernel_seconds": null', r"kernel_seconds: None: expected a finite number"),
        ('"kernel_seconds"', '"kernel"', r"unknown field kernel: expected only"),
        ('"peak_flops": 312000000000000.0', '"peak_flops": "fast"', r"peak_flops: 'fast': expected a finite number"),
    ):
        path.write_text(device.to_json().replace(old, new), encoding="utf-8")
        assert old in device.to_json()
        with pytest.raises(ValueError, match=f"a100.json.*{message}"):
            DeviceModel.load(path)
