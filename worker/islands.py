"""Which GPUs of a node reach one another directly: the ranks of a gang had best be on one island."""

from collections.abc import Callable, Sequence


def islands(devices: Sequence[str], reaches: Callable[[str, str], bool]) -> dict[str, str]:
    """Device -> its island, called by its first device; of one that reaches no other: nothing.

    reaches: whether two devices have a direct way (NVLink) to each other. What a third one joins is one island.
    """
    island = {device: device for device in devices}
    for at, device in enumerate(devices):
        for other in devices[at + 1 :]:
            if island[device] != island[other] and reaches(device, other):
                old, new = island[other], island[device]
                island = {one: new if of == old else of for one, of in island.items()}
    sizes = list(island.values())
    return {device: name for device, name in island.items() if sizes.count(name) > 1}
