"""Options and names that PipelineModule does not have, and options that exclude each other.

Exclusions are rows of (condition, text): the text of the first row whose condition holds is raised. `check_options`
runs before there is a layout, `check_reroute` and `check_layout` after.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from functools import wraps
from typing import ParamSpec

from ...comm import Compress, MeshPlace
from ...partition.model.batch_dims import parameter_names
from ...partition.plans.as_text import describe
from ...partition.plans.plan import Plan
from ...schedules import Schedule
from ...schedules.kinds import one_of, option
from ...schedules.transform import schedule_without
from ..shards.shard import DATA_PARALLEL, SYNC, Sharding
from .arguments import AUTO, Asynchronous, GivenOptions, Inputs, Slices, Synchronous
from .given import signature_of
from .model_loss import SHIFTED
from .options import Options

P = ParamSpec("P")
Row = tuple[object, str]

REROUTE = "reroute"

# Options, and what other libraries call them.
_MEANT = {
    "num_microbatches": "microbatches micro_batches n_microbatches gradient_accumulation_steps",
    "num_chunks": "chunks virtual_stages num_virtual_stages",
    "precision": "bf16 fp16 amp autocast dtype mixed_precision",
    "max_grad_norm": "grad_clip clip_grad_norm max_norm gradient_clipping gradient_clip_val",
    "recompute": "checkpoint checkpointing activation_checkpointing gradient_checkpointing",
    "mesh": "num_stages num_ranks world_size pp dp tp data tensor",
    "loss_fn": "loss criterion",
    "lr_scheduler": "scheduler lr_schedule lr_schedulers",
}

_DEVICE, _DTYPE = "PipelineModule(..., device=...)", 'PipelineModule(..., precision="bf16"), or a model of that type'
_MODE = "train() of the model before PipelineModule(model); eval_step and predict switch to evaluation mode"
_MODEL = "the model that you passed, whose modules the stages are made of"
_HOOK = "hooks of the model's own modules, registered before PipelineModule(model)"
INSTEAD = {  # of what a torch.nn.Module has, or a wrapper around one, and a PipelineModule has not
    **dict.fromkeys(("to", "cuda", "cpu", "to_empty"), _DEVICE),
    **dict.fromkeys(("half", "bfloat16", "float", "double", "type"), _DTYPE),
    **dict.fromkeys(("train", "eval", "training"), _MODE),
    **dict.fromkeys(("module", "model", "modules", "named_modules", "children", "get_submodule"), _MODEL),
    **dict.fromkeys(("register_forward_hook", "register_full_backward_hook", "register_forward_pre_hook"), _HOOK),
    "step": "train_step, which updates, or a step() of your own optimizer after forward_backward",
    "optimizer": "optimizers, a list of those of this process's stages",
    "fit": "train_step(*batch) for each batch of a loader",
    "evaluate": "eval_step(*batch) for each batch",
    "no_sync": "several calls of forward_backward, whose gradients add up",
    "zero_grad": "train_step, which does it; after forward_backward the zero_grad() of your model or optimizer",
    "forward": "predict(*inputs) for the output, or train_step(*inputs, target)",
    "backward": "train_step, or forward_backward, which run it",
    "compile": "PipelineModule(..., precision=stagewright.Precision(compile=True))",
    "apply": "the model's own apply() before PipelineModule(model)",
    "requires_grad_": "requires_grad_ of the model's parameters before PipelineModule(model)",
    "resume": "load(folder), which resumes from the checkpoint of save(folder)",
}


def refuse_unknown(names: Collection[str]) -> None:
    """Raises TypeError for an argument that PipelineModule does not have, with the likely one."""
    known = [each.name for each in fields(GivenOptions)]
    for name in names:
        meant = [own for own, others in _MEANT.items() if name in others.split()]
        near = ", or ".join(f"{own}=" for own in meant or difflib.get_close_matches(name, known, n=1))
        raise TypeError(
            f"PipelineModule() got an unexpected keyword argument {name!r}: expected "
            f"{near or 'one of ' + ', '.join(known)}"
        )


def _check(rows: Callable[P, Iterator[Row]]) -> Callable[P, None]:
    @wraps(rows)
    def check(*args: P.args, **kwargs: P.kwargs) -> None:
        for is_so, text in rows(*args, **kwargs):
            if is_so:
                raise ValueError(text)

    return check


@_check
def check_options(options: Options) -> Iterator[Row]:
    """Raises ValueError for options that exclude each other under any layout."""
    mesh, sizes, replan = options.mesh, options.sizes or {}, options.auto.replan
    is_plan = isinstance(options.schedule, Plan)
    such = '"batch", a schedule for each batch; or None, one for all'
    yield replan not in (None, "batch"), f"replan={replan!r}: expected {such}"
    option("data_parallel", mesh.data_parallel, one_of(DATA_PARALLEL))
    option("sync", mesh.sync, SYNC)
    option("on_failure", mesh.on_failure, one_of(("stop", REROUTE)))
    parts = {axis: sizes[axis] for axis in ("context", "expert") if sizes.get(axis, 1) > 1}
    for axis, size in parts.items():
        such = f'expected "{axis}": 1, or on_failure="stop"'
        yield mesh.on_failure == REROUTE, f'mesh={{"{axis}": {size}}} with on_failure="reroute": {such}'
    if not is_plan and options.schedule != AUTO:
        return
    decided = {
        "num_chunks=": options.num_chunks is not None,
        "num_slices=": options.slices.num_slices is not None,
        "cut=": options.cut is not None,
        "a list of stages": options.stages is not None,
        "recompute=": options.recompute not in (None, "none"),
        "data_parallel=": mesh.data_parallel not in (None, "replicate"),
        "Mesh(sync=)": mesh.sync not in (None, 1),
        "Mesh(on_failure=)": mesh.on_failure not in (None, "stop"),
        f"mesh={sizes}": is_plan and options.sizes is not None,
        "Mesh(order=)": mesh.order is not None,
    }
    plan = options.schedule
    what = f"a plan of {describe(plan)}" if isinstance(plan, Plan) else 'schedule="auto"'
    for said, is_given in decided.items():
        yield is_given, f"{said} together with {what}: expected only one of them, since the plan decides it"
    if is_plan:
        return
    members, replicas = sizes.get("tensor", 1), sizes.get("data", 1)
    such = 'which measures whole modules: expected "tensor": 1, or a schedule by name'
    yield members != 1, f'mesh={{"tensor": {members}}} with schedule="auto", {such}'
    for axis, size in parts.items():
        such = f'whose plans have none: expected "{axis}": 1, or a schedule by name'
        yield True, f'mesh={{"{axis}": {size}}} with schedule="auto", {such}'
    such = 'before their lengths are known: expected "data": 1, or no replan='
    shared = f'mesh={{"data": {replicas}}} with replan="batch": replicas would divide microbatches {such}'
    yield replan is not None and replicas != 1, shared
    yield from _flush(options, AUTO)


@_check
def check_reroute(options: Options, schedule: Schedule, *, num_replicas: int, tensor: int) -> Iterator[Row]:
    """Raises ValueError if replicas could not take over work, or a step could not be repeated."""
    said, mesh = 'mesh=Mesh(on_failure="reroute")', options.mesh
    yield num_replicas < 2, f"{said} with data={num_replicas}: no replica could take over. Expected data=2 or more"
    yield (
        tensor > 1 or mesh.data_parallel != "replicate" or mesh.order is not None,
        f"{said} with tensor={tensor}, data_parallel={mesh.data_parallel!r}, order={mesh.order}: expected tensor=1, "
        f'"replicate" and no order, so that each replica of a stage has all of it',
    )
    yield options.compress is not None, f"{said} with compress={options.compress!r}: expected only one of them"
    schedule_without(schedule, range(1, num_replicas))  # says what else it cannot do
    such = 'expected none, or on_failure="stop"'
    moves, own = "a loss scale, which changes with each try", "an optimizer of your own"
    yield options.grad_scaler is not None, f'Mesh(on_failure="reroute") with {moves}: {such}'
    yield options.optimizer is None, f'Mesh(on_failure="reroute") with {own}: {such}'


@_check
def check_layout(options: Options, schedule: Schedule, place: MeshPlace, sharding: Sharding) -> Iterator[Row]:
    """Raises ValueError for options that do not fit the layout."""
    yield from _kind(options, schedule)
    yield from _slices(options, schedule, place)
    yield from _context(options, schedule, place)
    yield from _expert(options, schedule, place)
    yield from _sync(options, schedule, place, sharding)
    yield from _compress(options, schedule, place, sharding)
    if schedule.is_asynchronous:
        yield (
            options.mesh.data_parallel == "fsdp",
            f"data_parallel='fsdp' under the asynchronous schedule {schedule.name!r}: batches are in flight from one "
            f"train_step to the next, and use the weight versions that are kept, so that none could be freed. "
            f"Expected data_parallel='zero1', which divides the optimizer's state, or a flush schedule such as "
            f"schedule='1f1b'",
        )
        yield (
            options.grad_scaler is not None,
            f"grad_scaler= under the asynchronous schedule {schedule.name!r}: batches are in flight with weights of "
            f"several updates, each with a scale of its own. Expected a flush schedule such as schedule='1f1b', or "
            f"torch.autocast to bfloat16, which needs no scale",
        )
    else:
        yield from _flush(options, schedule.name)
    yield (
        sharding.weights and options.optimizer is None,
        "data_parallel='fsdp' without an optimizer: between two batches each rank keeps parts of the weights alone, "
        "which only an optimizer of the pipeline can update. Expected PipelineModule(..., "
        "optimizer=lambda params: torch.optim.AdamW(params)), or data_parallel='replicate'",
    )


def _kind(options: Options, schedule: Schedule) -> Iterator[Row]:
    is_late = schedule.is_asynchronous
    corrected = options.flush_first or options.correction is not None  # has words of its own
    for record, word, such, is_so in (
        (Synchronous, "synchronous", "zb-h1", not is_late),
        (Asynchronous, "asynchronous", "2bw", is_late or corrected),
        (Slices, "sliced", "seq1f1b", schedule.num_slices > 1),
    ):
        yield (
            options.kind is record and not is_so,
            f"stagewright.{record.__name__} around the schedule {schedule.name!r}, which is not {word}: expected "
            f"{record.__name__}({such!r}) or another of its kind, or the schedule alone",
        )


def _slices(options: Options, schedule: Schedule, place: MeshPlace) -> Iterator[Row]:
    n, lengths = schedule.num_slices, options.slices.lengths
    such = "expected a schedule over slices of the sequence, such as stagewright.Slices('seq1f1b', num_slices=4)"
    for name, value in {"lengths": lengths, "dims": options.slices.dims or None}.items():
        yield n == 1 and value is not None, f"{name}={value!r} for a schedule without slices: {such}"
    listed = list(lengths or ())
    yield lengths is not None and len(listed) != n, f"lengths={listed} for {n} slices: expected {n} numbers of tokens"
    if n == 1:
        return
    what = f"schedule {schedule.name!r} over {n} slices of the sequence"
    yield (
        options.model_loss is not None,
        f'loss_fn="model" under {what}: a model shifts its labels within what it is given. Expected '
        f"loss_fn=lambda output, target: ..., with targets that are shifted already",
    )
    such = "expected compile=False, since keys and values are kept in Python"
    yield options.compile is not None, f"compile= under {what}: {such}"
    such = "expected mesh={'tensor': 1}, or a schedule without slices"
    yield max(place.mesh.tensor_sizes) > 1, f"a tensor group under {what}: {such}"


def _context(options: Options, schedule: Schedule, place: MeshPlace) -> Iterator[Row]:
    count, said = place.mesh.context, f'mesh={{"context": {place.mesh.context}}}'
    inputs = options.example_inputs
    dims = inputs.sequence_dims if isinstance(inputs, Inputs) else None
    yield count == 1 and dims is not None, f"sequence_dims={dims!r} without a context group: expected {said[:-2]}2}}"
    if count == 1:
        return
    such = 'expected "context": 1'
    for is_so, why in (
        (schedule.num_slices > 1, f"under {schedule.name!r}, whose slices are parts of the sequence, too"),
        (options.mesh.sync != 1, f"with sync={options.mesh.sync!r}, whose replicas take steps apart"),
        (options.compile is not None, "with compile=: attention gathers keys and values in Python"),
    ):
        yield is_so, f"{said} {why}: {such}"
    signature, loss = signature_of(options.model), options.model_loss
    takes_any = signature is not None and any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    yield (
        loss is not None and loss.shifts and not takes_any and SHIFTED not in parameter_names(signature),
        f'loss_fn="model" with {said}: the model shifts its labels within what it is given, and its forward takes no '
        f"{SHIFTED}=, labels that are shifted already. Expected loss_fn=lambda output, target: ..., with such targets",
    )


def _expert(options: Options, schedule: Schedule, place: MeshPlace) -> Iterator[Row]:
    count, mesh = place.mesh.expert, options.mesh
    for is_so, why in (
        (schedule.num_slices > 1, f"under {schedule.name!r}, over slices of the sequence"),
        (mesh.sync != 1, f"with sync={mesh.sync!r}, whose replicas take steps apart"),
        (bool(options.compress), f"with compress={options.compress!r}"),
        (options.compile is not None, "with compile=: rows of tokens are exchanged in Python"),
    ):
        yield count > 1 and is_so, f'mesh={{"expert": {count}}} {why}: expected "expert": 1, or only one of them'


def _sync(options: Options, schedule: Schedule, place: MeshPlace, sharding: Sharding) -> Iterator[Row]:
    sync = options.mesh.sync
    for is_so, why in (
        (not place.world.distributed, "in one process, where replicas share Parameters: expected processes"),
        (place.mesh.data == 1, "for one replica: expected Mesh(data=D) with D of at least 2"),
        (schedule.is_asynchronous, f"under the asynchronous schedule {schedule.name!r}: expected '1f1b'"),
        (sharding.is_any, "with 'zero1' or 'fsdp': expected data_parallel='replicate'"),
        (options.optimizer is None, "without an optimizer: expected optimizer=, since no gradients are summed"),
        (options.grad_scaler is not None, "with a grad_scaler: expected precision='bf16'"),
    ):
        yield sync != 1 and is_so, f"sync={sync!r} {why}, or sync=1"


def _compress(options: Options, schedule: Schedule, place: MeshPlace, sharding: Sharding) -> Iterator[Row]:
    compress, sync, is_late = options.compress or {}, options.mesh.sync, schedule.is_asynchronous
    late, is_auto, has_data = f"under the asynchronous {schedule.name!r}", AUTO in compress, "data" in compress
    for is_so, why in (
        (compress and max(place.mesh.tensor_sizes) > 1, "with a tensor group: expected Mesh(tensor=1)"),
        (compress and options.grad_scaler is not None, "with a grad_scaler: expected precision='bf16'"),
        (is_auto and is_late, f"{late}: expected a codec"),
        (is_auto and options.optimizer is None, "without an optimizer, whose steps it looks at: expected one"),
        (has_data and max(map(len, schedule.owners)) == 1, "where no stage has replicas: expected Mesh(data=D)"),
        (
            has_data and not place.world.distributed,
            "in one process, where replicas share Parameters: expected no 'data'",
        ),
        (has_data and is_late, f"{late}: expected '1f1b', or no 'data'"),
        (
            has_data and sharding.is_any,
            "with 'zero1' or 'fsdp': expected data_parallel='replicate', or no 'data'",
        ),
        (has_data and sync != 1, f"with sync={sync!r}, which sums no gradients: expected no 'data'"),
    ):
        yield is_so, f"compress={shown(compress)} {why}, or compress=None"


def shown(compress: Compress) -> str:
    if isinstance(compress, str):
        return repr(compress)
    return "{" + ", ".join(f"{link!r}: {codec}" for link, codec in compress.items()) + "}"


def _flush(options: Options, schedule: str) -> Iterator[Row]:
    flush_first, correction = options.flush_first, options.correction
    yield (
        flush_first,
        f"flush_first={flush_first} under the schedule {schedule!r}, which flushes after every batch: expected an "
        f"asynchronous schedule such as '2bw', or flush_first=0",
    )
    yield (
        correction is not None and correction.delay is None,
        f"correction= under the flush schedule {schedule!r}, whose gradients are not late: expected an asynchronous "
        f"schedule such as '2bw', correction=None, or a delay to correct as if there were one: "
        f"stagewright.ErrorFeedback(delay=1)",
    )
