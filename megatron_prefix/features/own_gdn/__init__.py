"""A trainer's own GatedDeltaNet: a kind of layer, and how its segments run."""
