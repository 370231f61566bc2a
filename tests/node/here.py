"""A node in a thread of this process, for what must be reached into: its calls to the disk, and its own defects."""

from __future__ import annotations

import threading

from ec_p2p.node.service import Node

from .conftest import PATIENCE_S


class NodeHere:
    """As `RunningNode`, as far as a client needs it. Made in a `with`, which ends it."""

    def __init__(self, config):
        self.config = config
        self.node = Node(config)
        self.thread = threading.Thread(target=self.node.run, name="the-node")

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.node.stop()
        self.join()

    def join(self):
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the node did not end"
