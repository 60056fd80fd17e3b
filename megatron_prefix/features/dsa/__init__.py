"""DeepSeek's sparse attention: a kind of layer, and how its segments run."""
