"""The calls of a case: training, and what a program does between steps."""

import random
from collections.abc import Sequence
from typing import Any

from stagewright.schedules import FAMILIES

from .blocks import RANDOM, STATEFUL
from .cases import Call, Model
from .changes import ON_BLOCKS
from .models import CHAINS
from .piped import BAD

SLICING = tuple(name for name, one in FAMILIES.items() if one.takes_slices)
ASYNC = ("2bw", "pipedream", "paci")
FLUSHING = tuple(name for name in FAMILIES if name not in (*SLICING, *ASYNC))


class Draws:
    def __init__(self, draw: random.Random, *, gloo: bool) -> None:
        self.draw, self.gloo = draw, gloo

    def often(self, share: float) -> bool:
        return self.draw.random() < share

    def one(self, choices: Sequence[Any]) -> Any:
        return self.draw.choice(choices)


class Calls(Draws):
    def __init__(
        self,
        draw: random.Random,
        schedule: str,
        model: Model,
        options: dict[str, Any],
        *,
        M: int,
        data: int,
        gloo: bool,
    ) -> None:
        super().__init__(draw, gloo=gloo)
        self.schedule, self.model, self.options, self.M, self.data = schedule, model, options, M, data
        self.is_saved = False
        self.size = self.batch()

    def batch(self) -> tuple[int, int]:
        more = self.draw.randint(0, 3) if self.data == 1 or not self.gloo else self.data * self.draw.randint(0, 2)
        return max(self.M * self.data + more, 2), 6 if self.schedule in SLICING else 3

    def drawn(self) -> tuple[Call, ...]:
        found: list[Call] = []
        for _ in range(self.draw.randint(2, 5)):
            if self.often(0.25):
                is_other = self.schedule not in SLICING and self.often(0.4)
                self.size = (self.batch()[0], self.draw.randint(2, 5) if is_other else self.size[1])
            found.append(("train", *self.size))
            for _ in range(self.one((0, 1, 1, 2))):
                found.append(self.between())
                self.is_saved |= found[-1][0] == "save"
        if self.often(0.1) and (not self.gloo or self.data == 1):
            found.insert(0, ("bad", self.one(self.bads(first=True)), *self.size))
        return (*found, ("train", *self.size))

    def bads(self, *, first: bool) -> list[str]:
        model = self.model
        kinds = [kind for kind in BAD if kind not in ("type", "target", "fewer", "argument", "empty")]
        multiplies = model.style in CHAINS and model.style != "halves" and {"linear", "mlp"} & {*model.blocks}
        if "autocast" not in self.options and (multiplies or not first):  # a product of weights refuses it
            kinds.append("type")
        if (
            model.loss in ("mse", "module", "sum-count")
            and model.inputs == "floats"
            and not (self.gloo or first or STATEFUL & {*model.blocks})
        ):
            kinds.append("target")
        if model.loss != "model":
            kinds += ["argument", "fewer"]
        return kinds

    def kinds(self) -> list[str]:
        kinds = ["eval", "predict", "state", "rate", "load-state", "flush", *["change"] * 4]
        if not self.gloo:  # over processes a bad batch ends the run, unless it is the first: docs/guides/debugging.md
            kinds.append("bad")
        if self.schedule in ASYNC:
            return kinds
        kinds += ["accumulate", "accumulate", "save", *["load"] * 2 * self.is_saved]
        if not self.gloo:
            kinds += ["other"] + ["forward"] * (self.model.loss != "model")
            if not STATEFUL & {*self.model.blocks}:
                kinds.append("fail")
        if "verify" in self.options or not self.gloo:
            kinds.append("verify")
        if self.model.style != "stages" and "counter" not in self.model.blocks:  # no names that stay, no counts
            kinds.append("move")
        if self.data == 1 and self.schedule not in SLICING and self.model.inputs != "positions":
            kinds.append("train-unequal")
        if self.model.inputs == "floats" and self.model.loss != "model":
            kinds.append("input-grad")
            if not (STATEFUL | {"top-one"}) & {*self.model.blocks}:
                kinds.append("nan")
        return kinds

    def between(self) -> Call:
        kind = self.one(self.kinds())
        if kind in ("eval", "predict") and self.often(0.3) and self.data == 1:
            return (kind, self.draw.randint(1, self.M + 2), self.size[1])
        if kind in ("eval", "predict", "verify", "input-grad", "nan", "fail", "other", "forward"):
            return (kind, *self.size)
        if kind == "accumulate":
            # An optimizer that holds parts of weights refuses to be stepped by hand.
            then = "zero" if "data_parallel" in self.options else self.one(("zero", "step", "clip-step"))
            return (kind, self.draw.randint(1, 3), *self.size, then)
        if kind == "rate":
            return (kind, self.one((0.0, 0.01, 0.03)))
        if kind == "bad":
            return (kind, self.one(self.bads(first=self.schedule in ASYNC)), *self.size)
        if kind == "train-unequal":
            return (kind, tuple((self.draw.randint(1, 3), self.draw.randint(2, 5)) for _ in range(self.M)))
        if kind == "move":
            other = {"schedule": self.one(("1f1b", "gpipe")), "V": None, "builder": ()}
            return (kind, () if self.schedule == "custom" else tuple(other.items()))
        return self.change() if kind == "change" else (kind,)

    def change(self) -> Call:
        kinds, model = [*ON_BLOCKS], self.model
        if "argument" in model.blocks:  # torch lets nobody change what a module with such a hook gives, in place
            kinds = [kind for kind in kinds if not kind.startswith("backward-")]
        if model.style not in CHAINS:
            kinds += ["read"] * 6 * (model.reads != "nothing") + ["root-hook", "root-pre-hook", "scale", "copy"]
            kinds += ["eval-model", "train-model"]
        if not RANDOM & {*model.blocks} and model.style not in ("halves", "stages"):
            kinds += ["append"] + ["replace", "delete"] * (model.head == "none")
        if self.schedule in SLICING:
            kinds = [kind for kind in kinds if kind not in ("hook", "pre-hook", "inner-hook")]
        return ("change", self.one(kinds), self.draw.randrange(6), self.one((0.5, 1.5, 2.0)))
