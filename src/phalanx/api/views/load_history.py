"""The view of how the load of a service was."""

from __future__ import annotations

from phalanx.api.services import HeadServices
from phalanx.core.ids import ServiceId
from phalanx.wire.api.services import LoadHistoryReply

_DIGITS = 4


def load_history_view(services: HeadServices, service_id: ServiceId, span_s: float) -> LoadHistoryReply:
    """Return the columns of a span that ends now. The newest point is the one that ended last."""
    step_s, points = services.controller.load_history(service_id, span_s)
    end_s = int(services.clock.now_s() // step_s) * step_s
    begin_s = end_s - int(min(span_s, 86_400.0) // step_s) * step_s
    known = {one.begin_s: one for one in points}
    spans = [known.get(at_s) for at_s in range(max(begin_s, min(known, default=end_s)), end_s, step_s)]

    def column(name: str) -> list[float | None]:
        return [None if one is None else round(getattr(one, name), _DIGITS) for one in spans]

    return LoadHistoryReply(
        service=service_id,
        begin_s=end_s - len(spans) * step_s,
        step_s=step_s,
        requests_per_s=column("requests_per_s"),
        tokens_per_s=column("tokens_per_s"),
        ttft_s=[one or None for one in column("ttft_s")],
        in_flight=column("in_flight"),
        waiting=column("waiting"),
        ready=column("ready"),
        wanted=column("wanted"),
    )
