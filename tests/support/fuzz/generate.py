"""A case from a number: the same one each time. Most run; what docs say is refused is seldom drawn."""

import random
from dataclasses import replace
from typing import Any

from stagewright.schedules import FAMILIES, build

from .blocks import AGAIN, BLOCKS, CAUSAL, RANDOM, STATEFUL
from .cases import Case, Model
from .generate_calls import ASYNC, FLUSHING, SLICING, Calls, Draws
from .models import CHAINS, STYLES, make_model, unit_names
from .reads import READS

INPUTS = ("floats", "tokens", "pair", "mask", "positions", "dict", "flags")
RECOMPUTE = ("none", "full", "layer", "selective")


def generate(number: int, *, gloo: bool = False) -> Case:
    return _Drawn(random.Random(f"{number} {gloo}"), gloo=gloo).case(number)


class _Drawn(Draws):
    def case(self, number: int) -> Case:
        schedule = self.one(self.one(((*FLUSHING, "custom"), (*FLUSHING, "custom"), ("1f1b", *ASYNC), SLICING)))
        P, V, M, builder = self.sizes(schedule)
        data, tensor = self.mesh(schedule, P)
        # Buffers follow the order in which microbatches run: an order of its own under "custom".
        replicated = schedule == "custom" or data > 1 or tensor > 1 or self.copies(schedule, builder) > 1
        model = self.model(schedule, replicated=replicated, tensor=tensor, S=P * (V or 1))
        optimizer = self.one(("sgd", "nesterov", "adamw", "adamw-foreach", "decay", "grouped"))
        optimizer = "joined" if self.often(0.04) else optimizer
        options = self.options(schedule, model, data=data, tensor=tensor)
        if optimizer in ("sgd", "nesterov") and schedule != "paci" and tensor == 1 and self.often(0.15):
            options += (("autocast", True),)
            blocks = tuple(name if name in CAUSAL else self.one(CAUSAL) for name in model.blocks)
            model = replace(model, blocks=blocks, loss="mse" if model.loss == "model" else model.loss)
        options += self.cut(model, S=P * (V or 1))
        if self.often(0.2) and tensor == 1 and schedule != "paci":  # as of recompute=
            options += self.edits(model, dict(options))
        calls = Calls(self.draw, schedule, model, dict(options), M=M, data=data, gloo=self.gloo).drawn()
        if "compiled" in model.blocks or "compile" in dict(dict(options).get("edits", ())).values():
            # torch leaves out hooks that come when a module has been compiled.
            calls = tuple(call for call in calls if call[0] != "change" or "hook" not in call[1])
        draws = bool(RANDOM & {*model.blocks})
        is_cast = ("autocast", True) in options  # types between stages are known inside of it
        is_lazy = is_cast or (schedule not in ("pipedream", "paci") and not draws and self.often(0.5))
        if self.gloo and not is_lazy and model.loss == "model" and calls[0][0] == "bad":
            # All processes weigh the labels of stages that are built: it ends the run, docs/guides/debugging.md.
            calls = calls[1:]
        return Case(
            model=model,
            schedule=schedule,
            P=P,
            V=V,
            M=M,
            builder=builder,
            data=data,
            tensor=tensor,
            gloo=self.gloo,
            optimizer=optimizer,
            options=options,
            is_lazy=is_lazy,
            refill=self.often(0.2),
            calls=calls,
            seed=number,
            is_deferred=not is_lazy and self.often(0.4),
        )

    # --- layout ---

    def sizes(self, schedule: str) -> tuple[int, int | None, int, tuple[tuple[str, Any], ...]]:
        """P, V, M and options that the family takes."""
        if schedule == "custom":
            return self.draw.randint(1, 3), self.one((1, 1, 2)), self.draw.randint(1, 5), ()
        record = FAMILIES[schedule]
        for _ in range(60):
            P = self.draw.randint(1 if not self.gloo else 2, 4)
            M = self.draw.randint(1, 6) if P < 4 else self.draw.randint(1, 9)
            V = self.draw.randint(1, 3) if record.takes_chunks else record.num_chunks if record.num_chunks > 1 else None
            if P * (V or 1) > 8:
                continue
            builder: dict[str, Any] = {}
            if schedule in ("pipedream", "paci"):
                builder["update_every"] = self.one([k for k in range(1, M + 1) if M % k == 0])
            if schedule == "pipedream":
                builder["vertical_sync"] = self.often(0.4)
            if record.takes_slices and self.often(0.5):
                builder["num_slices"] = self.draw.randint(1, 3)
            if schedule in ("1f1b", "2bw") and P > 1 and self.often(0.15):
                builder["replicas"] = self.one([(1,) * i + (2,) + (1,) * (P - 2 - i) for i in range(P - 1)])
            chunks = {} if V is None else {"num_chunks": V}
            try:
                build(schedule, num_ranks=P, num_microbatches=M, **chunks, **builder)
            except ValueError:
                continue
            if "replicas" not in builder or not self.gloo:
                return P, V, M, tuple(builder.items())
        return 2, 2 if record.num_chunks > 1 else None, 4, ()

    def copies(self, schedule: str, builder: Any) -> int:
        return 2 if "replicas" in dict(builder) else 1 if schedule == "custom" else FAMILIES[schedule].weight_copies

    def mesh(self, schedule: str, P: int) -> tuple[int, int]:
        if schedule in (*SLICING, "pipedream", "paci") or P > 2 or schedule == "custom":
            return 1, 1
        if FAMILIES[schedule].weight_copies > 1:
            return 1, 1
        if self.gloo:
            return self.one(((1, 1), (1, 1), (2, 1), (1, 2)))
        return (2, 1) if self.often(0.15) and schedule != "2bw" else (1, 1)

    # --- the model ---

    def model(self, schedule: str, *, replicated: bool, tensor: int, S: int) -> Model:
        style = self.style(schedule, tensor)
        chain = style in CHAINS
        forms = ("floats", "tokens") if chain or schedule in SLICING else INPUTS
        inputs = self.one(forms)
        head = self.one(("none", "linear", "tied")) if inputs == "tokens" else self.one(("none", "linear"))
        if head == "tied" and (schedule in ASYNC or self.often(0.5)):
            head = "linear"
        losses = ["mse", "mse", "sum-count", "module", "huber"]
        losses += ["cross-entropy"] * 3 * (inputs == "tokens" and head != "none")
        if not chain and schedule not in SLICING:
            losses += ["outputs"] + ["model"] * (inputs not in ("pair", "dict"))
        reads = "nothing" if chain or self.often(0.4) else self.one([name for name in READS if name != "nothing"])
        if style == "halves" and reads in ("child", "training", "requires-grad"):
            reads = "config"
        blocks = self.blocks(schedule, style, replicated=replicated, tensor=tensor, S=S)
        return Model(style=style, blocks=blocks, inputs=inputs, head=head, loss=self.one(losses), reads=reads)

    def style(self, schedule: str, tensor: int) -> str:
        if tensor > 1:
            return str(self.one(("loop", "residual", "memory")))
        if schedule in SLICING:
            return str(self.one(("sequential", "loop", "residual")))
        styles = [*STYLES, "sequential", "stages", "loop"]
        if schedule in ("pipedream", "paci"):  # weights of several stages; an order of stages of each process's own
            styles = [one for one in styles if one not in ("twice", "memory", *["set-of-blocks"] * self.gloo)]
        if schedule == "paci":
            styles.remove("checkpoint")
        return str(self.one(styles))

    def blocks(self, schedule: str, style: str, *, replicated: bool, tensor: int, S: int) -> tuple[str, ...]:
        out = {"first"} if schedule in ("pipedream", "paci") or self.often(0.7) else STATEFUL | {"layerdrop"}
        out |= {"stash", "pop"} | (STATEFUL if replicated or style == "checkpoint" else set())
        # Where units are opened, or run by replicas of other processes, seeds are not those of `plain`.
        if S > 6 or (self.gloo and replicated) or style in ("checkpoint", "set-of-blocks", "twice", "halves"):
            out |= RANDOM
        if schedule in ASYNC:
            out |= {"parameter-hook", "counter"}
        if schedule == "paci":  # what runs again sees newer weights: docs/guides/asynchronous.md
            out |= AGAIN
        if style in ("set-of-blocks", "dense", "memory", "unet", "twice", "residual", "checkpoint", "halves"):
            out |= {"argument"}
        names = [name for name in (CAUSAL if schedule in SLICING else BLOCKS) if name not in out]
        count = max(S if self.often(0.85) else S - 1, 2) + self.one((0, 0, 1, 2))
        blocks = [self.one(names) for _ in range(count)]
        if "first" not in out and "argument" not in blocks:
            blocks[-1 if blocks[0] != "stash" else 0] = "first" if len(blocks) > 2 else blocks[-1]
        if schedule not in SLICING and style in (*CHAINS, "loop", "residual") and self.often(0.12):
            at = sorted(self.draw.sample(range(len(blocks) + 1), 2))
            blocks.insert(at[1], "pop")
            blocks.insert(at[0], "stash")
        if tensor > 1 and "mlp" not in blocks:
            blocks[self.draw.randrange(len(blocks))] = "mlp"
        return tuple(blocks)

    def options(self, schedule: str, model: Model, *, data: int, tensor: int) -> tuple[tuple[str, Any], ...]:
        found: dict[str, Any] = {"seed": self.draw.randrange(1000)}
        if schedule != "paci" and "counter" not in model.blocks and "argument" not in model.blocks and self.often(0.4):
            found["recompute"] = self.one(RECOMPUTE[1:])
            if self.often(0.15) and model.style in ("loop", "residual"):
                found["recompute"] = (("blocks.*", self.one(("full", "selective"))),)
            if self.often(0.2):
                found["recompute"] = (("memory_budget", self.one(("2KiB", "8KiB", "1GiB"))),)
        if self.often(0.3) and schedule not in ("pipedream", "paci"):
            found["max_grad_norm"] = self.one((0.05, 1.0))
        if self.often(0.3):
            found["lr_scheduler"] = self.one((True, "sequential", "plateau"))
        if schedule in ASYNC and self.often(0.3):
            found["flush_first"] = self.draw.randint(1, 2)
        if self.gloo and data > 1 and self.often(0.5):
            found["data_parallel"] = self.one(("zero1", "fsdp"))
        if self.often(0.08) and tensor == 1 and not RANDOM & {*model.blocks}:
            found["verify"] = True
        return tuple(found.items())

    def edits(self, model: Model, options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
        """Of some blocks, which change no numbers."""
        if model.style in ("stages", "set-of-blocks", "twice", "halves") or {"stash", "pop", "first"} & {*model.blocks}:
            return ()
        names = unit_names(make_model(Case(model=model)))[model.inputs == "tokens" :]
        found = []
        for name, block in zip(names, model.blocks, strict=False):
            words = ["replace", "compile", *["dtype"] * ("autocast" not in options), *["gelu"] * 3 * (block == "mlp")]
            if "recompute" not in options and block not in {*STATEFUL, "argument"}:
                words += ["checkpoint"] * 2
            if self.often(0.4):
                found.append((name, self.one(words)))
        return (("edits", tuple(found)),) if found else ()

    def cut(self, model: Model, *, S: int) -> tuple[tuple[str, Any], ...]:
        """Sometimes split points of its own."""
        if model.style in ("stages", "set-of-blocks", "twice") or {"stash", "pop", "first"} & {*model.blocks} or S == 1:
            return ()
        names = unit_names(make_model(Case(model=model)))[1:]
        if len(names) < S - 1 or self.often(0.8):
            return ()
        return (("cut", tuple(names[i] for i in sorted(self.draw.sample(range(len(names)), S - 1)))),)
