"""A plain loop of accelerate, all but two lines of it: `loop.py plain|pipe FOLDER`."""

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import GPT2Config, GPT2LMHeadModel


def make_rows(size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 50, (size, 8), generator=generator)
    hidden = torch.rand(ids.shape, generator=generator) < 0.3  # batches have unequal numbers of labels
    return [{"input_ids": row, "labels": torch.where(gone, -100, row)} for row, gone in zip(ids, hidden, strict=True)]


def main() -> None:
    kind, folder = sys.argv[1:]
    set_seed(0)
    if kind == "pipe":
        from stagewright.integrations import PipelineAccelerator

        pipeline = {"mesh": {"pipe": 2, "data": 2}, "num_microbatches": 2}
        accelerator: Accelerator = PipelineAccelerator(cpu=True, gradient_accumulation_steps=2, pipeline=pipeline)
    else:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    sizes = {"vocab_size": 50, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    plain = GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=1, eos_token_id=2)).double()
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    loader: Any = torch.utils.data.DataLoader(make_rows(22), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    metrics: Any = torch.utils.data.DataLoader(make_rows(10), batch_size=3)  # type: ignore[arg-type]
    model, optimizer, loader, metrics, scheduler = accelerator.prepare(plain, optimizer, loader, metrics, scheduler)
    history: list[Any] = []

    def epoch() -> None:
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    history.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.7)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            history.append([float(accelerator.reduce(loss, "mean")), scheduler.get_last_lr()[0]])
        model.eval()
        for batch in metrics:
            with torch.no_grad():
                output = model(**batch)
            guesses, labels = accelerator.gather_for_metrics((output.logits.argmax(-1), batch["labels"]))
            history.append([len(guesses), float((guesses == labels).double().mean())])
            history.append(float(accelerator.gather(output.loss).mean()))

    epoch()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    epoch()
    continued = len(history)
    accelerator.load_state(folder)
    epoch()
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        sums = {name.removeprefix("module."): float(x.sum()) for name, x in weights.items()}
        with open(f"{folder}/history.json", "w") as file:
            json.dump([history[:continued], history[continued:], sums], file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
