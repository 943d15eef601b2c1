"""The buttons of the images in the host pool's panel."""

from typing import Any, Final
from urllib.parse import quote

from litestar import Request, Response, post
from litestar.params import FromPath

from controlplane.commands import PinImage, RebuildImage, RemoveImage
from controlplane.fleet import Image
from controlplane.refusal import Code, Refused
from controlplane.subjects import ImageAsk
from web.pages.answers import html, page, stage_of
from web.pages.stage import Stage
from web.views.images import parting, stays

VERBS: Final = ("verify", "rebuild", "pin", "unpin", "remove")


@post("/images/{image:str}/operations", include_in_schema=False, status_code=200)
async def operate_image(request: Request[Any, Any, Any], image: FromPath[str]) -> Response[str]:
    """A button: form field `verb`. Answers a line for the image's row, or sends a browser without scripts back.

    What can't be undone is asked about: scripts do it before they send; without them a page does, and sends `sure`.
    """
    stage = stage_of(request)
    form = await request.form()
    verb, by_script = str(form.get("verb", "")), bool(request.headers.get("hx-request"))
    known = stage.sight.fleet.images.get(image)
    if known is None:
        raise Refused(Code.IMAGE_UNKNOWN, f"there is no image {image[:100]!r}; it may have been removed: load the page again")
    if verb == "verify":
        return await _verified(stage, known, by_script)
    if verb == "remove" and not by_script and not form.get("sure"):
        again = {"action": f"/images/{quote(image)}/operations", "verb": verb, "label": "Remove"}
        question = parting(stage.sight.fleet, known)
        return page(stage, "message.html", title="Remove an image", message=question, code="", again=again)
    actor = getattr(request.scope.get("user"), "actor", "operator:browser")
    answered = await stage.send(_order(verb, image), actor)
    if not by_script:
        return html("", 303, {"location": "/"})
    words = f"{verb} requested" if answered.position else "nothing had to change"
    if verb == "unpin" and (why := stays(stage.sight.fleet, known)):
        words = f"{words}; {why}"
    return html(stage.templates.page("said.html", error=None, words=words, operation=None))


def _order(verb: str, image: str) -> RebuildImage | PinImage | RemoveImage:
    match verb:
        case "rebuild":
            return RebuildImage(image=image)
        case "pin" | "unpin":
            return PinImage(image=image, pinned=verb == "pin")
        case "remove":
            return RemoveImage(image=image)
        case _:
            raise Refused(Code.INVALID, f"there is no operation {verb[:100]!r} on an image; there are {', '.join(VERBS)}")


async def _verified(stage: Stage, known: Image, by_script: bool) -> Response[str]:
    done = await stage.nodes.ask(known.node, ImageAsk(verb="verify", image=known.image))
    status = 409 if done.code else 200
    if not by_script:
        return page(stage, "message.html", title="Check of an image", message=done.message, code=done.code, status=status)
    error = {"message": done.message, "code": done.code} if done.code else None
    return html(
        stage.templates.page("said.html", error=error, words=f"verified: {done.message}", operation=None, retry_s=None), status
    )
