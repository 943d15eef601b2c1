"""Who has not been heard of: beats in, commands of the desk out. Pure; times are seconds of one clock that never goes back.

Silence is held against nobody for a time in which we could not hear. Whether we could, an echo tells: a word that we send
ourselves, and that comes back by the way of the beats. While the bus stands still, or we do, none comes back:

    echo ─ echo ─ echo ─────── nothing ─────── echo ─ echo
    <─ silence counts ─>                       <─ and again, from nought: everybody has the full time
"""

from typing import Final

from controlplane.commands import CloseGateway, NodeHeard, NodeSilent
from controlplane.fleet import Fleet
from controlplane.subjects import GatewayBeat, NodeBeat

NODE_S: Final = 3.0
"""Three beats missed."""
GATEWAY_S: Final = 5.0
"""Longer: the requests of a silent gateway end, and web may be busy starting."""
DEAF_S: Final = 1.0
"""After this long without an echo we were deaf. With the second between two beats it is less than a node is given."""
OUTAGE_S: Final = 3.0
"""After this long what was due is given its time anew (`Tick.since_ms`). A machine that is merely busy makes no outage."""


class Silence:
    """Remembers when each node and gateway was last heard, and what part of the past we have listened to."""

    def __init__(self, now: float) -> None:
        self._since = self._until = self._back = now
        """We have listened from the first to the second without a break; of what came after nothing is known yet. The third is
        when we were last back from an outage."""
        self._nodes: dict[str, tuple[str, float]] = {}
        self._hellos: dict[str, tuple[str, float]] = {}
        """Of each node the worker that has said hello last, and when: 0 for what was there before our first look."""
        self._looked = False
        self._gateways: dict[str, float] = {}

    def echoed(self, sent: float, now: float) -> None:
        """An echo that we sent at `sent` has come: all that was said until then has been heard."""
        if now - self._until > DEAF_S:
            self.deaf(now)
        else:
            self._until = max(self._until, sent)

    def deaf(self, now: float) -> None:
        """We could not have heard anybody until now: start anew."""
        if now - self._until > OUTAGE_S:
            self._back = now
        self._since = self._until = now

    def back_since(self, now: float) -> float:
        """Since when there has been no outage; `now` while there is one."""
        return now if now - self._until > OUTAGE_S else self._back

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
            if self._hellos.get(node.node, ("", 0.0))[0] != node.incarnation:
                self._hellos[node.node] = node.incarnation, now if self._looked else 0.0  # it has yet to beat
            if node.heard and self._silent_s(max(at, self._hellos[node.node][1])) > NODE_S:
                found.append(NodeSilent(node=node.node))
            elif not node.heard and at and now - at <= NODE_S:
                found.append(NodeHeard(node=node.node))
        for gateway in fleet.gateways:
            heard = self._gateways.setdefault(gateway, now)  # one that has just opened has yet to beat
            if self._silent_s(heard) > GATEWAY_S:
                found.append(CloseGateway(gateway=gateway, code="silent"))
        self._forget(fleet)
        self._looked = True
        return found

    def _silent_s(self, heard: float) -> float:
        return self._until - max(heard, self._since)

    def _forget(self, fleet: Fleet) -> None:
        """Gateways end; a node that is unknown has yet to say hello."""
        if len(self._gateways) > 2 * len(fleet.gateways) + 16:
            self._gateways = {gateway: at for gateway, at in self._gateways.items() if gateway in fleet.gateways}
