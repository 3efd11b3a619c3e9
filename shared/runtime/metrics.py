"""Prometheus text for `/metrics`: gauges that services set, and gauges read from policies at scrape time."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

GaugeSource = Callable[[], Mapping[str, float]]


class PolicyGauges(Collector):
    """Exports `policy.gauges()` as `pivotrl_<service>_<name>`, read when scraped: policies need no metrics
    library."""

    def __init__(self, service: str, source: GaugeSource) -> None:
        self._service, self._source = service, source

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in sorted(self._source().items()):
            metric = f"pivotrl_{self._service}_{name}"
            yield GaugeMetricFamily(metric, f"{self._service}: {name.replace('_', ' ')}", value=value)


class Metrics:
    def __init__(self, service: str) -> None:
        self._service = service
        self._registry = CollectorRegistry()

    def add_source(self, source: GaugeSource) -> None:
        self._registry.register(PolicyGauges(self._service, source))

    def render(self) -> bytes:
        return generate_latest(self._registry)
