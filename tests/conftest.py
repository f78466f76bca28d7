"""One thread a process, before anything loads torch, and the pool of gloo workers."""

import gc
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from support.pool import Pool
from tiers import budget

# The pool's workers and every subprocess of a test inherit it. Two ranks with two threads each on two cores
# crawl, and a sum over another number of threads is another sum.
os.environ["OMP_NUM_THREADS"] = "1"

# A script's background job ignores SIGINT, and so would every process that a test starts to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, however long they take: only the nightly tests look for new ones.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For copies with a fault: the first example that fails is enough, and a smaller one takes a minute to find.
settings.register_profile("unshrunk", settings.get_profile("steady"), phases=[Phase.explicit, Phase.generate])
settings.register_profile("searching", deadline=None, suppress_health_check=[HealthCheck.too_slow])


def pytest_configure(config: pytest.Config) -> None:
    """Settings of hypothesis, before test files read them."""
    usual = "searching" if config.getoption("markexpr").startswith("nightly") else "steady"
    settings.load_profile(config.getoption("hypothesis_profile", None) or usual)
    is_whole = hasattr(config, "workerinput") or config.args_source == config.ArgsSource.TESTPATHS
    if is_whole and config.getoption("markexpr") == budget.MARKS:
        config.pluginmanager.register(budget.Budget())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`thorough(but=[...])`: these cases of the test are in the first tier. Who takes ranks is marked `gloo`."""
    collected: dict[str, set[str]] = defaultdict(set)
    named: dict[str, set[str]] = {}
    for item in items:
        of_case = getattr(getattr(item, "callspec", None), "params", ())
        if {"gloo", "command"} & {*getattr(item, "fixturenames", ())} - {*of_case}:
            item.add_marker(pytest.mark.gloo)
        test, _, case = item.nodeid.partition("[")
        collected[test].add(case.removesuffix("]"))
        mark = item.get_closest_marker("thorough")
        if mark is not None and mark.kwargs:
            named[test] = set(mark.kwargs["but"])
            if case.removesuffix("]") in named[test]:
                item.own_markers = [other for other in item.own_markers if other.name != "thorough"]
    names_cases = any("::" in argument for argument in config.args)
    for test, cases in named.items():
        if not names_cases and (gone := cases - collected[test]):
            raise pytest.UsageError(f"{test} has no case {gone.pop()!r}: type the new name in thorough(but=...)")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules that are loaded by then stay: Python's search for cycles need not look through it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def without_what_few_look_at() -> None:
    """Pipelines of tests, as those of gloo workers, verify no first batch unless they ask for it, and the like."""
    from support.pool_worker import leave_out_what_few_look_at

    leave_out_what_few_look_at()


@pytest.fixture(autouse=True)
def random_numbers_do_not_depend_on_the_tests_before() -> None:
    """A test that draws without a seed draws the same in any order of tests."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def gloo(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Gloo workers, started by the first case: `gloo.run(function, ranks=2, args=(...))`, results by rank."""
    pool = Pool(max_ranks=8, filters=request.config.getini("filterwarnings"))
    yield pool
    pool.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/data/golden and golden_plans.json anew instead of comparing; review them as a diff",
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
