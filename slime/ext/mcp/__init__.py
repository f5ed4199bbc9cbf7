"""Tools of MCP servers for the policy: ``--rollout-tools mcp:COMMAND`` or ``mcp:URL`` (docs/environments.md)."""
