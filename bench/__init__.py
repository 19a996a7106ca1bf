"""How fast nanum is. `make bench` runs all; nothing here is a test, since a busy machine is no bug."""
