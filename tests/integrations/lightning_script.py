"""A plain script of Lightning beside one over a pipeline: `lightning_script.py plain|pipe FOLDER`."""

import json
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

ROWS = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]).double()


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)


class Piped(LightningModule):
    automatic_optimization = False

    def __init__(self) -> None:
        from stagewright import PipelineModule

        super().__init__()
        self.pipe = PipelineModule(
            make_model(),
            num_microbatches=2,
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.pipe.train_step(*batch).loss, on_step=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.pipe.eval_step(*batch).loss)

    def configure_optimizers(self) -> None: ...


class Kept(LightningModule):
    """Mixed in: what was logged, step by step."""

    def on_train_batch_end(self, *_: Any) -> None:
        HISTORY.append([self.trainer.global_step, float(self.trainer.callback_metrics["loss"])])

    def on_validation_epoch_end(self) -> None:
        HISTORY.append([-1, float(self.trainer.callback_metrics["val_loss"])])


HISTORY: list[Any] = []


class KeptPlain(Plain, Kept): ...


class KeptPiped(Piped, Kept): ...


def fit(kind: str, folder: str, *, max_epochs: int, resume: str | None = None) -> Any:
    seed_everything(0)
    module = KeptPiped() if kind == "pipe" else KeptPlain()
    strategy: Any = "auto"
    if kind == "pipe":
        import stagewright

        strategy = stagewright.integrations.PipelineStrategy()
    data: Any = torch.utils.data.TensorDataset(ROWS, ROWS.flip(0))
    keeper: Any = ModelCheckpoint(
        folder, filename="{step}", every_n_epochs=1, save_top_k=1, monitor="val_loss", mode="min"
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=max_epochs,
        callbacks=[keeper],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    order = torch.Generator().manual_seed(2)  # of its own: resuming, a pipeline restores the global one
    shuffled = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=order)
    trainer.fit(module, shuffled, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=resume)
    weights = trainer.strategy.lightning_module_state_dict()
    if kind == "pipe":
        module.pipe.close()
    return trainer, keeper.best_model_path, weights


def main() -> None:
    kind, folder = sys.argv[1:]
    _, best, _ = fit(kind, folder, max_epochs=2)
    HISTORY.append([-2, int("step=6" in best)])
    trainer, _, weights = fit(kind, folder, max_epochs=3, resume=best)
    saved = torch.load(best, weights_only=False)["state_dict"]
    sums = sorted(float(x.sum()) for state in (weights, saved) for x in state.values())
    if trainer.is_global_zero:
        with open(f"{folder}/history.json", "w") as file:
            json.dump([HISTORY, sums], file)


if __name__ == "__main__":
    main()
