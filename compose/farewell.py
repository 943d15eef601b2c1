"""The last word of a plane that is ended in order. Without it its models would be up till the next start, and lost then."""

from pathlib import Path
from typing import Final

from controlplane import ids, parties, subjects
from controlplane.bus import Bus
from controlplane.commands import Farewell, Order
from controlplane.plane import Plane

CONNECT_S: Final = 2.0
ANSWER_S: Final = 3.0


async def say_farewell(data: Path) -> None:
    """For the node of the plane in `data`: its worker, its instances' processes and its pool are gone.

    Raises Refused (nobody hears it), OSError or msgspec.DecodeError (nothing was started there).
    """
    plane = Plane.read(data)
    bus = await Bus.connect(plane, "farewell", parties.node(plane.node), deadline_s=CONNECT_S)
    try:
        order = Order(id=ids.new(ids.COMMAND), actor=f"node:{plane.node}", body=Farewell(node=plane.node))
        await bus.command(subjects.command_node(plane.node), order, timeout_s=ANSWER_S)
    finally:
        await bus.close()
