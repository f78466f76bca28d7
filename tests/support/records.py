"""Arguments of PipelineModule one by one, as grids of tests have them, put into the records that it takes."""

from dataclasses import fields
from typing import Any

from stagewright.pipe import Asynchronous, Auto, Inputs, Mesh, Precision, Slices


def records(**flat: Any) -> dict[str, Any]:
    """Arguments of PipelineModule that say the same."""

    def taken(kind: type) -> dict[str, Any]:
        own = {field.name for field in fields(kind)} - {"schedule"}
        return {name: flat.pop(name) for name in own & {*flat}}

    if mesh := taken(Mesh):
        flat["mesh"] = Mesh(**(flat.get("mesh") or {}), **mesh)
    if "plan" in flat and flat.get("schedule") is None:
        flat["schedule"] = flat.pop("plan")
    for kind in (Asynchronous, Slices):
        options = taken(kind)
        if any(value not in (None, False, 0) for value in options.values()):  # else that is no option at all
            flat["schedule"] = kind(schedule=flat.get("schedule", "1f1b"), **options)
    if auto := taken(Auto):
        flat["schedule"] = Auto(**auto)
    if inputs := taken(Inputs):
        flat["example_inputs"] = Inputs(flat.get("example_inputs"), **inputs)
    if precision := taken(Precision):
        flat["precision"] = Precision(**precision)
    if "stages" in flat:
        flat["model"] = flat.pop("stages")
    return flat
