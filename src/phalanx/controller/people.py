"""Users, projects and tokens, judged where nothing else changes them at the same moment: what is left out stays, and one admin stays.

The gate judges who asks before the request is here; what takes their right away may be heard in between, so it is judged here again.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.controller.turn import Turn
from phalanx.core.errors import BadRequest, Conflict, NotFound, NotPermitted, NotSignedIn
from phalanx.core.ids import TokenId, UserId
from phalanx.core.state.events import ChangeProject, ChangeUser, RevokeToken, TokensUsed
from phalanx.core.work.people import Token, User, UserRole
from phalanx.core.work.queue import Project


def put_user(turn: Turn, user: User) -> User:
    """Add a user or replace one.

    Raises:
        Conflict: nobody would be left who may administer.
    """
    before = turn.world.users.get(user.id)
    others = (one for one in turn.world.users.values() if one.id != user.id)
    if before is not None and _administers(before) and not _administers(user) and not any(map(_administers, others)):
        raise Conflict(
            f"{user.id} is the last admin", hint="make somebody else admin first: phalanx users set NAME --role admin"
        )
    turn.change.put(user)
    return user


def change_user(turn: Turn, wish: ChangeUser) -> User:
    """Add a plain user, or change of one what is told.

    Raises:
        NotPermitted: who asks is no admin any more.
        Conflict: nobody would be left who may administer.
    """
    if wish.by is not None:
        _check_admin(turn, wish.by)
    known = turn.world.users.get(wish.user_id)
    if known is None:
        known = User(id=wish.user_id, role=UserRole.USER, created_s=turn.now.wall_s)
    role = known.role if wish.role is None else wish.role
    return put_user(
        turn, replace(known, role=role, disabled=known.disabled if wish.disabled is None else wish.disabled)
    )


def change_project(turn: Turn, wish: ChangeProject) -> Project:
    """Add a project, or change of one what is told. An admin of the project alone says who its members are, and nothing more.

    Raises:
        NotFound: a name that is no user's.
        NotPermitted: the caller is an admin of this project (or of the head, as whom they ask) no longer, or wants more than members.
        BadRequest: they would open the project to everybody by leaving it without members.
    """
    strangers = sorted({*(wish.members or ()), *(wish.admins or ())} - turn.world.users.keys())
    if strangers:
        raise NotFound(f"no user {strangers[0]!r}", hint="add them first: phalanx users")
    known = turn.world.projects.get(wish.project_id)
    if wish.as_admin:
        _check_admin(turn, wish.by)
    else:
        _check_project_admin(known, wish)
    project = known or Project(id=wish.project_id, created_s=turn.now.wall_s)
    project = replace(
        project,
        members=project.members if wish.members is None else wish.members,
        admins=project.admins if wish.admins is None else wish.admins,
    )
    turn.change.put(project)
    return project


def put_token(turn: Turn, token: Token) -> Token:
    """Add a token, if the one that it was made with is still good.

    Raises:
        NotSignedIn: that one is expired or revoked, or its user is disabled.
        NotPermitted: it is another's, and who made it is no admin any more.
    """
    maker = None if token.made_by is None else turn.world.tokens.get(token.made_by)
    if maker is not None:
        if not maker.good(turn.now.wall_s):
            raise NotSignedIn(f"token {maker.id} is expired or revoked", hint="make another: phalanx tokens add")
        user = turn.world.users.get(maker.user)
        if user is not None and user.disabled:
            raise NotSignedIn(f"user {user.id} is disabled", hint="ask an admin")
        if token.user != maker.user:
            _check_admin(turn, maker.user)
    turn.change.put(token)
    return token


def revoke(turn: Turn, wish: RevokeToken) -> Token:
    """End a token, and with `made_too` those that were made with it, and with those, and so on.

    Raises:
        NotFound: there is no such token.
    """
    token = turn.world.tokens.get(wish.token_id)
    if token is None:
        raise NotFound(f"no token {wish.token_id}", hint="phalanx tokens lists them")
    ending = {wish.token_id}
    if wish.made_too:
        ending |= _made_with(turn, wish.token_id)
    for token_id in sorted(ending):
        one = turn.world.tokens[token_id]
        if one.revoked_s is None:
            turn.change.put(replace(one, revoked_s=turn.now.wall_s))
    return turn.world.tokens[wish.token_id]


def note_use(turn: Turn, wish: TokensUsed) -> None:
    """Keep when tokens were last used. Of one that is not there any more nothing is kept."""
    for token_id, used_s in wish.used_s.items():
        token = turn.world.tokens.get(token_id)
        if token is not None and used_s > (token.used_s or 0.0):
            turn.change.put(replace(token, used_s=used_s))


def _administers(user: User) -> bool:
    return user.role is UserRole.ADMIN and not user.disabled


def _check_admin(turn: Turn, user_id: UserId) -> None:
    user = turn.world.users.get(user_id)
    if user is None or not _administers(user):
        raise NotPermitted(f"{user_id} is no admin", hint="ask an admin")


def _check_project_admin(project: Project | None, wish: ChangeProject) -> None:
    if project is None or wish.by not in project.admins:
        raise NotPermitted(
            f"{wish.by} is no admin of project {wish.project_id}", hint="its admins and those of the head may"
        )
    if wish.admins is not None and wish.admins != project.admins:
        raise NotPermitted(f"{wish.by} may not say who the admins of {project.id} are", hint="ask an admin of the head")
    if wish.members is not None and not wish.members and project.members:
        raise BadRequest(
            f"without members project {project.id} would be open to all", hint="keep one, or ask an admin of the head"
        )


def _made_with(turn: Turn, token_id: TokenId) -> set[TokenId]:
    made: dict[TokenId, list[TokenId]] = {}
    for token in turn.world.tokens.values():
        if token.made_by is not None:
            made.setdefault(token.made_by, []).append(token.id)
    found: set[TokenId] = set()
    ahead = list(made.get(token_id, ()))
    while ahead:
        one = ahead.pop()
        if one not in found:
            found.add(one)
            ahead += made.get(one, ())
    return found
