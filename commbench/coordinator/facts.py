"""What dispatch must know of a group of GPUs: nodes, links, multicast. All ranks find the same."""

from __future__ import annotations

import socket
from dataclasses import replace

from commbench.backends import device, gpu_links
from commbench.backends.base import Group, together
from commbench.coordinator.hosts import boot_id
from commbench.types import Platform


def of_group(group: Group, platform: Platform) -> Platform:
    """The platform with this group's facts. Collective on GPUs; on other devices nothing has to be asked."""
    facts = replace(platform, world_size=group.world_size, one_host=group.one_host)
    if platform.device not in ("cuda", "hip"):
        return facts
    places = together(group, "platform", lambda: (boot_id() or socket.gethostname(), gpu_links.identity(group.device)))
    mine = places[group.rank][0]
    beside = [gpu for node, gpu in places if node == mine]
    answers = together(group, "platform", lambda: _links(group, platform.device, places[group.rank][1], beside))
    nodes = len({node for node, _ in places})
    return replace(
        facts,
        nnodes=nodes,
        consecutive_ranks=list(group.ranks) == list(range(group.ranks[0], group.ranks[0] + group.world_size)),
        p2p=all(peer for peer, _, _ in answers),
        nvlink=nodes == 1 and all(nvlink for _, nvlink, _ in answers),
        multicast=all(multicast for _, _, multicast in answers),
    )


def _links(group: Group, kind: str, mine: str, beside: list[str]) -> tuple[bool, bool, bool]:
    """(peer access, all linked by NVLink or XGMI, multicast) as this rank sees it; what cannot be told is no."""
    if kind == "hip":
        return True, device.architecture(group.device).startswith(device.XGMI_ARCHITECTURES), False
    try:
        peer, nvlink = gpu_links.links(mine, beside)
    except OSError:  # no NVML: then nothing is known of links, and backends ask for themselves
        return True, False, device.has_multicast(group.device)
    return peer, nvlink, device.has_multicast(group.device)
