from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys
from ec_p2p.node.at_exit import close_at_exit

close_at_exit(lambda: print("closed", flush=True))
call_off = close_at_exit(lambda: print("never", flush=True))
call_off()
child = os.fork()
if child:
    os.waitpid(child, 0)
    print("the child is gone", flush=True)
sys.exit()
"""


def test_the_end_of_this_process_closes_and_that_of_a_fork_does_not():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["the child is gone", "closed"]
