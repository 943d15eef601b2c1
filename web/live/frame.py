"""A fragment on the wire: an `<hx-partial>` that morphs the element of the same id, inside an SSE `data` field."""


def partial(name: str, html: str) -> bytes:
    """Encode a fragment whose root element has the id `name`.

    No blank may surround the element: a morph would add it to the page at each frame. A carriage return ends a line in
    SSE, so one that is part of the text travels as a character reference.
    """
    text = f'<hx-partial id="{name}" hx-swap="outerMorph">{html.strip()}</hx-partial>'
    return text.replace("\r", "&#13;").replace("\n", "\ndata: ").encode()
