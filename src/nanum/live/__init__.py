"""Processes that run on a real device and speak JSON: the only importers of torch. Nobody imports them."""
