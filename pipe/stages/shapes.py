"""Shape inference: what every stage returns, found on fake tensors: nothing is computed and no buffer changes.

Every rank runs it over the whole model, with stand-ins for the parameters that it does not hold.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...comm import TensorSpec
from ...partition.graph.export import BatchSizes
from ...partition.graph.source_line import first_line, users_line
from ...partition.graph.trace import MODEL_INPUT, ValueRef
from .chain import NOT_TENSORS, Chain
from .randomness import Seeder
from .stage import Face

Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def signature(tensors: Sequence[torch.Tensor]) -> Signature:
    """Shapes and types: what the inferred specs depend on."""
    return tuple((tuple(t.shape), t.dtype) for t in tensors)


class Inference:
    """Output specs of all stages for given model inputs, remembered by signature and autocast.

    Arguments:
        faces: the stages in one mode, in order.
        seeder: learns which units draw random numbers.
        sizes: the batch sizes that the stages take.
        device: of the run.
        training: whether a graph is built, so that `requires_grad` of the outputs is known.
    """

    def __init__(
        self, faces: Sequence[Face], seeder: Seeder, *, sizes: BatchSizes, device: torch.device, training: bool
    ) -> None:
        self._faces = faces
        self._seeder = seeder
        self._sizes = sizes
        self._device = device
        self._training = training
        self._known: dict[object, tuple[tuple[TensorSpec, ...], ...]] = {}

    def outputs(self, inputs: Signature) -> tuple[tuple[TensorSpec, ...], ...]:
        """[S] tuples: the specs of each stage's outputs."""
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (inputs, autocast)
        if key not in self._known:
            self._sizes.check(inputs[0][0][0])
            self._known[key] = tuple(
                tuple(TensorSpec.of(output) for output in outputs) for outputs in self.run_fake(inputs)
            )
        return self._known[key]

    def run_fake(self, inputs: Signature) -> list[tuple[torch.Tensor, ...]]:
        """The fake outputs of each stage."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        grad = torch.enable_grad() if self._training else torch.no_grad()
        results: list[tuple[torch.Tensor, ...]] = []
        with mode, grad, self._seeder.watch():
            flat = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in inputs]
            for index, face in enumerate(self._faces):
                if isinstance(face.module, Chain) and index > 0:
                    before = self._faces[index - 1].module
                    assert isinstance(before, Chain)
                    face.module.in_spec = before.out_spec
                    face.inputs = _all_of(index - 1, len(results[-1]))
                arguments = tuple(
                    flat[ref.slot] if ref.producer == MODEL_INPUT else results[ref.producer][ref.slot]
                    for ref in face.inputs
                )
                outputs = self._named_call(index, face, arguments)
                face.num_outputs = len(outputs)
                results.append(outputs)
        return results

    def _named_call(self, index: int, face: Face, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """`_call`, or ValueError with the stage, what it was given and the user's source line."""
        try:
            with _quiet_torch():
                return self._call(face, arguments)
        except Exception as error:
            if isinstance(error, ValueError) and str(error).endswith(NOT_TENSORS):
                raise
            given = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in arguments)
            raise ValueError(
                f"stage {index} cannot take ({given}){users_line(error)}: {first_line(error)}. Expected inputs like "
                f"those that the model was built for (only the batch size may differ), and a forward whose output "
                f"shapes follow from its input shapes, not from values"
            ) from error

    def _call(self, face: Face, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        def leaves() -> tuple[torch.Tensor, ...]:
            return tuple(x.detach().requires_grad_(x.requires_grad) for x in arguments)

        with _stand_ins(face.module, self._device):
            if not face.clone_inputs:
                inputs = leaves()
                versions = [x._version for x in inputs]
                try:
                    outputs = face.run(inputs)
                except RuntimeError as error:
                    if "in-place" not in str(error):  # what autograd says of a leaf that is changed
                        raise
                else:
                    if versions == [x._version for x in inputs]:
                        return outputs
                face.clone_inputs = True
            return face.run(leaves())


def _all_of(producer: int, count: int) -> tuple[ValueRef, ...]:
    return tuple(ValueRef(producer, slot) for slot in range(count))


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Fake tensors log a traceback before they raise: the error says it better."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _stand_ins(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Within: fake tensors stand in for every parameter and buffer (called inside a fake mode)."""
    fakes: dict[int, torch.Tensor] = {}
    restore: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
    recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
    weights = [m._flat_weights for m in recurrent]
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                if value is None:
                    continue
                if id(value) not in fakes:
                    fake = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
                    fakes[id(value)] = (
                        nn.Parameter(fake, requires_grad=value.requires_grad)
                        if isinstance(value, nn.Parameter)
                        else fake
                    )
                restore.append((table, name, value))  # type: ignore[arg-type]
    for table, name, value in restore:
        table[name] = fakes[id(value)]
    for rnn in recurrent:  # it keeps its parameters in a list of its own too
        rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]
    try:
        yield
    finally:
        for table, name, value in restore:
            table[name] = value
        for rnn, flat in zip(recurrent, weights, strict=True):
            rnn._flat_weights = flat
