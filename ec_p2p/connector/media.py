"""What a request's item carries: media to encode, an embedding the client computed, or nothing but its size.

Owns the reading of vLLM's declarations of such fields. Loads the model's processor once, when it is made.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

logger = logging.getLogger("vllm.ec_p2p")

Roles = Mapping[str, Mapping[str, str]]
"""By modality: field name -> 'values' (the embedding itself) or 'metadata' (sizes the placeholder)."""


class Carries(Enum):
    MEDIA = auto()
    EMBEDDING = auto()
    """Computed by the client, who may say anything: usable for this request, never shared."""
    NOTHING = auto()
    """Placeholder metadata only: the embedding has to come from elsewhere, it cannot be computed here."""


class MediaFields:
    """vLLM's declaration of embedding fields for one model."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles

    @classmethod
    def of(cls, model_config: Any) -> MediaFields:
        """Never raises: a model whose processor cannot be made has no fields, so whatever an item carries is media."""
        try:
            from vllm.multimodal import MULTIMODAL_REGISTRY

            return cls(MULTIMODAL_REGISTRY.create_processor(model_config).info.data_parser.embedding_fields)
        except Exception:
            logger.warning("the model's placeholder metadata fields are unknown", exc_info=True)
            return cls({})

    def fields_for(self, modality: str) -> set[str]:
        """What sizes a placeholder: the part of an item that a producer publishes for consumers."""
        return {name for name, role in self._roles.get(modality, {}).items() if role == "metadata"}

    def carried_by(self, feature: Any) -> Carries:
        data = feature.data
        present = {name for name, field in data.items() if field.data is not None} if data else set()
        roles = self._roles.get(feature.modality, {})
        substance = {name for name in present if roles.get(name) != "metadata"}
        if not substance:
            return Carries.NOTHING
        if feature.modality == "prompt_embeds" or all(roles.get(name) == "values" for name in substance):
            return Carries.EMBEDDING
        return Carries.MEDIA
