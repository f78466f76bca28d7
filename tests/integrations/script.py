"""A plain script of transformers' Trainer: `script.py plain|pipe FOLDER '{CASE: {"pipeline": {...}, ...}, ...}'`.

Of a case's options, those in `OWN` are its own; all others are TrainingArguments. Cases run one after the other, each
in FOLDER/CASE; what is refused leaves its words as the history.
"""

import importlib
import json
import math
import os
import sys
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

OWN: dict[str, Any] = {
    "resume": None,
    "pipeline": None,
    "lengths": False,  # sequences of several
    "rows": 72,  # to train on
    "stop": math.inf,  # the step behind which a callback ends training
    "model": "gpt2",
    "set": {},  # attributes of the model
    "own": False,  # whether a subclass has methods of its own, and a callback that changes weights
}


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, size: int, seed: int, *, lengths: bool, model: str = "gpt2") -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, 50, (size, 12), generator=generator)
        self.lengths = torch.randint(5, 13, (size,), generator=generator) if lengths else [12] * size
        hidden = torch.rand(self.rows.shape, generator=generator) < 0.3
        self.masked = torch.where(hidden | (torch.arange(12) == 0), self.rows, -100)
        self.model = model

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = {"input_ids": self.rows[i][: self.lengths[i]]}
        if self.model == "gpt2":
            return row
        if self.model == "llama":
            return row | {"position_ids": torch.arange(len(row["input_ids"]))}
        return row | {"labels": self.masked[i][: self.lengths[i]] if self.model == "masked" else self.rows[i][0] % 3}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] for row in rows]
    labels = [row.get("labels", row["input_ids"]) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    positions = [row["position_ids"] for row in rows if "position_ids" in row]
    return {
        **({"position_ids": pad(positions, batch_first=True)} if positions else {}),
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100) if labels[0].dim() else torch.stack(labels),
    }


def accuracy(outcome: EvalPrediction) -> dict[str, float]:
    labels, guesses = outcome.label_ids, outcome.predictions.argmax(-1)
    if labels.ndim == 2:
        labels, guesses = labels[:, 1:], guesses[:, :-1]
    return {"accuracy": float((guesses == labels)[labels != -100].mean())}


class Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


class Shrink(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)


def with_own_methods(base: type[Trainer]) -> type[Trainer]:
    class Own(base):  # type: ignore[valid-type,misc]
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            steps = {"max_lr": 0.5, "total_steps": num_training_steps + 1}  # it changes the momentum, too
            self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, **steps)
            return self.lr_scheduler

        def get_train_dataloader(self) -> Any:
            options = {"batch_size": self.args.per_device_train_batch_size, "collate_fn": padded}
            return self.accelerator.prepare(torch.utils.data.DataLoader(self.train_dataset, **options))

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            batches, _ = super().get_batch_samples(*args, **kwargs)
            for batch in batches:
                batch["input_ids"] = 49 - batch["input_ids"]
                batch["labels"][:, 6:] = -100
            return batches, self._get_num_items_in_batch(batches, self.args.device)

    return Own


def make_model(kind: str, attributes: dict[str, Any]) -> Any:
    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    model: Any
    if kind == "gpt2":
        sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=1, eos_token_id=2))
        model.loss_type = "ForCausalLM"  # without it, Trainer divides the loss by the first labels, too
    elif kind == "llama":
        sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, bos_token_id=1, eos_token_id=2))
    else:
        sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(**sizes, **none, num_attention_heads=4, max_position_embeddings=16, num_labels=3)
        model = (BertForMaskedLM if kind == "masked" else BertForSequenceClassification)(config)
    if "attention" in attributes:
        model.set_attn_implementation(attributes["attention"])
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def run(kind: str, folder: str, options: dict[str, Any]) -> None:
    own = {name: options.pop(name, default) for name, default in OWN.items()}
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
        from stagewright import Mesh
        from stagewright.integrations import PipelineTrainer

        pipeline = own["pipeline"] or {}
        extra: dict[str, Any] = {
            "pipeline": {**pipeline, "mesh": Mesh(**pipeline["mesh"]) if "mesh" in pipeline else None}
        }
        made: type[Trainer] = PipelineTrainer
        if own["model"] == "llama":
            own["set"] = {"attention": importlib.import_module("stagewright.integrations.attention").NAME}
    else:
        extra, made = {}, Trainer
    words = {"lengths": own["lengths"], "model": own["model"]}
    trainer = (with_own_methods(made) if own["own"] else made)(
        None,
        arguments,
        model_init=lambda: make_model(own["model"], own["set"]),
        callbacks=[Stop(own["stop"]), *[Shrink()] * own["own"]],
        data_collator=padded,
        train_dataset=Words(own["rows"], 1, **words),  # the last step of an epoch has half of the batches
        eval_dataset=Words(22, 2, **words),
        compute_metrics=accuracy,
        **extra,
    )
    trainer.train(resume_from_checkpoint=own["resume"])
    trainer.save_model(f"{folder}/final")
    outcome = trainer.predict(Words(6, 3, lengths=False, model=own["model"]))
    if trainer.is_world_process_zero():
        history = [{k: v for k, v in row.items() if k not in ("total_flos",)} for row in trainer.state.log_history]
        with open(f"{folder}/history.json", "w") as file:
            json.dump([*history, {"step": -1, "first": float(outcome.predictions[0].flat[0])}], file)


def main() -> None:
    kind, folder, text = sys.argv[1:]
    for name, options in json.loads(text).items():
        place = f"{folder}/{name}"
        os.makedirs(place, exist_ok=True)
        try:
            run(kind, place, options)
        except ValueError as error:
            with open(f"{place}/history.json", "w") as file:
                json.dump(str(error), file)


if __name__ == "__main__":
    main()
