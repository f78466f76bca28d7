"""From a model, a layout and a batch to a pipeline, in numbered steps, each of which returns complete parts."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from ..comm import HostClocks, machine
from ..partition.deferred.filling import fill
from ..partition.model.forms import Arguments
from ..partition.model.recorded.words import modules
from ..partition.profiler.clock import clock_for
from ..schedules import Schedule
from ..schedules.messages import Sharing
from ..schedules.program import RankProgram
from ..schedules.timing.records import as_it_ran
from .batch.agreement import SamePrograms, agreed, check_agreement, describe
from .batch.batches import Batch
from .checkpoint.state import State
from .context import Run
from .guards.presence import OutputSpecs
from .run.engine import Engine
from .run.evaluation import Evaluation, warn_of_two_axes
from .run.ranks import RankLinks, Ranks, links_of
from .run.training import Training
from .run.worker import TrainingWorker
from .settings.arguments import AUTO
from .settings.given import Given
from .shards.cutting import styles_of_plan
from .shards.tensor_option import TensorStyles, peers_in_parts, read_tensor_parallel
from .stage.build import CutModel, cut_model, look_at_loss
from .stage.members import MemberShards, divide_over_group, refuse_divided
from .stage.ownership import Ownership
from .stage.shapes import Signature
from .stage.tokens import Slice
from .stage.unchanged import Unchanged
from .stage.wiring import Mode, message_bytes
from .trace.measurement import Measurement
from .update.flush import FlushUpdate, batch_programs, flush_programs
from .update.interface import Update
from .update.local import LocalUpdate
from .update.stream import StreamUpdate, stream_course
from .verify.parts import Regions, UnitsBeside
from .verify.plain import PlainModule, copy_to_verify
from .verify.verification import Verifier

if TYPE_CHECKING:
    from .run.fills import FillWork

_log = logging.getLogger("stagewright")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One process's pipeline: the schedule that it runs, its stages, and the parts that train, evaluate and measure."""

    schedule: Schedule
    parts: CutModel
    engine: Engine
    training: Training
    evaluation: Evaluation
    state: State
    measurement: Measurement
    verifier: Verifier
    again: Callable[[Run], Pipeline]  # for another membership: the same stages, optimizers and step
    message_bytes: Callable[[], tuple[list[float], list[float]]]
    fills: Callable[[], Callable[..., FillWork]]  # runs background work

    def cut_in_words(self) -> str:
        layout = self.state.run.layout
        rules = [*enumerate(layout.recompute.stages), *layout.recompute.modules.items()]
        recompute = [(where, "a policy" if callable(rule) else rule) for where, rule in rules]
        return repr((self.parts.names, recompute, layout.sharding, layout.place.mesh.tensor))


def build(run: Run, first: Callable[[], Arguments]) -> Pipeline:
    """The pipeline for batches whose microbatches are like those that `first` returns. Collective over the processes.

    Raises ValueError, on every rank alike, for what does not fit together; the user's model is then restored.
    """
    # 1. A microbatch that all processes know, and its slices
    layout, options, guard = run.layout, run.options, run.guard
    num_slices = layout.schedule.num_slices

    member, members = layout.place.context

    def read() -> tuple[Given, list[Slice]]:
        whole = Given(arguments=first())
        if num_slices == members == 1:
            return whole, []
        from .batch.slicing import cut_in_slices, part_of_group

        if members > 1:
            return whole, [part_of_group(options, whole, index=member, count=members)]
        return whole, cut_in_slices(options, whole, num_slices)

    whole, slices = agreed(read, run.collectives, guard, what="the first batch")
    example = (slices[0][0] if slices else whole).arguments

    # 2. A copy to compare with, before the model is divided
    refuse_divided(run.root)
    plain = copy_to_verify(run) if run.verifies else None

    # 3. to 6. The model divided, cut, and in its place
    placed = _place(run, example, whole, slices)

    # 7. to 11. Connected, with all that runs it, and additions
    return _connected(run, placed, example, plain=plain)


def _connected(
    run: Run, placed: _Placed, example: Arguments, *, plain: PlainModule | None, before: State | None = None
) -> Pipeline:
    """Steps 7 to 11, with the optimizers of an earlier membership, if any. Collective over the processes."""
    options, guard = run.options, run.guard

    # 7. Programs, and the links that they need
    programs, make_update = _update(run, placed)
    forwards = placed.evaluate or placed.train.forwards(placed.train.schedule.num_microbatches)
    sharing = Sharing(loss=run.has_loss, receives_ahead=forwards.receives_ahead)
    evaluation_programs = batch_programs(forwards.schedule, sharing)
    links = RankLinks(run, links_of([*programs, *evaluation_programs]), peers_in_parts=placed.peers_in_parts)

    # 8. The update
    update = make_update(placed.ownership, links.recorders, () if before is None else before.update.stages)
    clocks = HostClocks(run.collectives, now=clock_for(options.device).now, machine=machine())
    guard.on_failure(clocks.abort)

    # 9. and 10. What trains, evaluates, measures, saves and verifies
    if before is None:
        _tell_of_two_axes(run, placed, Signature.of(example))
    ranks = Ranks(links, update)
    beside = UnitsBeside(run, ranks.parts, ranks.stages) if run.by_unit and run.verifies else plain
    pipeline = _assembled(run, placed, ranks, example=example, clocks=clocks, plain=beside, before=before)

    # 11. Additions
    for each in run.added:
        each.connected(pipeline, links)
    return pipeline


def _budgets(train: Mode, ranks: Ranks) -> Callable[[Batch], None] | None:
    if float not in map(type, ranks.update.run.layout.recompute.stages):
        return None
    from .run.budget import Budgets  # with the profiler and the solver, which other runs need not load

    return Budgets(train, ranks).decide


def _fills(run: Run, engine: Engine) -> Callable[..., FillWork]:
    from .run.fills import fills  # which other runs need not load

    return fills(run, engine)


def _assembled(
    run: Run,
    placed: _Placed,
    ranks: Ranks,
    *,
    example: Arguments,
    clocks: HostClocks,
    plain: PlainModule | UnitsBeside | None,
    before: State | None,
) -> Pipeline:
    update, train = ranks.update, placed.train
    inferred = train.inference.of(Signature.of(example))

    # 9. Engines of this process's ranks, and what runs them
    engine = ranks.engine(TrainingWorker, train, update.ranks)
    reader = ranks.reader(train, has_loss=run.has_loss, like=example)
    training = Training(engine, update, reader, unchanged=placed.unchanged, clocks=clocks)
    if (decide := _budgets(train, ranks)) is not None:
        training.on_batch.append(decide)
    evaluation = Evaluation(ranks, placed.evaluate, like=example, training=training)
    if isinstance(update, LocalUpdate):
        training.before_step = partial(update.look_at_neighbour, partial(evaluation.step, at_rest=False))

    # 10. What is measured, saved and verified
    measurement = Measurement(
        run,
        list(update.recorders.values()),
        schedule=update.schedule,
        assemble=lambda records: update.timeline(records, schedule=as_it_ran(update.schedule, records)),
        drain=training.drain,
        one_way_seconds=partial(ranks.links.latency, inferred.specs[0]),
        clocks=clocks,
    )
    state = State(update=update, training=training)
    if before is not None:
        training.restart(before.training.num_steps)
        state = replace(state, own_checkpoints=before.own_checkpoints)

    def again(anew: Run) -> Pipeline:
        anew.seeder = run.seeder  # which the cut stages enter
        goes_on = anew.local_stages == run.local_stages  # else it was alone, and joins
        made = _placed_again(anew, placed, example, goes_on=goes_on)
        return _connected(anew, made, example, plain=None, before=state if goes_on else None)

    return Pipeline(
        schedule=update.schedule,
        parts=update.ownership.model,
        engine=engine,
        training=training,
        evaluation=evaluation,
        state=state,
        measurement=measurement,
        verifier=Verifier(state, plain, regions=placed.regions, evaluation=evaluation),
        again=again,
        fills=cache(partial(_fills, run, engine)),
        message_bytes=lambda: message_bytes(train, inferred, engine.ranks[0].transport.layouts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """This process's stages; `regions` are for `Verifier`. `evaluate` is None until the first evaluation."""

    train: Mode
    evaluate: Mode | None
    ownership: Ownership
    unchanged: Unchanged
    peers_in_parts: frozenset[int]
    regions: Regions | None


def _place(run: Run, example: Arguments, whole: Given, slices: Sequence[Slice]) -> _Placed:
    """Steps 3 to 6: stages with the weights of their first owners. Collective over the processes."""
    layout, options, root = run.layout, run.options, run.root
    together = run.collectives, run.guard
    microbatch = Signature.of(example)
    is_uneven = layout.place.is_uneven()
    by_name = not run.collectives.alone and SamePrograms(*together, "")(
        lambda: modules(root), lambda: sorted(modules(root))
    )  # a ModuleDict made from a set has another order in each process
    same = None if run.collectives.alone else SamePrograms(*together, str(microbatch))
    cut = partial(cut_model, run, example, same)

    # 3. Outputs of the model that is whole, where members of a tensor group send parts of them, or groups differ
    peers = peers_in_parts(options.mesh.sends, layout.place, run.collectives)
    undivided = agreed(
        lambda: _whole_outputs(run, cut, microbatch) if peers or is_uneven else (None, None),
        *together,
        what="cutting the model",
    )
    if same is not None:
        same.alike += f" of {layout.place.tensor[1]}"  # a divided model may be another one in a group of another size

    with ExitStack() as stack:
        # 4. and 5. Divided over the tensor group, cut, wired, the same on all ranks
        group, regions, parts, train, evaluate, tensor = agreed(
            partial(_divided_and_cut, run, stack, cut, undivided, example), *together, what="cutting the model"
        )
        _agree(run, parts, microbatch, tensor=tensor)
        look_at_loss(run, parts.train, whole.target)
        if any(parts.train.joined) and run.verifies:
            run.verifies = False
            _log.info("no batch is verified: a copy would call the model's own collectives in one process alone")
        if options.compress is not None:
            from .compression.added import Compression

            run.added.append(Compression(run, train, train.inference.of(microbatch)))

        # 6. This process's stages: others are freed, replicas get the weights of first owners
        local = run.local_stages
        ownership = Ownership(run, parts, group=group, by_name=by_name)
        fill(parts.root, ownership.held(), device=options.device, seed=options.seed)
        unchanged = Unchanged(run, parts)
        for stage in local:
            for mode in parts.prepared:
                mode.stages[stage].module.to(options.device)
        ownership.spread_from_first_owners(run.collectives)
        if slices:
            from .batch.slicing import try_parts

            try_parts(run, parts.train, whole, slices)
    if same is not None:
        same.settled()
    return _Placed(
        train=train,
        evaluate=evaluate,
        ownership=ownership,
        unchanged=unchanged,
        peers_in_parts=peers,
        regions=regions,
    )


def _placed_again(run: Run, placed: _Placed, example: Arguments, *, goes_on: bool) -> _Placed:
    """The same stages under another schedule of the same processes; in one that was alone, some of them."""
    schedule, microbatch = run.layout.schedule, Signature.of(example)
    if goes_on:
        placed.ownership.follow(run)
    else:
        ownership = Ownership(run, placed.ownership.model, group=placed.ownership.group)
        placed = replace(placed, ownership=ownership, unchanged=Unchanged(run, ownership.model))
    return replace(
        placed,
        train=Mode(schedule, placed.train.inference, microbatch),
        evaluate=Mode(schedule.forward_only(), placed.ownership.model.evaluation(), microbatch),
    )


def _divided_and_cut(
    run: Run, stack: ExitStack, cut: Callable[[], CutModel], undivided: Sequence[OutputSpecs | None], example: Arguments
) -> tuple[MemberShards, Regions | None, CutModel, Mode, Mode | None, str]:
    """The divided model, how it trains and evaluates, and a text of who divides what, for `_agree`.

    `undivided` are its outputs in both modes before. An error within `stack` restores the model.
    """
    # 4. The model divided over the tensor group
    layout, root, microbatch, mesh = run.layout, run.root, Signature.of(example), run.layout.place.mesh
    styles = run.options.mesh.tensor_parallel
    if styles is None and layout.plan is not None:  # it may split tensors without saying how
        styles = AUTO
    tensor = read_tensor_parallel(styles, root, count=layout.place.tensor[1], example=example)
    tensor = styles_of_plan(tensor, layout.plan, root)
    speaker = mesh.members(mesh.tensor_sizes.index(tensor.count))[0]
    experts = TensorStyles(count=1, styles={})
    if mesh.expert > 1:
        from .shards.found_experts import read_experts, without_experts  # which other runs need not load

        read = partial(read_experts, root, count=mesh.expert, example=example)
        experts = agreed(read, run.collectives, run.guard, what="dividing the experts")
        tensor = without_experts(tensor, experts)
    regions = Regions(root, tensor.styles) if run.verifies and tensor.styles else None
    divided = [(axis, own) for axis, own in (("tensor", tensor), ("expert", experts)) if own.styles]
    for axis, own in divided if layout.place.world.rank == speaker else ():
        _log.info("over %d %s ranks:\n%s", own.count, axis, own.table(root))
    group = stack.enter_context(divide_over_group(run, tensor.styles, experts.styles).undone_on_error())

    # 5. Cut, wired
    parts, schedule = cut(), layout.schedule
    train = Mode(schedule, parts.train, microbatch, undivided=undivided[0])
    evaluate = None
    for inference in parts.prepared[1:]:
        evaluate = Mode(schedule.forward_only(), inference, microbatch, undivided=undivided[1])
    how = " and ".join(str(own) for _, own in divided) or "none"
    if layout.place.is_uneven():
        _refuse_divided_ties(run, parts, group)
        modes = zip(filter(None, (train, evaluate)), undivided, strict=True)
        between = "; ".join(_uneven_layouts(run, mode, microbatch, whole) for mode, whole in modes)
        how = f"groups of different sizes, and between them {zlib.crc32(between.encode()):08x}"
    sends = "" if how == "none" else f", sends {run.options.mesh.sends}"
    return group, regions, parts, train, evaluate, f"{how}{sends}"


def _uneven_layouts(run: Run, mode: Mode, microbatch: Signature, undivided: OutputSpecs | None) -> str:
    """Layouts of messages between tensor groups of different size, as text.

    Raises ValueError for a tensor of which the members hold parts: a group of another size could not take them.
    """
    place, owners, inferred = run.layout.place, mode.schedule.owners, mode.inference.of(microbatch)
    found = []
    for wire in mode.wires:
        stage, ends = wire.producer, (wire.producer, *wire.consumers)
        if not place.is_uneven([rank for each in ends for rank in owners[each]]):
            continue
        for slot in mode.slots[wire]:
            if undivided is None or inferred.specs[stage][slot] != undivided[stage][slot]:
                sizes = " and ".join(str(place.mesh.tensor_sizes[owners[each][0]]) for each in ends)
                raise ValueError(
                    f"output {slot} of stage {stage} ({mode.inference.stages[stage].name}) goes between tensor groups "
                    f"of {sizes} processes, whose members hold parts of it: expected a cut where each of them "
                    f"holds the whole tensor, such as between two blocks, or a plan with one tensor size"
                )
        found.append(f"{wire} {mode.message_specs(wire.message(0), inferred)}")
    return "; ".join(found)


def _refuse_divided_ties(run: Run, parts: CutModel, group: MemberShards) -> None:
    place, owners = run.layout.place, run.layout.schedule.owners
    held: dict[int, set[int]] = {}
    for stage, each in enumerate(parts.train.stages):
        for parameter in each.module.parameters():
            held.setdefault(id(parameter), set()).update(owners[stage])
    for name, parameter in parts.root.named_parameters(remove_duplicate=False):
        ranks = sorted(held.get(id(parameter), ()))
        if ranks and group.is_divided(name) and place.is_uneven(ranks):
            raise ValueError(
                f"{name!r} is divided over a tensor group, and ranks {' and '.join(map(str, ranks))}, which hold it, "
                f"have groups of {' and '.join(str(place.mesh.tensor_sizes[rank]) for rank in ranks)} processes: "
                f"expected tensor_parallel= without it, one stage that holds it, or a plan with one tensor size"
            )


def _whole_outputs(
    run: Run, cut: Callable[[], CutModel], microbatch: Signature
) -> tuple[OutputSpecs | None, OutputSpecs | None]:
    """Outputs of all stages of the model before it is divided, in training and in evaluation; (None, None) for a model
    that runs only once it is divided, because its code contains a member's sizes."""
    try:
        parts = cut()
    except ValueError as error:
        if run.guard.spares(error):  # processes cut different models
            raise
        return None, None
    return parts.train.outputs(microbatch), parts.evaluation().outputs(microbatch)


def _agree(run: Run, parts: CutModel, microbatch: Signature, *, tensor: str) -> None:
    options = run.options
    kind = "none" if options.loss_fn is None else "given" if options.model_loss is None else "model"
    mine = describe(
        run.layout.schedule,
        parts.names,
        seed=options.seed,
        lengths=options.slices.lengths,
        max_grad_norm=options.max_grad_norm,
        correction=options.correction,
        flush_first=options.flush_first,
        grad_scaler=None if options.grad_scaler is None else options.grad_scaler.state_dict(),
        loss_fn=kind,
        verify=run.verifies,
        tensor=tensor,
        **({} if options.mesh.sync == 1 else {"sync": options.mesh.sync}),
        **({} if options.compress is None else {"compress": options.compress}),
    )
    common = f", microbatches of {microbatch}"
    check_agreement(mine, run.collectives, replica=(run.layout.place.replica[0], common))


def _update(run: Run, placed: _Placed) -> tuple[Iterable[RankProgram], Callable[..., Update]]:
    """Programs of all ranks, and the maker of the update: flush or stream, which is decided only here."""
    if placed.train.schedule.is_asynchronous:
        course = stream_course(run, placed.train, placed.ownership)
        return course.programs, partial(StreamUpdate, course)
    programs = flush_programs(run, placed.train, placed.ownership)
    return programs.programs, partial(FlushUpdate if run.options.mesh.sync == 1 else LocalUpdate, programs)


def _tell_of_two_axes(run: Run, placed: _Placed, microbatch: Signature) -> None:
    """Warns, in the process of the last stage, of an output whose batch dimension is unclear in a loss."""
    inference, num_samples = placed.train.inference, microbatch.num_samples
    might = any(spec.shape.count(num_samples) > 1 for spec in inference.example.specs[-1])
    schedule = run.layout.schedule
    if might and run.has_loss and schedule.num_microbatches > 1 and schedule.num_stages - 1 in run.local_stages:
        found = inference.batch_dimensions(microbatch)
        warn_of_two_axes(found, "a loss of them has no others than these", num_samples=num_samples)
