"""The one place that finds modules below the six packages, by the names that tests ask for: when something moves there,
no test changes.

A name is looked up when it is imported, in the text of all modules, so that a test loads what it asks for alone. Only
names that several modules define, or that are given out where they are not defined, are listed here.
"""

import importlib
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import stagewright

_ROOT = Path(stagewright.__file__).parent
_PACKAGES = ("cli", "comm", "experiments", "integrations", "partition", "pipe", "schedules", "viz")
_DEFINED = re.compile(r"^(?:class|def) (\w+)|^(\w+)(?:: [^=\n]+)? =", re.MULTILINE)

# By module: what tests import of it.
_NAMES = {
    "comm.codecs": "pack unpack",
    "comm.links": "_between",
    "comm.rendezvous": "_meet",
    "experiments.backends.facts": "differences",
    "experiments.backends.namespaces.links": "Link",
    "experiments.backends.namespaces.network": "Network",
    "experiments.backends.preflight": "meet",
    "experiments.backends.registry": "backend",
    "cli.commands.checked_run": "_fits",
    "cli.main": "main",
    "experiments.jobs.declaration": "check_layout",
    "experiments.jobs.figure": "Judged Spread",
    "experiments.jobs.job": "State",
    "experiments.jobs.results": "gather",
    "experiments.jobs.tables": "Table",
    "cli.own_task": "Batch",
    "cli.train.gpt": "Block",
    "cli.train.pipeline": "make_pipe",
    "cli.train.progress": "describe",
    "cli.train.recipe": "make_optimizer",
    "cli.train.run_folder": "Manifest",
    "experiments.works.bench_report": "lines_of",
    "experiments.works.convergence": "Setting",
    "experiments.works.convergence_report": "draw label",
    "partition.analytic.calibration": "MORE NO_FIT SCALE",
    "partition.analytic.transformer": "Head",
    "partition.profiler.optimizers": "named",
    "partition.solve.dynamic": "SCHEDULES solve",
    "pipe.settings.given": "Given",
    "pipe.checkpoint.checkpointer": "FIRST",
    "pipe.checkpoint.snapshot": "Snapshot",
    "pipe.shards.styles": "Samples",
    "pipe.shards.tensor_option": "read_tensor_parallel",
    "pipe.stage.moving": "_apart",
    "pipe.verify.compare": "first_difference",
    "schedules.custom": "B F I Rule U W",
    "schedules.ir": "BACKWARD_OPS COMPUTE_OPS MOVE_OPS chain",
    "schedules.custom.user_schedules": "read_schedule sizes_of",
    "schedules.program": "Step Wait",
    "schedules.orders.problem": "Problem",
    "schedules.timing.inputs": "calibrate",
    "schedules.weight_rules": "RULES",
    "schedules.wording": "printable size",
    "viz.palette": "OP_HUES",
}
_ALIKE = {
    "comparison_table": ("cli.commands.compare", "table"),
    "CompareOutcome": ("pipe.verify.compare", "Outcome"),
    "EvenCosts": ("partition.search.cuts", "_EvenCosts"),
    "GuardsChanges": ("partition.model.recorded.guards", "Changes"),
    "HostHost": ("experiments.backends.namespaces.network", "Host"),
    "JobChanges": ("experiments.jobs.job", "Changes"),
    "CliProgressProgress": ("cli.progress", "Progress"),
    "JobsFigureFigure": ("experiments.jobs.figure", "Figure"),
    "read_mask": ("integrations.attention", "_mask"),
    "LowerSTAGE_KINDS": ("schedules.lowering.lower", "STAGE_KINDS"),
    "MessagesSTAGE_KINDS": ("schedules.messages", "STAGE_KINDS"),
    "MovingHost": ("pipe.stage.moving", "Host"),
    "PingPongPingPong": ("comm.links", "PingPong"),
    "PipeContextRun": ("pipe.context", "Run"),
    "PipeStateState": ("pipe.checkpoint.state", "State"),
    "PipeTrainingTraining": ("pipe.run.training", "Training"),
    "ProgramWork": ("schedules.program", "Work"),
    "ProgressProgress": ("experiments.jobs.runner", "JobProgress"),
    "RecordsOutcome": ("experiments.backends.records", "Outcome"),
    "RecordsWork": ("experiments.backends.records", "Work"),
    "RunProgress": ("cli.train.progress", "Progress"),
    "SearchProgress": ("schedules.search.incumbent", "Progress"),
    "SynthesisEvaluateEvaluator": ("schedules.orders.evaluate", "OrderEvaluator"),
    "bounds_least_seconds": ("schedules.search.bounds", "problem_bound"),
    "run_report": ("cli.train.loop", "report"),
    "diagnosis_text": ("cli.train.diagnose", "text"),
    "expected_least_seconds": ("schedules.timing.bounds", "schedule_bound"),
    "fit_calibrate": ("partition.analytic.calibration", "calibrate"),
    "lower_doc": ("schedules.lowering.lower", "__doc__"),
    "quantities_bandwidth": ("partition.quantities", "bandwidth"),
    "simulated_simulated": ("partition.plans.as_schedule", "simulated"),
    "trace_file_digest": ("schedules.traces.trace_file", "digest"),
    "words_digest": ("partition.model.recorded.words", "digest"),
}
# Whole modules, whose attributes tests replace, under other names than their files'.
_MODULES = {
    "recording": "partition.deferred.recording",
    "runtime_seconds": "pipe.auto.runtime_seconds",
    "schedule_registry": "schedules.families.registry",
    "edit_memory": "pipe.edits.beside",
    "reach": "comm.rendezvous",
    "needs": "experiments.backends.netns",
    "bench_command": "experiments.commands.bench",
    "links": "experiments.works.links",
    "suite": "experiments.works.suite",
    "auto": "pipe.auto.layout",
    "batch_shared": "pipe.batch.shared",
    "checkpoint_persist": "pipe.checkpoint.persist",
    "building": "pipe.build",
    "plain": "pipe.verify.plain",
    "units": "pipe.verify.parts",
    "stream": "schedules.lowering.calls",
}

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


@cache
def _modules() -> dict[str, list[str]]:
    """By the name of something defined, or of a file, the modules below the packages."""
    found = defaultdict[str, list[str]](list)
    for path in (path for package in _PACKAGES for path in sorted((_ROOT / package).rglob("*.py"))):
        module = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
        defined = {one or other for one, other in _DEFINED.findall(path.read_text(encoding="utf-8"))}
        for name in (*defined, f"{path.stem}.py"):
            found[name].append(module)
    return found


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _MODULES:
        return importlib.import_module(f"stagewright.{_MODULES[name]}")
    module, own = _ALIKE.get(name) or (_MODULE_OF.get(name), name)
    if module is not None:
        return getattr(importlib.import_module(f"stagewright.{module}"), own)
    defining = _modules()[name]
    (found, *others) = defining or _modules()[f"{name}.py"] or [""]
    if others or not found:
        where = ", ".join([found, *others]) or "no module"
        raise AttributeError(f"{name!r} is in {where}: expected one module, or a line in {__file__}")
    loaded = importlib.import_module(f"stagewright.{found}")
    return getattr(loaded, name) if defining else loaded
