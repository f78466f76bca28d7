"""The launcher, with small Python programs for ranks: results, failures by name, and no hang in any case."""

import io
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.inside import LaunchResult, launch, launcher, processes

from ..experiments.backends.nodes import gone, lives, wait_for

pytestmark = pytest.mark.gloo

LIMIT = 400.0  # [s] guards against hangs alone

PRELUDE = """
import os, sys, time
from stagewright.cli.launcher import report_to_launcher
rank = int(os.environ["RANK"])
"""


def run(program: str, *, num_ranks: int = 2, grace: float = 5.0, timeout: float | None = LIMIT) -> LaunchResult:
    return launch([sys.executable, "-c", PRELUDE + program], num_ranks=num_ranks, grace=grace, timeout=timeout)


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc/net here")
def test_the_store_listens_on_loopback_alone(capfd: pytest.CaptureFixture[str]) -> None:
    program = """
from pathlib import Path
with report_to_launcher():
    port, listening = f"{int(os.environ['MASTER_PORT']):04X}", "0A"
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    print({row[1] for row in rows if row[1].endswith(":" + port) and row[3] == listening} == {"0100007F:" + port})
    print("threads", os.environ["OMP_NUM_THREADS"])
"""
    assert run(program) == LaunchResult(status=0, first_failed=None, report="")
    assert capfd.readouterr().out == "True\nthreads 1\n"  # only rank 0 talks


@pytest.mark.thorough
def test_the_first_failure_is_named_with_its_last_lines_and_the_others_end(capfd: pytest.CaptureFixture[str]) -> None:
    result = run(
        """
with report_to_launcher():
    if rank == 1:
        raise RuntimeError("stage 3 has run dry")
    time.sleep(400)
""",
        grace=0.2,
    )
    assert result.status == 1
    assert result.first_failed == 1
    # on a busy machine it takes longer to end than the others are given
    assert re.search(r"rank 1 failed first \((exit status 1|stopped before it had ended)\)", result.report)
    assert "RuntimeError: stage 3 has run dry" in result.report
    assert "rank 0 was still running and was stopped" in result.report


@pytest.mark.thorough
def test_the_rank_that_failed_first_is_not_the_one_that_ended_first() -> None:
    # Rank 1 fails, and takes long to be torn down; rank 0 fails of it and is gone at once.
    result = run(
        """
import atexit
from pathlib import Path
failed = Path(os.environ["STAGEWRIGHT_LAUNCH_FOLDER"], "1.failed")
if rank == 1:
    atexit.register(time.sleep, 3.0)
while rank == 0 and not failed.exists():
    time.sleep(0.02)
with report_to_launcher():
    raise RuntimeError(f"rank {rank} lost")
""",
        grace=60.0,
    )
    assert result.first_failed == 1
    assert "rank 0 failed after it (exit status 1); its last line: RuntimeError: rank 0 lost" in result.report


def test_a_rank_that_failed_and_does_not_end_is_stopped() -> None:
    """Without an exit status yet: the launcher itself failed of that."""
    hangs = "import atexit\natexit.register(time.sleep, 400)\nwith report_to_launcher(): raise RuntimeError('lost')"
    result = run(hangs, num_ranks=1, grace=0.2)
    assert (result.status, result.first_failed) == (1, 0)
    assert "rank 0 failed first (stopped before it had ended)" in result.report


@pytest.mark.thorough
def test_the_children_of_a_rank_that_is_killed_end_with_it(tmp_path: Path) -> None:
    """They would keep its connections, and the others wait for it."""
    os.mkfifo(tmp_path / "lives")
    lives = os.open(tmp_path / "lives", os.O_RDONLY | os.O_NONBLOCK)
    child = f"os.set_inheritable(os.open({str(tmp_path / 'lives')!r}, os.O_WRONLY), True); os.system('sleep 400 &')"
    result = run(f"import signal\nif rank == 1: {child}; os.kill(os.getpid(), signal.SIGKILL)", grace=0.2)
    assert (result.status, result.first_failed) == (128 + signal.SIGKILL, 1)
    assert "rank 1 failed first (killed by SIGKILL)" in result.report
    assert select.select([lives], [], [], 60.0)[0]
    os.close(lives)


@pytest.mark.thorough
def test_what_rank_0_says_goes_to_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose stream takes text alone: what nobody took would fill the pipe, and the rank stand still."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    assert run("sys.stderr.write(('x' * 99 + chr(10)) * 2000 * (rank == 0))").status == 0
    assert shown.getvalue().count("x" * 99) == 2000


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("last", "grace", "said"),
    [
        ("os.abort()", 60.0, "killed by SIGABRT after its results were out"),
        ("time.sleep(400)", 0.3, "stopped before it had ended"),
    ],
)
def test_what_becomes_of_a_rank_after_its_results_are_out_is_reported_and_not_fatal(
    last: str, grace: float, said: str
) -> None:
    result = run(f"with report_to_launcher(): pass\nif rank == 1: {last}", grace=grace)
    assert (result.status, result.first_failed) == (0, None)
    assert f"rank 1: {said}" in result.report


@pytest.mark.thorough
def test_the_whole_has_a_time_limit() -> None:
    result = run("time.sleep(400 * rank)", timeout=2.0)
    assert result.status == 1
    assert result.report in (f"rank {late}: not done after 2 s; stopped" for late in ("1", "0, 1"))  # a busy machine


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_ranks_that_all_stand_still_are_ended_and_the_report_says_where() -> None:
    program = """
import threading
def wait_for_a_lock_that_nobody_gives_back():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
def read_for_ever():
    os.read(os.pipe()[0], 1)
with report_to_launcher():
    (wait_for_a_lock_that_nobody_gives_back if rank else read_for_ever)()
"""
    result = launch([sys.executable, "-c", PRELUDE + program], num_ranks=2, timeout=LIMIT, stall=2.0)
    assert result.status == 1
    first, *stories = result.report.splitlines()
    assert first == "all ranks stand still: none has computed for 2 s; stopped"
    assert stories[0].startswith("rank 0 was at <string>:")
    assert " in read_for_ever, called from <string>:" in stories[0]
    assert " in wait_for_a_lock_that_nobody_gives_back" in stories[1]


@pytest.mark.parametrize(("busiest", "wants", "barks"), [(0.01, False, True), (0.05, False, False), (0.0, True, False)])
def test_threads_that_wait_in_gloo_do_not_compute_and_who_waits_for_a_core_does_not_stand_still(
    monkeypatch: pytest.MonkeyPatch, busiest: float, wants: bool, barks: bool
) -> None:
    """Such threads wake up a hundred times a second: those of four ranks take as much as one that computes a little."""
    now = 0.0
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: now))
    shares = (0.01, 0.01, 0.01, busiest)
    ranks: Any = [SimpleNamespace(computing=lambda share=share: (5 + share * now, wants)) for share in shares]
    watchdog, barked = launcher._Watchdog(ranks, 10.0), False
    while now < 30.0:
        now += 0.02
        barked |= watchdog.is_stalled()
    assert barked == barks


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_ranks_of_which_one_computes_are_left_alone() -> None:
    program = """
from pathlib import Path
done = Path(os.environ["STAGEWRIGHT_LAUNCH_FOLDER"], "1.done")
with report_to_launcher():
    while rank == 1 and time.process_time() < 3.0:
        pass
    while rank == 0 and not done.exists():
        time.sleep(0.02)
"""
    assert launch([sys.executable, "-c", PRELUDE + program], num_ranks=2, timeout=LIMIT, stall=1.0).status == 0


@pytest.mark.thorough
def test_a_rank_that_leaves_with_status_0_within_its_work_has_failed() -> None:
    """It counted as success. `sys.exit()` is an end of one's own."""
    left = run("with report_to_launcher():\n    os._exit(0) if rank == 1 else time.sleep(400)", grace=0.2)
    assert (left.status, left.first_failed) == (1, 1)
    assert left.report.startswith("rank 1 failed first (exit status 0 before its work was done)")
    assert run("with report_to_launcher():\n    sys.exit()") == LaunchResult(status=0, first_failed=None, report="")


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process that is stopped")
@pytest.mark.parametrize(
    ("number", "meanwhile"),
    [
        (signal.SIGTERM, "time.sleep(100)"),
        (signal.SIGKILL, "time.sleep(100)"),
        (signal.SIGKILL, "__import__('signal').raise_signal(19)"),
    ],
    ids=["politely", "killed", "killed beside a rank that is stopped"],
)
def test_ranks_end_with_the_launcher(tmp_path: Path, number: signal.Signals, meanwhile: str) -> None:
    program = PRELUDE + (
        f"with report_to_launcher():\n"
        f"    open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(str(os.getpid()))\n"
        f"    {meanwhile}\n"
    )
    start = "import sys; from stagewright.cli.launcher import launch; launch(sys.argv[1:], num_ranks=2)"
    launcher = subprocess.Popen([sys.executable, "-c", start, sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    files = [tmp_path / "0", tmp_path / "1"]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    pids = [int(file.read_text()) for file in files]
    launcher.send_signal(number)
    assert launcher.wait(timeout=LIMIT) != 0
    assert gone(pids)


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")
def test_ctrl_c_ends_a_training_with_all_its_processes(tmp_path: Path) -> None:
    """In one line and with a shell's status of an interrupt; the run's folder has the steps until then."""
    words = "train --layers 2 --width 32 --heads 2 --length 16 --batch 8 --steps 100000 --ranks 2 --name run"
    command = [sys.executable, "-P", "-m", "stagewright", *words.split()]
    train = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    wait_for(lambda: train.poll() is not None or (metrics.exists() and metrics.read_text()))
    tasks = Path(f"/proc/{train.pid}/task").iterdir()
    pids = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    train.send_signal(signal.SIGINT)
    _, said = train.communicate(timeout=LIMIT)
    assert train.returncode == 130
    first, *meanwhile, last = said.splitlines()
    assert (first, last) == ("train: starting 2 processes", "stagewright: stopped")
    assert [line for line in meanwhile if not line.endswith(" so far")] == []  # as on a busy machine
    assert len(pids) == 2
    assert not any(lives(pid) for pid in pids)
    assert metrics.read_text().endswith("}\n")


def test_no_ranks_at_all_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="num_ranks=0: expected at least 1"):
        run("", num_ranks=0)
    with pytest.raises(ValueError, match="restarts=-1: expected at least 0"):
        launch(["true"], num_ranks=1, restarts=-1)


@pytest.mark.thorough
def test_ranks_that_fail_alike_are_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    result = run("import sys\nprint('stagewright: error: no such thing', file=sys.stderr)\nsys.exit(2)")
    assert result.status == 2
    assert result.report == "all 2 ranks failed alike (exit status 2)"
    assert capfd.readouterr().err == "stagewright: error: no such thing\n"


@pytest.mark.parametrize(
    ("limit", "failures", "looks", "is_late"),
    [
        (3.0, (), 4, True),
        (0.0, (), 1, True),
        (3.0, (2,), 6, False),  # a grace of 4 from the look after 1 s on
        (3.0, (2, 3, 5), 6, False),  # the first failure counts
        (3.0, (4,), 8, False),  # in the look after the limit
        (None, (9,), 13, False),
    ],
)
def test_looks_end_after_the_limit_or_the_grace_of_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, failures: tuple[int, ...], looks: int, is_late: bool
) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(processes, "time", clock)
    seen = 0
    for _ in (supervision := processes.Supervision(limit, pause=1.0)):
        seen += 1
        if seen in failures:
            supervision.begin_grace(4.0)
    assert (seen, supervision.is_late, supervision.in_grace) == (looks, is_late, bool(failures))


def test_who_breaks_off_is_not_late() -> None:
    for _ in (supervision := processes.Supervision(0.0)):
        break
    assert not supervision.is_late
