"""The router of /api."""

from litestar import Router

from web.rest.changes import checkpoint, load, move, move_instance, register, retire, retry, revise, save, sleep, stop
from web.rest.fleet import device, devices, instance, instances, model, models, node, nodes, past, weights
from web.rest.history import event, events, follow_events
from web.rest.images import (
    collect_images,
    image,
    images,
    pin_image,
    rebuild_image,
    remove_image,
    unpin_image,
    verify_image,
)  # fmt: skip
from web.rest.operations import operation, operations
from web.rest.requests import cancel_request, request_log, single_request

router = Router(
    path="/api",
    tags=["Plane"],
    route_handlers=[
        nodes, node, devices, device, models, model, instances, instance, weights, past,
        register, revise, retire, load, sleep, checkpoint, save, move, move_instance, stop, retry,
        images, image, verify_image, rebuild_image, pin_image, unpin_image, remove_image, collect_images,
        request_log, single_request, cancel_request,
        operations, operation,
        events, event, follow_events,
    ],
)  # fmt: skip
