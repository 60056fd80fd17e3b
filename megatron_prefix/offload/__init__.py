"""Memory policy `offload`: saved tensors of inner segments wait on the host for their backward."""
