"""What is done around the parts of a model: data parallelism with its buffers, and the order of pipeline stages."""
