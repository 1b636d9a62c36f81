"""Each request has one handler."""

from phalanx.controller.requests import registry
from phalanx.controller.requests.registry import HANDLERS
from phalanx.core.state import events
from phalanx.core.state.events import Request


def test_each_request_has_one_handler():
    declared = {one for one in vars(events).values() if isinstance(one, type) and issubclass(one, Request)} - {Request}
    assert declared == HANDLERS.keys()
    assert sum(len(module.handlers.declared) for module in registry._MODULES) == len(HANDLERS)


def test_each_handler_is_declared_for_the_request_that_it_applies():
    for request, handler in HANDLERS.items():
        assert handler.apply.__annotations__["request"] == request.__name__
