"""Images: vision towers, and embeddings that a call has instead of tokens."""
