"""Where models come from: a source is fetched, checked, converted once if need be, and described."""

from worker.sources.identity import SourceRefused
from worker.sources.places import sweep
from worker.sources.prepare import Prepared, prepare

__all__ = ["Prepared", "SourceRefused", "prepare", "sweep"]
