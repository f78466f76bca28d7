"""From the arguments of a call to a batch of microbatches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ...partition.model.chain import is_sequential
from ...partition.model.forms import Arguments, tensors_in
from ...partition.model.memory import memory_of, overlap
from ...partition.model.units import MODEL_INPUT
from ..context import Run
from ..settings.given import Given, check_batch, check_like_example
from ..settings.precision import Autocast
from ..stage.shapes import Inferred, Signature
from ..stage.stage import unsent_gradient
from ..stage.tokens import Slice, Tokens
from ..stage.wiring import Mode
from .agreement import Identity, checksum, is_shape_alone
from .batches import Batch, BatchPart, weigh


class BatchReader:
    """Cuts batches for one mode of the pipeline.

    An error of a batch is raised on every rank alike, unless each replica has its own batch: then it is reported to the
    others, which would continue without this one.
    """

    def __init__(
        self,
        run: Run,
        mode: Mode,
        *,
        example: Arguments,  # that the stages were built for
        has_loss: bool,
        # Called once with the first microbatch and its slices, where their values are known.
        slices_agree: Callable[[Given, Sequence[Slice]], None] | None = None,
    ) -> None:
        options, place, schedule, inference = run.options, run.layout.place, mode.schedule, mode.inference
        M, n = schedule.num_microbatches, schedule.num_slices
        self._inference, self._mode = inference, mode
        self._example = example
        self._options = options
        self._slices_agree = slices_agree
        self._num_slices, self._context = n, place.context
        self._keeps = schedule.is_asynchronous
        self._has_loss = has_loss
        self._model_loss = options.model_loss if has_loss else None
        self._compares = place.world.distributed
        self._group = float(place.tensor[1])
        may_differ = place.replica[1] > 1 or options.model_loss is not None
        self._together: Callable[[], AbstractContextManager[None]] = run.guard.together if may_differ else nullcontext
        self._group_size = schedule.group_size
        replica, num_replicas = place.replica
        self._own = range(replica, M, num_replicas)
        # Microbatches of other replicas are assumed to be as large as this one's.
        self._like = [k // num_replicas * n + q for k in range(M) for q in range(n)]
        self._is_own = [k in self._own for k in range(M) for _ in range(n)]
        self._stages, self._is_chain = run.local_stages, options.model is None or is_sequential(options.model)
        # Slots of the model's inputs whose values the stages of this process read; the others may be passed as meta
        # tensors (shapes alone).
        self.reads_inputs = self._inputs_read(inference.example)
        # Whether they read the target's, too.
        self.reads_target = has_loss and schedule.num_stages - 1 in run.local_stages

    def read(self, given: Given, *, step: int, call: Identity) -> Batch:
        """The batch of a call; ValueError for one that does not fit the pipeline."""
        with self._together():
            own, device = self._own, self._options.device
            check_batch(given, len(own))
            has_target = self._has_loss and self._model_loss is None
            for part in given.parts:
                if self._is_chain or part.arguments.form == self._example.form:
                    check_like_example(part.arguments, self._example, has_target=has_target)
            parts = given.on(device, keeps=self._keeps).cut(len(own))
            spans: list[Tokens] = []
            if self._num_slices > 1 or self._context[1] > 1:
                parts, spans = self._slice(parts)
            # Members of a context group have as many tokens of a sample.
            lengths = [span.length for span in spans] if self._num_slices > 1 else [1] * len(parts)
            microbatches = [part.arguments for part in parts]
            sizes = [(each.num_samples, length) for each, length in zip(microbatches, lengths, strict=True)]
            signatures = _signatures(microbatches, range(len(parts)) if given.microbatches or spans else sizes)
            stages_of = {each: self._inference.of(each) for each in dict.fromkeys(signatures)}  # few of them differ
            inferred = [stages_of[each] for each in signatures]
            for part, its in zip(parts, inferred, strict=True) if is_shape_alone((given.inputs, given.targets)) else ():
                self._refuse_shapes_alone(part, its)
            _refuse_one_memory(given, frozenset().union(*(each.written_inputs for each in stages_of.values())))
            self._refuse_float16(stages_of.values())
            wants_grad = any(any(each.wants_grad) for each in stages_of)
            for its in stages_of.values():
                if (unsent := self._mode.unsent(its.specs)) is not None:
                    stage, slot = unsent
                    raise unsent_gradient(slot, f"stage {stage} ({its.stages[stage].name})", of_batch=wants_grad)
            if self._compares:
                programs = "".join(each.digest() for each in stages_of.values()).encode()
                program = float(zlib.crc32(programs))
                call = Identity(*call[:2], checksum(given.inputs), checksum(given.targets), program, self._group)
            targets: Sequence[object] = [part.target for part in parts]
            if self._model_loss is not None and self.reads_target:
                targets = self._model_loss.weigh(microbatches)
            items = [sizes[j][0] * sizes[j][1] for j in self._like]
            weights = weigh(items, self._group_size)
            return Batch(
                parts=[
                    BatchPart(
                        inputs=microbatches[j].tensors if is_own else None,
                        target=targets[j] if is_own else None,
                        inferred=inferred[j],
                        size=items[number],
                        weight=weights[number],
                        span=spans[j] if spans else None,
                    )
                    for number, (is_own, j) in enumerate(zip(self._is_own, self._like, strict=True))
                ],
                has_target=self._has_loss,
                group_size=self._group_size,
                step=step,
                autocast=Autocast.now(device.type),
                replica=(own.start, own.step),
                identity=call,
                num_slices=self._num_slices,
                signatures=signatures,
                wants_grad=wants_grad,
            )

    def _slice(self, microbatches: Sequence[Given]) -> tuple[list[Given], list[Tokens]]:
        from .slicing import cut_in_slices, part_of_group

        index, count = self._context
        if count > 1:
            own = [part_of_group(self._options, each, index=index, count=count) for each in microbatches]
            if self._slices_agree is not None:
                others = range(count)
                all_parts = [part_of_group(self._options, microbatches[0], index=i, count=count) for i in others]
                all_parts[index] = own[0]
                self._slices_agree(microbatches[0], all_parts)
                self._slices_agree = None
            return [part for part, _ in own], [span for _, span in own]
        slices = [cut_in_slices(self._options, each, self._num_slices) for each in microbatches]
        if self._slices_agree is not None:
            self._slices_agree(microbatches[0], slices[0])
            self._slices_agree = None
        return [part for each in slices for part, _ in each], [span for each in slices for _, span in each]

    def _refuse_float16(self, inferred: Iterable[Inferred]) -> None:
        where = next((each.float16 for each in inferred if each.float16 is not None), None)
        if where is not None and self._options.grad_scaler is None:
            raise ValueError(
                f"{where} in torch.float16, where small gradients become 0 without a loss scale: expected "
                f"PipelineModule(..., precision='fp16'), or torch.bfloat16, which needs none"
            )

    def _inputs_read(self, inferred: Inferred) -> frozenset[int]:
        refs = [ref for s in self._stages for ref in inferred.stages[s].inputs]
        return frozenset(ref.slot for ref in refs if ref.producer == MODEL_INPUT)

    def _refuse_shapes_alone(self, given: Given, inferred: Inferred) -> None:
        arguments, loss, read = given.arguments, self._model_loss, self._inputs_read(inferred)
        reads_loss = loss.reads if loss is not None and self.reads_target else lambda name: False
        metas = [(slot, arguments.names[slot]) for slot, x in enumerate(arguments.tensors) if x.is_meta]
        names = [name for slot, name in metas if slot in read or reads_loss(name)]
        if names or (self.reads_target and is_shape_alone(given.target)):
            raise ValueError(
                f"{names[0] if names else 'the target'} is a meta tensor, and a stage of this process reads it: "
                f"expected its values; shapes alone are for ranks whose stages read nothing (pipe.loader(..., "
                f"same_shapes=True) does it right)"
            )


def _signatures(microbatches: Sequence[Arguments], kinds: Sequence[object]) -> list[Signature]:
    """Signatures by microbatch. Those of one kind have the same: of a batch that was cut here, those of one size."""
    known: dict[object, Signature] = {}
    for kind, arguments in zip(kinds, microbatches, strict=True):
        if kind not in known:
            known[kind] = Signature.of(arguments)
    return [known[kind] for kind in kinds]


def _refuse_one_memory(given: Given, written: frozenset[int]) -> None:
    """ValueError where two tensors of a batch are over the same memory, and the model changes the inputs `written`."""
    over: dict[object, list[tuple[str, torch.Tensor, bool]]] = {}  # by memory
    for k, part in enumerate(given.parts if written else ()):
        where = f" of microbatch {k}" if given.microbatches else ""
        inputs, targets = part.arguments, tensors_in(part.target)
        named = [(*pair, slot in written) for slot, pair in enumerate(zip(inputs.names, inputs.tensors, strict=True))]
        for name, x, changes in [*named, *(("the target", x, False) for x in targets)]:
            here = over.setdefault(memory_of(x), [])
            for other, y, other_changes in here:
                if (changes or other_changes) and x.layout == torch.strided and overlap(x, y):
                    raise ValueError(
                        f"{other} and {name}{where} are over the same memory, and the model changes "
                        f"{other if other_changes else name + where} in place (so counts add_(0), too): in one process "
                        f"both would change, but each stage gets a copy. Expected a clone() of one of them, or another "
                        f"operation"
                    )
            here.append((name + where, x, changes))
