"""Inputs of `stagewright plan`: profiles or a transformer's formulas, and a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from ...partition import Cluster, Profile, ProfileSource, read_pipedream_profile
from ...partition.analytic import Transformer, TransformerSource
from ...partition.analytic.device_model import PRESETS, DeviceModel
from ...partition.search.source import difference
from ..options import OwnOptions, plain_help, read_file

_FREE = 1e15  # [bytes/s] between ranks whose links are not given
DEFAULT_DEVICE = "a100"
_FORM = "layers=24,hidden=1024,heads=16,vocabulary=51200,length=1024"


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(OwnOptions):
    """Where seconds and bytes come from, and the devices."""

    profile: tuple[Path, ...] = ()  # Files of `stagewright profile`, one per microbatch size and tensor size.
    pipedream: Path | None = None  # A profile as PipeDream writes it; its minibatch counts as one sample.
    transformer: str | None = None  # A shape, such as layers=24,hidden=1024,heads=16,vocabulary=51200,length=1024.
    # Device of the transformer: a name or its beginning (the match with the most memory), or the JSON file of a
    # DeviceModel.
    device: str = DEFAULT_DEVICE
    cluster: str | None = None  # 4x8:nvlink=300GB/s@2us,net=12GB/s@10us:80GB (links innermost first), or a JSON file.
    ranks: int | None = None  # Without --cluster: the number of devices, on links that cost nothing.

    @property
    def files(self) -> list[str | Path | None]:
        """Values of options that may be files, which are read."""
        return [*self.profile, self.pipedream, self.device, self.cluster]


def read_cluster(options: SourceOptions) -> Cluster:
    text = options.cluster
    if text is None:
        if options.ranks is None:
            raise ValueError(
                "a plan needs devices: expected --cluster FILE.json (`stagewright profile --links` writes one), "
                "--cluster 4x8:nvlink=300GB/s,net=12GB/s:80GB, or --ranks 4 with links that take no time"
            )
        if options.ranks < 1:
            raise ValueError(f"--ranks {options.ranks}: expected at least 1")
        return Cluster.from_levels([(options.ranks, _FREE)])
    cluster = read_file(Path(text), Cluster.load) if text.endswith(".json") else Cluster.parse(text)
    if options.ranks not in (None, cluster.num_devices):
        raise ValueError(
            f"--ranks {options.ranks} with a cluster of {cluster.num_devices} devices: leave --ranks away, or give a "
            f"cluster of {options.ranks}"
        )
    return cluster


def read_source(
    options: SourceOptions, cluster: Cluster, profiled: Callable[[], list[Profile]]
) -> tuple[list[Profile] | ProfileSource, float | None]:
    """Source of the profiles, and the memory of their device [bytes] if known; `profiled`: those of --model."""
    given = [name for name in ("profile", "model", "pipedream", "transformer") if getattr(options, name)]
    if len(given) != 1:
        raise ValueError(
            f"{' and '.join(f'--{name}' for name in given) or 'no model'}: expected one of --profile FILE, --model "
            f"FUNCTION, --pipedream FILE, or --transformer {_FORM}"
        )
    if options.device != DEFAULT_DEVICE and options.transformer is None:
        raise ValueError(
            f"--device {options.device} with --{given[0]}: leave it away, it is the device of --transformer"
        )
    if options.model is not None:
        return profiled(), None
    if options.transformer is not None:
        device = _device(options.device)
        shape = _transformer(options.transformer)
        return TransformerSource(transformer=shape, device=device, cluster=cluster), device.memory_bytes
    if options.pipedream is not None:
        return [read_file(options.pipedream, read_pipedream_profile)], None
    profiles: dict[tuple[int, int], Profile] = {}
    for path in options.profile:
        profile = _profile(path)
        size = profile.microbatch_size
        if size is None:
            if len(options.profile) == 1:
                return [profile], None
            raise ValueError(f"{path}: microbatch_size: missing: expected it where there are several profiles")
        if (size, profile.tensor) in profiles:
            over = f" over {profile.tensor} tensor ranks" if profile.tensor > 1 else ""
            raise ValueError(f"{path}: a second profile of microbatches of {size}{over}: expected one a size")
        profiles[size, profile.tensor] = profile
        differs = difference(next(iter(profiles.values())), profile)
        if differs is not None:
            raise ValueError(
                f"{options.profile[0]} and {path}: {differs}: expected profiles of one model, device and type"
            )
    return list(profiles.values()), None


def _profile(path: Path) -> Profile:
    try:
        return read_file(path, Profile.load)
    except ValueError as error:
        if path.suffix != ".txt":
            raise
        raise ValueError(f"{error}; PipeDream's text is read with --pipedream {path}") from None


def _device(name: str) -> DeviceModel:
    if name.endswith(".json"):
        if not Path(name).exists():
            expected = "expected what `DeviceModel.to_json` writes, or a name such as a100"
            raise ValueError(f"--device {name}: no such file: {expected}")
        return read_file(Path(name), DeviceModel.load)
    near = [each for each in PRESETS if name and each.name.lower().startswith(name.lower())]
    try:
        return max(near, key=lambda each: each.memory_bytes) if near else DeviceModel.preset(name)
    except ValueError as error:
        raise ValueError(f"--device takes a name or a .json file: {error}") from None


def _transformer(text: str) -> Transformer:
    known = {field.name: field.type for field in fields(Transformer)}
    values: dict[str, object] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in known or name in values:
            raise ValueError(
                f"--transformer: {part!r}: expected name=value, each of {', '.join(known)} once at most, as in {_FORM}"
            )
        written = str(known[name]).removesuffix(" | None")
        kind = float if written == "float" else int if written == "int" else str
        try:
            values[name] = kind(value)
        except ValueError:
            what = "a number" if kind is float else "a whole number"
            raise ValueError(f"--transformer: {name}={value}: expected {what}") from None
    missing = [name for name in ("layers", "hidden", "heads", "vocabulary", "length") if name not in values]
    if missing:
        raise ValueError(f"--transformer {text}: {', '.join(missing)} missing: expected all of {_FORM}")
    return Transformer(**values)  # type: ignore[arg-type]
