"""Runs made of runs: systems compared on the same model, data and seed."""
