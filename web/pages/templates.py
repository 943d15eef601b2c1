"""The template environment: escaped by default, strict about names, with our figures as filters and assets by digest."""

import base64
import hashlib
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from controlplane import moments
from web.views import figures, slots

if TYPE_CHECKING:
    import jinja2

TEMPLATES: Final = Path(__file__).parent.parent / "templates"
STATIC: Final = Path(__file__).parent.parent / "static"


class Site(msgspec.Struct, frozen=True):
    """What examples on the pages show: the base URL callers use, and a shell expression that gives a token."""

    url: str
    token: str = "$ENGINEHOUSE_TOKEN"  # noqa: S105 (a variable's name)


@cache
def _digest(name: str) -> bytes:
    return hashlib.sha384((STATIC / name).read_bytes()).digest()


def asset(name: str) -> str:
    """URL of a static file that changes with its content, so that it may be cached for ever."""
    return f"/static/{name}?v={_digest(name).hex()[:12]}"


def integrity(name: str) -> str:
    """Subresource integrity of a static file."""
    return f"sha384-{base64.b64encode(_digest(name)).decode()}"


class Templates:
    """Renders pages (`page`) and single fragments (`draw`). What that takes is imported and translated when the first is drawn,
    or by `warm`: fifty milliseconds that a start needn't wait for."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def warm(self) -> None:
        """Do what the first page would have to wait for; may be called in a thread."""
        _ = self._fragments

    @cached_property
    def _environment(self) -> "jinja2.Environment":
        import jinja2  # noqa: PLC0415

        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
            trim_blocks=True, lstrip_blocks=True, auto_reload=False,
        )  # fmt: skip
        environment.globals.update(asset=asset, integrity=integrity, site=self._site)
        environment.filters.update(
            size=figures.size, span=figures.span, count=figures.count, rate=figures.rate, clock=figures.clock,
            iso=figures.iso, day=figures.day, share=figures.share, slug=figures.slug, short=figures.short,
            described=slots.described, utc=moments.utc,
        )  # fmt: skip
        return environment

    @cached_property
    def _fragments(self) -> object:
        return self._environment.get_template("fragments.html").module

    def page(self, name: str, **values: object) -> str:
        return self._environment.get_template(name).render(values)

    def draw(self, template: str, view: object) -> str:
        """Render the macro `template` of fragments.html with its view."""
        return str(getattr(self._fragments, template)(view))
