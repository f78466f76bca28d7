"""PipelineTrainer over gloo ranks beside transformers' Trainer in one process, each started as a script."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import answer, end_forked, start_forked

import stagewright

pytest.importorskip("accelerate", reason="needs accelerate: make extras")
transformers = pytest.importorskip("transformers", reason="needs transformers: make extras")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gloo,
    pytest.mark.concerns("integrations", "pipe/module.py", "pipe/figures.py", "pipe/arguments.py"),
]
SCRIPT = Path(__file__).parent / "script.py"
# float32 rounds to 6e-8 of each number; 2.4e-7 was measured over 15 steps (one unit in the last place of a loss near
# 4), since microbatches' sums are added up in another order, and AdamW's division brings that back enlarged.
TOLERANCE = 2e-5
TIMES = ("runtime", "per_second", "preparation_time")
History = list[dict[str, float]]


def script(folder: Path, *, num_ranks: int | None, kind: str = "pipe", **options: Any) -> History:
    words = [str(SCRIPT), "plain" if num_ranks is None else kind, str(folder), json.dumps(options)]
    ranks = start_forked(words, num_ranks=num_ranks)
    try:
        done = [answer(rank) for rank in ranks]
    finally:
        end_forked(ranks)
    assert not any(each.status for each in done), "\n".join(each.stderr[-3000:] for each in done)
    history: History = json.loads((folder / "history.json").read_text())
    return [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in history]


def assert_same(found: History, expected: History) -> None:
    assert [list(row) for row in found] == [list(row) for row in expected]
    for row, other in zip(found, expected, strict=True):
        for name, value in other.items():
            assert math.isclose(row[name], value, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (name, row, other)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> History:
    return script(tmp_path_factory.mktemp("plain"), num_ranks=None)


def test_four_ranks_log_evaluate_save_and_resume_as_one_process(tmp_path: Path, plain: History) -> None:
    found = script(tmp_path, num_ranks=4)
    assert_same(found, plain)
    weights = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "final").state_dict()
    last = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-15").state_dict()
    assert all((weights[name] == last[name]).all() for name in weights)
    shutil.rmtree(tmp_path / "checkpoint-15")
    resumed = script(tmp_path, num_ranks=4, resume=True)
    behind = [row for row in found if row["step"] > 10 and "train_loss" not in row]
    assert_same([row for row in resumed if row["step"] > 10 and "train_loss" not in row], behind)


def test_data_replicas_read_their_own_share_and_resume(tmp_path: Path, plain: History) -> None:
    options = {"gradient_accumulation_steps": 2, "pipeline": {"mesh": {"pipe": 2, "data": 2}}}
    found = script(tmp_path, num_ranks=4, **options)
    assert_same(found, plain)
    shutil.rmtree(tmp_path / "checkpoint-15")
    resumed = script(tmp_path, num_ranks=4, resume=True, **options)
    behind = [row for row in found if row["step"] > 10 and "train_loss" not in row]
    assert_same([row for row in resumed if row["step"] > 10 and "train_loss" not in row], behind)


def test_data_replicas_share_an_uneven_end_of_an_epoch_as_trainers_processes_do(tmp_path: Path) -> None:
    # 69 rows: Trainer gives the last batch, of one row, to one process, and fills it up from the epoch's start.
    options = {"rows": 69, "lengths": True, "gradient_accumulation_steps": 2, "stop": 9, "num_train_epochs": 2}
    options |= {"include_num_input_tokens_seen": "non_padding", "eval_strategy": "no"}
    expected = script(tmp_path / "plain", num_ranks=2, kind="plain", ddp_find_unused_parameters=False, **options)
    found = script(tmp_path / "pipe", num_ranks=4, **options, pipeline={"mesh": {"pipe": 2, "data": 2}})
    assert_same(found, expected)
    states = [
        json.loads((tmp_path / kind / "checkpoint-5/trainer_state.json").read_text()) for kind in ("plain", "pipe")
    ]
    assert states[0]["total_flos"] == states[1]["total_flos"]


def test_padded_batches_and_the_best_model(tmp_path: Path) -> None:
    options = {"lengths": True, "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 2}
    expected = script(tmp_path / "plain", num_ranks=None, **options)
    assert_same(script(tmp_path / "pipe", num_ranks=2, **options, pipeline={"schedule": "zb-h1"}), expected)


def test_arguments_that_a_pipeline_cannot_follow_are_refused(tmp_path: Path) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_head=1, n_layer=1, vocab_size=9))
    for name, value in {
        "label_smoothing_factor": 0.1,
        "torch_compile": True,
        "neftune_noise_alpha": 5.0,
        "activation_checkpointing": True,
        "use_liger_kernel": True,
        "debug": "underflow_overflow",
        "torch_empty_cache_steps": 3,
        "enable_jit_checkpoint": True,
        "optim_target_modules": "all-linear",
    }.items():
        arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to="none", **{name: value})
        with pytest.raises(ValueError, match=rf"TrainingArguments\({name}=.*with a pipeline: expected "):
            stagewright.integrations.PipelineTrainer(model, arguments)
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match=r"compute_loss_func=.*expected a model that returns its loss"):
        stagewright.integrations.PipelineTrainer(model, arguments, compute_loss_func=lambda *_: None)
    trainer = stagewright.integrations.PipelineTrainer(model, arguments)
    with pytest.raises(ValueError, match="hyperparameter_search with a pipeline: expected a run for each choice"):
        trainer.hyperparameter_search()
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(ValueError, match="no folder 'pipeline': expected a checkpoint of a PipelineTrainer"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_what_a_pipeline_would_not_call_is_refused(tmp_path: Path) -> None:
    """Trained on another loss, or by an optimizer without its own options, without a word."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_head=1, n_layer=1, vocab_size=9))
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to="none")

    class Weighted(stagewright.integrations.PipelineTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    class Logged(stagewright.integrations.PipelineTrainer):
        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)

    class Momentum(torch.optim.SGD):
        pass

    with pytest.raises(ValueError, match=r"Weighted.compute_loss would never be called.*: expected a model that"):
        Weighted(model, arguments)
    Logged(model, arguments)
    own = Momentum(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"an optimizer of .*\.Momentum: expected one of torch.optim or transformers"):
        stagewright.integrations.PipelineTrainer(model, arguments, optimizers=(own, None)).create_optimizer()


def test_arguments_of_other_releases_are_refused_until_they_are_known(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Next(transformers.TrainingArguments):
        loss_spikes: str = "keep"

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_head=1, n_layer=1, vocab_size=9))
    stagewright.integrations.PipelineTrainer(model, Next(tmp_path, use_cpu=True, report_to="none"))
    with pytest.raises(ValueError, match=r"TrainingArguments\(loss_spikes='skip'\) with a pipeline: expected no such"):
        stagewright.integrations.PipelineTrainer(
            model, Next(tmp_path, use_cpu=True, report_to="none", loss_spikes="skip")
        )
