"""Few bits: training in the numbers of engines that serve them, and folders converted to them and back."""
