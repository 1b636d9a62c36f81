"""The page of settings: tokens, users, projects, and the file of queues. Its forms need the script, which sends what the API takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.users import UserRole
from phalanx.web.cells import moment, state_word
from phalanx.web.document import Viewer, document
from phalanx.web.fields import check, choice, text_field
from phalanx.web.html import Child, Html, element, join, table
from phalanx.wire.api.people import ProjectView, TokenView, UserView

ROWS_MAX: Final = 500  # of each table; the command line lists all
_ROLES: Final = tuple(role.value for role in UserRole if role is not UserRole.NODE)
_EXPIRES: Final = ("90d", "30d", "7d", "1d", "never")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the page shows. `tokens`: valid ones, newest first; None if the viewer may not manage any. `queue_file`: None if not shown."""

    tokens: Sequence[TokenView] | None
    own_token: str
    users: Sequence[UserView]
    projects: Sequence[ProjectView]
    admin_of: frozenset[str]
    queue_file: str | None


def settings_page(settings: Settings, viewer: Viewer) -> Html:
    """Return the page; forms only for what the viewer may change."""
    without_script = element(
        "noscript",
        element(
            "p",
            "Changes on this page need JavaScript. The command line makes them too: phalanx tokens, users, projects and queues.",
            class_="note",
        ),
    )
    parts = [
        _tokens(settings, viewer),
        _users(settings, viewer),
        _projects(settings, viewer),
        _queues(settings, viewer),
    ]
    return document("settings", "Settings", without_script, *parts, viewer=viewer)


# ---- tokens ---------------------------------------------------------------------------------------------------------


def _tokens(settings: Settings, viewer: Viewer) -> Html | None:
    if settings.tokens is None:
        return None
    rows = [
        (
            join(element("code", one.id), " (this session's)" if one.id == settings.own_token else ""),
            one.user,
            one.note,
            ", ".join(one.scope) or "all that the user may",
            moment(one.created_s),
            moment(one.expires_s) or "never",
            moment(one.used_s) or "not yet",
            _button("Revoke", data_revoke=one.id, data_user=one.user, class_="danger"),
        )
        for one in settings.tokens[:ROWS_MAX]
    ]
    titles = ("Token", "User", "Note", "For", "Created", "Expires", "Last used", "Change")
    shown = table(titles, rows, caption="Valid tokens, newest first", empty="There is no token.")
    admin = "administer" in viewer.actions
    form = _form(
        "token",
        "Make a token",
        text_field("Note", "note", maxlength="200", placeholder="laptop, CI"),
        text_field("User", "user", value=viewer.user, maxlength="63") if admin else None,
        choice("Expires", "expires", _EXPIRES),
        element(
            "fieldset",
            element("legend", "Only for (none: all that the user may)"),
            [check(action, "scope", action) for action in viewer.actions],
        ),
    )
    made = element("div", id="made-token", role="status")
    return _section("Tokens", _part("tokens", shown, _more(settings.tokens, "phalanx tokens")), form, made)


# ---- people ---------------------------------------------------------------------------------------------------------


def _users(settings: Settings, viewer: Viewer) -> Html:
    admin = "administer" in viewer.actions
    rows = [
        (
            one.id,
            one.role.value,
            state_word("disabled") if one.disabled else state_word("no access") if one.refused else "enabled",
            one.provider.partition("://")[2],
            moment(one.created_s),
            *([_button("Edit", data_edit="user", data_id=one.id, data_role=one.role.value)] if admin else []),
        )
        for one in settings.users[:ROWS_MAX]
    ]
    titles = ("User", "Role", "State", "Signs in at", "Added", *(["Change"] if admin else []))
    shown = table(titles, rows, caption="Users", empty="There are no users.")
    form = _form(
        "user",
        "Add or change a user",
        text_field("User", "id", required=True, maxlength="63"),
        choice("Role", "role", _ROLES, chosen="user"),
        choice("State", "disabled", ("enabled", "disabled")),
    )
    return _section("Users", _part("users", shown, _more(settings.users, "phalanx users")), form if admin else None)


def _projects(settings: Settings, viewer: Viewer) -> Html:
    admin = "administer" in viewer.actions
    manages = "manage_project" in viewer.actions and (admin or bool(settings.admin_of))
    rows = []
    for one in settings.projects[:ROWS_MAX]:
        members, admins = " ".join(one.members), " ".join(one.admins)
        edit = manages and (admin or one.id in settings.admin_of)
        button = _button("Edit", data_edit="project", data_id=one.id, data_members=members, data_admins=admins)
        rows.append((one.id, _belonging(one), admins, *([button if edit else ""] if manages else [])))
    titles = ("Project", "Members", "Its admins", *(["Change"] if manages else []))
    shown = table(titles, rows, caption="Projects", empty="There are no projects.")
    form = _form(
        "project",
        "Add or change a project" if admin else "Change the members of a project",
        text_field("Project", "id", required=True, maxlength="63"),
        text_field("Members (none: open to all)", "members", class_="wide"),
        text_field("Its admins", "admins", class_="wide") if admin else None,
    )
    return _section(
        "Projects", _part("projects", shown, _more(settings.projects, "phalanx projects")), form if manages else None
    )


def _belonging(project: ProjectView) -> str:
    """Return who belongs to a project, besides its admins."""
    groups = f"group {', '.join(project.groups)}" if project.groups else ""
    return " ".join(filter(None, [*project.members, groups])) or "open to all"


# ---- queues ---------------------------------------------------------------------------------------------------------


def _queues(settings: Settings, viewer: Viewer) -> Html | None:
    if settings.queue_file is None:
        return None
    operates = "operate" in viewer.actions
    text = element(
        "textarea",
        settings.queue_file,
        id="queue-file",
        name="file",
        rows=str(min(30, settings.queue_file.count("\n") + 2)),
        spellcheck="false",
        readonly=not operates,
    )
    label = element("label", "Queue file (YAML)", for_="queue-file")
    if not operates:
        return _section("Queues", label, text)
    form = element(
        "form",
        label,
        text,
        check("Remove queues that are not in the file, except default", "prune", "yes"),
        element(
            "div",
            element("button", "Dry run", type="submit", class_="primary"),
            element("button", "Apply", type="button", id="apply-queues", disabled=True),
            element("span", "Apply is possible after a dry run of the same text.", class_="note"),
            class_="buttons scripted-only",
        ),
        data_form="queues",
        class_="queue-form",
    )
    outcome = element("div", id="queue-changes", role="status")
    return _section("Queues", form, outcome)


# ---- parts ----------------------------------------------------------------------------------------------------------


def _section(title: str, *content: Child) -> Html:
    return element("section", element("h2", title), *content, aria_label=title)


def _part(name: str, *content: Child) -> Html:
    """Return what is loaded again after a change."""
    return element("div", *content, id=f"live-{name}", class_="live")


def _more(rows: Sequence[object], command: str) -> Html | None:
    more = len(rows) - ROWS_MAX
    return element("p", f"{more} more: ", element("code", command), class_="note") if more > 0 else None


def _form(name: str, title: str, *fields: Child) -> Html:
    save = element("button", title, type="submit", class_="primary")
    problem = element("p", class_="problem", role="alert", hidden=True)
    return element("form", *fields, save, problem, data_form=name, class_="filter scripted-only", aria_label=title)


def _button(title: str, *, class_: str = "", **data: str) -> Html:
    return element("button", title, type="button", class_=f"scripted-only {class_}".strip(), **data)
