from __future__ import annotations

import os
import subprocess
import sys


def test_a_reader_that_has_seen_enough_is_no_error():
    """As in `ec-p2p config | head -1`; here the reader is gone before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "ec_p2p.cli", "config"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
