"""/metrics: Litestar's HTTP figures, and the plane's own as they are when asked."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from litestar.plugins.prometheus import PrometheusConfig, PrometheusController
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.envelope import Recorded
from controlplane.events import RequestCancelled, RequestFailed, RequestFinished
from controlplane.spec import CELLS
from web.gateway import Gateway
from web.plane_view import Change, PlaneView
from web.views.hostmemory import host

OUTCOMES: Final = {RequestFinished: "finished", RequestFailed: "failed", RequestCancelled: "cancelled"}

QUIET: Final = ["^/static/", "^/livez", "^/readyz"]
config = PrometheusConfig(app_name="enginehouse", prefix="enginehouse", group_path=True, exclude=QUIET)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"enginehouse_{name}", text, labels=labels)


class Metrics(PrometheusController):
    """Prometheus' text format."""

    path = "/metrics"
    openmetrics_format = True
    include_in_schema = False


class PlaneFigures(Collector):
    """Gauges read from the view at each scrape, and requests counted by outcome since this process started."""

    def __init__(self, view: PlaneView, gateway: Gateway) -> None:
        self._view, self._gateway = view, gateway
        self._ended: Counter[tuple[str, str]] = Counter()

    def count(self, change: Change) -> None:
        """A listener of the view."""
        if isinstance(change, Recorded):
            event = change.event
            if isinstance(event, RequestFinished | RequestFailed | RequestCancelled):
                self._ended[event.model, OUTCOMES[type(event)]] += 1

    def register(self) -> None:
        REGISTRY.register(self)

    def unregister(self) -> None:
        REGISTRY.unregister(self)

    def describe(self) -> list[Metric]:
        """Nothing: saves a collection at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        fleet = self._view.fleet
        held = Counter[str]()
        for grant in fleet.grants.values():
            held[grant.device] += grant.cells
        cells = _gauge("device_cells", "Cells of a device, by whether they are granted", "device", "state")
        size = _gauge("device_bytes", "Size of a device and measured use", "device", "kind")
        for device in fleet.devices.values():
            cells.add_metric([device.name, "granted"], held[device.device])
            cells.add_metric([device.name, "free"], CELLS - held[device.device])
            size.add_metric([device.name, "size"], device.size_bytes)
            beat = self._view.beats.get(device.node)
            if beat is not None and device.device in beat.device_bytes:
                size.add_metric([device.name, "used"], beat.device_bytes[device.device])
        owned = _gauge("device_owner_bytes", "Memory of a GPU in use, by owner", "device", "owner")
        for device in fleet.devices.values():
            beat = self._view.beats.get(device.node)
            if beat is not None and (owners := beat.owners.get(device.device)) is not None:
                for owner in ("skeletons", "kv", "own_weights", "pool_context", "pool_sets", "driver"):
                    owned.add_metric([device.name, owner], getattr(owners, owner))
                owned.add_metric([device.name, "foreign"], sum(owners.foreign.values()))
        pool = _gauge("pool_bytes", "Host pool of a node", "node", "kind")
        for beat in self._view.beats.values():
            pool.add_metric([beat.node, "used"], beat.pool_used_bytes)
            pool.add_metric([beat.node, "budget"], beat.pool_budget_bytes)
        off = _gauge("host_bytes", "Memory of a host: engines off their devices, their limit, available", "node", "kind")
        for node in fleet.nodes:
            seen = host(fleet, self._view.beats, node)
            kinds = {"checkpointed": seen.checkpointed_bytes, "limit": seen.checkpoint_bytes, "available": seen.available_bytes}
            for kind, bytes_ in kinds.items():
                if bytes_ is not None:
                    off.add_metric([node, kind], bytes_)
        yield from (cells, size, owned, pool, off)
        yield from self._requests()

    def _requests(self) -> Iterator[Metric]:
        fleet = self._view.fleet
        queued = sum(request.instance is None for request in fleet.requests.values())
        requests = _gauge("requests_open", "Open requests of the plane", "state")
        requests.add_metric(["queued"], queued)
        requests.add_metric(["running"], len(fleet.requests) - queued)
        instances = _gauge("instances", "Instances by rung", "rung")
        for rung, number in Counter(instance.rung.value for instance in fleet.instances.values()).items():
            instances.add_metric([rung], number)
        text = "Requests that ended, as seen here"
        ended = CounterMetricFamily("enginehouse_requests_ended", text, labels=["model", "outcome"])
        for (model, outcome), number in self._ended.items():
            ended.add_metric([model, outcome], number)
        view = _gauge("view_position", "Position of the last event folded here")
        view.add_metric([], fleet.position)
        synced = _gauge("view_synced", "1 while events are followed")
        synced.add_metric([], int(self._view.synced))
        held = _gauge("gateway_requests", "Requests that this process holds for callers")
        held.add_metric([], self._gateway.held)
        ends = _gauge("gateway_ends_waiting", "Ends that the decider has not acknowledged yet")
        ends.add_metric([], len(self._gateway.ends))
        yield from (requests, instances, ended, view, synced, held, ends)
