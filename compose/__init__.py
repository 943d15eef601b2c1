"""How processes are put together: the CLI, `up` and its supervisor, embedded servers, `doctor`."""
