"""What a conversion takes, in a process of its own that need not import for seconds what the one before has imported.

One process, started at the first question, imports it and forks itself for each. Linux counts a fork's peak anew, from
what is in memory then.
"""

import atexit
import json
import subprocess
import sys
from functools import cache

SERVER = """
import json, os, sys
from colonnade import cli
import colonnade.convert.convert
for line in sys.stdin:
    if not (child := os.fork()):
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = ["colonnade", *json.loads(line)]
        cli.main()
        sys.exit()
    _, status, usage = os.wait4(child, 0)
    print(os.waitstatus_to_exitcode(status), usage.ru_maxrss, flush=True)
"""


def peak_of(*arguments: object) -> int:
    """[bytes] Of memory that `colonnade arguments` takes."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps([*map(str, arguments)]) + "\n")
    server.stdin.flush()
    status, kilobytes = map(int, server.stdout.readline().split())
    assert status == 0, arguments
    return kilobytes * 1024


@cache
def _server() -> "subprocess.Popen[str]":
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    return server
