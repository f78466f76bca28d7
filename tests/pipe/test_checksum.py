"""Checksums of batches that ranks pass to a step: equal for equal ones, others for another order or sample."""

from __future__ import annotations

import pytest
import torch
from support.inside import UNKNOWN, checksum

BATCHES = {
    "tokens": torch.arange(32 * 512).reshape(32, 512) % 97,
    "images": torch.linspace(0, 1, 16 * 3 * 40 * 40).reshape(16, 3, 40, 40),
    "channels last": torch.linspace(0, 1, 16 * 3 * 40 * 40).reshape(16, 40, 40, 3).permute(0, 3, 1, 2),
    "labels": torch.arange(32),
    "masks": torch.arange(64) % 3 == 0,
    "half": torch.linspace(-1, 1, 50).to(torch.bfloat16),
    "complex": torch.complex(torch.arange(9.0), -torch.arange(9.0)),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_another_order_of_the_samples_is_another_number(batch: torch.Tensor) -> None:
    number = checksum(batch)
    assert number == checksum(batch.clone()) == float(int(number)) < 2**32
    assert checksum(batch.roll(1, 0)) != number
    assert checksum((batch, batch)) != number


def test_a_column_that_is_equal_everywhere_does_not_hide_the_others() -> None:
    tokens = torch.randint(0, 9, (8192, 16), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 1  # every sample begins alike
    assert checksum(tokens) != checksum(tokens[torch.randperm(8192, generator=torch.Generator().manual_seed(1))])


def test_shapes_and_types_count_and_what_is_no_tensor_does_not() -> None:
    x = torch.zeros(2, 3)
    assert len({checksum(x), checksum(x.T), checksum(x.int()), checksum(torch.zeros(0)), checksum(())}) == 5
    assert checksum((x, "mean")) == checksum((x, "sum")) == checksum(x)
    assert checksum(torch.tensor(3.0)) != checksum(torch.tensor(4.0))
    assert checksum(torch.tensor(3.0).expand(1)) == checksum(torch.tensor([3.0]))  # one element, of stride 0


def test_shapes_alone_are_not_compared() -> None:
    assert checksum((torch.zeros(2), torch.zeros(2, device="meta"))) == UNKNOWN


def test_sparse_and_nested_tensors_count_by_their_shape() -> None:
    sparse = torch.eye(3).to_sparse()
    assert checksum(sparse) == checksum(2 * sparse) != checksum(torch.eye(4).to_sparse())
