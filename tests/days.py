"""Days of a busy fleet, simulated: logs that the real decisions have written."""

import random

from controlplane.commands import RegisterModel
from controlplane.refusal import Refused
from controlplane.scripted import Script
from controlplane.simulation import DEVICE_BYTES, Simulation
from controlplane.spec import ModelSpec


def simulated(seed: int, requests: int) -> Simulation:
    """Four models share two devices; about five events a request."""
    rng = random.Random(seed)
    simulation = Simulation(devices=2, script=Script(start_ms=900, serve_ms=300))
    for n, share in enumerate((1, 1, 2, 4)):
        arguments: dict[str, str | int | float | bool] = {"weight_bytes": DEVICE_BYTES // share - 1000, "skeleton_bytes": 1000}
        simulation.send(RegisterModel(spec=ModelSpec(name=f"m{n}", source=f"s{n % 3}", engine="fake", arguments=arguments)))
    for _ in range(requests):
        simulation.run(rng.randrange(300))
        try:
            simulation.admit(f"m{rng.randrange(4)}")
        except Refused as refused:
            simulation.refusals.append(refused)
    simulation.run(5_000)
    return simulation
