"""PipelineStrategy over gloo ranks beside Lightning in one process, each started as a script."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import run_forked
from support.pool import Pool
from torch.utils import _pytree as pytree

import stagewright

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason='needs lightning: pip install "stagewright[lightning]"'
    ),
    pytest.mark.filterwarnings("ignore"),
]


def script(folder: Path, kind: str, *, num_ranks: int | None) -> Any:
    words = [str(Path(__file__).parent / "lightning_script.py"), kind, str(folder)]
    done = run_forked(words, num_ranks=num_ranks)
    assert not any(each.status for each in done), "\n".join(each.stderr[-3000:] for each in done)
    return json.loads((folder / "history.json").read_text())


@pytest.mark.gloo
@pytest.mark.thorough
def test_two_ranks_log_validate_keep_the_best_and_resume_as_one_process(tmp_path: Path) -> None:
    folders = [tmp_path / "plain", tmp_path / "pipe"]
    for folder in folders:
        folder.mkdir()
    expected, found = script(folders[0], "plain", num_ranks=None), script(folders[1], "pipe", num_ranks=2)
    assert pytree.tree_flatten(found)[1] == pytree.tree_flatten(expected)[1]
    # Lightning keeps what is logged in float32.
    assert pytree.tree_leaves(found[0]) == pytest.approx(pytree.tree_leaves(expected[0]), abs=1e-6)
    assert found[1] == pytest.approx(expected[1], abs=1e-10)
    assert sorted(file.name for file in folders[1].glob("*.pipeline")) == sorted(
        f"{file.name}.pipeline" for file in folders[1].glob("*.ckpt")
    )


def test_what_a_pipeline_cannot_follow_is_refused(tmp_path: Path) -> None:
    import lightning.pytorch as lightning

    class Model(lightning.LightningModule):  # type: ignore[misc]
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.pipe = stagewright.PipelineModule(torch.nn.Linear(2, 2), num_microbatches=1)

        def training_step(self, *_: Any) -> None: ...

        def configure_optimizers(self) -> Any: ...

    class Own(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(2, 2)

    class Automatic(Model):
        automatic_optimization = True

    class Optimizer(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([torch.ones(1, requires_grad=True)])

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    for kind, options, words in (
        (Own, {}, "Own has parameters of its own"),
        (Automatic, {}, "expected self.pipe = .*automatic_optimization = False"),
        (Optimizer, {}, r"configure_optimizers with a pipeline: expected None, and PipelineModule\(optimizer="),
        (Model, {"precision": "bf16-mixed"}, r"precision='bf16-mixed'\) with a pipeline: expected PipelineModule\("),
        (Model, {"max_epochs": 1}, r"'none.ckpt' has no folder 'none.ckpt.pipeline'"),
    ):
        trainer = lightning.Trainer(
            strategy=stagewright.integrations.PipelineStrategy(), default_root_dir=tmp_path, **quiet, **options
        )
        with pytest.raises(ValueError, match=words):
            trainer.fit(kind(), [1], ckpt_path="none.ckpt" if "max_epochs" in options else None)


def decide(own: list[bool]) -> list[bool]:
    strategy = stagewright.integrations.PipelineStrategy()
    mine = own[torch.distributed.get_rank()]
    return [strategy.reduce_boolean_decision(mine), strategy.reduce_boolean_decision(mine, all=False)]


@pytest.mark.thorough
def test_processes_decide_as_one_on_whether_a_checkpoint_is_there(gloo: Pool) -> None:
    """Rank 1 looked behind rank 0's save, and took another name for the folder."""
    assert gloo.run(decide, ranks=2, args=([True, False],)) == [[False, True]] * 2
    assert gloo.run(decide, ranks=2, args=([True, True],)) == [[True, True]] * 2
