"""The pure heart: standard library and NumPy, no I/O, no clock, no logging."""
