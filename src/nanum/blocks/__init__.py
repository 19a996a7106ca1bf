"""Blocks: what each part of a model computes, with the sharding of every tensor stated. One part, one body."""
