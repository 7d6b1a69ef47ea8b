"""The server that renders formulas, waited for: a socket that is there does not listen yet on a busy machine.

Over a Unix socket, as it is meant: where there is no network, there may be no port of one's own machine either.
"""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinxcontrib import katex


def start(rundir: Path, _: float, timeout: float = 60.0) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts the server and connects to it, as often as it takes."""
    path, until = rundir / "katex.sock", time.monotonic() + timeout
    command = katex.KaTeXServer.build_command(socket=path)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=rundir)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError) as fault:
            connection.close()
            if time.monotonic() > until or process.poll() is not None:
                process.kill()
                raise katex.KaTeXServer.timeout_error(timeout) from fault
            time.sleep(0.01)
        else:
            return process, connection


def setup(app: Sphinx) -> dict[str, Any]:
    """Takes the place of the extension's own way to start."""
    katex.KaTeXServer.start_server_process = staticmethod(start)
    katex.RENDER_TIMEOUT = 60.0
    return {"parallel_read_safe": True, "parallel_write_safe": True, "version": "1"}
