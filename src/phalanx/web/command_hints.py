"""The command line's words for hints: the command or option that does what a hint suggests. Pages show the commands too."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Final

from phalanx.core.accounting.advice.evidence import Advice
from phalanx.core.hints import Hint, HintCode

RENDERINGS: Final[Mapping[HintCode, str]] = {
    # jobs
    HintCode.LIST_JOBS: "phalanx ps -a lists them",
    HintCode.LIST_QUEUE_JOBS: "phalanx ps --queue {queue} lists them",
    HintCode.SHOW_JOB: "phalanx show {job}",
    HintCode.FOLLOW_JOB: "phalanx attach {job}",
    HintCode.RELEASE_JOB: "phalanx release {job}",
    HintCode.RESUME_JOB: "phalanx resume {job}",
    HintCode.REQUEUE_JOB: "phalanx requeue {job} stops it first",
    HintCode.UPDATE_JOB: "phalanx update {job} {option} {value}",
    HintCode.RUN_RANKS: "ask for one node (--nodes 1), or start the ranks without it: phalanx run -- python train.py",
    HintCode.CANCEL_JOB: "phalanx cancel {job}",
    HintCode.RESTART_JOB: "phalanx requeue {job}",
    HintCode.END_FAILING_JOB: "phalanx cancel {job}",
    HintCode.READ_JOB_LOG: "phalanx logs {job}",
    HintCode.MOVE_JOB: "phalanx requeue {job}",
    HintCode.COMPARE_LAYOUTS: "phalanx plan MODEL",
    HintCode.SLEEP_SERVICE: "phalanx sleep {service}",
    HintCode.SCALE_SERVICE: "phalanx scale {service} REPLICAS",
    HintCode.SUBMIT_WITH: "phalanx submit {option} {value} ...",
    HintCode.SUBMIT_UNHELD: "phalanx submit ... (without --hold)",
    HintCode.SUBMIT_SERVICE: "phalanx submit FILE",
    HintCode.LIST_SERVICES: "phalanx ps lists them",
    HintCode.UPDATE_SERVICE: "phalanx update {service} FILE makes a new revision",
    HintCode.WIDEN_SERVICE: "change replicas: in its file, then: phalanx update {service} FILE",
    HintCode.UPLOAD_WORKDIR: "use --copy, which sets this key",
    HintCode.SET_WORKDIR: "--workdir sets the folder to copy",
    HintCode.SET_WORKDIR_SHARED: "leave out --copy, and run it in a folder that all nodes see",
    HintCode.GIVE_KEY: "add {option}",
    HintCode.GIVE_VALUE: "write {option} {value}",
    HintCode.NEAREST_FIT: "{fit}; see phalanx nodes",
    HintCode.REQUEST_LESS: "ask for at most {gpus} GPUs, or use another queue; --allow-never submits it anyway",
    HintCode.ALLOW_NEVER: "--allow-never submits it anyway",
    # topology and nodes
    HintCode.DEFINE_LEVELS: "{levels}; to define levels: phalanx topology set FILE",
    HintCode.PREFER_LEVEL: "use --prefer {level} to accept other placements; see phalanx topology",
    HintCode.SMALLER_SLICES: "use smaller or fewer slices; see phalanx topology",
    HintCode.LIST_NODES: "phalanx nodes lists them",
    HintCode.SHOW_NODE: "phalanx nodes show {node}",
    HintCode.REPAIR_NODE: "phalanx nodes drain {node}",
    HintCode.FORGET_NODE: "phalanx nodes forget {node}",
    HintCode.SWITCH_MIG_ON: "an operator: phalanx nodes drain NODE, nvidia-smi -i GPU -mig 1, then start the node again (docs/mig.md)",
    HintCode.MIG_PROFILES: "{profiles}; `phalanx nodes mig` lists the profiles of each model",
    HintCode.LIST_LICENCES: "phalanx licences lists them",
    HintCode.LIST_CHANNELS: "phalanx channels lists them",
    HintCode.ADD_MAIL_CHANNEL: "an admin adds one: phalanx channels add mail @FILE --topic notify, with mailto://... in FILE",
    HintCode.ADD_JOB_CHANNEL: "an admin adds it: phalanx channels add {channel} @FILE --topic notify",
    HintCode.LIST_ARCHIVES: "phalanx archives lists the months that have archives",
    HintCode.LINK_USER: "an admin can link them: phalanx users set {user} --provider",
    HintCode.SET_SIGN_IN: "phalanx sign-in set --issuer URL ...",
    HintCode.MAP_GROUPS: "phalanx sign-in map GROUP --role ...",
    HintCode.ADD_MEMBER: "phalanx projects set {project} --add-member NAME",
    HintCode.SIGN_IN_AGAIN: "phalanx login, or the page of the head, signs you in again",
    HintCode.LOGIN: "phalanx --cluster {cluster} login",
    HintCode.LOGIN_FIRST: "none is saved; phalanx login URL saves one",
    HintCode.LOGIN_AGAIN: "phalanx login starts it again",
    HintCode.CHECK_SIGN_IN: "for admins: phalanx sign-in check",
    HintCode.SHOW_RETENTION: "phalanx retention shows its progress",
    HintCode.SET_LICENCE: "phalanx licences set {licence} {seats}",
    HintCode.OFFER_EXTRAS: "nodes offer it with phalanx up|join --offers {name}=AMOUNT; a licence: phalanx licences set {name} SEATS; --allow-never submits it anyway",
    HintCode.LIST_POOLS: "phalanx pools lists them",
    HintCode.POOL_LIMITS: "use --min 0 --max 4",
    HintCode.POOL_PRICE: "use --price 2/h",
    HintCode.DRAIN_NODE: "phalanx nodes drain {node} first",
    HintCode.UNDRAIN_NODES: "phalanx nodes undrain {nodes}",
    HintCode.UNDRAIN_IN_ENGINE: "{command}",
    HintCode.RENAME_SERVER: "phalanx join --name gives this server another name",
    # reservations
    HintCode.LIST_RESERVATIONS: "phalanx nodes reservations lists them",
    HintCode.RESERVE_FOR: "use --maintenance, or --user and --queue",
    HintCode.RENAME_RESERVATION: "give another --name, or: phalanx nodes unreserve {reservation}",
    HintCode.MOVE_RESERVATION: "choose another time or other nodes, or: phalanx nodes unreserve {reservation}",
    HintCode.END_A_RESERVATION: "phalanx nodes unreserve NAME ends one",
    # queues, users, projects, tokens
    HintCode.LIST_QUEUES: "phalanx queues lists them",
    HintCode.CLOSE_QUEUE: "stop new starts: phalanx queues set {queue} --close; list the jobs: phalanx ps --queue {queue}",
    HintCode.OPEN_QUEUE: "phalanx queues set {queue} --open",
    HintCode.EDIT_QUEUES: "phalanx queues apply FILE",
    HintCode.LIST_USERS: "phalanx users lists them",
    HintCode.ADD_USER: "add the user first: phalanx users add",
    HintCode.MAKE_ADMIN: "make another user admin first: phalanx users set NAME --role admin",
    HintCode.FORWARD_PORT: "phalanx port-forward {job} {port}",
    HintCode.LIST_SECRETS: "phalanx secrets lists them",
    HintCode.SET_SECRET: "phalanx secrets set {secret} --project {project}",
    HintCode.RESET_SECRET: "phalanx secrets set {secret}",
    HintCode.LIST_PROJECTS: "phalanx projects lists them",
    HintCode.LIST_TOKENS: "phalanx tokens lists them",
    HintCode.ADD_TOKEN: "create another: phalanx tokens add",
    HintCode.OPEN_DASHBOARD: "phalanx dashboard",
    HintCode.SEND_TOKEN: "phalanx login gets one; or set PHALANX_TOKEN to one that `phalanx tokens add` printed",
    HintCode.GIVE_ANCHOR: "write SEQ:CODE, as in the last line of `phalanx audit`",
    # plans
    HintCode.CALIBRATE: "run `phalanx calibrate` to create a profile",
    HintCode.CALIBRATE_EACH: "run `phalanx calibrate --nodes` once for each model",
    # head
    HintCode.START_HEAD: "start one here with phalanx up, or set PHALANX_URL and PHALANX_TOKEN to use another",
    HintCode.RESTART_HEAD: "restart it with phalanx up; without a head, jobs are frozen once their lease ends",
    HintCode.STOP_HEAD: "stop it with phalanx down: only one head can use a database",
    HintCode.STOP_ALL_HEADS: "run phalanx down on every head first",
    HintCode.STOP_OLDER_HEADS: "run phalanx down on the older heads first; jobs keep running (docs/high-availability.md)",
    HintCode.LIST_HEADS: "phalanx heads shows the leader",
    HintCode.KEEP_OR_CANCEL_JOBS: "choose --keep-jobs or --cancel-jobs",
    HintCode.CHECK_HEAD: "run phalanx doctor",
    HintCode.CHECK_OR_START_HEAD: "run phalanx doctor, or start a head with phalanx up",
    HintCode.READ_HEAD_LOG: "the head's log has the cause: phalanx doctor",
    HintCode.CREATE_TOKEN_FILE: "phalanx up creates it; or set PHALANX_TOKEN",
    HintCode.TAKE_TOKEN: "on the head: phalanx tokens add; here: export PHALANX_TOKEN=...",
    HintCode.USE_PRINTED_URL: "use the URL that `phalanx up` printed",
    HintCode.USE_PRINTED_ADDRESS: "use the address and port that `phalanx up --listen` printed",
    HintCode.USE_PRINTED_HTTPS: "use the https address that `phalanx up --listen ADDRESS` prints on the head",
    HintCode.USE_LISTEN_ADDRESS: "use the address that was passed to `phalanx up --listen`",
    HintCode.LISTEN_WITH_TLS: "phalanx up --listen ADDRESS on the head serves TLS there",
    HintCode.ENCRYPT: "use {url} and set PHALANX_FINGERPRINT, which `phalanx join --print` prints on the head; "
    "--insecure or PHALANX_INSECURE=1 uses plain HTTP anyway",
    HintCode.PRINT_JOIN_LINE: "phalanx join --print on the head prints the current line",
    HintCode.COMPARE_FINGERPRINT: "`phalanx join --print` on the head prints the right line; "
    "if it has the expected fingerprint, someone intercepts the connection",
    HintCode.SET_FINGERPRINT: "set PHALANX_FINGERPRINT to the fingerprint that `phalanx join --print` prints on the head",
    # store
    HintCode.CREATE_BACKUP: "phalanx backup FILE creates one",
    HintCode.RESTORE_BACKUP: "restore a backup: phalanx restore FILE",
    HintCode.UPGRADE_STORE: "phalanx up upgrades it and keeps a copy of the old one",
    HintCode.REPLACE_DATABASE: "--replace keeps its records aside and restores the new ones",
    HintCode.RESTORE_AGAIN: "restore again with --replace: it is safe in both cases",
    HintCode.GIVE_PASSWORD: "put it into ~/.pgpass (mode 0600), or the whole address into a file: --store @FILE",
}


def render_hint(hint: str) -> str:
    """Return the hint in the words of the command line; a plain text unchanged."""
    if not isinstance(hint, Hint):
        return hint
    option = "--" + hint.arguments.get("key", "").replace("_", "-")
    return RENDERINGS[hint.code].format_map({**hint.arguments, "option": option, **_quoted_value(hint)})


def _quoted_value(hint: Hint) -> dict[str, str]:
    """The value for a shell: `h100:8|a100:16` needs quotes there."""
    value = hint.arguments.get("value", "")
    return {"value": shlex.quote(value)} if any(char in value for char in "|;&<>") else {}


def error_line(message: str, hint: str) -> str:
    """Return an error as one line: `message (hint)`."""
    return f"{message} ({render_hint(hint)})" if hint else message


def option_text(advice: Advice) -> str:
    """What advice says to write: the options of `phalanx run`, or a piece of the program."""
    return advice.code or " ".join(f"--{key.replace('_', '-')} {value}" for key, value in advice.settings)
