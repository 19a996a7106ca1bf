"""What is divided: the parts of a model, the stages they are on, and what their weights exchange."""
