"""The forward pass in C++: compiled at first use, called through ctypes."""
