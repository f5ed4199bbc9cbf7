"""Base class for environments of ``rollout_interaction_env_path``, a module with ``build_env(sample, args)``."""

from __future__ import annotations

from typing import Any


class BaseInteractionEnv:
    """The environment of one conversation; subclasses define ``step``."""

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin the conversation; return (observation, info)."""
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Process a turn of the policy; return (observation, whether the conversation is over, info).

        An observation has ``obs_str``, and optionally ``role`` (default: user) and ``images``, a list of images in any
        form that ``--multimodal-keys`` accepts.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the environment's resources."""

    def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return the observation as a chat message."""
        text, images = str(observation.get("obs_str", "")), observation.get("images") or []
        parts = [{"type": "image", "image": image} for image in images]
        content: Any = [*parts, {"type": "text", "text": text}] if images else text
        return {"role": observation.get("role", "user"), "content": content}
