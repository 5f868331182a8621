"""The processes of a run on several machines: from flags, from TF_CONFIG or from SLURM.

    --cluster=node1:5000,node2:5000 --process=1
    TF_CONFIG='{"cluster": {"worker": ["node1:5000", "node2:5000"]}, "task": {"index": 1}}'
    srun --ntasks=2 tekso-trainer …              SLURM_NTASKS, SLURM_PROCID, SLURM_JOB_NODELIST, …

Flags take precedence over TF_CONFIG, and TF_CONFIG over SLURM. All processes are given the same
addresses in the same order. A process is identified by its index in this list.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

_FIRST_SLURM_PORT = 61_440  # above Linux's ephemeral ports
_SLURM_JOBS = 64  # number of successive jobs that use different ports
_PORTS_A_JOB = 64
_ROLES = ("chief", "worker")


class ClusterError(ValueError):
    """The description of a cluster is invalid; the message names the flag or the variable."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a run.

    Attributes:
      addresses: "host:port" of every process.
      process: index of this process.
      source: the flag or variable that defines the cluster, for messages.
      allows_network: whether the user allowed addresses that other machines can reach.
    """

    addresses: tuple[str, ...]
    process: int
    source: str = "--cluster"
    allows_network: bool = False

    def __post_init__(self) -> None:
        for address in self.addresses:
            _check_address(address, self.source)
        doubled = {a for a in self.addresses if self.addresses.count(a) > 1}
        if doubled:
            raise ClusterError(
                f"{self.source}: {min(doubled)} appears more than once; every process needs its "
                "own address"
            )
        if not 0 <= self.process < self.size:
            raise ClusterError(
                f"{self.source} has {self.size} processes, 0 to {self.size - 1}, but the index of "
                f"this process is {self.process}"
            )

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.addresses)

    @property
    def address(self) -> str:
        """Address of this process."""
        return self.addresses[self.process]

    @property
    def num_local(self) -> int:
        """Number of processes on this process's host."""
        hosts = [_host(address) for address in self.addresses]
        return hosts.count(hosts[self.process])

    def name(self, process: int) -> str:
        """Returns the name of a process in messages."""
        return f"process {process} ({self.addresses[process]})"


def find(
    cluster: str | None, process: int | None, environment: Mapping[str, str]
) -> Cluster | None:
    """Returns the cluster that flags or the environment describe; None for a single process.

    Args:
      cluster: value of --cluster: addresses separated by commas, or "none".
      process: value of --process.
      environment: os.environ.

    Raises:
      ClusterError: the description is invalid.
    """
    if cluster is not None:
        return _from_flags(cluster, process)
    if process is not None:
        raise ClusterError(
            f"--process={process} needs the addresses of all processes: "
            "--cluster=host:port,host:port"
        )
    if environment.get("TF_CONFIG", "").strip():
        return _from_tf_config(environment["TF_CONFIG"])
    if "SLURM_PROCID" in environment:
        return _from_slurm(environment)
    return None


# --- flags ---


def _from_flags(cluster: str, process: int | None) -> Cluster | None:
    if cluster.strip().lower() == "none":
        if process not in (None, 0):
            raise ClusterError(f"--cluster=none is one process, but --process is {process}")
        return None
    addresses = tuple(part.strip() for part in cluster.split(",") if part.strip())
    if not addresses:
        raise ClusterError(
            "--cluster is empty; expected the address of every process, as in "
            "--cluster=host:port,host:port, or --cluster=none"
        )
    if process is None:
        if len(addresses) > 1:
            raise ClusterError(
                f"--cluster has {len(addresses)} processes, but --process is not set: set it to "
                f"the index of this process, --process=0 to --process={len(addresses) - 1}"
            )
        process = 0
    made = Cluster(addresses, process)
    return made if made.size > 1 else None


def _check_address(address: str, source: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not host or "/" in host:
        raise ClusterError(
            f"{source}: {address!r} is not an address; expected host:port, such as node1:5000"
        )
    if ":" in host and not re.fullmatch(r"\[[0-9a-fA-F:.%\w]+\]", host):
        raise ClusterError(
            f"{source}: {address!r}: an IPv6 address must be in brackets: [::1]:5000"
        )
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
        raise ClusterError(f"{source}: {address!r}: {port!r} is not a port; expected 1 to 65535")


def _host(address: str) -> str:
    return address.rpartition(":")[0]


# --- TF_CONFIG ---


def _from_tf_config(text: str) -> Cluster | None:
    source = "TF_CONFIG"
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ClusterError(f"{source} is not valid JSON: {error}") from None
    config = _mapping(config, "")
    roles = _mapping(config.get("cluster", {}), "cluster")
    if not roles:
        return None
    unknown = sorted(set(roles) - set(_ROLES))
    if unknown:
        raise ClusterError(
            f"{source}: cluster.{unknown[0]} is not supported; the roles are "
            f"cluster.{' and cluster.'.join(_ROLES)}, and all processes do the same work"
        )
    chiefs, workers = (_addresses(roles.get(role, []), role) for role in _ROLES)
    task = _mapping(config.get("task", {}), "task")
    kind, index = task.get("type", "worker"), task.get("index")
    own = {"chief": chiefs, "worker": workers}.get(kind)
    if own is None:
        raise ClusterError(f"{source}: task.type is {kind!r}, but must be {' or '.join(_ROLES)}")
    if isinstance(index, str) and index.isascii() and index.isdigit():
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(own):
        raise ClusterError(
            f"{source}: task.index is {index!r}, but cluster.{kind} has {len(own)} addresses"
        )
    process = index + (len(chiefs) if kind == "worker" else 0)
    made = Cluster((*chiefs, *workers), process, source)
    return made if made.size > 1 else None


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ClusterError(f"TF_CONFIG: {path or 'it'} is {value!r}, but must be a JSON object")
    return value


def _addresses(value: Any, role: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(address, str) for address in value):
        raise ClusterError(
            f'TF_CONFIG: cluster.{role} is {value!r}, but must be a list of "host:port"'
        )
    return value


# --- SLURM ---


def _from_slurm(environment: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster of a SLURM job; None for a single process.

    Processes are expected on nodes in blocks, SLURM's default. The variables of a step, which
    `srun` sets, take precedence over the variables of the job.
    """
    count = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", default=1)
    if count == 1:
        return None
    process = _number(environment, "SLURM_PROCID")
    name = _first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if name is None:
        raise ClusterError(f"SLURM_NTASKS is {count}, but SLURM_JOB_NODELIST is missing")
    hosts = expand_hosts(environment[name], source=name)
    tasks = _tasks_of_nodes(environment, count, len(hosts))
    job = _number(environment, "SLURM_JOB_ID", "SLURM_JOBID", default=0)
    first = _FIRST_SLURM_PORT + job % _SLURM_JOBS * _PORTS_A_JOB
    if max(tasks) > _PORTS_A_JOB:
        raise ClusterError(
            f"SLURM runs {max(tasks)} processes on a node; at most {_PORTS_A_JOB} are supported, "
            "because each needs its own port"
        )
    places = [
        (node, f"{host}:{first + local}")
        for node, host in enumerate(hosts)
        for local in range(tasks[node])
    ]
    made = Cluster(tuple(address for _, address in places), process, "SLURM")
    node = _number(environment, "SLURM_NODEID", default=places[process][0])
    if node != places[process][0]:
        raise ClusterError(
            f"SLURM_PROCID {process} runs on node {node}, not on node {places[process][0]}: the "
            "processes must be assigned to nodes in blocks, as with srun --distribution=block"
        )
    return made


def _tasks_of_nodes(environment: Mapping[str, str], count: int, nodes: int) -> list[int]:
    name = _first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name is None:
        if count % nodes:
            raise ClusterError(
                f"SLURM_NTASKS {count} does not divide evenly over the {nodes} nodes of "
                "SLURM_JOB_NODELIST, and SLURM_TASKS_PER_NODE is missing"
            )
        return [count // nodes] * nodes
    tasks = []
    for part in environment[name].split(","):
        found = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if not found:
            raise ClusterError(f"{name} is {environment[name]!r}; expected a list such as 2(x3),1")
        tasks += [int(found[1])] * int(found[2] or 1)
    if len(tasks) != nodes or sum(tasks) != count:
        raise ClusterError(
            f"{name} is {environment[name]!r}: {sum(tasks)} processes on {len(tasks)} nodes, but "
            f"there are {count} on {nodes}"
        )
    return tasks


def expand_hosts(text: str, *, source: str = "SLURM_JOB_NODELIST") -> list[str]:
    """Returns the hosts of a SLURM node list: "gpu[08-10,12],login" has five hosts.

    Raises:
      ClusterError: the text is not a node list.
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(text):
        hosts += _expand(part, text, source)
    if not hosts:
        raise ClusterError(f"{source} is empty; expected names of nodes")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    return [p.strip() for p in re.split(r",(?![^\[\]]*\])", text) if p.strip()]


def _expand(part: str, text: str, source: str) -> list[str]:
    """Expands the first brackets, then the rest recursively."""
    found = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\](.*)", part)
    if found is None:
        if not re.fullmatch(r"[\w.-]+", part):
            raise ClusterError(f"{source} is {text!r}; expected a list such as node[1-3,7],other")
        return [part]
    before, inside, after = found.groups()
    return [
        rest
        for number in _numbers(inside, text, source)
        for rest in _expand(f"{before}{number}{after}", text, source)
    ]


def _numbers(inside: str, text: str, source: str) -> list[str]:
    numbers: list[str] = []
    for piece in inside.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", piece)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ClusterError(f"{source} is {text!r}: {piece!r} is not a range such as 1-3")
        width = len(found[1]) if found[1].startswith("0") else 0  # "08-10" keeps its zeros
        first, last = int(found[1]), int(found[2] or found[1])
        numbers += [f"{n:0{width}d}" for n in range(first, last + 1)]
    return numbers


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if environment.get(name)), None)


def _number(environment: Mapping[str, str], *names: str, default: int | None = None) -> int:
    name = _first(environment, *names)
    if name is None:
        if default is None:
            raise ClusterError(f"{names[0]} is missing")
        return default
    value = environment[name]
    if not (value.isascii() and value.isdigit()):
        raise ClusterError(f"{name} is {value!r}, but must be a whole number")
    return int(value)


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the host of an address, without brackets, and the port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
