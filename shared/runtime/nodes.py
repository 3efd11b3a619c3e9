"""Which machine does what: the nodes of a run, the devices of each, and what of it is started here.

A node is an address of `gps.nodes`; without that section a run has one. Devices are numbered over the whole
run and shared out evenly, in order: of 32 devices on 4 nodes, device 11 is the fourth of node 1. The services
(planner, monitor, role services, trainer) and an embedded broker are on node 0.

Where every address is a loopback one (127.0.0.1, 127.0.0.2, …), all nodes are this machine: they can be
started together, and their devices are this machine's under the numbers of the run.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from shared.errors import ConfigError
from shared.ids import DeviceId
from shared.runtime.config import RunConfig
from shared.runtime.topology import cluster_of, rank_devices


@dataclass(frozen=True, slots=True)
class Machine:
    """The part of a run that one launcher starts. `first_device` is this machine's device 0 in the run's
    numbers."""

    nodes: tuple[int, ...]
    first_device: int = 0

    @property
    def has_services(self) -> bool:
        return 0 in self.nodes

    def local(self, device: DeviceId) -> int:
        """The number that this machine knows `device` by."""
        return int(device) - self.first_device


def node_addresses(config: RunConfig) -> tuple[str, ...]:
    """Where each node is, in order."""
    return config.gps.nodes if config.gps is not None else (config.network.host,)


def are_all_here(config: RunConfig) -> bool:
    """Whether one machine is all of the run's nodes."""
    addresses = node_addresses(config)
    return len(addresses) == 1 or all(_is_loopback(address) for address in addresses)


def node_of(config: RunConfig, devices: Iterable[DeviceId]) -> int:
    """The node that has all of `devices`. Raises ConfigError if they are on several."""
    per_node = config.num_devices // len(node_addresses(config))
    found = {int(device) // per_node for device in devices}
    if len(found) > 1:
        raise ConfigError(
            "gps.nodes",
            list(node_addresses(config)),
            f"has {per_node} devices a node, and one replica would be on {len(found)} nodes",
            "Choose cluster.rollout_tp, cluster.reward_tp and cluster.split that fit one node each",
        )
    return found.pop()


def machine_of(config: RunConfig, node: int | None) -> Machine:
    """What is started here: node `node`; without one, the only node, or all of them if all are here.

    Raises:
        ConfigError: there is no such node, or several machines and none is named; devices, a replica or the
        ranks cannot be shared out over the nodes.
    """
    addresses = node_addresses(config)
    _check_shares(config, addresses)
    if node is None and not are_all_here(config):
        remedy = "Start this on each machine with its own number, --node 0 on the first"
        raise ConfigError(
            "gps.nodes", list(addresses), "names other machines than this, and --node is not given", remedy
        )
    if node is not None and not 0 <= node < len(addresses):
        remedy = f"Use 0 to {len(addresses) - 1}, or add its address to gps.nodes"
        raise ConfigError("--node", node, f"is none of the {len(addresses)} nodes of gps.nodes", remedy)
    if node is None:
        return Machine(tuple(range(len(addresses))))
    first = 0 if are_all_here(config) else node * config.num_devices // len(addresses)
    return Machine((node,), first)


def _check_shares(config: RunConfig, addresses: tuple[str, ...]) -> None:
    if config.num_devices % len(addresses):
        raise ConfigError(
            "cluster.devices",
            config.num_devices,
            f"cannot be shared out evenly over the {len(addresses)} of gps.nodes",
            "Choose a multiple",
        )
    for slot in cluster_of(config).slots:
        node_of(config, slot.devices)
    hosts = sorted({node_of(config, [device]) for device in rank_devices(config)})
    if len(hosts) > 1 and not all(_is_loopback(addresses[node]) for node in hosts):
        raise ConfigError(
            "cluster.split.training",
            config.num_training_devices,
            f"policy {config.policy!r} puts ranks on nodes {', '.join(map(str, hosts))}, "
            "and ranks meet on one machine only",
            f"Give training as many devices as one node has or fewer: {config.num_devices // len(addresses)}",
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
