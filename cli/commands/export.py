"""`stagewright export runs/<name> -o model.pt`: a checkpoint as a file that a plain model loads, or the reverse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ...pipe.checkpoint.plain import export_checkpoint, import_checkpoint
from ..options import check_out, plain_help, read
from ..train.run_folder import RUNS


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Write a checkpoint's weights as one file that a plain model loads (load_state_dict), under their original names.

    With --to-checkpoint, make a checkpoint for pipe.load or `train --resume` from a file of weights or a folder of
    torch.distributed.checkpoint.
    """

    # Folder of checkpoints, one of them, or a run (runs/<name>, its name); with --to-checkpoint a file of weights or a
    # folder of torch.distributed.checkpoint.
    source: tyro.conf.Positional[Path]
    # File to write: .safetensors, or .pt for torch.load; with --dcp a folder.
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="PATH", help_behavior_hint="")] = None
    dcp: bool = False  # Write a folder that torch.distributed.checkpoint.load reads, on any number of ranks.
    # Also write optimizers, schedules and step (a .pt file, with the weights under "model"; --dcp without schedules).
    # With --to-checkpoint, take the optimizer and step from a folder of torch.distributed.checkpoint.
    optimizer: bool = False
    to_checkpoint: Path | None = None  # Folder for the new checkpoint.
    json: bool = False  # Print one JSON object.


def run(argv: Sequence[str]) -> int:
    options = read(ExportOptions, argv, "export")
    if (options.out is None) == (options.to_checkpoint is None):
        raise ValueError("expected one of -o FILE, to write a checkpoint's weights, and --to-checkpoint FOLDER")
    if options.to_checkpoint is not None:
        if options.dcp:
            raise ValueError("--dcp with --to-checkpoint: expected the folder alone, whose kind is detected")
        made = import_checkpoint(options.source, options.to_checkpoint, optimizer=options.optimizer)
        answer: dict[str, str | int] = {"checkpoint": str(made)}
    else:
        assert options.out is not None
        if not options.dcp:
            check_out("-o", options.out)
        folder = _checkpoints(options.source)
        export_checkpoint(folder, options.out, optimizer=options.optimizer, dcp=options.dcp)
        files = options.out.iterdir() if options.dcp else [options.out]
        size = sum(file.stat().st_size for file in files)
        answer = {"checkpoint": str(folder), "file": str(options.out), "bytes": size}
    if options.json:
        print(json.dumps(answer))
    elif options.out is not None:
        print(f"{answer['file']}: {int(answer['bytes']):,} bytes, from {answer['checkpoint']}")
    else:
        print(f"{answer['checkpoint']}: pipe.load({str(options.to_checkpoint)!r})")
    return 0


def _checkpoints(source: Path) -> Path:
    """The run's folder of checkpoints if the source names a run, else the source."""
    for folder in (source / "checkpoints", RUNS / source / "checkpoints"):
        if folder.is_dir():
            return folder
    return source
