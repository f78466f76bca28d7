"""What a forward sets around its layers holds in the stages; what it changes is told; caches hold no fakes."""

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import near, train_alone, train_piped
from support.parts import GIVEN, Parts
from support.small import sgd
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from stagewright.pipe import PipelineModule

SCALE = 1.0
VARIABLE = ContextVar("scale", default=1.0)
LOCAL = threading.local()
LOCAL.scale = 1.0
TABLE = {"scale": 1.0}


class Settings:
    scale = 1.0


SETTINGS = Settings()
SETTINGS.scale = 1.0


class Layer(Parts, linear=lambda: nn.Linear(4, 4), scale=GIVEN):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale(x)


class Net(nn.Module):
    def __init__(self, step: Callable[[Any, int, Tensor], Tensor], scale: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(scale) for _ in range(4))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            x = self.step(self, i, x)
        return x


def plainly(net: Net, i: int, x: Tensor) -> Tensor:
    return net.layers[i](x)


def made(step: Callable[[Any, int, Tensor], Tensor] = plainly, scale: Callable[[Tensor], Any] = lambda x: 1.0) -> Net:
    torch.manual_seed(0)
    return Net(step, scale).double()


def batch(length: int = 3) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 4, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    return x, y


def trains_as_plain(net: Net, lengths: tuple[int, ...] = (3, 3), **options: Any) -> None:
    """The pipeline first: what it leaves is what the plain model finds."""
    plain = copy.deepcopy(net)
    batches = [batch(length) for length in lengths]
    options = {"mesh": {"pipe": 2}, "num_microbatches": 2, "timeout": 60.0, **options}
    found = train_piped(PipelineModule(net, loss_fn=F.mse_loss, optimizer=sgd, **options), batches)
    near(found.losses, train_alone(plain, batches, sgd).losses, rtol=1e-12, atol=0.0)


def within(manager: Callable[[int], AbstractContextManager[Any]]) -> Callable[[Net, int, Tensor], Tensor]:
    def step(net: Net, i: int, x: Tensor) -> Tensor:
        with manager(i):
            return plainly(net, i, x)

    return step


@contextmanager
def variable(i: int) -> Iterator[None]:
    token = VARIABLE.set(2.0 + i) if i != 1 else None
    yield
    if token is not None:
        VARIABLE.reset(token)


COLLECTED: ContextVar[list[Tensor] | None] = ContextVar("collected", default=None)


@contextmanager
def collecting(i: int) -> Iterator[None]:
    token = COLLECTED.set([])
    yield
    COLLECTED.reset(token)


def collect(x: Tensor) -> float:
    found = COLLECTED.get()
    assert found is not None
    found.append(x)
    return float(len(found))


def set_scale(value: float) -> None:
    global SCALE  # noqa: PLW0603
    SCALE = value


def put(
    write: Callable[[Any], object], value: Callable[[int], Any] = lambda i: 2.0 + i, usual: Any = 1.0
) -> Callable[[int], AbstractContextManager[Any]]:
    """A value while a layer runs, and the usual one after it."""

    @contextmanager
    def around(i: int) -> Iterator[None]:
        write(value(i))
        yield
        write(usual)

    return around


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


AROUND: dict[str, tuple[Callable[[int], AbstractContextManager[Any]], Callable[[Tensor], Any]]] = {
    "context variable": (variable, lambda x: VARIABLE.get()),
    "list that is filled": (collecting, collect),
    "global": (put(set_scale), lambda x: SCALE),
    "thread-local": (put(partial(setattr, LOCAL, "scale")), lambda x: LOCAL.scale),
    "attribute of an object": (put(partial(setattr, SETTINGS, "scale")), lambda x: SETTINGS.scale),
    "attribute of a class": (put(partial(setattr, Settings, "scale")), lambda x: Settings.scale),
    "entry of a dict": (put(partial(TABLE.__setitem__, "scale")), lambda x: TABLE["scale"]),
    "attention": (
        lambda i: sdpa_kernel(SDPBackend.MATH),
        lambda x: 1.0 if torch.backends.cuda.flash_sdp_enabled() else 2.0,
    ),
    "deterministic": (
        put(torch.use_deterministic_algorithms, lambda i: i == 2, False),
        lambda x: 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0,
    ),
    "default type": (
        put(torch.set_default_dtype, lambda i: torch.float64 if i == 2 else torch.float32, torch.float32),
        lambda x: torch.tensor(1 / 3).double(),
    ),
    "mode of torch": (lambda i: Doubling(), lambda x: 1.0),
}


@pytest.mark.thorough(but=["mode of torch", "context variable", "attribute of a class"])
@pytest.mark.parametrize("around", AROUND)
def test_what_is_set_around_a_layer_holds_when_a_stage_runs_it(around: str) -> None:
    """It used to hold while the model was recorded alone."""
    manager, scale = AROUND[around]
    trains_as_plain(made(within(manager), scale), verify=False)


UNSET = ContextVar("unset", default=1.0)


def sets(net: Net, i: int, x: Tensor) -> Tensor:
    UNSET.set(UNSET.get() + 1.0)
    return plainly(net, i, x)


def decides(net: Net, i: int, x: Tensor) -> Tensor:
    return sets(net, i, x if x.sum() > 0 else -x)


@pytest.mark.parametrize("step", [sets, lambda *args: decides(*args[:2], sets(*args))], ids=["recorded", "refused"])
def test_a_variable_that_was_never_set_is_after_a_recording_what_it_was(step: Any) -> None:
    """It stayed as the recording had left it, also for the plain model and for a second recording (fuzz 710000504)."""
    pipe = PipelineModule(made(step), mesh={"pipe": 2}, loss_fn=F.mse_loss)
    with suppress(ValueError):
        pipe.build(*batch())
    assert UNSET.get() == 1.0


def test_a_region_of_a_profile_is_around_its_layer() -> None:
    net = made(within(lambda i: torch.profiler.record_function(f"layer {i}")))
    pipe = PipelineModule(net, loss_fn=F.mse_loss, mesh={"pipe": 2}, num_microbatches=2)
    pipe.forward_backward(*batch())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipe.forward_backward(*batch())
    found = [event.name for event in profile.events()]
    assert [found.count(f"layer {i}") for i in range(4)] == [2] * 4


def test_a_tensor_of_the_forward_is_refused_there() -> None:
    class Held:
        tensor: Any = None

    def step(net: Net, i: int, x: Tensor) -> Tensor:
        SETTINGS.held = Held()  # type: ignore[attr-defined]
        SETTINGS.held.tensor = x * 2  # type: ignore[attr-defined]
        return plainly(net, i, x)

    message = r"'held' of SETTINGS, which holds tensors of this forward, is set around layers\.0"
    with pytest.raises(ValueError, match=message):
        trains_as_plain(made(step))
    assert not hasattr(SETTINGS, "held")


def seeded(net: Net, i: int, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return plainly(net, i, x + torch.randn(4))


def forked(net: Net, i: int, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return plainly(net, i, x)


def drawn_again(net: Net, i: int, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    x = x + torch.rand(4)
    torch.set_rng_state(state)
    return plainly(net, i, x)


OWN = torch.Generator()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (seeded, "sets or reads the state of a random generator .manual_seed."),
        (forked, "sets or reads the state of a random generator .get_state."),
        (drawn_again, "sets or reads the state of a random generator .get_state."),
        (
            lambda net, i, x: plainly(net, i, x + torch.randn(4, generator=OWN)),
            "draws from a torch.Generator of its own",
        ),
    ],
)
def test_a_generator_between_the_layers_is_refused(step: Any, message: str) -> None:
    """Each call draws numbers of its own, whatever the seed of the model's code: other ones than the plain model's."""
    with pytest.raises(ValueError, match=message):
        trains_as_plain(made(step))


LOG: dict[int, Any] = {}
SEEN: list[Any] = []
COUNT = 0


def logged(net: Net, i: int, x: Tensor) -> Tensor:
    LOG[i] = x.norm()
    return plainly(net, i, x)


def appended(net: Net, i: int, x: Tensor) -> Tensor:
    SEEN.append(x.detach())
    return plainly(net, i, x)


def counted(net: Net, i: int, x: Tensor) -> Tensor:
    global COUNT  # noqa: PLW0603
    COUNT += 1
    return plainly(net, i, x)


def counted_late(net: Any, i: int, x: Tensor) -> Tensor:
    net.calls = getattr(net, "calls", 0) + 1
    return plainly(net, i, x)


def kept(net: Any, i: int, x: Tensor) -> Tensor:
    net.last_hidden = x
    return plainly(net, i, x)


@pytest.mark.thorough(but=["logged-LOG at .*test_surroundings.py:\\\\d+, in logged"])
@pytest.mark.parametrize(
    ("step", "name"),
    [
        (logged, r"LOG at .*test_surroundings.py:\d+, in logged"),
        (appended, r"SEEN at .*test_surroundings.py:\d+, in appended"),
        (counted, r"'COUNT' of module .*test_surroundings at .*, in counted"),
        (counted_late, "attribute 'calls' of the model"),
        (kept, "attribute 'last_hidden' of the model"),
    ],
)
def test_a_side_effect_is_told_and_leaves_nothing_fake(step: Any, name: str) -> None:
    net = made(step)
    with pytest.warns(UserWarning, match=rf"changes {name}.*: it does so once, while the model is recorded") as told:
        trains_as_plain(net, verify=False)
    assert len(told) == 1
    held = [*LOG.values(), *SEEN, *vars(net).values()]
    assert not any(isinstance(each, FakeTensor) for each in held)
    assert COUNT in (0, 8)  # of the plain model
    globals().update(COUNT=0)
    LOG.clear()
    SEEN.clear()


@functools.lru_cache
def remembered(length: int) -> Tensor:
    return torch.arange(1, 1 + length, dtype=torch.float64)[:, None] / length


class Tables:
    by_length: dict[int, Tensor] = {}  # noqa: RUF012


def by_length(x: Tensor) -> Tensor:
    length = x.shape[-2]
    if length not in Tables.by_length:
        Tables.by_length[length] = torch.arange(length, dtype=x.dtype)[:, None] / length
    return Tables.by_length[length]


def glue(scale: Callable[[Tensor], Any]) -> Callable[[Net, int, Tensor], Tensor]:
    return lambda net, i, x: plainly(net, i, x) * scale(x)


# Those of modules themselves: test_fuzz.py.
CACHES: dict[str, Callable[[], Net]] = {
    "lru_cache between layers": lambda: made(glue(lambda x: remembered(x.shape[-2]))),
    "lru_cache, whose value decides": lambda: made(scale=lambda x: 2.0 if remembered(x.shape[-2]).sum() > 2 else 1.0),
    "dict between layers": lambda: made(glue(by_length)),
}


@pytest.mark.thorough(but=["lru_cache between layers"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_holds_nothing_fake(cache: str) -> None:
    """A bug: what a recording left there broke the first step, or the plain model afterwards."""
    remembered.cache_clear()
    Tables.by_length.clear()
    trains_as_plain(CACHES[cache](), (3, 3, 5, 3))
    held = [remembered(3), remembered(5), *Tables.by_length.values()]
    assert not any(isinstance(each, FakeTensor) for each in held)
