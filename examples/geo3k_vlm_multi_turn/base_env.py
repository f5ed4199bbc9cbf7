"""What an environment of ``rollout_interaction_env_path`` is: a module with ``build_env(sample, args)``."""

from __future__ import annotations

from typing import Any


class BaseInteractionEnv:
    """One conversation's environment; subclasses define ``step``."""

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin; returns (observation, info)."""
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Take a turn of the policy; returns (observation, whether it was the last, info).

        An observation has ``obs_str``, and may have ``role`` (default: user) and ``images``, a list of whatever
        ``--multimodal-keys`` takes.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free what the environment holds."""

    def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return the observation as a chat message."""
        text, images = str(observation.get("obs_str", "")), observation.get("images") or []
        parts = [{"type": "image", "image": image} for image in images]
        content: Any = [*parts, {"type": "text", "text": text}] if images else text
        return {"role": observation.get("role", "user"), "content": content}
