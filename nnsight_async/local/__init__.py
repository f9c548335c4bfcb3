"""A model of transformers in this process: its forward passes, its gradients, and the runs on it."""
