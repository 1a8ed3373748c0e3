"""The recipes of configs/cluster: what linters and schemas say of them, and that their commands start what they say.

No image is built and no cluster is run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.commands.job import plan_job

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = ROOT / "configs" / "cluster"
DEPLOYMENTS = ("kubernetes_cuda", "kubernetes_ascend")


def checker(name: str) -> str:
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=beside)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install -e '.[dev]'")
    return found


def check(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def objects(name: str) -> Iterator[Any]:
    yield from yaml.safe_load_all((CLUSTER / f"{name}.yaml").read_text())


def test_hadolint_has_nothing_to_say() -> None:
    check(checker("hadolint"), *sorted(CLUSTER.glob("*.Dockerfile")))


def test_shellcheck_warns_of_no_script() -> None:
    scripts = [*(ROOT / "scripts").glob("*.sh"), CLUSTER / "slurm.sh", ROOT / ".ci" / "run"]
    # -x with the scripts' own folder: what they source is looked at as part of them.
    check(checker("shellcheck"), "--shell=bash", "--severity=warning", "-x", "--source-path=SCRIPTDIR", *scripts)


def test_compose_files_keep_to_their_specification() -> None:
    check(checker("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", CLUSTER / "compose.yaml")


@pytest.mark.parametrize("name", DEPLOYMENTS)
@pytest.mark.parametrize("release", ["1.28", "1.37"])
def test_kubernetes_takes_the_manifests(name: str, release: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for part in objects(name):
        validate(part, release, strict=True)


@pytest.mark.parametrize("release", ["1.28", "1.37"])
def test_kubernetes_takes_the_pods_of_an_ascend_job(release: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    (job,) = objects("ascendjob")
    for role, replica in job["spec"]["replicaSpecs"].items():
        metadata = {"name": role.lower()}
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": replica["template"]}
        validate(pod, release, strict=True)


def test_an_ascend_job_is_what_its_operator_takes() -> None:
    """The outer keys of the CustomResourceDefinition of mind-cluster's ascend-operator, and what it insists on."""
    (job,) = objects("ascendjob")
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"]) == ("mindxdl.gitee.com/v1", "AscendJob")
    assert job["metadata"]["labels"]["framework"] == "pytorch"
    assert spec.keys() == {"schedulerName", "runPolicy", "successPolicy", "replicaSpecs"}
    assert spec["runPolicy"].keys() == {"schedulingPolicy"}
    replicas = spec["replicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    num_pods = sum(replica["replicas"] for replica in replicas.values())
    assert spec["runPolicy"]["schedulingPolicy"] == {"minAvailable": num_pods, "queue": "default"}
    for replica in replicas.values():
        assert replica.keys() == {"replicas", "restartPolicy", "template"}
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "ascend"
        assert [port["name"] for port in container["ports"]] == ["ascendjob-port"]
        devices = container["resources"]["requests"]["huawei.com/Ascend910"]
        assert devices == container["resources"]["limits"]["huawei.com/Ascend910"] == "16"
        assert int(job["metadata"]["annotations"]["sp-block"]) == num_pods * int(devices)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_pod_ends_after_its_drain(name: str) -> None:
    deployment, service, claim = objects(name)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    before_stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = 25  # serve.drain_timeout_s
    assert pod["terminationGracePeriodSeconds"] > before_stop + drain
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert claim["metadata"]["name"] in [
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    probes = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert probes == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}


def planned(words: list[str], environment: dict[str, str]) -> str:
    """What a recipe's `scripts/NAME.sh PROFILE RUN ...` starts. RUN is of the user's: the demo stands for it."""
    script, profile, _, *options = words
    command = {"scripts/serve.sh": "serve", "scripts/run_batch.sh": "run"}[script]
    return plan_job([command, profile, "demo_block_causal", *options], environment)[0].script()


def test_the_pods_of_an_ascend_job_start_its_nodes() -> None:
    (job,) = objects("ascendjob")
    ranks = []
    for rank, replica in enumerate(job["spec"]["replicaSpecs"].values()):
        (container,) = replica["template"]["spec"]["containers"]
        given = {"WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "16", "LOCAL_RANK": ",".join(map(str, range(16))),
                 "RANK": str(rank), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2222"}  # fmt: skip
        started = planned(container["args"], given)
        assert "--nnodes=2" in started and "--master-addr=10.0.0.1 --master-port=2222 --nproc-per-node=16" in started
        assert "unset LOCAL_RANK LOCAL_WORLD_SIZE RANK WORLD_SIZE" in started
        ranks.append(f"--node-rank={rank}" in started)
    assert ranks == [True, True]


def test_servers_start_as_many_processes_as_their_pods_have_devices() -> None:
    deployment, *_ = objects("kubernetes_ascend")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--nproc-per-node=16" in planned(container["args"], {})
    words = [
        word.replace("${RUN:-demo_block_causal}", "RUN")
        for word in next(objects("compose"))["services"]["ascend"]["command"]
    ]
    assert "--nproc-per-node=16" in planned(words, {})


SRUN = """#!/usr/bin/env bash
shift
for SLURM_NODEID in 0 1; do SLURM_NODEID=$SLURM_NODEID "$@"; done
"""


def test_a_slurm_batch_starts_each_of_its_nodes(tmp_path: Path) -> None:
    for name, text in {"scontrol": "#!/bin/sh\nprintf 'first\\nsecond\\n'\n", "srun": SRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "123", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "x", "IFNAME": "eth0", "DRY_RUN": "1"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    command = [str(CLUSTER / "slurm.sh"), "h200_tp1_bp8", "demo", "--set", "mesh.data_parallel_size=2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    started = [line for line in done.stdout.splitlines() if "torch.distributed.run" in line]
    where = "--nnodes=2 --node-rank={} --master-addr=first --master-port=20123 --nproc-per-node=8"
    assert [where.format(rank) in line for rank, line in enumerate(started)] == [True, True]


def test_a_slurm_batch_is_queued_again_before_its_limit(tmp_path: Path) -> None:
    """SIGTERM comes to the batch's shell alone; its nodes are told, and end before it does."""
    log = tmp_path / "log"
    srun = f"#!/usr/bin/env bash\ntrap 'echo stopped >>{log}; exit 143' TERM\necho started >>{log}\nsleep 60 & wait\n"
    for name, text in {"scontrol": f'#!/bin/sh\necho "$@" >>{log}\n', "srun": srun}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "123", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "x"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    batch = subprocess.Popen([str(CLUSTER / "slurm.sh"), "cpu", "demo"], cwd=ROOT, env=environment)
    while not (log.exists() and "started" in log.read_text()):
        assert batch.poll() is None
    batch.terminate()
    assert batch.wait(timeout=30) == 143
    assert log.read_text().splitlines()[-2:] == ["stopped", "requeue 123"]


CANN_FOLDERS = ("ascend-toolkit", "cann")  # before and since CANN 8.5


@pytest.mark.parametrize("cann", CANN_FOLDERS)
def test_the_environment_of_ascend_is_sourced_whole(tmp_path: Path, cann: str) -> None:
    """CANN's, its compiler's and nnal's, though the last ends with an error, the driver's libraries, and jemalloc
    before what is preloaded already. None reads the script's arguments for its own."""
    files = {
        cann: "export CANN=$UNSET GIVEN=$*", f"{cann}/share/info/ascendnpu-ir/bin": "export BISHENG=yes",
        "nnal/atb": "export NNAL=yes\nfalse",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "set_env.sh").write_text(f"{text}\n")
    libraries = tmp_path / "driver" / "lib64" / "driver"
    libraries.mkdir(parents=True)
    done = sourced_on_ascend(tmp_path, LD_LIBRARY_PATH="/elsewhere")
    names = ("CANN=", "BISHENG=", "NNAL=", 'GIVEN="--cxx_abi=1"', f'LD_PRELOAD="{tmp_path / "libjemalloc.so.2"}')
    assert all(f"declare -x {name}" in done for name in (*names, f'LD_LIBRARY_PATH="/elsewhere:{libraries}"'))
    assert f'LD_LIBRARY_PATH="{libraries}"' in sourced_on_ascend(tmp_path, LD_LIBRARY_PATH=str(libraries))


def test_where_two_cann_lie_the_folder_of_today_is_sourced(tmp_path: Path) -> None:
    """An upgrade leaves the older folder behind."""
    for name in CANN_FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "set_env.sh").write_text(f"export CANN={name}\n")
    assert 'declare -x CANN="cann"' in sourced_on_ascend(tmp_path)


def sourced_on_ascend(root: Path, **variables: str) -> str:
    """Return what a script with arguments exports where Ascend's files lie in this folder."""
    (root / "libjemalloc.so.2").touch()
    given = {"ASCEND_ROOT": str(root), "JEMALLOC": str(root / "libjemalloc.so.2"), "PYTHON": sys.executable} | variables
    code = f"set -eu; source {shlex.quote(str(ROOT / 'scripts' / 'env.sh'))}; export -p"
    command = ["bash", "-c", code, "script", "an argument"]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
