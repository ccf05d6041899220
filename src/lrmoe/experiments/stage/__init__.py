"""Recorded calls executed by all systems on several ranks, call by call in turn."""
