"""An agent with one tool, trained through the OpenAI adapter of slime.agent."""
