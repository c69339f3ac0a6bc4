"""partc compiles a single-device PyTorch model into readable distributed programs."""

__version__ = "0.1.0"
