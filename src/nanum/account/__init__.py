"""The readers of a Program: memory, traffic, cost and timeline. None of them knows what the operations mean."""
