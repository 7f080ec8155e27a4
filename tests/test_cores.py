"""Threads follow the quota of CPU time of a container, and whoever chose their number."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedstrata._cores import affinity, cpu_quota, physical_cores, threads_by_quota
from fedstrata._platform import DEFAULTS, THREAD_BINDING, limit_threads, prepare

V1, V2 = "4:cpu,cpuacct:{}\n1:name=systemd:/\n0::/\n", "0::{}\n"
SIXTEEN = range(16)


def tree(root, group, files, version=V2):
    """Write what a process sees of its control groups."""
    files = {"proc/self/cgroup": version.format(group), **files}
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def unified(limits):
    return {f"sys/fs/cgroup/{group}cpu.max": content for group, content in limits.items()}


def legacy(limits, mount="cpu,cpuacct"):
    return {
        f"sys/fs/cgroup/{mount}/{group}cpu.cfs_{what}_us": f"{value}\n"
        for group, values in limits.items()
        for what, value in zip(("quota", "period"), values, strict=True)
    }


@pytest.mark.parametrize(
    ("group", "limits", "quota"),
    [
        ("/", {"": "400000 100000\n"}, 4.0),
        ("/", {"": "max 100000\n"}, None),
        ("/", {"": "50000 100000\n"}, 0.5),
        ("/", {"": "250000\n"}, 2.5),
        ("/a/b", {"a/b/": "max 100000\n", "a/": "300000 100000\n", "": "max\n"}, 3.0),
        ("/a/b", {"a/b/": "600000 200000\n", "a/": "800000 100000\n"}, 3.0),
        ("/seen/only/outside", {"": "200000 100000\n"}, 2.0),
        ("/", {"": "nonsense\n"}, None),
        ("/", {"": "0 100000\n"}, None),
        ("/", {"": "100000 0\n"}, None),
        ("/", {"": ""}, None),
        ("/", {}, None),
        ("/../elsewhere", {"": "200000 100000\n"}, None),
    ],
)
def test_version_2(tmp_path, group, limits, quota):
    assert cpu_quota(tree(tmp_path, group, unified(limits))) == quota


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(
    ("group", "limits", "quota"),
    [
        ("/", {"": (150000, 100000)}, 1.5),
        ("/", {"": (-1, 100000)}, None),
        ("/docker/0a", {"docker/0a/": (-1, 100000), "docker/": (700000, 100000), "": (-1, 100000)}, 7.0),
        ("/docker/0a", {"": (100000, 50000)}, 2.0),
        ("/", {"": ("many", 100000)}, None),
        ("/", {}, None),
    ],
)
def test_version_1(tmp_path, group, limits, quota, mount):
    assert cpu_quota(tree(tmp_path, group, legacy(limits, mount), V1)) == quota


def test_beside_version_1_version_2_stands_in_a_folder_of_its_own(tmp_path):
    files = {**legacy({"": (800000, 100000)}), "sys/fs/cgroup/unified/cpu.max": "300000 100000"}
    assert cpu_quota(tree(tmp_path, "/", files, V1)) == 3.0


def test_where_there_are_no_control_groups_there_is_no_quota(tmp_path):
    assert cpu_quota(tmp_path) is None
    assert threads_by_quota(tmp_path, SIXTEEN) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"\xff\xfe:::\n0\n::\n")
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("limit", "processors", "threads"),
    [(400000, 16, 4), (350000, 16, 4), (10000, 16, 1), (1600000, 16, None), (6400000, 16, None), (400000, 3, None)],
)
def test_a_thread_for_each_core_begun_but_no_more_than_there_are(tmp_path, limit, processors, threads):
    root = tree(tmp_path, "/", unified({"": f"{limit} 100000"}))
    assert threads_by_quota(root, range(processors)) == threads


def test_two_threads_of_a_core_are_one(tmp_path):
    topology = {
        f"sys/devices/system/cpu/cpu{processor}/topology/core_cpus_list": f"{processor % 8},{processor % 8 + 8}\n"
        for processor in SIXTEEN
    }
    root = tree(tmp_path, "/", {**unified({"": "1000000 100000"}), **topology})
    assert physical_cores(root, SIXTEEN) == 8
    assert physical_cores(root, (0, 1, 8)) == 2
    assert threads_by_quota(root, SIXTEEN) is None, "ten are more than PyTorch takes of itself"


def test_a_quota_sets_the_threads_and_leaves_them_unbound():
    environment = {}
    prepare(environment, threads=4)
    assert environment == {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4", **DEFAULTS}


def test_without_a_quota_threads_are_bound():
    environment = {}
    prepare(environment, threads=None)
    assert environment == {**THREAD_BINDING, **DEFAULTS}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
@pytest.mark.parametrize("threads", [None, 4])
def test_who_sets_the_number_of_threads_decides(name, threads):
    environment = {name: "7"}
    prepare(environment, threads)
    assert environment == {name: "7", **DEFAULTS}


@pytest.mark.parametrize(("now", "after"), [(16, 4), (8, 4), (5, 5), (4, 4), (2, 2)])
def test_torch_that_was_imported_before_takes_fewer_unless_told_otherwise(now, after):
    torch = SimpleNamespace(get_num_threads=lambda: chosen[-1], set_num_threads=lambda count: chosen.append(count))
    chosen = [now]
    limit_threads(torch, 4, own=(8, 16, 2, 4))
    assert chosen[-1] == after


TORCH_FIRST = """
import importlib.util, pathlib, sys
import torch

source = importlib.util.find_spec("fedstrata").origin
spec = importlib.util.spec_from_file_location("fedstrata._cores", pathlib.Path(source).with_name("_cores.py"))
cores = sys.modules["fedstrata._cores"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cores)
cores.threads_by_quota = lambda: 1
import fedstrata

print(torch.get_num_threads())
"""


@pytest.mark.skipif(len(affinity()) < 2, reason="needs two processors")
def test_a_quota_reaches_torch_where_it_was_imported_before():
    """The quota of one core is made up."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MKL_"))}
    told = subprocess.run(
        [sys.executable, "-c", TORCH_FIRST], env=environment, capture_output=True, text=True, check=False
    )
    assert told.stdout.strip() == "1", told.stderr
