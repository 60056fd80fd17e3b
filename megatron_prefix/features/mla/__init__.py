"""Multi-latent attention: a kind of layer, and how its segments run."""
