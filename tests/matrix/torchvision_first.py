"""Import torchvision: the first of the modules that the ranks' server imports (``pool.PRELOADED``)."""

from slime.utils.processing_utils import import_torchvision

import_torchvision()
