"""schedule="auto": the first batch is profiled where it will run, the links are measured, and the planner decides.

every rank   profiles microbatches of a few sizes, all ranks at once, as they will compute
together     latency and bandwidth of the links, and how fast hosts are
rank 0       the median profile of all ranks -> plan -> a better order, if there is one -> the same plan on every rank
together     a trial: the best plan, and others close to it, run for a few real steps; the fastest is taken, and the
             measured time is kept in the plan (`trial`)
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...comm import Collectives, Guard, MeshPlace, World, join_world, make_guard, read_mesh
from ...comm.links import MeasuredLevel, MeasuredLinks, measure_links
from ...partition.cluster import Cluster, DeviceKind, Level
from ...partition.deferred.filling import lent
from ...partition.host_speeds import host_speeds, with_host_speeds
from ...partition.model.batch_dims import parameter_names
from ...partition.model.forms import Arguments
from ...partition.model.untouched import untouched
from ...partition.plans.plan import Plan
from ...partition.plans.reorder import reorder
from ...partition.plans.sizes import Size, at_size, planned_for, sizes_to_measure
from ...partition.profile import Node, Profile
from ...partition.profiler import profile_model
from ...partition.profiler.clock import clock_for
from ...partition.profiler.memory import device_memory
from ...partition.search.plan import plan
from ...schedules.wording import count
from ..batch.agreement import SamePrograms, agreed, check_agreement
from ..context import Layout, layout_of_plan
from ..settings.arguments import Auto
from ..settings.given import Given, check_batch, signature_of
from ..settings.options import Options
from ..stage.shapes import Signature, size_of
from ..telling import Phases, told_if_slow
from .runtime_seconds import clipping, measure_runtime_seconds

PROFILE_SECONDS = 4.0  # for all microbatch sizes together, tracing apart
SEARCH_SECONDS = 2.0  # for better orders of the plans' work
MAX_SIZES = 4
TRIALS = 3  # of plans, at most
WITHIN = 0.1  # of the best predicted step, at most: others that may be tried
_LEAST_NOISE = 0.05  # of a prediction, however steady its profile
_FREE = 1e15  # [bytes/s] between ranks in one process
_COPIED_BYTES = 1 << 26  # to the host and back, by which that link is measured


class AutoLayout:
    """Decides on a layout by measuring; `predicted` is the plan that was taken, as its profile alone predicted it."""

    def __init__(self, options: Options, world: World, *, guard: Guard) -> None:
        self.predicted: Plan | None = None
        self._model = options.root
        self._world = world
        self._options = options
        self._guard = guard
        mesh = read_mesh(options.sizes, world, wanted=None)
        self._num_ranks = mesh.num_processes
        # Axes that the user gave stay as they are; without, the plan divides all ranks.
        self._axes = {"pipeline_sizes": (mesh.pipe,), "data_sizes": (mesh.data,)} if options.sizes else {}
        self._phases = Phases(world.rank)
        self._replans = options.auto.replan is not None
        self._trials = TRIALS if options.auto.trials is None else options.auto.trials
        self._noise = WITHIN
        self._parameters = parameter_names(signature_of(options.model))
        self._measured: dict[Size, Profile] = {}  # of a batch whose microbatches differ
        self._runtime: tuple[float, float] | None = None
        self._hosts: list[Profile] = []  # by host, of the first microbatch that was measured
        self._collectives = Collectives(
            MeshPlace.line(world), device=options.device, timeout=options.timeout, guard=guard
        )
        guard.on_failure(self._collectives.abort)

    def decide(self, given: Given) -> Layout:
        schedules = self._options.auto.schedules
        found = self.plan(given, **({} if schedules is None else {"schedules": schedules}))
        layout = layout_of_plan(found, self._world, num_microbatches=None)
        if not self._replans:
            return layout
        from ...partition.plans.replan import Replanner
        from ..batch.orders import Replanning

        replanner = Replanner(found, self._measured) if self._world.rank == 0 else None
        return replace(layout, adds=(partial(Replanning, self._parameters, replanner),))

    def plan(self, given: Given, **restrictions: Any) -> Plan:
        """The plan for batches like this one, the same on every rank; call it once. Collective.

        `restrictions` limit the planner's search. Raises ValueError, on every rank alike, for a batch without a target,
        if nothing fits, and for errors of a profile on any rank.
        """
        wanted = self._options.num_microbatches
        if wanted is None and given.microbatches:
            wanted = len(given.microbatches)
        num_samples = check_batch(given, wanted or 1)
        if self._options.loss_fn is not None and self._options.model_loss is None and given.target is None:
            raise ValueError(
                'schedule="auto" with a first batch without a target: its loss is profiled, too. Expected a '
                "train_step, or build(inputs, target), before the first predict"
            )
        if self._replans and wanted is None:
            raise ValueError(
                'replan="batch" with a first batch that is not cut: expected train_step(microbatches=[...]), or '
                "num_microbatches= as well"
            )
        with self._guard.together():
            return self._measured_plan(given, num_samples, wanted, restrictions)

    def _measured_plan(self, given: Given, num_samples: int, wanted: int | None, restrictions: dict[str, Any]) -> Plan:
        self._agree(given, wanted)
        self._phases.begin(
            f"profiling the model on {count(self._num_ranks, 'rank')} for {count(num_samples, 'sample')} a batch; "
            "then links, a search, and trials where plans come close"
        )
        if wanted is not None and (given.microbatches or self._replans):
            profiles = self._by_size(given.on(self._options.device).cut(wanted))
        else:
            profiles = self._by_samples(given, num_samples)
        spread = max(profile.step_spread for profile in profiles.values())
        self._noise = min(WITHIN, max(_LEAST_NOISE, spread))
        sizes = ", ".join(map(str, profiles))
        self._phases.ended("profile", f"microbatches of {sizes} samples", then="links between the ranks")
        cluster = self._cluster()
        self._phases.ended("links", then="a search for the best plan and its order")
        batch = num_samples if wanted is None else max(profiles) * wanted
        if self._replans:  # replicas would divide microbatches before their lengths are known
            restrictions = {"data_sizes": (1,), **restrictions}
        restrictions = {**self._axes, **restrictions}
        # Whether the user's optimizer may be divided is known only once it is made.
        bounds = {
            "runnable": True,
            "optimizer_sharding": ("none",),
            "max_grad_norm": self._options.max_grad_norm or 0.0,
            "search": self._options.auto.search,
            "seconds": self._options.auto.seconds,
            **restrictions,
        }

        def search() -> list[str]:
            others: list[Plan] = []
            best = plan(profiles, cluster, global_batch=batch, on_runners_up=others.extend, **bounds)
            if self._replans:  # each batch has its own
                return [best.to_json()]
            chosen = [best]
            if self._trials:
                from .trial import to_try

                chosen = to_try(best, others, trials=self._trials, noise=self._noise)
            ordered = [
                reorder(each, profiles.get(each.microbatch_size or 0), seconds=SEARCH_SECONDS / len(chosen))
                for each in chosen
            ]
            return [each.to_json() for each in sorted(ordered, key=lambda each: each.simulated_step_time or 0.0)]

        texts = agreed(search if self._world.rank == 0 else lambda: [], self._collectives, self._guard, what="planning")
        texts = self._collectives.gather(texts, what="planning")[0]
        found = self._tried([Plan.from_json(text) for text in texts], given)
        self._collectives.gather(None, what="planning")
        self._collectives.close()
        assert self.predicted is not None
        self._phases.decided(found, self.predicted, num_samples=num_samples, replans=self._replans)
        return found

    def _agree(self, given: Given, wanted: int | None) -> None:
        """Raises ValueError, on every rank alike, unless all pass such a batch with the same options. Collective."""
        batch = "; ".join(dict.fromkeys(str(Signature.of(part.arguments)) for part in given.parts))
        mine = (
            f"schedule 'auto' for {self._num_ranks} ranks, M={'as planned' if wanted is None else wanted}, "
            f"a batch of {batch}, trials={self._trials}, max_grad_norm={self._options.max_grad_norm}"
        )
        check_agreement(mine, self._collectives)

    def _tried(self, plans: Sequence[Plan], given: Given) -> Plan:
        self.predicted = plans[0]
        if not self._trials:
            return plans[0]
        note = "each batch has an order of its own" if self._replans else None
        if len(plans) == 1 < self._trials:
            note = note or f"no other plan comes within {self._noise:.0%} of it, more than the profile can be off"
        if note is not None:
            return replace(plans[0], notes=(*plans[0].notes, f"not tried: {note}"))
        from .trial import Trials

        trials = Trials(self._options, self._world, self._collectives)
        if trials.refusal(plans, given) is None:
            self._phases.ended("search", then=f"{count(len(plans), 'trial')}, of plans closer than {self._noise:.0%}")
        found, self.predicted = trials.best(plans, given)
        return found

    def _by_samples(self, given: Given, num_samples: int) -> dict[int, Profile]:
        sizes = sizes_to_profile(num_samples, self._num_ranks)
        if self._options.num_microbatches is not None:
            sizes = (-(-num_samples // self._options.num_microbatches),)
        whole = given.on(self._options.device)
        measured = sizes if len(sizes) < 3 else (sizes[1], sizes[-1])  # others are interpolated
        parts = {size: whole.cut(-(-num_samples // size))[0] for size in measured}  # the first is the largest
        found = {size: self._profile(part, PROFILE_SECONDS / len(parts)) for size, part in parts.items()}
        most, least = max(parts), min(parts)
        if found[least].parts_seconds > found[most].parts_seconds:  # something else ran during the smaller one
            found[least] = self._profile(parts[least], PROFILE_SECONDS / len(parts))
        if found[least].parts_seconds > found[most].parts_seconds:
            del found[least]  # then the other alone
        return {size: at_size(found, size) for size in sizes}

    def _by_size(self, parts: Sequence[Given]) -> dict[int, Profile]:
        all_sizes = [size_of(Signature.of(part.arguments), self._parameters) for part in parts]
        of_size, sizes = dict(zip(all_sizes, parts, strict=True)), sizes_to_measure(all_sizes)
        seconds = PROFILE_SECONDS / len(sizes)
        self._measured = {size: self._profile(of_size[size], seconds) for size in sizes}
        profile = planned_for(self._measured)
        assert profile.microbatch_size is not None
        return {profile.microbatch_size: profile}

    def _profile(self, first: Given, seconds: float) -> Profile:
        """Profile of a microbatch: the median of all ranks, which measure at once; see `_typical`. Collective."""
        samples = count(first.arguments.num_samples, "sample")
        with told_if_slow(f"profiling microbatches of {samples}", rank=self._collectives.rank):
            found = self._measure(first, seconds)
        profile = self._typical([(host, Profile.from_json(text)) for host, text in found])
        if profile.optimizer_ratio is not None and self._options.correction is not None:
            profile = replace(profile, optimizer_ratio=profile.optimizer_ratio + 1.0)  # the last update
        return replace(profile, microbatch_size=first.arguments.num_samples)

    def _measure(self, first: Given, seconds: float) -> list[tuple[str, str]]:
        """Host and profile, as JSON, of each rank; all measure at once. Collective."""
        options = self._options
        loss, target = options.loss_fn, first.target
        if options.model_loss is not None:
            target = options.model_loss.weigh([first.arguments])[0]
        kind = options.device.type
        same = SamePrograms(self._collectives, self._guard, str(Signature.of(first.arguments)))

        def measure() -> tuple[str, str]:
            with (
                untouched(*options.user_code, device=options.device),
                lent(self._model, alike=True, device=options.device),
            ):
                found = profile_model(
                    self._model.to(options.device),
                    first.arguments,
                    target=target,
                    loss_fn=loss,
                    optimizer=None if options.optimizer is None else clipping(options.optimizer, options.max_grad_norm),
                    autocast=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
                    seconds=seconds,
                    agree=None if self._collectives.alone else same,
                )
            if self._runtime is None:
                with torch.autocast(kind, enabled=False):  # its layers have no loss scale, which float16 asks for
                    self._runtime = measure_runtime_seconds(options.device)
            action, around = self._runtime
            return socket.gethostname(), replace(found, action_seconds=action, around_seconds=around).to_json()

        self._collectives.gather(None, what="profiling together")  # all begin at once
        mine = agreed(measure, self._collectives, self._guard, what="profiling the model")
        return self._collectives.gather(mine, what="profiling the model")

    def _typical(self, found: Sequence[tuple[str, Profile]]) -> Profile:
        """The median of the ranks on hosts as fast as the first one, whose speed a plan's devices have."""
        by_host: dict[str, list[Profile]] = {}
        for host, each in found:
            by_host.setdefault(host, []).append(each)
        if not self._hosts:
            self._hosts = [median_profile(each).typical() for each in by_host.values()]
        speeds = dict(zip(by_host, host_speeds(self._hosts), strict=True))
        return median_profile([each for host, each in found if speeds[host] == 1.0]).typical()

    def _cluster(self) -> Cluster:
        device, world = self._options.device, self._world
        # Compiled stages offload nothing.
        host = None if self._options.compile is not None else host_bandwidth(device, self._collectives)
        if not world.distributed:
            level = Level(name="process", size=self._num_ranks, bandwidth=_FREE)
            kind = DeviceKind(memory_bytes=device_memory(device, sharing=1), host_bandwidth=host)
            return Cluster(levels=(level,), kinds=(kind,))
        memory = least_memory(device, self._collectives)
        measured = measure_links(world, device=device, timeout=self._options.timeout)
        cluster = cluster_of(measured, memory_bytes=memory, host_bandwidth=host)
        if len(set(host_speeds(self._hosts))) > 1:
            cluster = with_host_speeds(cluster, measured.hosts, self._hosts)
        return cluster


def sizes_to_profile(num_samples: int, num_ranks: int) -> tuple[int, ...]:
    """Microbatch sizes to measure for a batch: a few that divide it into enough microbatches, the largest first.

    >>> sizes_to_profile(16, 2)
    (8, 4, 2, 1)
    """
    counts = [m for m in range(1, num_samples + 1) if num_samples % m == 0]
    enough = [m for m in counts if m >= num_ranks] or counts[-1:]
    return tuple(num_samples // m for m in enough[:MAX_SIZES])


def cluster_of(measured: MeasuredLinks, **device: float | None) -> Cluster:
    figures = {each.name for each in fields(Level)} & {each.name for each in fields(MeasuredLevel)}
    levels = tuple(Level(**{name: getattr(each, name) for name in figures}) for each in measured.levels)
    return Cluster(levels=levels, kinds=(DeviceKind(**device),), rings=measured.rings)  # type: ignore[arg-type]


def median_profile(profiles: Sequence[Profile]) -> Profile:
    first = profiles[0]
    figures = [each.name for each in fields(Node) if isinstance(getattr(first.nodes[0], each.name), float)]
    nodes = tuple(
        replace(same[0], **{name: statistics.median(getattr(node, name) for node in same) for name in figures})
        for same in zip(*(profile.nodes for profile in profiles), strict=True)
    )
    wholes = [profile.step_seconds for profile in profiles if profile.step_seconds is not None]
    return replace(
        first,
        nodes=nodes,
        step_seconds=statistics.median(wholes) if wholes else None,
        slowdown=statistics.median(profile.slowdown for profile in profiles),
        action_seconds=statistics.median(profile.action_seconds for profile in profiles),
        around_seconds=statistics.median(profile.around_seconds for profile in profiles),
    )


def least_memory(device: torch.device, together: Collectives) -> float:
    """Memory that each rank has at least: its device's, or its share of its host's [bytes]. Collective."""
    hosts = together.gather(socket.gethostname(), what="counting the ranks of each host")
    memory = device_memory(device, sharing=hosts.count(socket.gethostname()))
    return min(together.gather(memory, what="comparing the memory of all ranks"))


def host_bandwidth(device: torch.device, together: Collectives) -> float | None:
    """Bandwidth between a device and pinned memory while all ranks copy [bytes/s]; None on a CPU. Collective.

    It is that of the slower direction on the slowest rank.
    """
    if device.type == "cpu":
        return None
    here = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    there, clock, slowest = torch.empty_like(here, device="cpu", pin_memory=True), clock_for(device), 0.0
    together.gather(None, what="copying to the host together")
    for to, source in ((there, here), (here, there)):
        marks = []
        for _ in range(6):
            to.copy_(source, non_blocking=True)
            marks.append(clock.stamp())
        clock.settle()
        slowest = max(slowest, statistics.median(clock.between(*pair) for pair in pairwise(marks)))
    return min(together.gather(_COPIED_BYTES / slowest, what="comparing the links to the host"))


def plan_here(
    model: nn.Module,
    batch: tuple[tuple[Any, ...], Any],
    *,
    num_microbatches: int | None,
    timeout: float,
    trials: int = 0,
    restrictions: Mapping[str, Any],
    **options: Any,
) -> tuple[Plan, Plan]:
    """The plan of schedule="auto" on CPUs, and the same as its profile alone predicted it; without a pipeline.
    Collective.

    `batch` is (inputs, target), `restrictions` limit the planner's search, and `options` are those of PipelineModule.
    """
    device = torch.device("cpu")
    world = join_world(device=device, timeout=timeout)
    auto = Auto(trials=trials)
    told = Options(model=model, num_microbatches=num_microbatches, auto=auto, device=device, timeout=timeout, **options)
    layout = AutoLayout(told, world, guard=make_guard(world))
    taken = layout.plan(Given(arguments=Arguments.of(batch[0]), target=batch[1]), **restrictions)
    assert layout.predicted is not None
    return taken, layout.predicted
