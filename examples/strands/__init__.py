"""An agent built with the package strands-agents, trained through the OpenAI adapter of slime.agent."""
