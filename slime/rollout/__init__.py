"""From prompts to kept groups of samples: data source, generation, rewards, filters, buffer.

Engines are reached over HTTP only.
"""
