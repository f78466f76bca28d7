"""PipelineAccelerator over gloo ranks beside accelerate's own, of a process a replica, in one script."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.commands import run_forked
from torch.utils import _pytree as pytree

import stagewright

pytest.importorskip("accelerate", reason="needs accelerate: make extras")
pytest.importorskip("transformers", reason="needs transformers: make extras")


def loop(folder: Path, kind: str, *, num_ranks: int) -> Any:
    done = run_forked([str(Path(__file__).parent / "loop.py"), kind, str(folder)], num_ranks=num_ranks)
    assert not any(each.status for each in done), "\n".join(each.stderr[-3000:] for each in done)
    return json.loads((folder / "history.json").read_text())


@pytest.mark.gloo
@pytest.mark.thorough
def test_two_replicas_of_two_stages_train_measure_save_and_load_as_two_processes(tmp_path: Path) -> None:
    expected = loop(tmp_path, "plain", num_ranks=2)
    found = loop(tmp_path, "pipe", num_ranks=4)
    # The model takes its loss in float32: 2.4e-7 was measured, one unit in its last place.
    assert pytree.tree_flatten(found)[1] == pytree.tree_flatten(expected)[1]
    assert pytree.tree_leaves(found) == pytest.approx(pytree.tree_leaves(expected), abs=2e-6)


def test_what_a_pipeline_cannot_follow_is_refused() -> None:
    made = stagewright.integrations.PipelineAccelerator
    for options, words in (
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16' with a pipeline: expected 'no' or 'bf16'"),
        ({"fsdp_plugin": 1}, "fsdp_plugin= with a pipeline: expected no such argument"),
    ):
        with pytest.raises(ValueError, match=words):
            made(**options)
    for given, words in (
        ("1f1b", "pipeline='1f1b': expected arguments of PipelineModule"),
        ({"shedule": "1f1b"}, r"pipeline=\{'shedule': ...\}: expected 'schedule'"),
    ):
        with pytest.raises(ValueError, match=words):
            made(pipeline=given)  # type: ignore[arg-type]
    for pipeline in ({"schedule": "auto"}, {"optimizer": torch.optim.SGD}):
        with pytest.raises(ValueError, match=r"pipeline=\{.*: expected .*optimizer"):
            made(cpu=True, pipeline={**pipeline, "num_microbatches": 2}).prepare(torch.nn.Linear(2, 2))
    accelerator = made(cpu=True, pipeline={"num_microbatches": 2})
    with pytest.raises(ValueError, match="0 models to prepare: expected one, in the first call"):
        accelerator.prepare(torch.optim.SGD([torch.ones(1)]))

    class Model(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return {"loss": super().forward(x).mean(), "more": x}

    own = Model(2, 2)
    model = accelerator.prepare(own)
    assert accelerator.unwrap_model(model) is own
    with pytest.raises(ValueError, match=r"save_model with a pipeline: expected accelerator\.unwrap_model\(model\)"):
        accelerator.save_model(model, "folder")
    output = model(torch.ones(4, 2))
    with pytest.raises(AttributeError, match="more in training, which stays on the pipeline's last stage"):
        _ = output.more
    with pytest.raises(ValueError, match=r"backward\(loss\) of another loss than the model has just returned"):
        accelerator.backward(2 * output.loss)
    with pytest.raises(ValueError, match=r"clip_grad_norm_ of some parameters with a pipeline: expected model\.param"):
        accelerator.clip_grad_norm_([model.module.bias], 1.0)
    with pytest.raises(ValueError, match=r"without backward\(loss\) since the last call"):
        model(torch.ones(4, 2))
    with pytest.raises(ValueError, match="gather_for_metrics of objects with a pipeline: expected tensors"):
        accelerator.gather_for_metrics(["a"])


def test_sums_of_integers_stay_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale of 1.0 made float32 of them: 16,777,217 became 16,777,216."""
    accelerator = pytest.importorskip("stagewright.integrations.accelerator", reason="needs accelerate: make extras")
    one = torch.tensor([16_777_217])
    monkeypatch.setattr(accelerator, "from_all", lambda tensor, replica: [tensor, tensor])
    own = SimpleNamespace(_replica=(0, 2), device=torch.device("cpu"))
    total = accelerator.PipelineAccelerator.reduce(own, one)
    assert (total.item(), total.dtype) == (33_554_434, torch.int64)
    assert accelerator.PipelineAccelerator.reduce(own, one.float(), "mean", scale=0.5).item() == 8_388_608
