"""Multi-token prediction: a layer behind the decoder, and what it reads in a step."""
