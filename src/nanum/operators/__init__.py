"""Operators: each states the kernels it is made of, and what its transpose reads. What is saved for backward follows
from that.
"""
