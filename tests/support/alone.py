"""Training in one plain process, in a pipeline, and the comparison of both."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Alone(NamedTuple):
    """losses: of all steps; norms: before clipping; state: behind them."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def train_alone(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, ...]],
    optimizer: Callable[[Any], Any],
    *,
    loss_fn: Callable[..., Any] = F.mse_loss,
    parts: int = 1,
    delay: int = 0,
    clip: float = float("inf"),
    scheduler: Callable[[Any], Any] | None = None,
    loss_of: Callable[..., Tensor] | None = None,
) -> Alone:
    """A step a batch, of equal parts; each gradient is taken at the weights of `delay` steps before.

    `optimizer` takes the trained parameters, and returns one optimizer or a list, in which None stands for none;
    `loss_of(model, x, y)` is for models that are not called with x alone.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    made, versions = optimizer(trained), list[nn.Module]()
    optimizers = [one for one in (made if isinstance(made, list) else [made]) if one is not None]
    schedulers = [scheduler(one) for one in optimizers] if scheduler else []
    losses, norms = [], []
    for t, (x, y) in enumerate(batches):
        versions += [copy.deepcopy(model)] if delay else []
        used = versions[max(t - delay, 0)] if delay else model
        used.zero_grad()
        losses.append(0.0)
        for mine, target in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
            loss = loss_of(used, mine, target) if loss_of else loss_fn(used(mine.clone()), target)
            loss = (loss[0] / loss[1] if isinstance(loss, tuple) else loss) / parts
            loss.backward()
            losses[-1] += loss.item()
        for parameter, leaf in zip(model.parameters(), used.parameters(), strict=True):
            parameter.grad = leaf.grad
        norms.append(float(nn.utils.clip_grad_norm_(trained, clip)))
        for one in (*optimizers, *schedulers):
            one.step()
    return Alone(losses, norms, model.state_dict())


def train_piped(pipe: Any, batches: Iterable[tuple[Tensor, ...]]) -> Alone:
    """The same in a pipeline, which is then flushed and closed."""
    with pipe:
        results = [*(pipe.train_step(*batch) for batch in batches), *pipe.flush()]
        known = [result for result in results if result.loss is not None]
        state = {name: value.clone() for name, value in pipe.full_state_dict().items()}
    return Alone([result.loss for result in known], [result.grad_norm for result in known], state)


def same_gradients(model: nn.Module, twin: nn.Module, *, atol: float = 1e-12, rtol: float = 0.0) -> None:
    """Asserts that two models, whose parameters may have other names, have the same gradients, or none in both."""
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None:
            near(parameter.grad, other.grad, atol=atol, rtol=rtol, where=name)


def near(found: Any, wanted: Any, *, atol: float = 1e-12, rtol: float = 0.0, where: str = "") -> None:
    """Asserts that mappings, sequences, tensors and numbers are as those wanted; `found` may have more names."""
    if isinstance(wanted, Mapping):
        assert not wanted.keys() - found.keys(), f"{where}: without {sorted(wanted.keys() - found.keys())}"
        for name, value in wanted.items():
            near(found[name], value, atol=atol, rtol=rtol, where=f"{where}{name} ")
    elif isinstance(wanted, Sequence) and not isinstance(wanted, str):
        assert len(found) == len(wanted), f"{where}: {len(found)} instead of {len(wanted)}"
        for number, value in enumerate(wanted):
            near(found[number], value, atol=atol, rtol=rtol, where=f"{where}{number} ")
    elif isinstance(wanted, Tensor | float) and found is not None:
        one, other = (x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in (found, wanted))
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol, msg=lambda text: f"{where}: {text}")
    else:
        assert found == wanted, f"{where}: {found} instead of {wanted}"
