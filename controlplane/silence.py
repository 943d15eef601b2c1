"""Who has not been heard of: beats in, commands of the desk out. Pure; times are seconds of a monotonic clock."""

from typing import Final

from controlplane.commands import CloseGateway, NodeHeard, NodeSilent
from controlplane.fleet import Fleet
from controlplane.subjects import GatewayBeat, NodeBeat

NODE_S: Final = 3.0
"""Three beats missed."""
GATEWAY_S: Final = 5.0
"""Longer: the requests of a silent gateway end, and web may be busy starting."""


class Silence:
    """Remembers when each node and gateway was last heard. Silence counts only while we listened ourselves."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._nodes: dict[str, tuple[str, float]] = {}
        self._gateways: dict[str, float] = {}

    def deaf(self, now: float) -> None:
        """We could not have heard anybody until now (the bus was away, or this process stood still): start anew."""
        self._since = now

    def heard_node(self, beat: NodeBeat, now: float) -> None:
        self._nodes[beat.node] = beat.incarnation, now

    def heard_gateway(self, beat: GatewayBeat, now: float) -> None:
        self._gateways[beat.gateway] = now

    def commands(self, fleet: Fleet, now: float) -> list[NodeSilent | NodeHeard | CloseGateway]:
        """What to tell the decider. Repeated until the state shows it."""
        found: list[NodeSilent | NodeHeard | CloseGateway] = []
        for node in fleet.nodes.values():
            incarnation, at = self._nodes.get(node.node, ("", 0.0))
            if incarnation != node.incarnation:  # another run of the worker, which has yet to say hello
                at = 0.0
            if node.heard and now - max(at, self._since) > NODE_S:
                found.append(NodeSilent(node=node.node))
            elif not node.heard and at and now - at <= NODE_S:
                found.append(NodeHeard(node=node.node))
        for gateway in fleet.gateways:
            heard = self._gateways.setdefault(gateway, now)  # one that has just opened has yet to beat
            if now - max(heard, self._since) > GATEWAY_S:
                found.append(CloseGateway(gateway=gateway, code="silent"))
        self._forget(fleet)
        return found

    def _forget(self, fleet: Fleet) -> None:
        """Gateways end; a node that is unknown has yet to say hello."""
        if len(self._gateways) > 2 * len(fleet.gateways) + 16:
            self._gateways = {gateway: at for gateway, at in self._gateways.items() if gateway in fleet.gateways}
