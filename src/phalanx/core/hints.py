"""Hints of errors and explanations: what to do next, as a code with arguments.

A front end renders the code in its own words: the command line names its command, a dashboard its button. The plain text, free of any
front end's words, serves those that do not know the code. `phalanx.web.command_hints` has the command line's words.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Self


class HintCode(enum.Enum):
    """A hint that front ends render: its code on the wire, and its plain text with arguments in braces."""

    plain: str

    def __new__(cls, code: str, plain: str) -> Self:
        """A member whose value is the code."""
        member = object.__new__(cls)
        member._value_ = code
        member.plain = plain
        return member

    # jobs
    LIST_JOBS = "list-jobs", "list the jobs, with those that have ended"
    LIST_QUEUE_JOBS = "list-queue-jobs", "list the jobs of queue {queue}"
    SHOW_JOB = "show-job", "see job {job}"
    FOLLOW_JOB = "follow-job", "follow job {job}"
    RELEASE_JOB = "release-job", "release job {job}"
    RESUME_JOB = "resume-job", "resume job {job}"
    REQUEUE_JOB = "requeue-job", "requeue job {job}, which stops it first"
    UPDATE_JOB = "update-job", "set {key} of job {job} to {value}"
    RUN_RANKS = "run-ranks", "request one node, or submit the command of one rank: it starts once for each GPU"
    CANCEL_JOB = "cancel-job", "cancel job {job}"
    RESTART_JOB = "restart-job", "restart job {job} from its newest checkpoint"
    END_FAILING_JOB = "end-failing-job", "read why job {job} fails, and cancel it"
    READ_JOB_LOG = "read-job-log", "read the log of job {job}"
    MOVE_JOB = "move-job", "requeue job {job}, so that it makes room on {node}"
    COMPARE_LAYOUTS = "compare-layouts", "compare the layouts of the model of job {job}"
    SLEEP_SERVICE = "sleep-service", "let replicas of service {service} sleep"
    SCALE_SERVICE = "scale-service", "scale service {service} down"
    SUBMIT_WITH = "submit-with", "submit it with {key} {value}"
    SUBMIT_UNHELD = "submit-unheld", "submit it without holding it"
    SUBMIT_SERVICE = "submit-service", "submit it as a service"
    LIST_SERVICES = "list-services", "list the services"
    UPDATE_SERVICE = "update-service", "update service {service}, which makes a new revision"
    WIDEN_SERVICE = "widen-service", "update service {service} with another range of replicas"
    UPLOAD_WORKDIR = "upload-workdir", "upload the working directory, which sets this key"
    SET_WORKDIR = "set-workdir", "workdir names the folder to copy"
    SET_WORKDIR_SHARED = "set-workdir-shared", "run it in a folder that all nodes see, without a copy"
    GIVE_KEY = "give-key", "give {key}"
    GIVE_VALUE = "give-value", "give {key} {value}"
    NEAREST_FIT = "nearest-fit", "{fit}"
    REQUEST_LESS = "request-less", "request at most {gpus} GPUs, or use another queue; allow_never submits it anyway"
    ALLOW_NEVER = "allow-never", "allow_never submits it anyway"
    # topology and nodes
    DEFINE_LEVELS = "define-levels", "{levels}"
    PREFER_LEVEL = "prefer-level", "prefer one {level} to accept other placements"
    SMALLER_SLICES = "smaller-slices", "request smaller or fewer slices"
    LIST_NODES = "list-nodes", "list the nodes"
    SHOW_NODE = "show-node", "see what is free on node {node}"
    REPAIR_NODE = "repair-node", "drain node {node}, and repair it"
    FORGET_NODE = "forget-node", "start node {node} again, or remove it"
    SWITCH_MIG_ON = (
        "switch-mig-on",
        "an operator switches it on while the GPU is idle, on a drained node: nvidia-smi -i GPU -mig 1, then starts the node again",
    )
    MIG_PROFILES = "mig-profiles", "{profiles}"
    LIST_LICENCES = "list-licences", "list the licences"
    LIST_CHANNELS = "list-channels", "list the channels"
    ADD_MAIL_CHANNEL = "add-mail-channel", "an admin adds a channel mailto:// with the topic notify"
    ADD_JOB_CHANNEL = "add-job-channel", "an admin adds channel {channel} with the topic notify"
    LIST_ARCHIVES = "list-archives", "list the months that have archives"
    SHOW_RETENTION = "show-retention", "look at its progress"
    SET_LICENCE = "set-licence", "set licence {licence} to {seats} seats"
    OFFER_EXTRAS = (
        "offer-extras",
        "let nodes offer {name}, or add a licence of that name; allow_never submits it anyway",
    )
    LIST_POOLS = "list-pools", "list the node pools"
    POOL_LIMITS = "pool-limits", "give a minimum of 0 and a maximum of 4"
    POOL_PRICE = "pool-price", "give an amount such as 2/h"
    DRAIN_NODE = "drain-node", "drain node {node} first"
    UNDRAIN_NODES = "undrain-nodes", "return {nodes} to service"
    UNDRAIN_IN_ENGINE = "undrain-in-engine", "return it to service there: {command}"
    RENAME_SERVER = "rename-server", "give this server another name"
    # reservations
    LIST_RESERVATIONS = "list-reservations", "list the reservations"
    RESERVE_FOR = "reserve-for", "give either maintenance, or users and queues"
    RENAME_RESERVATION = "rename-reservation", "choose another name, or end reservation {reservation}"
    MOVE_RESERVATION = "move-reservation", "choose another time or other nodes, or end reservation {reservation}"
    END_A_RESERVATION = "end-a-reservation", "end one of them"
    # queues, users, projects, tokens
    LIST_QUEUES = "list-queues", "list the queues"
    CLOSE_QUEUE = "close-queue", "close queue {queue}, then list its jobs"
    OPEN_QUEUE = "open-queue", "open queue {queue}"
    EDIT_QUEUES = "edit-queues", "change the queues"
    LIST_USERS = "list-users", "list the users"
    ADD_USER = "add-user", "add the user first"
    MAKE_ADMIN = "make-admin", "make another user admin first"
    FORWARD_PORT = "forward-port", "forward port {port} of job {job} to your machine"
    LIST_SECRETS = "list-secrets", "list the secrets"
    SET_SECRET = "set-secret", "set secret {secret} of project {project}"
    RESET_SECRET = "reset-secret", "set secret {secret} again"
    LIST_PROJECTS = "list-projects", "list the projects"
    LIST_TOKENS = "list-tokens", "list the tokens"
    ADD_TOKEN = "add-token", "create another token"
    LINK_USER = (
        "link-user",
        "ask an admin to link user {user} with the provider, or to give the person another name there",
    )
    SET_SIGN_IN = "set-sign-in", "set the sign-in provider first"
    MAP_GROUPS = "map-groups", "change what the groups at the sign-in provider give"
    ADD_MEMBER = "add-member", "add a member to project {project} first"
    SIGN_IN_AGAIN = "sign-in-again", "sign in again at the provider"
    LOGIN = "login", "log in to the cluster {cluster}"
    LOGIN_FIRST = "login-first", "none is saved: log in to one first"
    LOGIN_AGAIN = "login-again", "start the login again"
    CHECK_SIGN_IN = "check-sign-in", "an admin can check the sign-in provider"
    OPEN_DASHBOARD = "open-dashboard", "sign in again, by a token or a new link"
    SEND_TOKEN = "send-token", "send `Authorization: Bearer <token>`"
    GIVE_ANCHOR = "give-anchor", "write SEQ:CODE, as at the end of the audit trail"
    # plans
    CALIBRATE = "calibrate", "calibrate the fleet, which creates a profile"
    CALIBRATE_EACH = "calibrate-each", "calibrate the nodes of each model separately"
    # head
    START_HEAD = "start-head", "start one here, or set PHALANX_URL and PHALANX_TOKEN to use another"
    RESTART_HEAD = "restart-head", "start it again; without a head, jobs are frozen once their lease ends"
    STOP_HEAD = "stop-head", "stop it: only one head can use a database"
    STOP_ALL_HEADS = "stop-all-heads", "stop every head first"
    STOP_OLDER_HEADS = "stop-older-heads", "stop the older heads first; jobs keep running (docs/high-availability.md)"
    LIST_HEADS = "list-heads", "list the heads, which shows the leader"
    KEEP_OR_CANCEL_JOBS = "keep-or-cancel-jobs", "choose keep_jobs or cancel_jobs"
    CHECK_HEAD = "check-head", "check the head"
    CHECK_OR_START_HEAD = "check-or-start-head", "check the head, or start one"
    READ_HEAD_LOG = "read-head-log", "the head's log has the cause"
    CREATE_TOKEN_FILE = "create-token-file", "start a head, which creates it; or set PHALANX_TOKEN"
    TAKE_TOKEN = "take-token", "create a token on the head, and set PHALANX_TOKEN to it here"
    USE_PRINTED_URL = "use-printed-url", "use the URL that the head printed when it started"
    USE_PRINTED_ADDRESS = "use-printed-address", "use the address and port that the head printed when it started"
    USE_PRINTED_HTTPS = "use-printed-https", "use the https address that the head printed when it started"
    USE_LISTEN_ADDRESS = "use-listen-address", "use the address on which the head listens"
    LISTEN_WITH_TLS = "listen-with-tls", "start the head on an address of the network, which it serves with TLS"
    ENCRYPT = "encrypt", "use {url} and set PHALANX_FINGERPRINT; PHALANX_INSECURE=1 uses plain HTTP anyway"
    PRINT_JOIN_LINE = "print-join-line", "print the current join line on the head"
    COMPARE_FINGERPRINT = (
        "compare-fingerprint",
        "the join line of the head has its fingerprint; if it is the expected one, someone intercepts the connection",
    )
    SET_FINGERPRINT = "set-fingerprint", "set PHALANX_FINGERPRINT to the fingerprint in the join line of the head"
    # store
    CREATE_BACKUP = "create-backup", "name a file that a backup has written"
    RESTORE_BACKUP = "restore-backup", "restore a backup"
    UPGRADE_STORE = "upgrade-store", "start the head, which upgrades it and keeps a copy of the old one"
    REPLACE_DATABASE = "replace-database", "replace it, which keeps its records aside"
    RESTORE_AGAIN = "restore-again", "restore again and replace the database: it is safe in both cases"
    GIVE_PASSWORD = "give-password", "put it into ~/.pgpass (mode 0600), or the whole address into a file"


_BY_CODE = {code.value: code for code in HintCode}


class Hint(str):
    """The plain text of a hint, with its code and arguments for front ends. Joined to other text, only the plain text remains."""

    __slots__ = ("arguments", "code")
    code: HintCode
    arguments: Mapping[str, str]

    def __new__(cls, code: HintCode, **arguments: object) -> Self:
        """The hint; KeyError if an argument of its text is missing."""
        texts = {name: str(value) for name, value in arguments.items()}
        hint = super().__new__(cls, code.plain.format_map(texts))
        hint.code, hint.arguments = code, texts
        return hint

    def __getnewargs_ex__(self) -> tuple[tuple[HintCode], dict[str, str]]:
        return (self.code,), dict(self.arguments)


def hint_keys(hint: str) -> dict[str, Any]:
    """The hint as keys of a reply: its text and, if it has a code, the code and the arguments."""
    coded = {"hint_code": hint.code.value, "hint_args": dict(hint.arguments)} if isinstance(hint, Hint) else {}
    return {"hint": str(hint), **coded}


def parse_hint(text: str, code: str | None, arguments: Mapping[str, object] | None) -> str:
    """The hint of a reply. If its code or an argument is unknown here, as those of a newer head may be, its text remains."""
    try:
        return Hint(_BY_CODE[code or ""], **(arguments or {}))
    except (KeyError, TypeError):
        return text
