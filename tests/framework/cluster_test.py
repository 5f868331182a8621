"""The cluster of a run, from flags, TF_CONFIG and SLURM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tekso.framework.cluster import Cluster, ClusterError, expand_hosts, find


def tf_config(task: Any = None, **cluster: Any) -> dict[str, str]:
    config = {"cluster": cluster, "task": task or {"type": "worker", "index": 0}}
    return {"TF_CONFIG": json.dumps(config)}


def slurm(**variables: str) -> dict[str, str]:
    return {f"SLURM_{name}": value for name, value in variables.items()}


def test_one_process_without_any_description() -> None:
    assert find(None, None, {}) is None
    assert find("none", None, tf_config(worker=["a:1", "b:1"])) is None
    assert find("a:1", None, {}) is None
    assert find(None, None, tf_config(worker=["a:1"])) is None
    assert find(None, None, slurm(PROCID="0", NTASKS="1", JOB_NODELIST="a")) is None


def test_flags_give_addresses_and_index() -> None:
    found = find("a:1, b.example.org:2,[::1]:3", 2, {})
    assert found == Cluster(("a:1", "b.example.org:2", "[::1]:3"), 2)
    assert found.name(1) == "process 1 (b.example.org:2)"


def test_flags_go_before_tf_config_and_that_before_slurm() -> None:
    both = tf_config(worker=["a:1", "b:1"]) | slurm(PROCID="1", NTASKS="2", JOB_NODELIST="c,d")
    assert find("e:1,f:1", 1, both) == Cluster(("e:1", "f:1"), 1)
    found = find(None, None, both)
    assert found == Cluster(("a:1", "b:1"), 0, "TF_CONFIG")


@pytest.mark.parametrize(
    ("cluster", "process", "expected"),
    [
        ("a:1,b:1", None, "--process=0 to --process=1"),
        ("a:1,b:1", 2, "2 processes, 0 to 1, but"),
        ("a:1,b:1", -1, "2 processes, 0 to 1, but"),
        ("a:1,a:1", 0, "a:1 appears more than once"),
        ("a,b:1", 0, "'a' is not an address"),
        ("a:1,b:port", 0, "'port' is not a port"),
        ("a:1,b:70000", 0, "'70000' is not a port"),
        ("a:1,::1:5000", 0, "in brackets"),
        ("", 0, "--cluster is empty"),
        ("none", 1, "--cluster=none is one process"),
        (None, 1, "needs the addresses of all"),
    ],
)
def test_wrong_flags_are_reported(cluster: str | None, process: int | None, expected: str) -> None:
    with pytest.raises(ClusterError, match=expected):
        find(cluster, process, {})


def test_tf_config_lists_the_chief_before_the_workers() -> None:
    task = {"type": "worker", "index": 1}
    found = find(None, None, tf_config(task, chief=["a:1"], worker=["b:1", "c:1"]))
    assert found == Cluster(("a:1", "b:1", "c:1"), 2, "TF_CONFIG")
    task = {"type": "chief", "index": "0"}
    found = find(None, None, tf_config(task, chief=["a:1"], worker=["b:1", "c:1"]))
    assert found is not None
    assert found.process == 0


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not valid JSON"),
        ({"TF_CONFIG": "[]"}, "must be a JSON object"),
        (tf_config(worker="a:1"), "must be a list"),
        (tf_config(worker=["a:1", "b:1"], ps=["c:1"]), "cluster.ps is not supported"),
        (tf_config({"index": 2}, worker=["a:1", "b:1"]), "task.index is 2"),
        (tf_config({"type": "worker"}, worker=["a:1", "b:1"]), "task.index is None"),
        (tf_config({"type": "evaluator", "index": 0}, worker=["a:1", "b:1"]), "'evaluator'"),
        (tf_config(worker=["a:1", "b"]), "TF_CONFIG: 'b' is not an address"),
    ],
)
def test_wrong_tf_config_is_reported(environment: dict[str, str], expected: str) -> None:
    with pytest.raises(ClusterError, match=expected):
        find(None, None, environment)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("gpu[1-3,7]", ["gpu1", "gpu2", "gpu3", "gpu7"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("r[1-2]n[3-4].x", ["r1n3.x", "r1n4.x", "r2n3.x", "r2n4.x"]),
    ],
)
def test_slurm_node_lists_are_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a[1-", "a[3-1]", "a[x]", "a b"])
def test_wrong_slurm_node_lists_are_reported(text: str) -> None:
    with pytest.raises(ClusterError, match="SLURM_JOB_NODELIST"):
        expand_hosts(text)


def test_slurm_gives_processes_of_a_node_successive_ports() -> None:
    job = slurm(
        PROCID="2", NTASKS="3", JOB_NODELIST="n[1-2]", TASKS_PER_NODE="2,1", JOB_ID="65", NODEID="1"
    )
    found = find(None, None, job)
    assert found == Cluster(("n1:61504", "n1:61505", "n2:61504"), 2, "SLURM")
    assert [Cluster(found.addresses, p).num_local for p in range(3)] == [2, 2, 1]


def test_slurm_tasks_are_spread_evenly_by_default() -> None:
    found = find(None, None, slurm(PROCID="0", NTASKS="4", JOB_NODELIST="n[1-2]"))
    assert found is not None
    assert found.addresses == ("n1:61440", "n1:61441", "n2:61440", "n2:61441")


def test_slurm_step_goes_before_the_job() -> None:
    environment = slurm(
        PROCID="1", NTASKS="8", JOB_NODELIST="n[1-8]", TASKS_PER_NODE="1(x8)", JOB_ID="64"
    ) | slurm(STEP_NUM_TASKS="2", STEP_NODELIST="n[3,5]", STEP_TASKS_PER_NODE="1(x2)")
    assert find(None, None, environment) == Cluster(("n3:61440", "n5:61440"), 1, "SLURM")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PROCID": "0", "NTASKS": "two", "JOB_NODELIST": "a"}, "SLURM_NTASKS is 'two'"),
        ({"PROCID": "0", "NTASKS": "2"}, "SLURM_JOB_NODELIST is missing"),
        ({"PROCID": "3", "NTASKS": "2", "JOB_NODELIST": "a,b"}, "2 processes, 0 to 1, but"),
        ({"PROCID": "0", "NTASKS": "3", "JOB_NODELIST": "a,b"}, "does not divide"),
        (
            {"PROCID": "0", "NTASKS": "3", "JOB_NODELIST": "a,b", "TASKS_PER_NODE": "2(x2)"},
            "4 processes on 2 nodes",
        ),
        (
            {"PROCID": "0", "NTASKS": "2", "JOB_NODELIST": "a,b", "TASKS_PER_NODE": "1 each"},
            "expected a list such as",
        ),
        (
            {"PROCID": "1", "NTASKS": "4", "JOB_NODELIST": "a,b", "NODEID": "1"},
            "--distribution=block",
        ),
    ],
)
def test_wrong_slurm_variables_are_reported(variables: dict[str, str], expected: str) -> None:
    with pytest.raises(ClusterError, match=expected):
        find(None, None, slurm(**variables))
