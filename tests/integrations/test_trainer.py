"""PipelineTrainer over gloo ranks beside transformers' Trainer in one process, each started as a script."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import run_forked
from support.parts import Parts

import stagewright
from stagewright.partition import Plan, PlanStage
from stagewright.schedules import Costs

pytest.importorskip("accelerate", reason="needs accelerate: make extras")
transformers = pytest.importorskip("transformers", reason="needs transformers: make extras")

pytestmark = pytest.mark.gloo
SCRIPT = Path(__file__).parent / "script.py"
# float32 rounds to 6e-8 of each number; 2.4e-7 was measured over 15 steps (one unit in the last place of a loss near
# 4), since microbatches' sums are added up in another order, and AdamW's division brings that back enlarged.
TOLERANCE = 2e-5
TIMES = ("runtime", "per_second", "preparation_time")
History = list[dict[str, float]]


def start(folder: Path, cases: object, *, num_ranks: int | None, kind: str = "pipe") -> Path:
    """Cases one after the other in the same processes: to load transformers takes each of these seconds."""
    words = [str(SCRIPT), "plain" if num_ranks is None else kind, str(folder), json.dumps(cases)]
    done = run_forked(words, num_ranks=num_ranks)
    assert not any(each.status for each in done), "\n".join(each.stderr[-3000:] for each in done)
    return folder


def read(folder: Path) -> History:
    history: History = json.loads((folder / "history.json").read_text())
    assert isinstance(history, list), history
    return [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in history]


def assert_same(found: History, expected: History, tolerance: float = TOLERANCE) -> None:
    assert [list(row) for row in found] == [list(row) for row in expected]
    for row, other in zip(found, expected, strict=True):
        for name, value in other.items():
            assert math.isclose(row[name], value, rel_tol=tolerance, abs_tol=tolerance), (name, row, other)


SHORT = {"num_train_epochs": 1, "eval_strategy": "no", "save_strategy": "no"}
MEAN = {"accepts_loss_kwargs": False}  # of batches, in models that pass over num_items_in_batch
# 69 rows: Trainer gives the last batch, of one row, to one process, and fills it up from the epoch's start.
UNEVEN = {"rows": 69, "lengths": True, "gradient_accumulation_steps": 2, "stop": 9, "num_train_epochs": 2}
UNEVEN |= {"include_num_input_tokens_seen": "non_padding", "eval_strategy": "no"}
UNVERIFIED = {"verify": False}  # the case that verifies its first batch is "whole"
REPLICAS = {"pipeline": UNVERIFIED | {"mesh": {"pipe": 2, "data": 2}}, "gradient_accumulation_steps": 2}
CONTEXT = {"mesh": {"pipe": 2, "context": 2}}
LLAMA = {"model": "llama", "max_steps": 2, "num_train_epochs": 1, "save_strategy": "no", "rows": 33}
LLAMA |= {"eval_strategy": "steps", "eval_steps": 2}
TENSOR = {"mesh": {"pipe": 2, "tensor": 2, "tensor_parallel": "auto"}}
PLAIN: dict[str, dict[str, Any]] = {  # and on two ranks
    "padded": {"lengths": True, "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 2},
    "plan": SHORT | {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
    "bf16": SHORT | {"max_steps": 2, "bf16": True, "lengths": True},
    "one row": SHORT | {"rows": 33, "eval_on_start": True},  # in the last step, in four microbatches
    "uneven": SHORT | {"rows": 38, "model": "classes", "set": MEAN, "eval_strategy": "epoch"},  # batches of 4 and 2
    "own": SHORT | {"rows": 38, "own": True, "save_strategy": "epoch"},
}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (
        r"num_items_in_batch does not divide all of the loss of BertForMaskedLM, .* a sum over 4 batches, .*: expected "
        r"model.accepts_loss_kwargs = False",
        {"model": "masked"},
    ),
    (r"divides the loss of 176 labels by 192.*: expected model.loss_type = .ForCausalLM", {"set": {"loss_type": None}}),
    (
        r"equal weights, though their losses are means over .*: expected .* a microbatch for each",
        {"model": "masked", "set": MEAN, "pipeline": {"num_microbatches": 2}},
    ),
    (r"2bw.* returns the loss of a batch later: expected a schedule with a flush", {"pipeline": {"schedule": "2bw"}}),
    (
        r"2 data replicas: expected even_batches=True of accelerator_config",
        {"accelerator_config": {"even_batches": False}, "pipeline": {"mesh": {"data": 2}}},
    ),
    (
        r"2 data replicas: expected average_tokens_across_devices=True",
        {"average_tokens_across_devices": False, "pipeline": {"mesh": {"data": 2}}},
    ),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(tmp_path_factory.mktemp("plain"), {"whole": {}, "context": LLAMA} | PLAIN, num_ranks=None)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    # A plan, such as "auto" makes, may give both ranks the last stage, and each a share of one batch.
    nodes = [f"transformer.{name}" for name in ("wte", "wpe", "h.0", "h.1", "ln_f")]
    stages = (PlanStage(nodes=(*nodes, "lm_head"), ranks=(0, 1), step_seconds=1),)
    costs = {"cost_model": "default", "costs": Costs(forward=1, backward=2)}
    sizes = {"num_devices": 2, "num_microbatches": 4, "bottleneck": 1, "bound": 1}
    (folder / "plan.json").write_text(Plan(stages=stages, schedule="1f1b", **sizes, **costs).to_json())
    schedules = {"padded": "zb-h1", "plan": str(folder / "plan.json")}
    cases = {
        name: case | {"pipeline": UNVERIFIED | ({"schedule": schedules[name]} if name in schedules else {})}
        for name, case in PLAIN.items()
    }
    refused = {str(number): SHORT | options for number, (_, options) in enumerate(REFUSED)}
    return start(folder, cases | refused, num_ranks=2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = {
        "whole": {},
        "replicas": REPLICAS,
        "uneven": UNEVEN | REPLICAS,
        "context": LLAMA | {"pipeline": UNVERIFIED | CONTEXT},
        "tensor": SHORT | {"stop": 2, "pipeline": UNVERIFIED | TENSOR},
    }
    return start(tmp_path_factory.mktemp("four"), cases, num_ranks=4)


@pytest.mark.thorough
def test_four_ranks_log_evaluate_and_save_as_one_process(four: Path, plain: Path) -> None:
    assert_same(read(four / "whole"), read(plain / "whole"))
    weights = transformers.GPT2LMHeadModel.from_pretrained(four / "whole/final").state_dict()
    last = transformers.GPT2LMHeadModel.from_pretrained(four / "whole/checkpoint-15").state_dict()
    assert all((weights[name] == last[name]).all() for name in weights)


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "alone"), [("context", "context"), ("replicas", "whole")])
def test_members_of_groups_train_as_one_process(four: Path, plain: Path, case: str, alone: str) -> None:
    """Of a context group with position_ids in the data, which a part cannot tell; replicas read a share each."""
    assert_same(read(four / case), read(plain / alone))


@pytest.mark.thorough
def test_four_ranks_and_data_replicas_resume_in_other_processes(tmp_path: Path, four: Path) -> None:
    cases = {"whole": {"resume": True}, "replicas": REPLICAS | {"resume": True}}
    for name in cases:
        shutil.copytree(four / name, tmp_path / name, ignore=shutil.ignore_patterns("checkpoint-15", "history.json"))
    start(tmp_path, cases, num_ranks=4)
    for name in cases:
        resumed, whole = (
            [row for row in read(folder / name) if row["step"] > 10 and "train_loss" not in row]
            for folder in (tmp_path, four)
        )
        assert_same(resumed, whole)


@pytest.mark.thorough
def test_data_replicas_share_an_uneven_end_of_an_epoch_as_trainers_processes_do(tmp_path: Path, four: Path) -> None:
    start(tmp_path, {"uneven": UNEVEN | {"ddp_find_unused_parameters": False}}, num_ranks=2, kind="plain")
    assert_same(read(four / "uneven"), read(tmp_path / "uneven"))
    states = [
        json.loads((folder / "uneven/checkpoint-5/trainer_state.json").read_text()) for folder in (tmp_path, four)
    ]
    assert states[0]["total_flos"] == states[1]["total_flos"]


@pytest.mark.thorough
@pytest.mark.parametrize("case", PLAIN)
def test_what_a_pipeline_can_follow_equals_plain(case: str, two: Path, plain: Path) -> None:
    # bfloat16 rounds to 4e-3; 7e-4 was measured over three steps.
    assert_same(read(two / case), read(plain / case), 4e-3 if case == "bf16" else TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_a_pipeline_cannot_follow_is_refused_before_training(number: int, two: Path) -> None:
    text = json.loads((two / f"{number}/history.json").read_text())
    assert re.search(REFUSED[number][0], text), text


@pytest.mark.nightly
def test_a_plan_that_is_made_on_the_spot_trains_as_one_process(tmp_path: Path, plain: Path) -> None:
    start(tmp_path, {"auto": SHORT | {"stop": 2, "pipeline": {"schedule": "auto"}}}, num_ranks=2)
    assert_same([row for row in read(tmp_path / "auto") if "loss" in row], read(plain / "whole")[:2])


@pytest.mark.thorough
def test_tensor_parallel_stages_train_as_one_process(four: Path, plain: Path) -> None:
    assert_same([row for row in read(four / "tensor") if "loss" in row], read(plain / "whole")[:2])


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


@pytest.mark.thorough
def test_steps_that_would_differ_without_a_word_are_refused(tmp_path: Path) -> None:
    """Trained on another loss, or by an optimizer without its own options."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_head=1, n_layer=1, vocab_size=9))
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to="none")
    made = stagewright.integrations.PipelineTrainer

    class Norms(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...

    class Clips(made):
        def _clip_grad_norm(self, model: Any) -> Any: ...

    class Sums(made):
        loss_is_scaled_for_ga = True

    class Weighted(made):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    class Logged(made):
        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)

    class Momentum(torch.optim.SGD):
        pass

    @dataclasses.dataclass
    class Next(transformers.TrainingArguments):  # of another release
        loss_spikes: str = "keep"

    made(model, Next(tmp_path, use_cpu=True, report_to="none"))
    with pytest.raises(ValueError, match=r"TrainingArguments\(loss_spikes='skip'\) with a pipeline: expected no such"):
        made(model, Next(tmp_path, use_cpu=True, report_to="none", loss_spikes="skip"))
    with pytest.raises(ValueError, match=r"Weighted.compute_loss would never be called.*: expected a model that"):
        Weighted(model, arguments)
    Logged(model, arguments)
    own = Momentum(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"an optimizer of .*\.Momentum: expected one of torch.optim or transformers"):
        made(model, arguments, optimizers=(own, None), train_dataset=[1]).train()
    with pytest.raises(ValueError, match=r"Norms.on_pre_optimizer_step would see no gradients.*: expected on_step_end"):
        made(model, arguments, callbacks=[Norms()])
    with pytest.raises(ValueError, match=r"Clips._clip_grad_norm would never be called.*max_grad_norm"):
        Clips(model, arguments)
    with pytest.raises(ValueError, match=r"loss_is_scaled_for_ga=True with a pipeline: expected None"):
        Sums(model, arguments)
    with pytest.raises(ValueError, match=r"example_inputs.*expected stagewright.Inputs\(\.\.\.\) without an example"):
        made(model, arguments, pipeline={"example_inputs": (torch.ones(2, 3),)})
    with pytest.raises(ValueError, match=r"'loss_fn': <.*expected a model that returns its loss"):
        made(model, arguments, pipeline={"loss_fn": lambda *_: 0})
    late = made(model, arguments, train_dataset=[1])
    late.add_callback(Norms())
    with pytest.raises(ValueError, match=r"Norms.on_pre_optimizer_step would see no gradients"):
        late.train()
    late.pop_callback(Norms)
    late.training_step = lambda *_: None
    with pytest.raises(ValueError, match=r"PipelineTrainer.training_step would never be called"):
        late.train()


def test_a_loss_that_a_number_of_items_does_not_divide_is_known_before_it_runs(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to="none")

    def is_divided(model: torch.nn.Module) -> bool:
        rows = torch.ones(2, 4, dtype=torch.int64)
        trainer = stagewright.integrations.PipelineTrainer(model, arguments)
        return trainer._is_divided({"input_ids": rows, "labels": rows})

    class Summed(Parts, weight=lambda: torch.nn.Parameter(torch.ones(()))):
        def forward(self, input_ids: Any, labels: Any, num_items_in_batch: Any = 1, **_: Any) -> Any:
            return {"loss": (input_ids * self.weight).sum() / num_items_in_batch}

    class Reads(Summed):
        def forward(self, input_ids: Any, labels: Any, num_items_in_batch: Any = 1, **_: Any) -> Any:
            return super().forward(input_ids, labels, float(labels.sum()))

    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 9}
    assert is_divided(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=8)))
    assert not is_divided(transformers.BertForMaskedLM(transformers.BertConfig(**sizes)))
    assert is_divided(Summed())
    with pytest.warns(UserWarning, match="whether num_items_in_batch divides the loss of Reads cannot be seen"):
        assert is_divided(Reads())
    routed = Summed()
    routed.config = transformers.MixtralConfig(output_router_logits=True)  # type: ignore[assignment]
    assert not is_divided(routed)


def train_here(folder: Path, *, evaluates: bool = False, as_loaded: bool = False, dropout: float = 0.3) -> list[float]:
    transformers.set_seed(0)
    dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=8, n_head=1, n_layer=2, vocab_size=9, n_positions=8, **dropouts)
    )
    model.loss_type = "ForCausalLM"
    if as_loaded:
        model.eval()
    rows = [{"input_ids": torch.arange(i, i + 8) % 9, "labels": torch.arange(i, i + 8) % 9} for i in range(24)]
    arguments = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=3,
        logging_steps=1,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=1,
        save_strategy="no",
    )
    trainer = stagewright.integrations.PipelineTrainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[:4], pipeline={"mesh": {"pipe": 2}}
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.thorough
def test_dropout_acts_whatever_from_pretrained_or_an_evaluation_has_left(tmp_path: Path) -> None:
    """Each evaluation put the model into the other mode, and training went on without dropout, without a word."""
    expected = train_here(tmp_path)
    assert train_here(tmp_path, evaluates=True) == expected
    assert train_here(tmp_path, as_loaded=True) == expected
    assert train_here(tmp_path, dropout=0.0) != expected
