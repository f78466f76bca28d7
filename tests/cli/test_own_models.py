"""Models, data, losses and optimizers that a user names on the command line."""

import json
import math
import re
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.alone import train_alone
from support.commands import Cli, Done
from support.inside import (
    OwnBatches,
    OwnOptions,
    UserCodeError,
    default_loss,
    learning_rate_curve,
    load,
    main,
    pipeline,
)

from stagewright.partition import PlanStage

from .test_train_plan import write_plan

MINE = """
    import itertools

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    answer = 42

    def model():
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    class Counting(nn.Linear):
        count = itertools.count(1)

        def forward(self, x):
            return super().forward(x) / next(self.count)

    def counting():
        return nn.Sequential(Counting(4, 8), nn.Linear(8, 3)).double()

    def few():
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(24, 4, generator=generator, dtype=torch.float64)
        y = x[:, :3].argmax(1)
        return [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]

    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x, labels=None):
            logits = self.head(torch.tanh(self.body(x)))
            if labels is None:
                return logits
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def labelled():
        return Labelled().double()

    def named():
        return [{"x": x, "labels": y} for x, y in few()]

    def with_target():
        return [{"x": x, "target": y} for x, y in few()]

    def samples():
        return TensorDataset(torch.arange(12.0)[:, None], torch.arange(12))

    def loader(batch_size):
        return DataLoader(samples(), batch_size=batch_size, shuffle=True)

    def stream():
        yield from few()

    def sgd(parameters, lr):
        return torch.optim.SGD(parameters, lr=lr)

    def plain_sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    def needs(width, *, depth):
        return nn.Linear(width, depth)

    def breaks():
        raise ValueError("inside")

    def empty():
        return []

    def uneven():
        return [few()[0], [x[:3] for x in few()[1]]]

    def alone():
        return [torch.zeros(8, 4)]

    def words():
        return [("one", torch.zeros(8))]
"""


@pytest.fixture
def mine(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_mine", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (here / "own_mine.py").write_text(textwrap.dedent(MINE))
    return here


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def by_hand(steps: int, name: str = "model") -> list[float]:
    own = sys.modules["own_mine"]
    torch.manual_seed(3)
    model, batches = getattr(own, name)(), islice(cycle(own.few()), steps)
    decay = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=learning_rate_curve(steps))
    sgd = partial(torch.optim.SGD, lr=0.5)
    return train_alone(model, batches, sgd, loss_fn=F.cross_entropy, clip=0.25, scheduler=decay).losses


COMMON = ("--steps", "7", "--microbatches", "4", "--seed", "3", "--clip", "0.25", "--lr", "0.5", "--json")


@pytest.mark.thorough
@pytest.mark.parametrize("data", ["few", "stream"])
def test_a_model_of_the_users_is_trained_as_plain_pytorch_would(mine: Path, data: str, cli: Cli) -> None:
    words = ("--model", "own_mine:model", "--data", f"own_mine:{data}", "--optimizer", "own_mine:sgd", "--name", "one")
    summary = cli.json("train", *words, *COMMON, "--ranks 1")
    assert (summary["samples"], summary["tokens"], summary["val_loss"]) == (56, None, None)
    assert losses(mine / "runs" / "one") == pytest.approx(by_hand(7), rel=1e-12)
    manifest = json.loads((mine / "runs" / "one" / "manifest.json").read_text())
    assert (manifest["corpus_source"], manifest["corpus_sha256"]) == (f"own_mine:{data}", None)


@pytest.mark.thorough
@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("option", "memory", "said"),
    [
        ((), 1 << 40, r"verified against the plain model: loss, \d gradients, outputs"),
        ((), 8, "not verified: a plain copy of the model would take more than an eighth"),
        (("--no-verify",), 1 << 40, None),
    ],
)
def test_the_first_batch_is_verified_where_the_model_fits(
    option: tuple[str, ...],
    memory: int,
    said: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "physical_bytes", lambda: memory)
    words = ("--model", "own_mine:model", "--data", "own_mine:few", "--optimizer", "own_mine:sgd", "--name", "one")
    assert main(["train", *words, *COMMON, "--ranks", "1", *option]) == 0
    found = re.search(r"(not )?verified.*", capsys.readouterr().err)
    assert (found is None) if said is None else (found is not None and re.match(said, found[0]))


@pytest.mark.thorough
@pytest.mark.parametrize(("data", "loss"), [("named", "the model's own"), ("with_target", "cross-entropy")])
def test_batches_may_be_dicts_and_the_loss_the_models_own(
    mine: Path, data: str, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", "own_mine:labelled", "--data", f"own_mine:{data}", "--optimizer", "own_mine:sgd")
    assert main(["train", *words, *COMMON, "--name", "one", "--ranks", "1"]) == 0
    assert f"; loss: {loss}\n" in capsys.readouterr().err
    assert losses(mine / "runs" / "one") == pytest.approx(by_hand(7, "labelled"), rel=1e-12)


@pytest.mark.thorough
def test_two_ranks_train_it_to_the_same_losses(command: Callable[..., Done], mine: Path) -> None:
    words = ("--model", "own_mine:model", "--data", "own_mine.py:few", "--loss", "torch.nn:CrossEntropyLoss")
    done = command("train", *words, "--optimizer", "own_mine:sgd", *COMMON, "--name", "two")
    assert done.status == 0, done.stderr
    assert losses(mine / "runs" / "two") == pytest.approx(by_hand(7), rel=1e-12)
    assert json.loads(done.stdout)["num_ranks"] == 2


def test_the_cut_of_an_own_model_is_shown_before_anything_is_trained(mine: Path, cli: Cli) -> None:
    words = ("--model", "own_mine:model", "--data", "own_mine:few", "--dry-run", "--json")
    answer = cli.json("train", *words)
    assert answer["parameters"] == 4 * 8 + 8 + 8 * 3 + 3
    assert [stage["ranks"] for stage in answer["stages"]] == [[0], [1]]
    assert not (mine / "runs").exists()


def take(value: str, number: int, *, batch_size: int | None = None) -> list[tuple[torch.Tensor, ...]]:
    found = OwnBatches(OwnOptions(model="own_mine:model", data=value), batch_size=batch_size, seed=0)
    return [next(found).args for _ in range(number)]


def test_a_dataset_is_drawn_from_once_an_epoch_in_another_order_each_time(mine: Path) -> None:
    one, other = ([*take("own_mine:samples", 6, batch_size=4)] for _ in range(2))
    order = [[int(y) for _, ys in epoch for y in ys] for epoch in (one[:3], one[3:])]
    assert [sorted(epoch) for epoch in order] == [list(range(12))] * 2
    assert order[0] != order[1]
    assert all(
        torch.equal(x, y) for mine, theirs in zip(one, other, strict=True) for x, y in zip(mine, theirs, strict=True)
    )


@pytest.mark.usefixtures("mine")
def test_workers_read_the_same_samples_ahead() -> None:
    options = OwnOptions(model="own_mine:model", data="own_mine:samples")
    one, other = (OwnBatches(options, batch_size=4, seed=0, workers=workers) for workers in (0, 1))
    assert [next(one).args[1].tolist() for _ in range(4)] == [next(other).args[1].tolist() for _ in range(4)]


def test_a_loader_that_shuffles_by_itself_gives_every_process_the_same_batches(mine: Path) -> None:
    one = take("own_mine:loader", 6, batch_size=4)
    torch.rand(7)  # another process may have drawn other random numbers before
    other = take("own_mine:loader", 6, batch_size=4)
    assert all(torch.equal(mine[1], theirs[1]) for mine, theirs in zip(one, other, strict=True))
    assert {int(y) for _, ys in one[:3] for y in ys} == set(range(12))


def test_a_generator_is_asked_for_again_when_it_has_ended(mine: Path) -> None:
    found = take("own_mine:stream", 7)
    assert torch.equal(found[0][0], found[3][0])
    assert torch.equal(found[0][0], found[6][0])


def test_the_default_loss_follows_the_type_of_the_target() -> None:
    torch.manual_seed(0)
    for output, target in (
        (torch.randn(5, 3), torch.tensor([0, 2, 1, -100, 2])),
        (torch.randn(2, 4, 3), torch.randint(3, (2, 4))),
        (torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))),
    ):
        total, count = default_loss(output, target)
        classes_last = output.dim() == 3
        wanted = F.cross_entropy(output.movedim(-1, 1) if classes_last else output, target)
        assert total / count == pytest.approx(wanted.item(), rel=1e-6)
    assert default_loss(torch.ones(2, 3), torch.zeros(2, 3)) == 1.0


@pytest.mark.parametrize(
    ("output", "target", "message"),
    [
        (torch.zeros(4, 1), torch.zeros(4), "expected equal shapes for mean squared error"),
        (torch.zeros(2, 5, 5), torch.zeros(2, 5, dtype=torch.long), "either may be the dimension of the classes"),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long), "none is the dimension of the classes"),
        ({"logits": 1}, torch.zeros(2), "output and target are dict and Tensor: expected tensors, or --loss"),
    ],
)
def test_where_the_default_loss_would_be_a_guess_it_is_refused(output: object, target: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        default_loss(output, target)


OWN = ("--model", "own_mine:model", "--data", "own_mine:few")


@pytest.mark.thorough(
    but=[
        "words0---model own_mine: expected package.module:function or fi",
        "words3-'own-mine' is no module's name",
        "words13---loss own_mine:model: takes 0 arguments: expected a function of 2",
        "words15-has no parameter lr: leave --lr away",
    ]
)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "own_mine", "--data", "own_mine:few"), "--model own_mine: expected package.module:function or fi"),
        (("--model", "own_mime:model", "--data", "own_mine:few"), "no module 'own_mime' in .*did you mean own_mine?"),
        (("--model", "own_mine.sub:model", "--data", "own_mine:few"), "no module 'own_mine.sub'"),
        (("--model", "own-mine:model", "--data", "own_mine:few"), "'own-mine' is no module's name"),
        (("--model", "nowhere.py:model", "--data", "own_mine:few"), "there is no file nowhere.py"),
        (("--model", "own_mine:modle", "--data", "own_mine:few"), "own_mine has no 'modle': did you mean model"),
        (("--model", "own_mine:answer", "--data", "own_mine:few"), "answer is an int: expected a function"),
        (("--model", "own_mine:needs", "--data", "own_mine:few"), "needs width, depth, which are not given: expected"),
        (("--model", "own_mine:few", "--data", "own_mine:few"), "--model own_mine:few returned list: expected a torch"),
        (("--model", "own_mine:model"), "without --data: expected --data package.module:function"),
        (("--data", "own_mine:few"), "--data own_mine:few without --model"),
        ((*OWN, "--width", "32"), "--width 32 with --model: leave it away"),
        ((*OWN, "--batch", "16"), "--batch 16 and --data own_mine:few gives batches of 8"),
        ((*OWN, "--loss", "own_mine:model"), "--loss own_mine:model: takes 0 arguments: expected a function of 2"),
        ((*OWN, "--optimizer", "own_mine:model"), "--optimizer own_mine:model: takes 0 arguments: expected a function"),
        ((*OWN, "--optimizer", "own_mine:plain_sgd", "--lr", "1"), "has no parameter lr: leave --lr away"),
        ((*OWN, "--microbatches", "9"), "own_mine:few gives a batch of 8 for 9 microbatches: .* --microbatches 8"),
        (
            ("--model", "own_mine:model", "--data", "own_mine:uneven", "--no-verify"),
            r"a batch of 3 for 8 microbatches: .* 8 samples or more \(.* drop_last=True\), or --microbatches 3",
        ),
        (("--model", "own_mine:model", "--data", "own_mine:empty"), "--data own_mine:empty gave no batch"),
        (("--model", "own_mine:model", "--data", "own_mine:alone"), "gave a batch that is Tensor: expected"),
        (("--model", "own_mine:model", "--data", "own_mine:words"), "whose input 0 is str: expected a tensor"),
        (("--model", "own_mine:model", "--data", "own_mine:model"), "returned Sequential: expected a torch Dataset"),
        (("--clip", "-1"), "--clip -1.0: expected a number above 0"),
        (
            ("--model", "own_mine:counting", "--data", "own_mine:few"),
            r"verify=False trains without this check\n\(stagewright train: --no-verify for verify=False\)",
        ),
    ],
)
def test_mistakes_name_the_value_what_was_expected_and_what_to_type(
    mine: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--ranks", "1", *words]) == 2  # some have begun to run, and have said so
    error = capsys.readouterr().err
    assert error.startswith("stagewright: error: ")
    assert "Traceback" not in error
    assert re.search(message, error), error


def test_a_plan_for_batches_of_another_size_is_refused(mine: Path, cli: Cli) -> None:
    alone = {"stages": (PlanStage(nodes=("0", "1", "2"), ranks=(0,), step_seconds=0.3),), "num_devices": 1}
    write_plan(mine, ("0", "1"), **alone, microbatch_size=4)
    error = cli.refused("train --ranks 1 --dry-run", *OWN, "--plan plan.json")
    assert "own_mine:few gives batches of 8, and the plan is for 4 microbatches of 4 samples: expected batches" in error
    assert "batches of 16 (--batch where" in error
    write_plan(mine, ("0", "1"), **alone)
    assert main(["train", "--ranks", "1", "--dry-run", *OWN, "--plan", "plan.json"]) == 0


@pytest.mark.parametrize("option", ["model", "data"])
def test_an_error_in_the_users_own_code_keeps_its_traceback(mine: Path, option: str) -> None:
    """As a ValueError it would be printed as one line, without the place."""
    words = {"model": "own_mine:model", "data": "own_mine:few", option: "own_mine:breaks"}
    with pytest.raises(UserCodeError, match=f"--{option} own_mine:breaks raised ValueError") as told:
        main(["train", "--ranks", "1", *(word for name, its in words.items() for word in (f"--{name}", its))])
    assert isinstance(told.value.__cause__, ValueError)


def test_a_module_whose_own_import_fails_is_not_taken_for_a_missing_one(mine: Path) -> None:
    (mine / "own_broken.py").write_text("import no_such_package\n")
    with pytest.raises(UserCodeError, match="importing own_broken failed"):
        load("model", "own_broken:model")


def test_two_options_may_name_one_file(mine: Path) -> None:
    one, other = load("model", "own_mine.py:model"), load("data", "own_mine.py:few")
    assert one.__globals__ is other.__globals__
    assert math.isfinite(one()[0].weight.sum().item())


@pytest.mark.thorough
def test_an_own_model_is_profiled_and_planned_in_one_go(mine: Path, cli: Cli) -> None:
    words = (*OWN, "--optimizer", "own_mine:plain_sgd")
    profile = cli.json("profile", *words, "--microbatch 3 --seconds 0.1")
    assert (len(profile["nodes"]), profile["microbatch_size"]) == (3, 3)
    plan = cli.json("plan", *words, "--ranks 2 --batch 8 --replicas 1 --pipeline 2")
    assert "ranks that share a host slow each other down, which is not in these seconds: `stagewright" in cli.told
    assert plan["costs"]["norm"] == 0.0  # clipped to 1, as `stagewright train` does, over links that take no time
    assert [node for stage in plan["stages"] for node in stage["nodes"]] == ["0", "1", "2"]
    assert plan["microbatch_size"] in (1, 2, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("profile", *OWN, "--microbatch", "9"), "gives batches of 8, smaller than one microbatch of 9"),
        (("profile", *OWN, "--links"), "--links and --model: expected one of them"),
        (("profile", *OWN, "--layers", "9"), "--layers 9 with --model"),
        (("plan", *OWN, "--ranks", "2", "--batch", "6"), "--batch 6 and --data own_mine:few gives batches of 8"),
        (("plan", *OWN, "--profile", "a.json", "--ranks", "2", "--batch", "8"), "--profile and --model: expected one"),
    ],
)
def test_mistakes_of_profile_and_plan(mine: Path, words: tuple[str, ...], message: str, cli: Cli) -> None:
    assert message in cli.refused(*words)
