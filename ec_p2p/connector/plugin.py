"""The entry point in the group `vllm.general_plugins`.

Owns the registration of the connector's name. It runs in every vLLM process, whether or not that process uses an
encoder cache, so it must import nothing heavy and start nothing.
"""

from __future__ import annotations

import logging

NAME = "ECP2PConnector"
MODULE = "ec_p2p.connector.connector"

logger = logging.getLogger("vllm.ec_p2p")


def register() -> None:
    """Make `"ec_connector": "ECP2PConnector"` work without a module path. May be called any number of times."""
    try:
        from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    except ImportError:
        logger.debug("this vLLM has no encoder cache connectors: %s is not registered", NAME)
        return
    try:
        ECConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        logger.debug("%s is registered already", NAME)
