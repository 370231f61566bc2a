"""What landers say of their quarantine, in the metrics of a real node."""

from __future__ import annotations

from ec_p2p.node.messages import Quarantined

from .conftest import until


def test_the_quarantine_of_all_landers_is_shown_until_it_ends_or_they_are_gone(zmq_fleet):
    [(node, tool)] = zmq_fleet.connected("a")
    first, second = (zmq_fleet.client(node, "lander", "engine", rank) for rank in range(2))

    def shown():
        seen = tool.inspect()
        own = seen.gauges["quarantined_bytes"], seen.counters.get("quarantined", 0)
        return own, seen.gauges["device_quarantined_bytes"], seen.counters.get("device_quarantined", 0)

    def says(lander, nbytes, entries):
        lander.node.send(Quarantined(nbytes, entries))
        lander.sync()
        return shown()

    assert shown() == ((0, 0), 0, 0)
    assert says(first, 8 << 20, 1) == ((0, 0), 8 << 20, 1)
    assert says(second, 4 << 20, 2) == ((0, 0), 12 << 20, 3)
    assert says(tool, 1 << 20, 5) == ((0, 0), 12 << 20, 3), "it is no lander"
    assert says(first, 0, 0) == ((0, 0), 4 << 20, 3)
    second.close()
    until(lambda: shown() == ((0, 0), 0, 3), "a lander that is gone to count no more")
