"""Import torchvision: the first of the modules that the ranks' server imports (``pool.PRELOADED``)."""

from slime.utils.torchvision_package import import_torchvision

import_torchvision()
