"""examples/launch/: the Ray script runs; the Kubernetes manifest and the Slurm script say what torchrun understands."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.inside import Nodes, Shape, network, what_is_missing
from torch.distributed.run import config_from_args, get_args_parser

import stagewright

ROOT = Path(stagewright.__file__).parent
LAUNCH = ROOT / "examples" / "launch"
KINDS: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def misfits(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """As the server finds them: kinds, what is missing, and fields that it would drop without a word."""
    if schema.get("x-kubernetes-int-or-string"):
        if not (isinstance(value, int | str) and re.fullmatch(schema.get("pattern", ".*"), str(value))):
            yield f"{where}: {value!r}"
        return
    if not isinstance(value, KINDS[schema["type"]]):
        yield f"{where}: {value!r} is no {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r}"
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from misfits(each, schema["items"], f"{where}[{number}]")
    elif isinstance(value, dict):
        yield from (f"{where} lacks {name}" for name in schema.get("required", ()) if name not in value)
        for name, each in value.items():
            known = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if known is not None:
                yield from misfits(each, known, f"{where}.{name}")
            elif where != ".metadata":
                yield f"{where} has no {name}"


def manifest() -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text(encoding="utf-8"))


def test_the_manifest_fits_the_operators_schema() -> None:
    job = manifest()
    schema = json.loads((ROOT / "tests" / "data" / "pytorchjob_schema.json").read_text(encoding="utf-8"))["schema"]
    assert list(misfits(job, schema)) == []
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")


def parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """torchrun's options and what it would launch; the script's own parser has taken its words, too."""
    options = get_args_parser().parse_args(words)
    config, _, _ = config_from_args(options)

    class StopError(Exception):
        pass

    def stop() -> None:
        raise StopError

    script = load(ROOT / options.training_script)
    monkeypatch.setattr(script, "GPT", stop)  # right behind the parser
    monkeypatch.setattr(sys, "argv", [options.training_script, *options.training_script_args])
    with pytest.raises(StopError):
        script.main()
    return options, config


def test_torchrun_reads_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the operator sets (v1.9.0, pkg/controller.v1/pytorch/elastic.go and envvar.go)."""
    job = manifest()
    spec, (kind, worker) = job["spec"], next(iter(job["spec"]["pytorchReplicaSpecs"].items()))
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    policy = spec["elasticPolicy"]
    monkeypatch.setenv("PET_RDZV_ENDPOINT", f"{job['metadata']['name']}-{kind.lower()}-0:23456")
    monkeypatch.setenv("PET_RDZV_BACKEND", policy["rdzvBackend"])
    monkeypatch.setenv("PET_NNODES", f"{policy['minReplicas']}:{policy['maxReplicas']}")
    monkeypatch.setenv("PET_MAX_RESTARTS", str(policy["maxRestarts"]))
    monkeypatch.setenv("PET_NPROC_PER_NODE", spec["nprocPerNode"])
    program, *words = container["command"]
    assert program == "torchrun"
    _, config = parsed(words, monkeypatch)
    assert config.min_nodes == config.max_nodes == worker["replicas"] == 4
    assert (config.nproc_per_node, config.max_restarts, config.rdzv_backend) == (1, 3, "c10d")
    assert config.rdzv_endpoint == "stagewright-gpt-worker-0:23456"
    folder = next(word.partition("=")[2] for word in words if word.startswith("--folder="))
    assert any(folder.startswith(f"{mount['mountPath']}/") for mount in container["volumeMounts"])


def test_slurm_gives_each_node_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands are stood in for: srun runs its words once a node, and torchrun prints its own."""
    for name, text in {
        "scontrol": "printf 'first\\nsecond\\nthird\\nfourth\\n'",
        "srun": 'shift; for SLURM_NODEID in 0 1 2 3; do export SLURM_NODEID; "$@" || exit 1; done',
        ".venv/bin/torchrun": 'echo "$@"',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "123456"}
    environment |= {"SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_CPUS_PER_TASK": "2"}
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for node, line in enumerate(lines):
        options, config = parsed(line.split(), monkeypatch)
        assert (options.node_rank, config.min_nodes, config.max_nodes, config.nproc_per_node) == (node, 4, 4, 1)
        assert (options.master_addr, options.master_port, config.rdzv_backend) == ("first", 23456, "static")


TWO_NODES = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
import stagewright as sw

class Layer(nn.Linear):
    def forward(self, x):
        if os.environ.get("GROUP_RANK") == "1" and step == 2:
            Path("stands").touch()
            time.sleep(600)  # until its node dies
        return super().forward(x)

step = 0
torch.manual_seed(0)
model = nn.Sequential(*[Layer(8, 8) for _ in range(4)])
x, y = torch.randn(2, 3, 16, 8)
pipe = sw.PipelineModule(
    model, num_microbatches=4, loss_fn=nn.functional.mse_loss, mesh={"pipe": 4}, timeout=60.0, verify=False,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)
for step in range(int(sys.argv[1])):
    print(f"rank {pipe.rank}, step {step}: {pipe.train_step(x[step], y[step]).loss!r}", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.gloo
@pytest.mark.skipif(bool(what_is_missing()), reason="needs root and network namespaces")
def test_two_nodes_train_as_one_process_and_the_survivor_names_the_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/guides/nodes.md as it stands there: the same line on each node, in a network of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TWO_NODES)
    for name in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    alone = subprocess.run([sys.executable, "train.py", "2"], capture_output=True, text=True, timeout=300, check=True)
    line = "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node0:29500 train.py 3"
    with network(Nodes(num_nodes=2, shape=Shape()), has_netem=False) as nodes, ExitStack() as stack:
        logs = [stack.enter_context((tmp_path / f"{host.name}.log").open("wb")) for host in nodes.hosts]
        words = [sys.executable, "-m", "torch.distributed.run", *line.split()]
        agents = [host.start(words, output=log) for host, log in zip(nodes.hosts, logs, strict=True)]
        until = time.monotonic() + 240.0
        while not (tmp_path / "stands").exists() and agents[0].poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        nodes.hosts[1].crash()
        assert agents[0].wait(240.0) == 1
        agents[1].wait(60.0)
    said = "".join((tmp_path / f"node{node}.log").read_text() for node in range(2))
    for told in alone.stdout.splitlines():
        ranks = [told.replace("rank 0", f"rank {rank}") for rank in range(4)]
        assert [each in said for each in ranks] == [True] * 4, said
    survivor = (tmp_path / "node0.log").read_text()
    assert "PeerLost: rank 1: lost the connection to rank 2" in survivor
    assert "cause: rank 2, which rank 1 waited for, reports nothing: it died" in survivor


RAY = """
import ray, runpy, sys
ray.init(address="local", _node_ip_address="127.0.0.1", include_dashboard=False, num_cpus=4)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.nightly
@pytest.mark.gloo
def test_ray_train_starts_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers train as one process does."""
    train = pytest.importorskip("ray.train")
    script = LAUNCH / "ray_train.py"
    # Without clusters all that Ray opens is on the loopback; nothing is told to anybody.
    environment = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", RAY, str(script), "--folder", str(tmp_path / "ray")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told: list[dict[str, float]] = []
    monkeypatch.setattr(train, "report", told.append)
    load(script).work({"steps": 20, "every": 10, "folder": str(tmp_path / "alone")})
    assert [metrics["step"] for metrics in told] == [10, 20]
    for metrics in told:
        assert f"step {metrics['step']}: loss {metrics['loss']:.3f}" in done.stdout
    states = [stagewright.read_checkpoint(tmp_path / where / "checkpoints") for where in ("ray", "alone")]
    assert all(states[0][name].equal(tensor) for name, tensor in states[1].items())
