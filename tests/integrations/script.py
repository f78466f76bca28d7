"""A plain script of transformers' Trainer: `script.py plain|pipe FOLDER '{"resume": ..., "pipeline": {...}, ...}'`.

Of the options, `resume`, `pipeline`, `lengths` (sequences of several), `rows` (to train on) and `stop` (the step behind
which a callback ends training) are its own; all others are TrainingArguments.
"""

import json
import math
import sys
from typing import Any

import torch
from transformers import (
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, size: int, seed: int, *, lengths: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, 50, (size, 12), generator=generator)
        self.lengths = torch.randint(5, 13, (size,), generator=generator) if lengths else [12] * size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i][: self.lengths[i]]}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad(ids, batch_first=True, padding_value=-100),
    }


def accuracy(outcome: EvalPrediction) -> dict[str, float]:
    labels = outcome.label_ids[:, 1:]
    right = outcome.predictions.argmax(-1)[:, :-1] == labels
    return {"accuracy": float(right[labels != -100].mean())}


class Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def make_model() -> GPT2LMHeadModel:
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 4, "n_head": 4}
    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=1, eos_token_id=2))
    model.loss_type = "ForCausalLM"  # without it, Trainer divides the loss by the first labels, too
    return model


def main() -> None:
    kind, folder, text = sys.argv[1:]
    options: dict[str, Any] = json.loads(text)
    own = {"resume": None, "pipeline": None, "lengths": False, "rows": 72, "stop": math.inf}
    resume, pipeline, lengths, rows, stop = (options.pop(name, default) for name, default in own.items())
    set_seed(0)
    given = {
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 3,
        "learning_rate": 3e-3,
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_steps": 5,
        "eval_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(folder, **{**given, **options})
    if kind == "pipe":
        from stagewright.integrations import PipelineTrainer

        extra: dict[str, Any] = {"pipeline": pipeline}
        made: type[Trainer] = PipelineTrainer
    else:
        extra, made = {}, Trainer
    trainer = made(
        None,
        arguments,
        model_init=make_model,
        callbacks=[Stop(stop)],
        data_collator=padded,
        train_dataset=Words(rows, 1, lengths=lengths),  # the last step of an epoch has half of the batches
        eval_dataset=Words(22, 2, lengths=lengths),
        compute_metrics=accuracy,
        **extra,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    outcome = trainer.predict(Words(6, 3, lengths=False))
    if trainer.is_world_process_zero():
        history = [{k: v for k, v in row.items() if k not in ("total_flos",)} for row in trainer.state.log_history]
        with open(f"{folder}/history.json", "w") as file:
            json.dump([*history, {"step": -1, "first": float(outcome.predictions[0, 0, 0])}], file)


if __name__ == "__main__":
    main()
