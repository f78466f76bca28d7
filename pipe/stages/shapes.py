"""Shape inference: what every stage takes and returns, found on fake tensors: nothing is computed, no buffer changes.

Every rank runs it over the whole model, with stand-ins for the parameters that it does not hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...comm import TensorSpec
from ...partition.graph.first_run import first_run, run_and_watch, take
from ...partition.graph.source_line import first_line, users_line
from ...partition.graph.units import Cut, OutputError, StageModule, Tensors
from .randomness import Seeder
from .wiring import OutputSpecs

Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]

_RunStage = Callable[[int, Sequence[torch.Tensor], Sequence[Tensors]], Tensors]


def signature(tensors: Sequence[torch.Tensor]) -> Signature:
    """Shapes and types: what the inferred specs depend on."""
    return tuple((tuple(t.shape), t.dtype) for t in tensors)


class InferredStages:
    """The stages of a model in one mode, complete, and what they return for given model inputs.

    Arguments:
        cut: the stages before anything ran.
        example: the model inputs that show how the stages go together.
        seeder: learns which units draw random numbers.
        device: of the run.
        training: whether a graph is built, so that `requires_grad` of the outputs is known.

    Raises ValueError, with the user's source line, for a stage that cannot run on fake tensors.

    Attributes:
        stages: [S].
        output_form: how the flat outputs of the last stage make the model's output.
    """

    def __init__(self, cut: Cut, example: Signature, *, seeder: Seeder, device: torch.device, training: bool) -> None:
        self._seeder = seeder
        self._sizes = cut.batch_sizes
        self._device = device
        self._training = training
        stages: list[StageModule] = []

        def run_first(index: int, inputs: Sequence[torch.Tensor], results: Sequence[Tensors]) -> Tensors:
            before = stages[-1] if stages else None
            linked = cut.pieces[index].link(before, index=index, num_inputs=len(inputs))
            arguments = take(linked.inputs, inputs, results)
            with _explained(index, arguments), _stand_ins(linked.module, device):
                stage, outputs = first_run(cut.pieces[index], linked, arguments)
            stages.append(stage)
            return outputs

        specs = self._specs(example, len(cut.pieces), run_first)
        self._known: dict[object, OutputSpecs] = {self._key(example): specs}
        self.stages = tuple(stages)
        self.output_form = cut.form_of_output(stages[-1])

    def outputs(self, inputs: Signature) -> OutputSpecs:
        """The specs of each stage's outputs, remembered by signature and autocast.

        Raises ValueError for inputs that the stages do not take.
        """
        key = self._key(inputs)
        if key not in self._known:
            self._known[key] = self._specs(inputs, len(self.stages), self._run_again)
        return self._known[key]

    def _key(self, inputs: Signature) -> object:
        kind = self._device.type
        return inputs, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _specs(self, inputs: Signature, num_stages: int, run: _RunStage) -> OutputSpecs:
        """Walk over the stages with fake tensors."""
        self._sizes.check(inputs[0][0][0])
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        grad = torch.enable_grad() if self._training else torch.no_grad()
        results: list[Tensors] = []
        with mode, grad, self._seeder.watch():
            flat = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in inputs]
            for index in range(num_stages):
                results.append(run(index, flat, results))
        return tuple(tuple(map(TensorSpec.of, outputs)) for outputs in results)

    def _run_again(self, index: int, inputs: Sequence[torch.Tensor], results: Sequence[Tensors]) -> Tensors:
        stage = self.stages[index]
        arguments = take(stage.inputs, inputs, results)
        with _explained(index, arguments), _stand_ins(stage.module, self._device):
            value, changes = run_and_watch(stage.module, arguments)
            outputs = stage.flatten(value)
        if changes and not stage.clone_inputs:
            raise ValueError(
                f"stage {index} ({stage.name}) changes an input of {_shapes(arguments)} in place, and did not for the "
                f"inputs that the model was built with: expected a forward that does so always or never (inplace=False)"
            )
        return outputs


@contextmanager
def _explained(index: int, arguments: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within: an error is told as a ValueError with the stage, what it was given and the user's source line."""
    try:
        with _quiet_torch():
            yield
    except OutputError:
        raise
    except Exception as error:
        raise ValueError(
            f"stage {index} cannot take ({_shapes(arguments)}){users_line(error)}: {first_line(error)}. Expected "
            f"inputs like those that the model was built for (only the batch size may differ), and a forward whose "
            f"output shapes follow from its input shapes, not from values"
        ) from error


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors)


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
