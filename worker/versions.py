"""Which release of a package is installed."""

from importlib import metadata


def release(package: str) -> str:
    """Empty: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
