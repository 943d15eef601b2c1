"""The plane's own file: where its servers, sockets and secrets are. Written by `up` before it starts anything else."""

import os
from pathlib import Path
from typing import Final

import msgspec

FILE: Final = "plane.json"
NODE: Final = "n1"
"""The node that `up` makes of its own machine."""


ANYBODY: Final = "*"
"""In `Plane.nats_logins`: the login of whoever has none of his own (a server given by URL)."""


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """A user of the NATS server."""

    user: str
    password: str


class PlaneDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that this node offers. `device` is its UUID, kept in the data directory for a declared one."""

    device: str
    name: str
    kind: str
    size_bytes: int
    island: str = ""
    """Devices of one island reach each other directly (NVLink); empty: this one reaches none."""


class Plane(msgspec.Struct, frozen=True, kw_only=True):
    """What every process of a plane must know; it reads it from `<data>/plane.json` (0600: it holds secrets)."""

    data: str
    """The data directory, absolute."""
    node: str = NODE
    node_address: str = "127.0.0.1"
    postgres_url: str
    """`postgresql://user@/database?host=<socket directory>`; asyncpg reads it as it is."""
    nats_url: str
    nats_token: str | None = None
    """Of a server that knows no users."""
    nats_logins: dict[str, Login] = {}
    """By party of the bus (`parties`). A node that joins is given its own alone."""
    web_host: str = "127.0.0.1"
    web_port: int = 0
    node_token: str = ""
    """Shared by web and frontends."""
    cookie_key: str = ""
    pool_socket: str = ""
    pool_bytes: int = 0
    devices: tuple[PlaneDevice, ...] = ()
    settings_path: str | None = None
    deadlines: dict[str, float] = {}
    """Seconds, by name, of the worker's deadlines that the settings have changed."""
    criu: str = ""
    """The CRIU to use, where the settings name one."""
    image_quota_bytes: int = 0
    """What saved engines may take of the disk; 0: half of what they could."""
    image_pins: tuple[str, ...] = ()
    """Models and configurations whose images stay whatever the quota says."""
    checkpoint_bytes: int | None = None
    """Memory of the host that engines off their devices may take; None: no limit but the host's own."""
    pool_ready_bytes: int | None = None
    """Memory that may lie ready in the pool for the next set; None: a quarter of `pool_bytes`."""
    pool_helpers: bool = True
    """Whether a GPU may be filled over the links of others, too."""
    pool_beside_decoding: float | None = None
    """Of a link's rate that a copy takes while another engine decodes on its device; None: the pool's default."""
    embedded: bool = True
    """False: Postgres and NATS were given by URL."""

    @property
    def settings_due(self) -> Path:
        """A file that is there from the start of `up` until web has seen what applying the settings ended with."""
        return Path(self.data) / "run" / "settings-due"

    @property
    def settings_unapplied(self) -> Path:
        """A file that is there while the settings file, as it is now, is not applied; it says why."""
        return Path(self.data) / "run" / "settings-unapplied"

    def nats_login(self, party: str) -> Login | None:
        """How that party connects to the bus; None: with `nats_token`, if that."""
        return self.nats_logins.get(party) or self.nats_logins.get(ANYBODY)

    @property
    def web_url(self) -> str:
        """Where web answers, as a URL; bound to every address, it answers on loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.web_host, self.web_host)  # noqa: S104 (compared with)
        return f"http://[{host}]:{self.web_port}" if ":" in host else f"http://{host}:{self.web_port}"

    @staticmethod
    def read(data: Path) -> "Plane":
        """Read `<data>/plane.json`. Raises FileNotFoundError (nothing was started there) or msgspec.DecodeError."""
        return msgspec.json.decode((data / FILE).read_bytes(), type=Plane)

    def write(self) -> None:
        """Replace `<data>/plane.json` as a whole; nobody ever reads half of it, and only its owner reads it at all."""
        path = Path(self.data) / FILE
        fresh = path.with_suffix(".json.new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            # Not synced: after a power cut it may be empty, but then nothing runs that it tells of, and `up` writes it anew.
            file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        fresh.replace(path)
