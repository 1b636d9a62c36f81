"""A notebook and an editor in jobs of a real head, opened in a real Chromium after the sign-in; the page is lost and found again."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, var-annotated"

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.cluster import ROOT, cluster, free_port, wait_until
from tests import chromium_here

JUPYTER = Path(ROOT, "build/jupyter/bin/jupyter-lab")
CODE_SERVER = Path(ROOT, "build/code-server/node_modules/code-server/out/node/entry.js")
READY = Path(ROOT, "build/code-server/ready")
PICTURES = Path(ROOT, "build/web-programs")
WITH_SHIFT, WITH_CONTROL = 8, 2
CELLS = ["x = 41", "print('answer', x + 1)"]
pytestmark = [
    pytest.mark.prove,
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(500),
    pytest.mark.skipif(chromium_here.program() is None, reason="no chromium here: make browser-tools"),
]


@pytest.fixture(scope="module")
def head():
    PICTURES.mkdir(parents=True, exist_ok=True)
    with cluster("1x2", revive_s=0.5) as made:
        yield made


@pytest.fixture
def port():
    return free_port()


def url_of(head):
    return f"http://127.0.0.1:{head.port}"


def open_program(head, page, job_id, port, rest):
    """Open a program by its address at the head, as a person who is signed out: by a token, in the form of the sign-in page."""
    path = f"/j/{job_id}/{port}/{rest}"
    page.send("Emulation.setFocusEmulationEnabled", enabled=True)
    page.send("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
    page.send("Page.navigate", url=url_of(head) + path)
    page.until("document.querySelector('#token') !== null")
    page.run(f"document.querySelector('#token').value = {json.dumps(head.token())}; document.forms[0].submit()")
    page.until(f"location.pathname === '{path}' && location.origin !== '{url_of(head)}'")


def press(page, key, code, number, modifiers, text=""):
    down = {"type": "keyDown" if text else "rawKeyDown", **({"text": text} if text else {})}
    for kind in (down, {"type": "keyUp"}):
        page.send(
            "Input.dispatchKeyEvent", key=key, code=code, windowsVirtualKeyCode=number, modifiers=modifiers, **kind
        )


def run_cell(page, number):
    page.until(
        f"document.querySelectorAll('.jp-Notebook .jp-CodeCell').length == {len(CELLS)}"
        " && document.querySelector('.jp-Notebook-ExecutionIndicator[data-status=idle]') !== null"
    )
    page.until(  # the page calls itself idle before it has a kernel
        "fetch(location.pathname.replace(/lab[/].*/, 'api/sessions')).then(found => found.json())"
        ".then(all => all.length === 1 && all[0].kernel.connections > 0 && all[0].kernel.execution_state === 'idle')"
    )
    page.click(f".jp-Notebook .jp-CodeCell:nth-child({number}) .cm-content")
    press(page, "Enter", "Enter", 13, WITH_SHIFT, "\r")


@pytest.mark.skipif(not JUPYTER.exists(), reason="no JupyterLab here: make ide-tools")
def test_a_notebook_runs_a_cell_and_is_found_again_with_its_variables(head, tmp_path, port):
    cells = [
        {"cell_type": "code", "id": f"c{at}", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for at, source in enumerate(CELLS)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "x.ipynb").write_text(json.dumps(notebook))
    options = "--no-browser --allow-root --IdentityProvider.token= --LabApp.news_url="
    command = f"{JUPYTER} --port {port} --ServerApp.base_url=/j/$PHALANX_JOB_ID/{port}/ {options}"
    job_id = head.submit(
        name="jupyter",
        run=["bash", "-c", command],
        gpus=1,
        ports={"jupyter": f"{port}:keep-path"},
        workdir=str(tmp_path),
    )
    wait_until(lambda: head.job(job_id)["state"] == "running", "the job runs")
    with chromium_here.chromium() as page:
        open_program(head, page, job_id, port, "lab/tree/x.ipynb")  # the page tries again until the server listens
        run_cell(page, 1)
        page.until("document.querySelector('.jp-CodeCell .jp-InputPrompt').innerText.includes('[1]')")
        page.screenshot(PICTURES / "notebook.png")
    with chromium_here.chromium() as page:  # another browser: nothing is left of the first one
        open_program(head, page, job_id, port, "lab/tree/x.ipynb")
        run_cell(page, 2)
        shown = page.until(
            "(document.querySelectorAll('.jp-CodeCell')[1].querySelector('.jp-OutputArea-output') || {}).innerText"
        )
        assert shown.strip() == "answer 42"
        page.screenshot(PICTURES / "notebook-again.png")
    head.call("POST", f"/v1/jobs/{job_id}/cancel", {})


@pytest.mark.skipif(not READY.exists() or not shutil.which("node"), reason="no code-server here: make ide-tools")
def test_an_editor_opens_a_folder_and_its_terminal_runs_a_command_of_the_job(head, tmp_path, port):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "hello.py").write_text("print('hello')\n")
    options = f"--auth none --disable-telemetry --disable-update-check --disable-workspace-trust --user-data-dir {tmp_path}/data"
    command = ["node", str(CODE_SERVER), "--bind-addr", f"127.0.0.1:{port}", *options.split(), str(folder)]
    job_id = head.submit(name="code", run=command, gpus=1, ports={"code": port}, workdir=str(tmp_path))
    wait_until(lambda: head.job(job_id)["state"] == "running", "the job runs")
    typed = Path(folder, "typed.txt")
    with chromium_here.chromium() as page:
        open_program(head, page, job_id, port, "")
        page.until("document.querySelector('.monaco-workbench .statusbar') !== null")
        page.until("document.body.innerText.includes('hello.py')")
        press(page, "`", "Backquote", 192, WITH_CONTROL)
        page.until("document.querySelector('.terminal-wrapper .xterm-helper-textarea') !== null")
        page.click(".terminal-wrapper .xterm-screen")
        page.until("document.activeElement.className.includes('xterm')")
        wait_until(lambda: _typed(page, typed), "the terminal runs the command", every_s=5.0)
        assert typed.read_text() == f"42 {job_id}\n"
        page.screenshot(PICTURES / "editor.png")
    head.call("POST", f"/v1/jobs/{job_id}/cancel", {})


def _typed(page, path):
    """Type the command, which may come before the shell reads."""
    if not path.exists():
        for char in "echo $((41+1)) $PHALANX_JOB_ID > typed.txt":
            page.send("Input.dispatchKeyEvent", type="keyDown", key=char, text=char, unmodifiedText=char)
            page.send("Input.dispatchKeyEvent", type="keyUp", key=char)
        page.press("Enter")
    return path.exists() and path.read_text().endswith("\n")
