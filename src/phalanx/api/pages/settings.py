"""The page of settings: tokens, users, projects and queues, as far as the API shows them to the same caller."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.pages.responses import error_page, page_response, viewer_of
from phalanx.api.routes.queues import queue_settings
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.views.people import project_view, token_view, user_view
from phalanx.core.access.caller import may
from phalanx.core.work.users import Action
from phalanx.user_files.queue_file import queue_file_text
from phalanx.web.html import Html
from phalanx.web.settings_page import Settings, settings_page
from phalanx.wire.api.people import TokenView

routes = RouteTable()


@routes.get("/settings", Action.VIEW, reply=MediaType.HTML, error_page=error_page)
async def show_settings(request: Request) -> Response:
    """Show tokens, users, projects and queues, with forms for what the caller may change."""
    runtime, caller, viewer = runtime_of(request), caller_of(request), viewer_of(request)
    store, now_s = runtime.services.store, runtime.services.clock.now_s()

    def tokens() -> list[TokenView] | None:
        if not may(caller, Action.MANAGE_OWN_TOKENS):
            return None
        every = may(caller, Action.ADMINISTER)
        valid = [one for one in store.tokens() if one.is_valid(now_s) and (every or one.user == caller.user)]
        valid.sort(key=lambda one: (-one.created_s, one.id))
        return [token_view(one, runtime.authenticator.last_used_s(one)) for one in valid]

    sign_in = runtime.provider_sign_in.settings()

    def read() -> Html:
        settings = Settings(
            tokens=tokens(),
            own_token=caller.token_id,
            users=[user_view(user, now_s) for user in store.users()],
            projects=[project_view(project, sign_in) for project in store.projects()],
            admin_of=frozenset(caller.admin_of),
            queue_file=queue_file_text([queue_settings(queue) for queue in store.queues()]),
        )
        return settings_page(settings, viewer)

    return page_response(request, await run_in_thread(read))
