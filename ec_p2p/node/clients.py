"""What clients say, and which part it concerns.

Owns the way from a message to the part that acts on it, what is left to do when a client is gone, and what the fleet
is told of the instances that are attached. It must never act on a message itself.
"""

from __future__ import annotations

import time

from ec_p2p.control.messages import InstanceInfo
from ec_p2p.node.device_reads import DeviceReads
from ec_p2p.node.directory_links import DirectoryLinks
from ec_p2p.node.instances import instances_of
from ec_p2p.node.leases import Leases
from ec_p2p.node.messages import (
    CloseWindow,
    Commit,
    Dispatched,
    Encoding,
    Forget,
    Inspect,
    OpenWindow,
    Quarantined,
    ReadEnded,
    Release,
    SaveSkipped,
    Sync,
    Synced,
    ToNode,
    Want,
)
from ec_p2p.node.saving import Saving
from ec_p2p.node.sessions import Session, Sessions
from ec_p2p.node.status import Status
from ec_p2p.node.wants import Wants


class Clients:
    """Used by the node's loop only."""

    def __init__(
        self,
        sessions: Sessions,
        wants: Wants,
        leases: Leases,
        device_reads: DeviceReads,
        saving: Saving,
        links: DirectoryLinks,
        status: Status,
    ) -> None:
        self._sessions = sessions
        self._wants = wants
        self._leases = leases
        self._device_reads = device_reads
        self._saving = saving
        self._links = links
        self._status = status
        self._instances: list[InstanceInfo] = []

    def on_message(self, session: Session, message: ToNode) -> None:
        now = time.monotonic()
        match message:
            case Want():
                self._wants.start(session, message, now)
            case Forget():
                self._wants.forget(session, message.want)
            case Dispatched():
                self._leases.dispatched(message.lease, session.sid)
            case Release() if message.reader < 0:
                self._leases.drop(message.lease, session.sid)
            case Release():
                self._leases.read_by(message.lease, session.attach.instance, message.reader)
            case Encoding():
                self._saving.encoding(session, message.identities, now)
            case OpenWindow():
                self._saving.open_window(session, message)
            case CloseWindow():
                self._saving.close_window(session, message.window)
            case Commit():
                self._saving.commit(session, message)
            case SaveSkipped():
                self._saving.skipped(session, message)
            case ReadEnded():
                self._device_reads.answered(session, message, now)
            case Quarantined():
                self._device_reads.quarantined(session, message)
            case Sync():
                self._links.flush(now)
                self._sessions.send(session, Synced(message.token))
            case Inspect():
                self._sessions.send(session, self._status.inspection(message.token))

    def on_gone(self, session: Session) -> None:
        self._wants.forget_session(session)
        if session.attach.kind == "worker" and not self._has_another(session):
            self._leases.reader_gone(session.attach.instance, session.attach.rank)
        if session.attach.kind == "lander":
            self._device_reads.lander_gone(session)
        self._saving.session_gone(session)

    def _has_another(self, gone: Session) -> bool:
        """Whether another worker has the same rank. Where an instance starts again beside what is left of it, the end
        of the old worker says nothing of what the new one still copies."""
        hello = gone.attach
        return any(
            (other.attach.kind, other.attach.instance, other.attach.rank) == (hello.kind, hello.instance, hello.rank)
            for other in self._sessions.all()
        )

    def tell_instances(self) -> None:
        """Tell the fleet who is attached, if that has changed."""
        instances = instances_of(session.attach for session in self._sessions.all())
        if instances != self._instances:
            self._instances = instances
            self._links.describe(instances)
