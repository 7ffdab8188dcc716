"""Bringing it up: on this machine, or on a cluster that stands."""
