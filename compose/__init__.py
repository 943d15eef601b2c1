"""How processes are put together: the CLI, `up` and its supervisor, embedded servers, `doctor`."""

from controlplane import lean

lean.install()
