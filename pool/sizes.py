"""Numbers of bytes in messages, as people read them. Fields beside a message have them to the byte.

As `controlplane.quantities` writes them: the pool can be used without the plane, and imports nothing of it.
"""


def written(size: int) -> str:
    """Write bytes for people: `1.5 GiB`."""
    scaled, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if scaled < 1024 or unit == "TiB":
            break
        scaled /= 1024
    return f"{scaled:.0f} {unit}" if unit == "B" or scaled >= 100 else f"{scaled:.1f} {unit}"


def both(need: int, there: int) -> tuple[str, str]:
    """Write two numbers that are compared, to the byte where they would read the same and are not."""
    texts = written(need), written(there)
    return texts if need == there or texts[0] != texts[1] else (f"{need} bytes", f"{there} bytes")
