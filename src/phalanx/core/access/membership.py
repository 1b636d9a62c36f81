"""Who belongs to a project: by its own lists, or by a group at the sign-in provider."""

from __future__ import annotations

from phalanx.core.ids import UserId
from phalanx.core.work.queue import Project
from phalanx.core.work.sign_in import SignInSettings
from phalanx.core.work.users import User


def is_open(project: Project, settings: SignInSettings | None) -> bool:
    """Whether all users may submit for the project: it has no members, and no group at the provider gives it."""
    return not project.members and (settings is None or project.id not in settings.projects)


def administers(project: Project, user_id: UserId, user: User | None) -> bool:
    """Whether the user may manage the members of the project."""
    by_group = user is not None and user.identity is not None and project.id in user.identity.admin_of
    return by_group or user_id in project.admins


def belongs(project: Project, user_id: UserId, user: User | None) -> bool:
    """Whether the user is a member or an admin of the project. `user`: None if the head does not know the user."""
    by_group = user is not None and user.identity is not None and project.id in user.identity.projects
    return by_group or user_id in project.members or administers(project, user_id, user)
