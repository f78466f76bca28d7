"""Options of PipelineModule one by one, as grids of tests have them, put into the records that it takes."""

from __future__ import annotations

from typing import Any

from stagewright.pipe import Asynchronous, Auto, Inputs, Mesh, Precision, Slices

_MESH = {"mesh_order": "order", "data_parallel": "data_parallel", "tensor_parallel": "tensor_parallel"}
_MESH |= {"tensor_sends": "sends"}
_SCHEDULES: tuple[tuple[type, dict[str, str]], ...] = (
    (Asynchronous, {"flush_first": "flush_first", "delay_correction": "correction"}),
    (Slices, {"num_slices": "num_slices", "slice_lengths": "lengths", "sequence_dims": "dims"}),
    (Auto, {"trials": "trials", "replan": "replan"}),
)


def records(**flat: Any) -> dict[str, Any]:
    """Arguments of PipelineModule that say the same."""

    def taken(names: dict[str, str]) -> dict[str, Any]:
        return {new: flat.pop(old) for old, new in names.items() if old in flat}

    if mesh := taken(_MESH):
        flat["mesh"] = Mesh(**(flat.get("mesh") or {}), **mesh)
    if "plan" in flat and flat.get("schedule") is None:
        flat["schedule"] = flat.pop("plan")
    for kind, names in _SCHEDULES:
        options = {names[name]: flat.pop(name) for name in names if name in flat}
        if kind is not Auto and all(value in (None, False, 0) for value in options.values()):
            continue  # that is no option at all
        if options:
            schedule = {} if kind is Auto else {"schedule": flat.get("schedule", "1f1b")}
            flat["schedule"] = kind(**schedule, **options)
    if inputs := taken({"batch_dims": "batch_dims", "loss_weight": "loss_weight"}):
        flat["example_inputs"] = Inputs(flat.get("example_inputs"), **inputs)
    if precision := taken({"grad_scaler": "grad_scaler", "compile": "compile"}):
        flat["precision"] = Precision(**precision)
    if "stages" in flat:
        flat["model"] = flat.pop("stages")
    if "split_points" in flat:
        flat["cut"] = flat.pop("split_points")
    return flat
