"""What became of a case: equal, refused, wrong, error."""

import math
import re
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cases import Case, Outcome

HOUSE = Path(__file__).resolve().parents[3]
TESTS = HOUSE / "tests"
GOOD = ("equal", "refused", "diverged")
LARGE = 1e4  # a run that comes to such numbers learns nothing, and shows rounding alone


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a case.

    kind: equal, refused (by a ValueError of the library's own), wrong, error, hang, diverged (the training), no case
    (a plain process cannot run it either). what: in a line.
    """

    kind: str
    what: str = ""
    text: str = ""
    at: int = 0

    @property
    def is_good(self) -> bool:
        return self.kind in GOOD

    @property
    def signature(self) -> str:
        """Alike for faults that are likely the same."""
        return f"{self.kind}: {re.sub(r'[0-9]+', '#', self.what)[:70]}"


def is_clear(error: BaseException) -> bool:
    """A ValueError that the library raised, not torch or the user's code that it ran; that the pipeline differs from
    the model is none."""
    from stagewright.pipe import VerificationError

    frames = traceback.extract_tb(error.__traceback__)
    last = Path(frames[-1].filename).resolve() if frames else Path()
    is_own = last.is_relative_to(HOUSE) and not last.is_relative_to(TESTS) and ".venv" not in last.parts
    return isinstance(error, ValueError) and not isinstance(error, VerificationError) and is_own


def story(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def plain_outcome(case: Case, stage_of: dict[str, int]) -> Outcome:
    from .plain import Plain

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Plain(case, stage_of).run()


def stage_of(case: Case) -> dict[str, int]:
    """Where each parameter stands; only where the rule asks for it."""
    from .models import make_batch, make_loss, make_model
    from .piped import make_pipeline

    if case.schedule not in ("pipedream", "paci"):
        return {}
    case = replace(case, gloo=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = make_pipeline(case, make_model(case), make_loss(case))
    if case.is_lazy:
        pipe.build(*make_batch(case, 0, case.M, 3).positional)
    found = {name: stages[0] for name, stages in pipe.stages_of.items()}
    pipe.close()
    return found


def check(case: Case) -> Verdict:
    from .piped import run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge(case, [run(case)])


def judge(case: Case, outcomes: Sequence[Outcome]) -> Verdict:
    errors = [outcome for outcome in outcomes if outcome.error]
    try:
        where = next((one.stages for one in outcomes if one.stages), None) or stage_of(case)
    except ValueError:
        where = {}
    if errors:  # what the calls after the one that was refused would have seen, in place of what those before it saw
        case = replace(case, calls=case.calls[: max(outcome.at for outcome in errors) + 1])
    try:
        expected = plain_outcome(case, where)
    except Exception as error:
        return Verdict(kind="no case", what=last_line(story(error)), text=story(error))
    if not all(_size(value) < LARGE for value in expected.seen.values()):
        return Verdict(kind="diverged")
    tolerance = case.tolerance
    if case.option("autocast"):  # sums in another order may differ by as much as they differ from what is exact
        exact = replace(case, options=tuple(pair for pair in case.options if pair[0] != "autocast"))
        precise = plain_outcome(exact, where)
        tolerance = max([tolerance, *(2 * _gap_of(expected, precise, key) for key in expected.seen)])
    for outcome in sorted(errors, key=lambda one: "PeerLost" in last_line(one.error)):
        if not outcome.is_clear:
            return Verdict(kind="error", what=last_line(outcome.error), text=outcome.error, at=outcome.at)
    if errors and len(errors) < len(outcomes):
        text = errors[0].error
        return Verdict(kind="error", what=f"on some ranks alone: {last_line(text)}", text=text, at=errors[0].at)
    if (what := _difference(case, outcomes, expected, tolerance, whole=not errors)) is not None:
        return Verdict(kind="wrong", what=what, at=len(case.calls))
    if errors:
        return Verdict(kind="refused", what=last_line(errors[0].error), text=errors[0].error, at=errors[0].at)
    return Verdict(kind="equal")


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line and not line.startswith(" ")]
    return lines[-1] if lines else ""


def _difference(
    case: Case, outcomes: Sequence[Outcome], expected: Outcome, tolerance: float, *, whole: bool
) -> str | None:
    """The first thing that differs; where a refusal ended the run, of what was seen until then."""
    seen_by_any: set[str] = set()
    for rank, outcome in enumerate(outcomes):
        for key, value in outcome.seen.items():
            if key == "norms":
                if not whole:
                    continue
                value, wanted = sorted(value), sorted(expected.seen["norms"])
                if len(value) != len(wanted):
                    continue
                value, wanted = torch.tensor(value), torch.tensor(wanted)
            elif key not in expected.seen:
                if key.endswith("loss") or "state" in key or "gradient" in key or "no loss" in key:
                    return f"rank {rank}: {key} is seen here alone"
                continue
            else:
                wanted = expected.seen[key]
            gap = _gap(value, wanted)
            if not gap <= tolerance:
                return f"{key}: off by {gap:.1e}" + (f" on rank {rank}" if len(outcomes) > 1 else "")
        seen_by_any |= outcome.seen.keys()
    missing = expected.seen.keys() - seen_by_any - {"norms"}
    if case.parts_outputs:
        missing = {key for key in missing if "output" not in key and "prediction" not in key}
    if case.tensor > 1:
        missing = {key for key in missing if "gradient of" not in key}
    if whole and missing:
        return f"{min(missing)} is missing ({len(missing)})"
    return None


def _size(value: Any) -> float:
    tensor = torch.as_tensor(value).double()
    return float(tensor.abs().nan_to_num(nan=math.inf).max()) if tensor.numel() else 0.0


def _gap_of(one: Outcome, other: Outcome, key: str) -> float:
    a, b = one.seen[key], other.seen.get(key)
    if key == "norms" or a is None or b is None:
        return 0.0
    gap = _gap(torch.as_tensor(a).double(), torch.as_tensor(b).double())
    return gap if math.isfinite(gap) else 0.0


def _gap(value: Any, wanted: Any) -> float:
    """Relative to the largest element, or 1."""
    if value is None or wanted is None:
        return 0.0 if value is wanted else math.inf
    a, b = torch.as_tensor(value), torch.as_tensor(wanted)
    if a.shape != b.shape:
        return math.inf
    if isinstance(value, Tensor) and isinstance(wanted, Tensor) and a.dtype != b.dtype:
        return math.inf
    if not a.numel():
        return 0.0
    gap = float((a.double() - b.double()).abs().max()) / max(1.0, float(b.double().abs().max()))
    return math.inf if math.isnan(gap) else gap
