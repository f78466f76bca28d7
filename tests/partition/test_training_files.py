"""Files of measured sums and of devices: what is read from them, and which are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.inside import DeviceModel, MeasuredSum, read_sums

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
