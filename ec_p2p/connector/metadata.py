"""What the scheduler's side tells the workers with a step.

Must stay picklable: vLLM sends it to other processes its own way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from ec_p2p.node.tensors import Place


@dataclass
class ECP2PMetadata(ECConnectorMetadata):  # type: ignore[misc]
    """Identities travel with the step, so that only the scheduler's process has to know the namespace."""

    loads: list[tuple[str, Place]] = field(default_factory=list)
    """Identifiers whose tensors must be in the worker's encoder cache before the model runs, and where they lie."""
    encodes: dict[str, bytes] = field(default_factory=dict)
    """Identities of what this step encodes and may share, by identifier."""
    saves_resident: dict[str, bytes] = field(default_factory=dict)
    """Identities of what is in the worker's encoder cache but not in the node, by identifier."""
