"""GLM-4, GLM-4.5 and their relatives with a vision tower."""

from slime_plugins.models import names_of_layers

__getattr__ = names_of_layers(__name__)
